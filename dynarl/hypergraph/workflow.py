"""What a job consists of, declared once: components, the channels between them, and the state that lives on devices.

A workflow is a small YAML file in `workflows/`; `algorithm.workflow` names it. The graph of a job, its picture and the
rules for moves all read the declaration, so that another workflow is another file and no other code::

    components:
      rollout: {program: rollout, kind: dynamic, interruptible: always}
      training: {program: training, kind: static, interruptible: regular}
    channels:
      prompts: {consumers: [rollout], granularity: sample}
      answers: {producers: [rollout], consumers: [training], granularity: group, deferrable: true}
    state:
      weights: {owner: training, held_by: [rollout, training]}
"""

from __future__ import annotations

import functools
import graphlib
from collections.abc import Iterator
from importlib import resources
from typing import Any, Literal

import msgspec
import yaml

from dynarl.errors import ConfigError

DEFAULT = "grpo"
# Those that dynarl/roles has: a workflow with another one can be declared and drawn, but not run.
PROGRAMS = ("rollout", "inference", "training", "environment")

Names = tuple[str, ...]


class _Declaration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Unknown keys are refused."""


class Component(_Declaration):
    """A kind of work.

    program: of the worker, `dynarl.roles.<program>.worker`; kind: static where throughput grows with the devices,
    dynamic where it levels off, at a point that moves with the load; interruptible: always, at regular points (a
    micro-batch, a step), or never; runs_on: nodes that do nothing else meanwhile, or beside these on every node.
    """

    program: str
    kind: Literal["static", "dynamic"]
    interruptible: Literal["always", "regular", "never"]
    runs_on: Literal["own nodes", "every node"] = "own nodes"


class Channel(_Declaration):
    """What flows from producers to consumers; without producers the controller puts it in.

    granularity: of one item; affinity: of an item to the node that it comes from; deferrable: items may wait while no
    node runs a consumer; feedback: it closes a cycle; waiting, at_work: the figures of a decision's `seen` that count
    items not yet taken and items being worked on.
    """

    consumers: Names
    granularity: Literal["sample", "group", "minibatch"]
    producers: Names = ()
    affinity: Literal["required", "preferred", "none"] = "none"
    deferrable: bool = False
    feedback: bool = False
    waiting: str | None = None
    at_work: str | None = None


class State(_Declaration):
    """State objects. owner: the component whose home nodes keep it; held_by: components that have a copy as well."""

    owner: str
    held_by: Names = ()


class Workflow(_Declaration):
    """A whole declaration; `parse` makes one, and checks it."""

    about: str
    components: dict[str, Component]
    channels: dict[str, Channel]
    state: dict[str, State] = {}

    @property
    def roles(self) -> Names:
        """Components that a node can be given to, as declared."""
        return tuple(name for name, component in self.components.items() if component.runs_on == "own nodes")

    @property
    def order(self) -> Names:
        """Components from the first to work on an item to the last."""
        return tuple(_sorted(self))

    def taken_by(self, component: str) -> dict[str, Channel]:
        """Channels that it takes from, feedback left out."""
        return {n: c for n, c in self.channels.items() if component in c.consumers and not c.feedback}

    @property
    def chunked(self) -> Names:
        """Channels on which whole groups go from one component to another; these can be gathered on the way."""
        return tuple(n for n, c in self.channels.items() if c.granularity == "group" and c.producers and not c.feedback)


@functools.cache
def names() -> Names:
    """Workflows that come with dynarl."""
    return tuple(sorted(f.name.removesuffix(".yaml") for f in _folder().iterdir() if f.name.endswith(".yaml")))


@functools.cache
def declared(name: str) -> Workflow:
    """The workflow of this name. Raises ConfigError if there is none."""
    if name not in names():
        raise ConfigError(f"algorithm.workflow = {name!r}: there is no such workflow; there are {', '.join(names())}")
    return parse(yaml.safe_load((_folder() / f"{name}.yaml").read_text(encoding="utf-8")), name)


def _folder() -> resources.abc.Traversable:
    return resources.files(__package__) / "workflows"


def parse(data: Any, name: str) -> Workflow:
    """A declaration from plain values. Raises ConfigError that names every fault."""
    try:
        workflow = msgspec.convert(data, Workflow)
    except msgspec.ValidationError as error:
        raise ConfigError(f"workflow {name}: {error}") from None
    if faults := list(_faults(workflow)):
        raise ConfigError("\n".join(f"workflow {name}: {fault}" for fault in faults))
    return workflow


def _faults(workflow: Workflow) -> Iterator[str]:
    known = workflow.components
    named = [(f"channel {n}", (*c.producers, *c.consumers)) for n, c in workflow.channels.items()]
    named += [(f"state {n}", (s.owner, *s.held_by)) for n, s in workflow.state.items()]
    unknown = [(where, each) for where, ends in named for each in ends if each not in known]
    for where, each in unknown:
        yield f"{where} names the component {each}; there are {', '.join(known)}"
    for name, channel in workflow.channels.items():
        if not channel.consumers:
            yield f"nobody takes from channel {name}: give it consumers, or leave it out"
    for name, component in known.items():
        if not any(name in channel.consumers for channel in workflow.channels.values()):
            yield f"component {name} takes from no channel, so it would never have anything to do"
    for name, state in workflow.state.items():
        if state.owner in known and known[state.owner].runs_on == "every node":
            yield f"state {name} is owned by {state.owner}, which has no nodes of its own to keep it on"
    if not unknown:
        yield from _cycles(workflow)


def _cycles(workflow: Workflow) -> Iterator[str]:
    try:
        _sorted(workflow)
    except graphlib.CycleError as error:
        loop = " to ".join(reversed(error.args[1]))
        yield f"channels lead from {loop}; mark the one that goes back with `feedback: true`"
        return
    for name, channel in workflow.channels.items():
        if channel.feedback and not any(_leads(workflow, c, p) for c in channel.consumers for p in channel.producers):
            yield f"channel {name} is marked as feedback, but closes no cycle"


def _sorted(workflow: Workflow) -> list[str]:
    """Components in the order of the channels between them. Raises graphlib.CycleError."""
    before: dict[str, list[str]] = {name: [] for name in workflow.components}
    for channel in workflow.channels.values():
        for consumer in channel.consumers if not channel.feedback else ():
            before[consumer] += channel.producers
    return list(graphlib.TopologicalSorter(before).static_order())


def _leads(workflow: Workflow, start: str, end: str) -> bool:
    """Whether what `start` puts out can reach `end`."""
    reached, ahead = {start}, [start]
    while ahead:
        at = ahead.pop()
        for channel in workflow.channels.values():
            if at in channel.producers and not channel.feedback:
                ahead += set(channel.consumers) - reached
                reached |= set(channel.consumers)
    return end in reached
