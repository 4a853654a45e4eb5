"""State between four agents under mpirun, each with worker processes: what arrives, and what is left after a fault."""

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

PROGRAM = Path(__file__).with_name("mpi_ranks.py")
CHECKOUT = PROGRAM.parents[2]


def run(scenario: str, directory: Path, **env: str) -> list[dict]:
    # Ended by `timeout`, mpirun ends its ranks; killed, it could not.
    command = [
        "timeout",
        "300",
        "mpirun",
        "--allow-run-as-root",
        "--oversubscribe",
        "-n",
        "4",
        sys.executable,
        PROGRAM,
        scenario,
        directory,
    ]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(CHECKOUT)} | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((directory / f"result{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.parametrize("scenario", ["trainer", "two devices"])
@pytest.mark.parametrize("ring", [1 << 13, 1 << 20])
def test_state_arrives_where_it_belongs(scenario, ring, tmp_path):
    for result in run(scenario, tmp_path, RING=str(ring)):
        assert "error" not in result
        assert result["cached"] == [False, True]
        assert result["looks"] and all(look["wrong"] == 0 and look["committed"] for look in result["looks"])


def test_weights_arrive_in_the_staged_model_of_every_node(tmp_path):
    results = run("sync", tmp_path)
    assert all("error" not in r and r["staged_wrong"] == 0 and r["same_digest"] for r in results)
    assert len({r["phases"]["digests"]["staged"] for r in results}) == 1


def test_no_agent_goes_away_while_another_waits(tmp_path):
    # MPI sends on only while it is called: the sender of the last message may not fall asleep when that is posted.
    results = run("one way", tmp_path, RING=str(1 << 20))
    assert all("error" not in result and result["all_entered"] for result in results)


def test_a_worker_that_dies_leaves_the_old_state_and_a_clear_error(tmp_path):
    results = run("trainer", tmp_path, FAULT="die", LIMIT="5")
    assert any(word in results[1]["error"] for word in ("w0 is gone", "ended in the middle of a transition"))
    for result in (results[0], results[2], results[3]):
        assert result["error"].startswith("PhaseTimeout: exchange of transition 1 did not complete within 5 s")
        assert result["looks"][0]["source_kept"] and not result["looks"][0]["committed"]
        assert result["left"] == []


def test_a_wrong_digest_drops_what_is_new_and_the_next_try_works(tmp_path):
    results = run("sync", tmp_path, FAULT="digest")
    assert "digest differs" in results[1]["error"]
    for result in results:
        assert result["left"] == [f for f in result["left"] if not f.endswith((".safetensors", ".part"))]
    results = run("trainer", tmp_path, FAULT="digest")
    assert all(look["wrong"] == 0 and look["committed"] for result in results for look in result["looks"])


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small tmpfs")
def test_no_memory_on_one_node_is_noticed_before_anything_moves(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", small], capture_output=True).returncode:
        pytest.skip("may not mount here")
    try:
        results = run("trainer", tmp_path, FAULT="memory", SMALL=str(small), RING=str(4 << 20))
    finally:
        subprocess.run(["umount", "-l", small], check=True)
    assert results[1]["error"].startswith("NoStagingMemory") and "lower the transition's budget" in results[1]["error"]
    assert all("was not ready" in results[rank]["error"] for rank in (0, 2, 3))
    assert all(look["wrong"] == 0 and look["committed"] for result in results for look in result["looks"])
