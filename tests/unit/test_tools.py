"""What tools answer, and what they cannot be made to do."""

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dynarl.tasks.tools import base, sandbox
from dynarl.tasks.tools.calculator import Calculator
from dynarl.tasks.tools.sandbox import Limits, PythonTool
from dynarl.tasks.tools.search import Search

CORPUS = Path(base.__file__).with_name("corpus.txt").read_text().splitlines()


def ask(tool: base.Tool, arguments: str, session: dict | None = None) -> str:
    return base.run({"t": tool}, "t", arguments, {} if session is None else session)


# ---- calculator


@pytest.mark.parametrize(
    "expression, answer",
    [
        ("123*456", "56088"),
        ("1/3+1/6", "1/2"),
        ("0.1+0.2", "3/10"),
        ("7//2*2+7%2", "7"),
        ("-(2**-3)", "-1/8"),
        (" 2 * 3 ", "6"),
    ],
)
def test_arithmetic_is_exact(expression, answer):
    assert ask(Calculator(), expression) == answer


@pytest.mark.parametrize(
    "expression, error",
    [
        ("9**9**9", "too large"),
        ("9" * 150 + "*" + "9" * 40 + "**4", "too large"),
        ("1e99999999", "exponent"),
        ("1e-99999999", "exponent"),
        ("2**0.5", "whole number"),
        ("1/0", "division by zero"),
        ("0**-1", "division by zero"),
        ("(1+2", "not an expression"),
        ("__import__('os')", "not arithmetic"),
        ("True", "not arithmetic"),
        ("'x'*9", "not arithmetic"),
        ("1<<99999", "not arithmetic"),
        ("ans", "not arithmetic"),
        ("(" * 150 + "1" + ")" * 150, "at most 200"),
        ("1\x00", "not an expression"),
        ("", "not an expression"),
    ],
)
def test_what_is_no_arithmetic_or_too_large_is_an_error_at_once(expression, error):
    began = time.process_time()
    answer = ask(Calculator(), expression)
    assert answer.startswith("error: ") and error in answer and time.process_time() - began < 2.0


def test_the_result_before_is_kept_in_the_session_alone():
    session = {}
    ask(Calculator(), "6*7", session)
    assert session == {"ans": "42"}
    assert ask(Calculator(), "ans+1", session) == "43"  # by another instance, as on another node


# ---- search


def test_every_fact_is_found_by_its_name_and_names_are_not_shared():
    search = Search(CORPUS)
    names = [
        next(word for word in sentence.split() if word[0].isupper() and word not in ("Mount", "Lake", "The"))
        for sentence in CORPUS
    ]
    assert len(set(names)) == len(names)
    assert [ask(search, name) for name in names] == CORPUS


def test_rare_words_count_more_and_the_shorter_sentence_wins():
    search = Search(["the old mill is here", "the lake is deep and the lake is cold", "the lake"], num_results=2)
    assert ask(search, "the lake") == "the lake\nthe lake is deep and the lake is cold"
    assert ask(search, "the mill") == "the old mill is here\nthe lake"
    assert ask(search, "nowhere") == "error: nothing found"


# ---- python: a sandbox

TIGHT = Limits(wall_s=120.0, cpu_s=1, memory_bytes=128 << 20, file_bytes=1 << 20, processes=4, output_bytes=500)
SHORT = dataclasses.replace(TIGHT, wall_s=3.0)


@pytest.fixture(scope="module")
def python():
    tool = PythonTool(TIGHT)
    try:
        tool.check()
    except ValueError as error:
        pytest.skip(str(error))
    return tool


def test_a_program_prints_its_answer_and_the_error_it_ends_with(python):
    assert ask(python, "print(sum(map(int, str(7**45))))") == "163"
    assert ask(python, "print(1)\nraise ValueError('two')") == "1\nerror: ValueError: two"
    assert "SyntaxError" in ask(python, "def f(")
    assert ask(python, "") == ""


def test_memory_is_limited(python):
    assert ask(python, "x = bytearray(10**9)") == "error: MemoryError"


def test_cpu_time_is_limited(python):
    answer = ask(python, "print('begun', flush=True)\nwhile True: pass")
    assert answer == "begun\nerror: killed; a program may take 1 s of CPU time"


def test_wall_clock_time_is_limited_and_what_was_printed_is_kept(python):
    began = time.monotonic()
    program = "import time\nprint('begun', flush=True)\ntime.sleep(60)"
    assert ask(PythonTool(SHORT), program) == "begun\nerror: stopped after 3 s"
    assert time.monotonic() - began < 50.0


def test_output_is_limited(python):
    answer = ask(python, "while True: print('x' * 99)")
    assert answer.endswith("\nerror: more than 500 bytes of output") and len(answer) < 600


def test_files_are_limited_and_gone_after_the_call(python):
    assert "File too large" in ask(python, "open('big', 'wb').write(b'x' * 2**21)")
    many = "for n in range(9):\n    open(str(n), 'wb').write(b'x' * 2**18)"
    assert "No space left" in ask(python, many)
    assert ask(python, "open('kept', 'w').write('x')\nimport os\nprint(os.listdir())") == "['kept']"
    assert ask(python, "import os\nprint(os.listdir())") == "[]"


def test_the_network_is_not_there(python):
    assert "unreachable" in ask(python, "import socket\nsocket.create_connection(('192.0.2.1', 80), timeout=1)")
    # Nor the machine itself, where the agent and torch's store listen.
    assert "error" in ask(python, "import socket\nsocket.create_connection(('127.0.0.1', 22), timeout=1)")


def test_files_of_the_machine_are_not_there(python, tmp_path):
    (tmp_path / "key").write_text("secret")
    for path in (tmp_path / "key", Path(__file__), "/etc/passwd", "/proc/self/environ"):
        assert "No such file" in ask(python, f"import os\nos.stat({str(path)!r})")
    assert "Read-only file system" in ask(python, "open('/usr/new', 'w')")
    assert ask(python, "import os\nprint(sorted(set(os.environ) - {'LC_CTYPE'}))") == "[]"


def test_there_are_no_rights_to_break_out_with(python):
    assert "PermissionError" in ask(python, "import os\nos.chroot('/tmp')")
    assert "PermissionError" in ask(python, "import os\nos.setuid(0)") or "Invalid argument" in ask(
        python, "import os\nos.setuid(0)"
    )
    assert (
        ask(python, "import os\nos.kill(os.getpid(), 9)\nprint('process 1 of its namespace')")
        == "process 1 of its namespace"
    )


def running(mark: str) -> list[int]:
    """Processes whose sleep has this length."""
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and is_marked(path, mark)]


def until(reached, timeout_s: float = 50.0) -> bool:
    """Whether it happens, before what is marked ends by itself."""
    deadline = time.monotonic() + timeout_s
    while not (there := reached()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(there)


def is_marked(path: Path, mark: str) -> bool:
    try:
        return mark in (path / "cmdline").read_text()
    except OSError:
        return False


def test_a_fork_bomb_is_stopped_and_leaves_nothing(python):
    bomb = "import os\ntry:\n    while True: os.fork()\nexcept OSError as error: print(error.errno)"
    assert "11" in ask(python, bomb)  # EAGAIN
    assert ask(python, "print('well')") == "well"


def test_what_a_program_leaves_running_ends_with_it(python):
    mark = f"61.{os.getpid()}"
    left = f"""
import os, sys
if os.fork() == 0:
    os.setsid()
    os.close(1), os.close(2)
    os.execv({sandbox.sys._base_executable!r}, ['python', '-S', '-c', 'import time; time.sleep({mark})'])
import time
time.sleep(0.3)
print('left')"""
    assert ask(python, left) == "left"
    assert until(lambda: not running(mark))


def test_the_program_dies_with_the_process_that_called_the_tool(python):
    mark = f"62.{os.getpid()}"
    program = (
        f"import os\nos.execv({sys._base_executable!r}, ['python', '-S', '-c', 'import time; time.sleep({mark})'])"
    )
    code = f"from dynarl.tasks.tools.sandbox import *\nPythonTool(Limits(wall_s=60)).call({program!r}, {{}})"
    caller = subprocess.Popen(
        [sys.executable, "-c", code.replace(mark, "6'+'" + mark[1:])], cwd=Path(__file__).parents[2]
    )
    assert until(lambda: running(mark))
    caller.kill()
    caller.wait()
    assert until(lambda: not running(mark))


def test_where_no_namespaces_are_permitted_the_tool_says_what_to_do(monkeypatch):
    monkeypatch.setattr(sandbox, "JAIL", str(Path(__file__).with_name("jail_without_namespaces.py")))
    with pytest.raises(ValueError, match=r"unshare: Operation not permitted.*user namespaces.*unconfined_python"):
        PythonTool(TIGHT).check()


def test_unconfined_programs_keep_their_limits():
    tool = PythonTool(TIGHT, confined=False)
    tool.check()
    assert ask(tool, "x = bytearray(10**9)") == "error: MemoryError"
    brief = PythonTool(SHORT, confined=False)
    assert ask(brief, "import time\ntime.sleep(60)") == "error: stopped after 3 s"
    directory = ask(tool, "import os\nopen('kept', 'w').write('x')\nprint(os.getcwd())")
    assert directory.startswith("/") and not Path(directory).exists()


# ---- all


def test_a_tool_that_fails_or_is_not_there_answers_with_text():
    class Broken(base.Tool):
        def call(self, arguments, session):
            raise KeyError("inside")

    assert base.run({"b": Broken()}, "b", "", {}) == "error: KeyError"
    assert base.run({}, "b", "", {}) == "error: there is no tool b"
