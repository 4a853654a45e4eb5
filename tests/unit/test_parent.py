"""A child that must not outlive its parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

STARTS_A_CHILD = """
import asyncio, functools, os
from dynarl.parent import in_child_of

async def main():
    child = await asyncio.create_subprocess_exec("sleep", "1000", preexec_fn=functools.partial(in_child_of, os.getpid()))
    print(child.pid, flush=True)
    await child.wait()

asyncio.run(main())
"""


def test_a_child_dies_with_its_parent_even_when_it_takes_no_signal():
    parent = subprocess.Popen([sys.executable, "-c", STARTS_A_CHILD], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    os.kill(child, signal.SIGSTOP)  # it could not end by itself now
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60
    while is_alive(child):
        assert time.monotonic() < deadline, "the child outlives its parent"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
