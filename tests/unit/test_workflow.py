import copy
from pathlib import Path

import pytest
import yaml
from graph_records import job, records

from dynarl.config import validate
from dynarl.config.schema import Algorithm, Config
from dynarl.errors import ConfigError
from dynarl.hypergraph import workflow
from dynarl.hypergraph.check import check
from dynarl.hypergraph.edges import edges, vertices
from dynarl.hypergraph.fold import fold

DECLARATION = yaml.safe_load("""
about: a small one
components:
  rollout: {program: rollout, kind: dynamic, interruptible: always}
  training: {program: training, kind: static, interruptible: regular}
channels:
  prompts: {consumers: [rollout], granularity: sample}
  answers: {producers: [rollout], consumers: [training], granularity: group, deferrable: true}
state:
  weights: {owner: training, held_by: [rollout, training]}
""")


def changed(**paths):
    """The declaration with values put in: changed(channels__answers__consumers=[])."""
    data = copy.deepcopy(DECLARATION)
    for path, value in paths.items():
        *ahead, last = path.split("__")
        at = data
        for key in ahead:
            at = at[key]
        at[last] = value
    return data


@pytest.mark.parametrize("name", workflow.names())
def test_every_workflow_that_is_shipped_holds_together(name):
    declared = workflow.declared(name)
    assert declared.order.index("rollout") < declared.order.index("training")
    assert declared.state["optimizer"].owner == "training"
    assert set(declared.roles) <= set(declared.order) == set(declared.components)


def test_programs_are_those_that_there_are_workers_for():
    roles = Path(workflow.__file__).parents[1] / "roles"
    assert sorted(path.parent.name for path in roles.glob("*/worker.py")) == sorted(workflow.PROGRAMS)


def test_an_agentic_workflow_differs_from_grpo_by_its_tools_alone():
    grpo, agentic = workflow.declared("grpo"), workflow.declared("agentic")
    assert agentic.components.keys() - grpo.components.keys() == {"tools"}
    assert agentic.channels.keys() - grpo.channels.keys() == {"tool_calls", "tool_results"}
    assert {name: agentic.channels[name] for name in grpo.channels} == grpo.channels
    assert agentic.channels["tool_results"].feedback


BACK = {"producers": ["training"], "consumers": ["rollout"], "granularity": "sample"}

FAULTS = {
    "an unknown component": (
        changed(channels__answers__consumers=["trainer"]),
        "channel answers names the component trainer; there are rollout, training",
    ),
    "a state without an owner": (changed(state__weights__owner="nobody"), "state weights names the component nobody"),
    "a channel without a consumer": (changed(channels__answers__consumers=[]), "nobody takes from channel answers"),
    "a component without work": (
        changed(components__critic={"program": "critic", "kind": "static", "interruptible": "never"}),
        "component critic takes from no channel",
    ),
    "an undeclared cycle": (
        changed(channels__back=BACK),
        "channels lead from rollout to training to rollout; mark the one that goes back with `feedback: true`",
    ),
    "feedback that leads nowhere back": (
        changed(channels__answers__feedback=True),
        "channel answers is marked as feedback, but closes no cycle",
    ),
    "an owner without nodes": (
        changed(components__training__runs_on="every node"),
        "state weights is owned by training, which has no nodes of its own",
    ),
    "a wrong word": (changed(components__rollout__kind="elastic"), "Invalid enum value 'elastic'"),
    "a wrong key": (changed(channels__prompts__takers=["rollout"]), "contains unknown field `takers`"),
}


@pytest.mark.parametrize("data, text", FAULTS.values(), ids=FAULTS)
def test_a_declaration_that_does_not_hold_together_is_refused_with_its_place(data, text):
    assert workflow.parse(DECLARATION, "small").roles == ("rollout", "training")
    with pytest.raises(ConfigError) as error:
        workflow.parse(data, "small")
    assert str(error.value).startswith("workflow small: ") and text in str(error.value)


def test_a_declared_cycle_is_none():
    declared = workflow.parse(changed(channels__back=BACK | {"feedback": True}), "small")
    assert declared.order == ("rollout", "training")
    assert "back" not in declared.taken_by("rollout")


def test_all_faults_are_named_at_once():
    data = changed(channels__answers__consumers=[], channels__prompts__consumers=["cook"])
    with pytest.raises(ConfigError) as error:
        workflow.parse(data, "small")
    assert len(str(error.value).splitlines()) == 4  # training and rollout take from nothing now


def test_the_graph_of_a_job_is_that_of_its_workflow():
    graph = fold(records(*job(algorithm={"workflow": "agentic"})))
    assert "component/tools" in vertices(graph) and "channel/tool_calls" in vertices(graph)
    assert "component/tools" not in vertices(fold(records(*job())))
    critic = fold(records(*job(homes=("critic", "training"), algorithm={"workflow": "ppo-critic"})))
    assert check(critic) == [] and critic.roles == {"a": "critic", "b": "training"}
    owned = {e.vertices for e in edges(critic) if e.kind == "residency"}
    assert ("state/critic_optimizer", "device/a:0") in owned and ("state/optimizer", "device/b:0") in owned


def test_the_graph_of_a_workflow_that_is_not_known_says_so():
    graph = fold(records(*job(algorithm={"workflow": "dreams"})))
    assert graph.workflow == workflow.declared("grpo")
    assert check(graph) == ["record 1: the workflow 'dreams' is not known here; the graph is that of grpo"]


@pytest.mark.parametrize(
    "name, text",
    [
        ("dreams", "there is no such workflow; there are agentic, grpo, ppo-critic"),
        ("ppo-critic", "its component critic needs the role program critic, which this version does not have"),
    ],
)
def test_a_job_can_only_follow_a_workflow_that_can_be_run(name, text):
    with pytest.raises(ConfigError, match=text):
        validate.check(Config(algorithm=Algorithm(workflow=name)))
    for runs in ("grpo", "agentic"):
        validate.check(Config(algorithm=Algorithm(workflow=runs)))
