import asyncio
import os
import stat

import pytest
import zmq
import zmq.asyncio

from dynarl import keys


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def loose_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def test_only_the_owner_can_read_the_keys(tmp_path, loose_umask):
    directory = tmp_path / "keys"
    keys.create(directory)
    assert mode(directory) == 0o700
    assert {path.name: mode(path) for path in directory.iterdir()} == {"controller.key": 0o600, "agent.key": 0o600}


def test_a_directory_that_was_open_to_others_is_closed(tmp_path):
    directory = tmp_path / "keys"
    directory.mkdir()
    directory.chmod(0o755)
    keys.create(directory)
    assert mode(directory) == 0o700


def test_every_attempt_has_keys_of_its_own(tmp_path):
    keys.create(tmp_path / "keys")
    first = [keys.load(tmp_path / "keys", name) for name in ("controller", "agent")]
    keys.create(tmp_path / "keys")
    second = [keys.load(tmp_path / "keys", name) for name in ("controller", "agent")]
    assert len({pair.secret for pair in first + second}) == 4


@pytest.mark.parametrize("loose", [0o640, 0o604, 0o620, 0o602])
def test_a_key_that_others_can_read_or_write_is_refused(tmp_path, loose):
    keys.create(tmp_path)
    (tmp_path / "agent.key").chmod(loose)
    with pytest.raises(PermissionError, match=rf"agent\.key .*mode {loose:o}.*chmod 600"):
        keys.load(tmp_path, "agent")
    keys.load(tmp_path, "controller")


class Server:
    """A ROUTER that admits the agents of one key directory, as the controller's does."""

    def __init__(self, directory):
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.own, self.agent = (keys.load(directory, name) for name in ("controller", "agent"))
        self.authenticator = keys.admit(self.context, self.agent)
        keys.as_server(self.socket, self.own)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")

    def client(self, own=None, server_public=None) -> zmq.asyncio.Socket:
        socket = self.context.socket(zmq.DEALER)
        socket.linger = 0  # what does not get through must not keep the context open
        if own:
            keys.as_client(socket, own, server_public or self.own.public)
        socket.connect(f"tcp://127.0.0.1:{self.port}")
        return socket

    async def received(self, wait_s: float) -> bytes | None:
        """The next message that comes through; None: not for so long."""
        return (await self.socket.recv_multipart())[-1] if await self.socket.poll(int(1000 * wait_s)) else None

    def close(self) -> None:
        self.authenticator.stop()
        self.context.destroy(linger=0)


def test_only_the_right_key_pair_gets_a_word_through(tmp_path):
    keys.create(tmp_path / "ours")
    keys.create(tmp_path / "theirs")

    async def scenario():
        server = Server(tmp_path / "ours")
        try:
            stranger = keys.load(tmp_path / "theirs", "agent")
            wrong = [server.client(stranger), server.client(), server.client(server.agent, stranger.public)]
            for socket in wrong:
                await socket.send(b"not for you")
            assert await server.received(0.4) is None
            right = server.client(server.agent)
            await right.send(b"ours")
            assert await server.received(60.0) == b"ours"
            assert await server.received(0.4) is None
        finally:
            server.close()

    asyncio.run(scenario())
