"""What published systems decide, as pure rules beside our own, to compare with.

`Boundaries` is DynaRL's rule (OSDI'26, section 5, with the points of decision of its artifact):

- All nodes generate. When few enough requests are left (`policy.trigger` of all) and some groups are complete, so that
  there is something to do, every node takes its home role: placement as configured, for instance 40, 8 and 16 of 64.
- After that only at boundaries, before a minibatch: rollout keeps what its requests fill at `policy.threshold` per node,
  the nodes with the fewest leave; inference leaves as a whole once it has nothing left.
- Training takes of the free nodes what brings it to the largest size on its list (`trainer_sizes`); data-parallel ranks
  of unequal load (M groups on d ranks: ceil(M / d) on some) make sizes useful that do not divide a batch. Rollout leaves
  only if training can grow by it. What is over stays idle until the next boundary.
- Rollout and inference never grow, training never shrinks within an iteration, and there is no last-minibatch move.

`in_turn` is RLinf's collocated mode, the baseline of both papers: every node generates until the last answer is there,
then every node scores until the last group is, then every node trains.

>>> trainer_sizes(16), trainer_sizes(32)
([4, 8, 13, 16], [8, 16, 26, 32])
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from dynarl.config.schema import Policy
from dynarl.scheduler.policy import View, return_to_rollout

# Of all groups, complete before nodes return to inference and training: these would find nothing to do.
LEAST_COMPLETE = 0.1
# Sizes of the trainer by the largest one, in data-parallel ranks. 13 of 16 and its like: of 128 groups ten on the busiest
# rank where eight ranks have sixteen, for less than all nodes.
SIZES = {2: [1, 2], 4: [1, 2, 3, 4], 8: [2, 4, 6, 8], 16: [4, 8, 13, 16], 32: [8, 16, 26, 32], 64: [16, 32, 54, 64]}


def trainer_sizes(nodes: int) -> list[int]:
    """Sizes that the trainer may have on `nodes` nodes, one data-parallel rank each; where the published list has no
    entry, the same shares of them.

    >>> trainer_sizes(12)
    [3, 6, 9, 12]
    """
    return SIZES.get(nodes) or sorted({max(1, nodes * share // 16) for share in (4, 8, 13, 16)})


@dataclass
class Boundaries:
    """DynaRL's rule over one iteration. It remembers at which boundary it has decided: one that came to nothing is not
    tried again before the next. home: {node: role} after the first change.
    """

    policy: Policy
    home: Mapping[str, str]
    decided: int = 0

    def decide(self, view: View) -> dict[str, str]:
        """The moves wanted now. Between boundaries: none."""
        if rescue := return_to_rollout(view) or _return_to_inference(view):
            return rescue
        if not view.is_taken("training"):
            return self._return_home(view)
        if view.minibatch <= self.decided:
            return {}
        self.decided = view.minibatch
        return self._at_boundary(view)

    def _return_home(self, view: View) -> dict[str, str]:
        # The artifact adds one, so that a tiny batch can trigger at all.
        few = view.live <= int(self.policy.trigger * view.num_samples) + 1
        if not few or view.num_complete <= LEAST_COMPLETE * view.num_groups:
            return {}
        self.decided = view.minibatch
        return {node: self.home[node] for node, role in view.roles.items() if self.home[node] not in ("rollout", role)}

    def _at_boundary(self, view: View) -> dict[str, str]:
        numbers = Counter(view.roles.values())
        scored = not (view.live or view.to_score or view.scoring or view.generating)
        # Only nodes in roles: one that left without a place to go is where it was, with nothing to do.
        leavers = self._leavers(view) + [n for n, r in sorted(view.roles.items()) if r == "inference" and scored]
        able = [node for node in leavers if "training" in view.may[node]]
        sizes = [size for size in trainer_sizes(len(view.roles)) if size - numbers["training"] <= len(able)]
        grow = max([0, *(size - numbers["training"] for size in sizes)])
        return dict.fromkeys(able[:grow], "training")

    def _leavers(self, view: View) -> list[str]:
        """Rollout nodes that are not needed, those with the fewest requests first."""
        generators = [node for node, role in view.roles.items() if role == "rollout"]
        keep = max(self.policy.min_rollout_nodes, -(-view.live // self.policy.threshold)) if view.live else 0
        order = sorted(generators, key=lambda node: (view.running.get(node, 0), node))
        return order[: max(0, len(generators) - keep)]


def in_turn(view: View) -> dict[str, str]:
    """All nodes to the stage that is next, once the one before it has ended."""
    if view.live or view.generating:
        return return_to_rollout(view)
    left = view.needs_scoring and (view.to_score or view.scoring)
    stage = "inference" if left else "training"
    return {node: stage for node, role in view.roles.items() if role != stage and stage in view.may[node]}


def _return_to_inference(view: View) -> dict[str, str]:
    """One node where a fault has left groups to score and no node that scores: inference had left, or the node that was
    to take it could not. A rollout node with nothing to do comes first."""
    if not view.to_score or view.is_taken("inference") or not view.is_taken("training"):
        return {}
    idle = {n for n, r in view.roles.items() if r == "rollout" and not view.waiting + view.running.get(n, 0)}
    free = sorted((role == "training", node) for node, role in view.roles.items() if role == "training" or node in idle)
    able = [node for _, node in free if "inference" in view.may[node]]
    return dict.fromkeys(able[:1], "inference")
