"""A worker whose role has a Python of its own, in an environment that knows nothing of dynarl."""

from __future__ import annotations

import asyncio
import os
import venv
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from dynarl import wire
from dynarl.agent.supervisor import Supervisor


def environment_without_dynarl(directory: Path) -> Path:
    """An interpreter that finds msgspec and zmq. (What .pth files of their directory add, such as a checkout, it does not find.)"""
    venv.create(directory, symlinks=True)
    (packages,) = directory.glob("lib/python*/site-packages")
    (packages / "more.pth").write_text("\n".join({str(Path(m.__file__).parents[1]) for m in (msgspec, zmq)}))
    return directory / "bin" / "python"


async def first_event(python: Path, directory: Path) -> tuple[wire.Event, dict[str, str]]:
    """What the worker says first, and its environment."""
    socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
    socket.bind(f"ipc://{directory}/agent.sock")
    died = asyncio.get_running_loop().create_future()
    supervisor = Supervisor("n1", f"ipc://{directory}/agent.sock", directory, lambda *death: died.set_result(death))
    worker = supervisor.start("rollout", 0, python=str(python), env={}, device_kind="cpu")
    heard = asyncio.ensure_future(socket.recv_multipart())
    await asyncio.wait({heard, died}, timeout=120, return_when=asyncio.FIRST_COMPLETED)
    assert heard.done(), worker.log_path.read_text()
    pairs = Path(f"/proc/{worker.process.pid}/environ").read_text().split("\0")
    await supervisor.stop_all()
    socket.close(linger=0)
    return wire.decode(heard.result()[1]), dict(pair.split("=", 1) for pair in pairs if pair)


def test_it_runs_the_dynarl_of_its_agent_and_no_other_package_of_it(tmp_path, monkeypatch):
    python = environment_without_dynarl(tmp_path / "venv")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "zmq.py").write_text("raise ImportError('zmq of the agent, built for another Python')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(foreign), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.chdir(tmp_path)  # python -m looks in the current directory first, which may be the checkout
    event, environment = asyncio.run(first_event(python, tmp_path))
    assert (event.name, event.data["role"]) == ("up", "rollout")
    assert str(foreign) not in environment["PYTHONPATH"]
