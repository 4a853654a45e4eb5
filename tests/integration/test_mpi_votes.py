"""Votes of three agents under mpirun, also after one that was cut short."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mpi4py")
if shutil.which("mpirun") is None:
    pytest.skip("no mpirun here", allow_module_level=True)

PROGRAM = Path(__file__).with_name("vote_ranks.py")
AGREED, NOT_READY, OTHER_DIGEST = [True, True, True], [False, False, True], [False, True, False]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    directory = tmp_path_factory.mktemp("votes")
    # Over TCP, as between nodes: a message is on its way for as long as the other end does not answer.
    transport = ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self"]
    command = ["timeout", "60", "mpirun", "--allow-run-as-root", "--oversubscribe", *transport, "-n", "3"]
    done = subprocess.run([*command, sys.executable, PROGRAM, directory], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(PROGRAM.parents[2])})
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(3)]


def test_all_have_the_same_verdict(found):
    for each in found:
        assert each["all alike"] == [AGREED, AGREED] and each["alone"] == AGREED
        assert each["another digest"] == OTHER_DIGEST
        assert each["not ready"] == NOT_READY


def test_what_was_said_in_a_vote_that_was_cut_short_stays_as_it_was_while_it_is_on_its_way(found):
    first, *others = (each["first comes late"] for each in found)
    assert others == ["vote of epoch 5 did not complete in time"] * 2
    assert first == AGREED, "it has read what was sent"
    assert [each["in use"] for each in found] == [0, 0, 0]


def test_a_vote_that_was_cut_short_disturbs_no_communicator_and_no_later_vote(found):
    assert [each["communicator of that number"] for each in found] == [3, 3, 3]
    # Some read what was left of it; nobody takes it for a yes.
    assert all(not agreed for agreed, *_ in (each["late one's tag again"] for each in found))
