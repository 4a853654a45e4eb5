import dataclasses
import sys

import pytest
from fake_tools import FakeTools

from dynarl.config import interpreters, load
from dynarl.config.schema import Config
from dynarl.errors import SlurmError
from dynarl.slurm import preflight
from dynarl.slurm.cli_client import CliClient
from dynarl.slurm.client import PartitionInfo, TransientError
from dynarl.slurm.fake import FakeClient
from dynarl.slurm.preflight import Level
from dynarl.slurm.version import Version


def findings(slurm=None, written="", **options):
    return list(preflight.check(slurm or FakeClient(), load.from_text(written).config, **options))


def of(level, found):
    return [finding.text for finding in found if finding.level is level]


def test_a_sound_slurm_passes():
    found = findings()
    assert of(Level.FAULT, found) == of(Level.NOTE, found) == []
    assert {finding.topic for finding in found} == {"version", "het-steps", "mpi", "partition"}
    assert preflight.require(FakeClient(), Config()) == found


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: CliClient(FakeTools(None, FileNotFoundError())), "srun is not on the PATH"),
        (
            lambda: CliClient(FakeTools(None, ("", "srun: fatal: Could not establish a configuration source", 1))),
            "find no slurm.conf and no slurmctld",
        ),
        (lambda: FakeClient(release=Version(21, 8, 8)), "this is Slurm 21.08.8; dynarl needs 22.05 or newer"),
        (
            lambda: FakeClient(faults={"config": [TransientError("scontrol: Unable to contact slurm controller")]}),
            "Unable to contact",
        ),
        (
            lambda: FakeClient(settings={"SchedulerParameters": "bf_interval=30,disable_hetjob_steps"}),
            "disable_hetjob_steps",
        ),
        (lambda: FakeClient(plugins=("none", "pmi2")), "`srun --mpi=list` has no pmix here, only: none, pmi2"),
        (lambda: FakeClient(node_names=("n1", "n2")), "cluster.nodes = 4, but partition main has 2"),
    ],
)
def test_each_fault_is_told_apart(make, message):
    faults = of(Level.FAULT, findings(make()))
    assert len(faults) == 1 and message in faults[0]
    with pytest.raises(SlurmError) as error:
        preflight.require(make(), Config())
    assert error.value.exit_code == 4


def with_partition(**changes):
    part = dataclasses.replace(PartitionInfo("main", True, True, 8, None, "infinite"), **changes)

    class Slurm(FakeClient):
        def partitions(self):
            return [part]

    return Slurm()


@pytest.mark.parametrize(
    "slurm, written, message",
    [
        (with_partition(max_nodes=2), "", "cluster.nodes = 4, but partition main allows 2 per job"),
        (with_partition(up=False), "", "partition main is down"),
        (with_partition(default=False), "", "there is no default partition: set cluster.partition. Known here: main"),
        (with_partition(), "cluster: {partition: gpu}", "no partition 'gpu'. Known here: main"),
        (
            with_partition(time_limit="30:00"),
            "",
            "cluster.time = 1:00:00 is 60 minutes, but partition main allows 30 (30:00)",
        ),
    ],
)
def test_what_the_partition_does_not_allow(slurm, written, message):
    faults = of(Level.FAULT, findings(slurm, written))
    assert len(faults) == 1 and message in faults[0]


@pytest.mark.parametrize("limit", ["infinite", "1:00:00", "n/a"])
def test_time_limits_that_are_no_obstacle(limit):
    assert of(Level.FAULT, findings(with_partition(time_limit=limit))) == []


def test_inside_a_job_the_partition_no_longer_matters():
    assert of(Level.FAULT, findings(FakeClient(node_names=("n1",)), allocated=True)) == []


def test_one_role_alone_needs_no_heterogeneous_step():
    slurm = FakeClient(settings={"SchedulerParameters": "disable_hetjob_steps"})
    alone = "cluster: {nodes: 1}\nsplit: {rollout: 0, inference: 0, training: 1}\npolicy: {name: colocated}"
    found = findings(slurm, alone)
    assert of(Level.FAULT, found) == [] and "disable_hetjob_steps" in of(Level.NOTE, found)[0]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"JobRequeue": "0"}, "JobRequeue is 0"),
        ({"PreemptMode": "GANG,CANCEL"}, "PreemptMode is"),
        ({"MaxStepCount": "40"}, "MaxStepCount is 40"),
    ],
)
def test_what_is_worth_a_note(settings, message):
    notes = of(Level.NOTE, findings(FakeClient(settings=settings)))
    assert len(notes) == 1 and message in notes[0]


def test_requeueing_is_no_matter_for_a_run_that_does_not_want_it():
    assert of(Level.NOTE, findings(FakeClient(settings={"JobRequeue": "0"}), "cluster: {requeue: false}")) == []


def test_an_interpreter_that_a_role_names_must_be_there_and_have_what_the_role_needs(tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f"#!/bin/sh\nexec {sys.executable} -S -I \"$@\"\n")
    bare.chmod(0o755)
    for python, message in ((bare, "no torch, megatron, safetensors"), (tmp_path / "none", "No such file")):
        written = f"training: {{python: {python}}}"
        (fault,) = of(Level.FAULT, findings(written=written, allocated=True))
        assert "training" in fault and message in fault
        # The login node may not see what the compute nodes have.
        assert of(Level.FAULT, findings(written=written)) == [] and of(Level.NOTE, findings(written=written)) == [fault]


def test_sglang_without_an_interpreter_is_a_fault_before_anything_is_submitted(monkeypatch, tmp_path):
    monkeypatch.setattr(interpreters, "CHECKOUT", tmp_path)
    monkeypatch.delenv(interpreters.SGLANG_VARIABLE, raising=False)
    (fault,) = of(Level.FAULT, findings(written="rollout: {engine: sglang}"))
    assert f"{sys.executable}, which runs the rollout workers, has no sglang" in fault and "bin/install-sglang" in fault


def test_sglang_runs_in_what_the_variable_names_or_else_in_what_bin_install_sglang_made(monkeypatch, tmp_path):
    monkeypatch.setattr(interpreters, "CHECKOUT", tmp_path)
    config = load.from_text("rollout: {engine: sglang}").config
    assert interpreters.of_role(config, "rollout", {}) is None
    made = tmp_path / ".cache" / "sglang-venv" / "bin" / "python"
    made.parent.mkdir(parents=True)
    made.touch()
    assert interpreters.of_role(config, "rollout", {}) == str(made)
    assert interpreters.of_role(config, "rollout", {interpreters.SGLANG_VARIABLE: "/v/python"}) == "/v/python"
    assert interpreters.of_role(config, "training", {interpreters.SGLANG_VARIABLE: "/v/python"}) is None
    config.rollout.python = "/w/python"
    assert interpreters.of_role(config, "rollout", {interpreters.SGLANG_VARIABLE: "/v/python"}) == "/w/python"
