"""Links over real sockets in one process: a routed server and its named clients."""

import asyncio
import contextlib

import pytest
import zmq
import zmq.asyncio

from dynarl import wire
from dynarl.rpc import Link, PeerGone


class Handler:
    def __init__(self):
        self.events = []
        self.gate = asyncio.Event()

    async def on_add(self, peer, a, b):
        return a + b

    async def on_whoami(self, peer):
        return peer

    async def on_fail(self, peer):
        raise ValueError("seven is not even")

    async def on_refuse(self, peer):
        raise wire.CallError("n1 has no rollout worker")

    async def on_wait(self, peer):
        await self.gate.wait()
        return "waited"

    async def on_open_gate(self, peer):
        self.gate.set()

    async def on_unsendable(self, peer):
        return object()

    def event_note(self, peer, text):
        self.events.append((peer, text))

    def event_break(self, peer):
        raise KeyError("no such lease")


class Net:
    """`server` is a routed link with a Handler; `client(name)` makes a link to it, or a bare socket."""

    def __init__(self):
        self.context = zmq.asyncio.Context()
        self.tasks = []
        socket = self.context.socket(zmq.ROUTER)
        self.port = socket.bind_to_random_port("tcp://127.0.0.1")
        self.handler = Handler()
        self.server = self._serve(Link(socket, self.handler, routed=True))

    def _serve(self, link):
        self.tasks.append(asyncio.create_task(link.serve()))
        return link

    def socket(self, name):
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, name.encode())
        socket.connect(f"tcp://127.0.0.1:{self.port}")
        return socket

    def client(self, name, handler=None):
        return self._serve(Link(self.socket(name), handler, routed=False))

    async def close(self):
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.context.destroy(linger=0)


def on_net(scenario):
    async def go():
        net = Net()
        try:
            async with asyncio.timeout(120):
                await scenario(net)
        finally:
            await net.close()

    asyncio.run(go())


def test_a_call_returns_the_value():
    async def scenario(net):
        assert await net.client("n1").call("", "add", a=2, b=3) == 5
        assert await net.client("n2").call("", "whoami") == "n2"

    on_net(scenario)


def test_an_error_reaches_the_caller_with_its_text():
    async def scenario(net):
        client = net.client("n1")
        with pytest.raises(wire.CallError, match=r"^ValueError: seven is not even$"):
            await client.call("", "fail")
        with pytest.raises(wire.CallError, match=r"^n1 has no rollout worker$"):
            await client.call("", "refuse")
        with pytest.raises(wire.CallError, match="unknown method 'dance'"):
            await client.call("", "dance")
        with pytest.raises(wire.CallError, match="TypeError"):
            await client.call("", "add", a=1)

    on_net(scenario)


def test_a_value_that_cannot_be_sent_is_an_error_and_not_silence():
    async def scenario(net):
        with pytest.raises(wire.CallError, match="object"):
            await net.client("n1").call("", "unsendable", timeout_s=60)

    on_net(scenario)


def test_a_late_answer_raises_timeout_error_and_is_then_dropped():
    async def scenario(net):
        client = net.client("n1")
        with pytest.raises(TimeoutError, match=r"no answer to wait within 0.05 s"):
            await client.call("", "wait", timeout_s=0.05)
        await client.call("", "open_gate")
        assert await client.call("", "add", a=1, b=1) == 2

    on_net(scenario)


def test_calls_of_one_peer_run_concurrently():
    async def scenario(net):
        client = net.client("n1")
        waiting = asyncio.create_task(client.call("", "wait"))
        assert await client.call("", "add", a=1, b=2) == 3
        assert not waiting.done()
        await client.call("", "open_gate")
        assert await waiting == "waited"

    on_net(scenario)


def test_calls_from_the_server_find_the_named_peer():
    async def scenario(net):
        names = [f"n{i}" for i in range(5)]

        class Client:
            def __init__(self, name):
                self.name = name

            async def on_name(self, peer, salt):
                await asyncio.sleep(0.01 * (salt % 3))  # answers come back in another order
                return [self.name, salt]

        for name in names:
            await net.client(name, Client(name)).emit("", "note", text="here")
        while len(net.handler.events) < len(names):
            await asyncio.sleep(0.01)
        wanted = [(name, salt) for salt in range(4) for name in names]
        answers = await asyncio.gather(*(net.server.call(name, "name", salt=salt) for name, salt in wanted))
        assert answers == [[name, salt] for name, salt in wanted]

    on_net(scenario)


def test_an_answer_from_another_peer_than_was_asked_is_dropped():
    async def scenario(net):
        asked, other = net.socket("asked"), net.socket("other")
        for socket in (asked, other):
            await socket.send(wire.encode(wire.Event("note", {"text": "here"})))
        while len(net.handler.events) < 2:
            await asyncio.sleep(0.01)
        answer = asyncio.create_task(net.server.call("asked", "name"))
        call = wire.decode(await asked.recv())
        await other.send(wire.encode(wire.Reply(call.id, "forged")))
        await other.send(wire.encode(wire.Event("note", {"text": "after"})))
        while len(net.handler.events) < 3:
            await asyncio.sleep(0.01)
        await asked.send(wire.encode(wire.Reply(call.id, "true")))
        assert await answer == "true"

    on_net(scenario)


def test_open_calls_to_a_peer_that_is_gone_fail_and_others_go_on():
    async def scenario(net):
        sockets = {name: net.socket(name) for name in ("n1", "n2")}
        for name, socket in sockets.items():
            await socket.send(wire.encode(wire.Event("note", {"text": name})))
        while len(net.handler.events) < 2:
            await asyncio.sleep(0.01)
        lost = [asyncio.create_task(net.server.call("n1", "work")) for _ in range(2)]
        kept = asyncio.create_task(net.server.call("n2", "work"))
        call = wire.decode(await sockets["n2"].recv())
        net.server.peer_gone("n1", "n1 died: killed by SIGKILL")
        for task in lost:
            with pytest.raises(PeerGone, match="n1 died: killed by SIGKILL"):
                await task
        await sockets["n2"].send(wire.encode(wire.Reply(call.id, 7)))
        assert await kept == 7

    on_net(scenario)


GARBAGE = [
    [b""], [b"\xff\x00garbage"], [b"a", b"b", b"c"], [b"\x80"],
    [wire.encode(wire.Reply(10**6, "to nobody"))],
    [wire.encode(wire.Event("nobody_handles_this"))],
    [wire.encode(wire.Event("note", {"wrong": "field"}))],
    [wire.encode(wire.Event("note", {"peer": "somebody else", "text": "x"}))],
    [wire.encode(wire.Event("break"))],
    [wire.encode(wire.Call(1, "add", {"self": 1}))],
    [wire.encode(wire.Call(1, "__init__"))],
]


@pytest.mark.parametrize("frames", GARBAGE, ids=range(len(GARBAGE)))
def test_no_message_stops_the_server(frames):
    async def scenario(net):
        bad = net.socket("bad")
        with contextlib.closing(bad):
            await bad.send_multipart(frames)
            await bad.send_multipart([wire.encode(wire.Call(2, "whoami"))])
            while (answer := wire.decode(await bad.recv())).id != 2:
                assert answer.error
            assert answer.value == "bad"
        assert await net.client("n1").call("", "add", a=1, b=1) == 2

    on_net(scenario)


def test_a_peer_without_a_name_that_is_text_costs_nobody_else_anything():
    async def scenario(net):
        nameless = net.context.socket(zmq.DEALER)
        nameless.connect(f"tcp://127.0.0.1:{net.port}")
        await nameless.send(wire.encode(wire.Call(1, "whoami")))
        assert await net.client("n1").call("", "whoami") == "n1"

    on_net(scenario)


def test_events_of_a_peer_arrive_in_order():
    async def scenario(net):
        client = net.client("n1")
        for index in range(200):
            await client.emit("", "note", text=str(index))
        while len(net.handler.events) < 200:
            await asyncio.sleep(0.01)
        assert net.handler.events == [("n1", str(index)) for index in range(200)]

    on_net(scenario)


def test_a_failed_background_task_is_logged(caplog):
    async def scenario(net):
        async def fail():
            raise RuntimeError("nobody waits for me")

        net.server.spawn(fail())
        await asyncio.sleep(0.01)

    on_net(scenario)
    assert "nobody waits for me" in caplog.text


class Cuttable:
    """A TCP relay to `port`. While `lossy` it swallows what comes; `cut` breaks all connections."""

    def __init__(self, port: int):
        self._target, self.lossy, self.connections = port, False, []

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1")
        return self._server.sockets[0].getsockname()[1]

    async def _relay(self, reader, writer):
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self.connections += [writer, other_writer]
        with contextlib.suppress(OSError):
            await asyncio.gather(self._pump(reader, other_writer), self._pump(other_reader, writer))

    async def _pump(self, reader, writer):
        while data := await reader.read(65536):
            if not self.lossy:
                writer.write(data)

    def cut(self):
        for writer in self.connections:
            writer.transport.abort()
        self.connections.clear()

    def close(self):
        self.cut()
        self._server.close()


@pytest.mark.parametrize("lasting", [True, False])
def test_a_connection_that_breaks_loses_and_doubles_nothing_if_the_link_is_lasting(lasting):
    async def scenario(net):
        socket = net.context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        relay = Cuttable(socket.bind_to_random_port("tcp://127.0.0.1"))
        server = net._serve(Link(socket, net.handler, routed=True, lasting=lasting))
        dealer = net.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.IDENTITY, b"n1")
        dealer.setsockopt(zmq.RECONNECT_IVL, 10)
        dealer.connect(f"tcp://127.0.0.1:{await relay.start()}")
        client = net._serve(Link(dealer, net.handler, routed=False, lasting=lasting))
        said, calls = [], []

        async def beat():
            while True:
                await server.beat("n1", "nobody_handles_this")
                await client.beat("", "nobody_handles_this")
                await asyncio.sleep(0.05)

        net.tasks.append(asyncio.create_task(beat()))
        for index in range(60):
            if index % 20 == 10:
                relay.lossy = True
            elif index % 20 == 15:
                relay.cut()  # with what it has swallowed; before this nobody noticed
                relay.lossy = False
            said.append(str(index))
            await client.emit("", "note", text=said[-1])
            if index % 5 == 0 and index:
                calls.append(asyncio.create_task(server.call("n1", "add", timeout_s=60 if lasting else 1.5, a=index, b=1)))
            await asyncio.sleep(0.01)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        heard = [text for _, text in net.handler.events]
        relay.close()
        if lasting:
            assert heard == said
            assert answers == [index + 1 for index in range(5, 60, 5)]
        else:
            assert heard != said and any(isinstance(answer, TimeoutError) for answer in answers)

    on_net(scenario)
