"""The environment worker as the agent sees it: a process behind a socket, that may be killed and started again."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import zmq
from machine import cpu_seconds, slowness

from dynarl import wire
from dynarl.tasks import tokenizer
from dynarl.tasks.arithmetic import INSTRUCTION, MARKER

ROOT = Path(__file__).parents[2]
TASK = {"name": "arithmetic", "args": {"min_terms": 2, "max_terms": 6, "worked": 0.5}, "eval_size": 16}


class Client:
    """What an agent does: listen, start the worker, call it, kill it."""

    def __init__(self, directory: Path):
        self.socket = zmq.Context.instance().socket(zmq.ROUTER)
        self.address = f"ipc://{directory}/env.sock"
        self.socket.bind(self.address)
        self.calls = 0
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "dynarl.roles.environment.worker", "--socket", self.address, "--name", "n1-environment-0"]
        self.process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
        up = self.receive(120.0)  # cold imports on a busy machine
        assert isinstance(up, wire.Event) and up.name == "up" and up.data["role"] == "environment"

    def receive(self, timeout_s: float = 60.0):
        if not self.socket.poll(timeout_s * 1000):
            raise TimeoutError(f"nothing from the worker in {timeout_s} s")
        return wire.decode(self.socket.recv_multipart()[1])

    def send(self, method: str, **args) -> None:
        self.calls += 1
        self.socket.send_multipart([b"n1-environment-0", wire.encode(wire.Call(self.calls, method, args))])

    def call(self, method: str, timeout_s: float = 60.0, **args):
        self.send(method, **args)
        reply = self.receive(timeout_s)
        assert reply.id == self.calls
        if reply.error:
            raise wire.CallError(reply.error)
        return reply.value

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        self.socket.close(linger=0)


@pytest.fixture
def client(tmp_path):
    with contextlib.closing(Client(tmp_path)) as client:
        yield client


def right_answer(codec: tokenizer.Codec, text: str) -> bytes:
    value = eval(text.removeprefix(INSTRUCTION).removesuffix(" ="))  # noqa: S307
    return wire.pack_ids([*codec.encode(f"{MARKER}{value}"), codec.eos_id])


def score(client, responses: dict[str, bytes], **limit) -> list[dict]:
    answers = [{"sample": sample, "split": "train", "index": wire.prompt_of(sample), "response": response}
               for sample, response in responses.items()]
    return client.call("score", answers=answers, **limit)


def test_prompts_scores_and_demonstrations_agree(client, tmp_path):
    opened = client.call("open", task=TASK, seed=1, tokenizer_dir=None)
    client.call("save_tokenizer", dir=str(tmp_path / "tok"))
    codec = tokenizer.load(tmp_path / "tok")
    assert opened == {"vocab_size": codec.vocab_size, "eos_id": codec.eos_id, "call_end": None, "no_answer": b""}

    prompts = client.call("prompts", split="train", indices=[5, 3])
    assert [prompt["index"] for prompt in prompts] == [5, 3]
    for prompt in prompts:
        assert codec.decode(wire.unpack_ids(prompt["prompt"])) == prompt["text"]
    right = right_answer(codec, prompts[0]["text"])
    responses = {"0:5:1": right, "0:5:2": b"", "0:5:3": prompts[0]["prompt"]}  # the answer is in the prompt only
    assert score(client, responses) == [
        {"sample": "0:5:1", "reward": 1.0, "correct": True}, {"sample": "0:5:2", "reward": 0.0, "correct": False},
        {"sample": "0:5:3", "reward": 0.0, "correct": False}]

    demonstrations = client.call("demonstrations", start=10, count=3)
    assert len(demonstrations) == 3
    assert demonstrations[1:] == client.call("demonstrations", start=11, count=2)
    for pair in demonstrations:
        response = wire.unpack_ids(pair["response"])
        assert response[-1] == codec.eos_id and response.count(codec.eos_id) == 1


def test_errors_are_answers_and_the_worker_lives_on(client, tmp_path):
    with pytest.raises(wire.CallError, match="no task is open"):
        client.call("prompts", split="train", indices=[0])
    with pytest.raises(wire.CallError, match="max_term"):
        client.call("open", task={"name": "arithmetic", "args": {"max_term": 3}}, seed=1, tokenizer_dir=None)
    with pytest.raises(wire.CallError, match="tokenizer.json is missing"):
        client.call("open", task=TASK, seed=1, tokenizer_dir=str(tmp_path))
    client.call("open", task=TASK, seed=1)
    with pytest.raises(wire.CallError, match="'valid'"):
        client.call("prompts", split="valid", indices=[0])
    assert client.call("ping") == "n1-environment-0"


def test_after_a_kill_in_a_hanging_verifier_a_new_process_goes_on(client):
    task = {**TASK, "name": "tests.integration.hanging_task:HangingArithmetic"}
    client.call("open", task=task, seed=1)
    before = client.call("prompts", split="train", indices=[4, 5])
    with pytest.raises(TimeoutError):
        score(client, {"0:4:0": b""}, timeout_s=0.5)
    client.kill()

    client.start()
    client.call("open", task=task, seed=1)
    assert client.call("prompts", split="train", indices=[4, 5]) == before
    assert score(client, {"0:5:0": b""})[0]["reward"] == 0.0


def test_the_worker_is_ready_fast_and_answers_fast(client):
    """A node restarts it after every time-out, and scores hundreds of answers an iteration. In CPU time: the machine may
    be busy."""
    client.call("open", task=TASK, seed=1)
    client.call("prompts", split="train", indices=list(range(64)))
    for index in range(256):
        score(client, {f"0:{index % 64}:0": b""})
    assert cpu_seconds(client.process.pid) < 1.5 * slowness()  # 0.4 s, imports included


def test_stop_ends_the_process(client):
    client.call("stop")
    assert client.process.wait(timeout=60) == 0
