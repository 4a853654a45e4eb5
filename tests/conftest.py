"""Fixtures for all tests. Its place here puts tests/ on the import path, so that tests of every folder can import the
helpers beside it."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sglang_environment
from hypothesis import HealthCheck, settings

from dynarl.slurm.mini import MiniSlurmError, preflight
from dynarl.slurm.mini import cgroup as cgroups
from dynarl.slurm.mini.handle import MiniSlurm
from dynarl.slurm.mini.processes import Process

# One directory of clusters per test run, named after its process: a later run stops what a killed one left.
CLUSTERS = Path("/tmp/dynarl-clusters")

# An example takes as long as it takes: the machine may be busy.
settings.register_profile("patient", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "integration: runs on a real Slurm (needs root and Debian's Slurm packages)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "minislurm" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.integration)


@pytest.fixture(scope="session")
def minislurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., MiniSlurm]]:
    """`minislurm(nodes=2, quota=None, gpus=0, cpus=4)`: a real cluster of that shape, idle and healthy.

    Clusters stay up until the session ends, and tests that ask for the same shape share one. A test may leave jobs
    behind, fail nodes, or take the cluster down: the next one that asks gets a sound one. The current directory, the
    checkout, all of pytest's temporary directories and SGLang's environment are visible on the nodes.
    """
    preflight.complete_path()
    try:
        preflight.check()
    except MiniSlurmError as error:
        pytest.skip(f"no minislurm here: {error}")
    _stop_clusters_of_killed_runs()
    me = Process.of(os.getpid())
    top = CLUSTERS / f"{me.pid}-{me.start}"
    top.mkdir(parents=True, mode=0o700)
    shares = (str(tmp_path_factory.getbasetemp()), *sglang_environment.directories())

    def cluster(nodes: int = 2, quota: float | None = None, gpus: int = 0, cpus: int = 4) -> MiniSlurm:
        if quota is not None and cgroups.for_cluster("test") is None:
            pytest.skip("no CPU quota here: there is no writable cgroup hierarchy with the cpu controller")
        state_dir = top / f"{nodes}n-{quota}q-{gpus}g-{cpus}c"
        shape = {"nodes": nodes, "cpu_quota": quota, "gpus_per_node": gpus, "cpus_per_node": cpus}
        handle = MiniSlurm(state_dir)
        if handle.status()["state"] in ("degraded", "broken"):
            handle.down()
        handle = MiniSlurm.start(state_dir, **shape, shares=shares)
        if handle.run(["squeue", "-h"]).stdout:
            handle.down()  # jobs of an earlier test: quicker than to wait until Slurm has ended and cleaned up each
            handle = MiniSlurm.start(state_dir, **shape, shares=shares)
        return handle

    yield cluster
    _stop_clusters(top)


def _stop_clusters(top: Path) -> None:
    for state_dir in top.iterdir():
        MiniSlurm(state_dir).down()
    shutil.rmtree(top, ignore_errors=True)
    with contextlib.suppress(OSError):  # another test run has clusters there
        CLUSTERS.rmdir()


def _stop_clusters_of_killed_runs() -> None:
    for top in CLUSTERS.iterdir() if CLUSTERS.is_dir() else ():
        pid, start = map(int, top.name.split("-"))
        if not Process(pid, start).alive():
            print(f"stopping clusters of test run {pid}, which was killed", file=sys.stderr)
            _stop_clusters(top)
