"""The step's command line, against golden files. To accept a change: DYNARL_UPDATE_GOLDEN=1, then read the diff."""

import os
from pathlib import Path

import pytest

from dynarl.errors import SlurmError
from dynarl.slurm.srun import Component, StepSpec, command_line, in_node_order, rendered

GOLDEN = Path(__file__).parents[1] / "golden"
AGENT = ("python3", "-m", "mpi4py", "-m", "dynarl.agent", "--controller", "tcp://n1:4000", "--run-dir", "/runs/a")


def component(role, *nodes, **env):
    return Component(role, nodes, AGENT, env)


def compare(name, argv):
    path = GOLDEN / name
    if os.environ.get("DYNARL_UPDATE_GOLDEN"):
        path.write_text(rendered(argv) + "\n")
    assert rendered(argv) + "\n" == path.read_text()


def test_three_components():
    spec = StepSpec(
        (
            component("rollout", "n1", "n2", DYNARL_ATTEMPT="1"),
            component("inference", "n3"),
            component("training", "n4"),
        ),
        log_dir="/runs/a/logs/1",
    )
    compare("srun-3-components.txt", command_line(spec))


def test_two_components_with_gpus_since_inference_has_no_nodes():
    spec = StepSpec(
        (component("rollout", "gpu098", "gpu099", "gpu100"), component("inference"), component("training", "gpu007")),
        log_dir="/runs/100%/logs/1",
        mpi="pmix_v4",
        cpus_per_node=64,
        gpus_per_node=8,
        immediate_s=30,
        extra_args=("--network=single_vni",),
    )
    compare("srun-2-components.txt", command_line(spec))


def test_one_node_is_an_ordinary_step():
    argv = command_line(
        StepSpec((component("rollout"), component("inference"), component("training", "n1")), log_dir="/runs/a/logs/1")
    )
    assert ":" not in argv
    compare("srun-1-component.txt", argv)


def test_nodes_come_in_slurms_order_over_the_whole_step_so_a_role_may_be_cut():
    """Slurm 22.05: MPI_Init fails over a step whose second component has a node that sorts before one of the first."""
    parts = in_node_order(
        [component("rollout", "n10", "n2", "n1"), component("inference"), component("training", "n9", "n3")]
    )
    assert [(part.role, part.nodes) for part in parts] == [
        ("rollout", ("n1", "n2")),
        ("training", ("n3", "n9")),
        ("rollout", ("n10",)),
    ]


def test_every_component_has_every_option():
    spec = StepSpec(
        (component("rollout", "n1"), component("inference", "n2"), component("training", "n3")),
        log_dir="/l",
        cpus_per_node=4,
        gpus_per_node=2,
        extra_args=("--x=1",),
    )
    argv = command_line(spec)[1:]
    parts, part = [], []
    for word in [*argv, ":"]:
        if word == ":":
            parts.append(part)
            part = []
        else:
            part.append(word)
    names = [[word.split("=")[0] for word in part] for part in parts]
    assert len(parts) == 3 and names[0] == names[1] == names[2]


@pytest.mark.parametrize(
    "spec, text",
    [
        (StepSpec((), "/l"), "at least one node"),
        (StepSpec((component("rollout"),), "/l"), "at least one node"),
        (StepSpec((component("rollout", "n1"), component("training", "n1")), "/l"), "n1 is in rollout and in training"),
        (StepSpec((Component("rollout", ("n1",), ("a", ":", "b")),), "/l"), "lone ':'"),
        (StepSpec((component("rollout", "n1"),), "/l", extra_args=(":",)), "lone ':'"),
        (StepSpec((component("rollout", "n1", A="b,c"),), "/l"), "A='b,c'"),
        (StepSpec((component("rollout", "n1", HF_TOKEN="x"),), "/l"), "HF_TOKEN looks like a secret"),
    ],
)
def test_a_step_that_slurm_would_misread_is_refused(spec, text):
    with pytest.raises(SlurmError, match=text):
        command_line(spec)
