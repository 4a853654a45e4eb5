"""Which node does what next: pure functions of what is seen now.

The rule, in four lines:
- Rollout keeps as many nodes as its live requests fill at `threshold` requests per node (at least `min_rollout_nodes`
  while requests live); the nodes with the fewest requests leave first, because they have the least to hand over.
- While requests live, no more nodes leave than there are complete groups that nobody works on: a group cannot be trained
  before its last answer is there, and a node that left for nothing would only crowd the others.
- The other nodes share inference and training in proportion to the work that is left for each; a node changes only when
  its present role has nothing to hand out and the other has.
- Where the roles of a node take turns by themselves, a node that has nothing to do takes a role that has work waiting;
  no more nodes take it than there are groups that wait.
- Nobody returns to rollout before the next iteration: on-policy data for it does not exist before the weights do. Only when
  a fault leaves requests behind and no rollout node is there, one returns.

Static jobs use the same code with an empty set of choices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from dynarl.config.schema import LENDING, TAKING_TURNS, Policy

ROLES = ("rollout", "inference", "training")

# A training step is forward and backward, inference is forward only: 3 to 1 in floating-point operations.
TRAINING_COST, INFERENCE_COST = 3.0, 1.0


@dataclass(slots=True)  # made for every event: to freeze it would take twice as long
class View:
    """What the decision sees. Group counts are of the running iteration (or minibatch).

    roles: active role of each node; may: roles each node can take; running: live requests on each node, where there are some;
    num_running: all of these, taken: the roles that some node has, if they are known;
    needs_scoring: the inference role recomputes old log-probabilities in this job. minibatch: index of the running one;
    num_samples, num_groups: of the whole iteration; num_complete: groups whose answers are all there.
    """

    roles: dict[str, str]
    may: dict[str, frozenset[str]]
    running: dict[str, int] = field(default_factory=dict)
    waiting: int = 0
    generating: int = 0
    needs_scoring: bool = True
    to_score: int = 0
    scoring: int = 0
    to_train: int = 0
    training: int = 0
    minibatch: int = 0
    num_samples: int = 0
    num_groups: int = 0
    num_complete: int = 0
    num_running: int | None = None
    taken: frozenset[str] | None = None

    def is_taken(self, role: str) -> bool:
        """Whether some node has this role."""
        return role in (self.roles.values() if self.taken is None else self.taken)

    @property
    def live(self) -> int:
        """Requests that are not finished."""
        return self.waiting + (sum(self.running.values()) if self.num_running is None else self.num_running)


def capabilities(policy: Policy, home: dict[str, str]) -> dict[str, frozenset[str]]:
    """The roles that each node may take under `policy`, from its home role."""
    if policy.name == "static":
        return {node: frozenset({role}) for node, role in home.items()}
    if policy.name in TAKING_TURNS:
        return {node: frozenset(ROLES) for node in home}
    lends = policy.lend_owners or policy.name in LENDING
    lent = {"rollout"} if lends else set()
    extra = {"rollout": {"inference", "training"} if lends else {"training"}, "inference": {"training"} | lent, "training": lent}
    return {node: frozenset({role} | extra[role]) for node, role in home.items()}


def start_roles(policy: Policy, home: dict[str, str]) -> dict[str, str]:
    """The roles at the start of an iteration."""
    everyone_generates = policy.name in LENDING or (policy.name != "static" and policy.lend_owners)
    return {node: "rollout" if everyone_generates else role for node, role in home.items()}


def decide(policy: Policy, view: View) -> dict[str, str]:
    """The moves wanted now: {node: new role}. Empty: stay."""
    return return_to_rollout(view) or _leave_rollout(policy, view) or _balance(view)


def take_turns(view: View, free: Iterable[str]) -> dict[str, str]:
    """Roles for `free` nodes, which have nothing to do, where each node switches by itself: {node: role}."""
    if view.waiting:
        return return_to_rollout(view)
    waiting = {"inference": view.to_score, "training": view.to_train}
    roles, turns = dict(view.roles), {}
    # Who has the right role already comes first: it need not switch.
    for node in sorted(roles.keys() & free, key=lambda node: (not waiting.get(roles[node]), node)):
        able = frozenset(role for role, groups in waiting.items() if groups and role in view.may[node])
        role = roles[node] if roles[node] in able else _neediest(roles, view, able)
        if role is None:
            continue
        waiting[role] -= 1
        if role != roles[node]:
            turns[node] = roles[node] = role
    return turns


def return_to_rollout(view: View) -> dict[str, str]:
    """One node back where a fault has left requests and no node that generates."""
    if not view.waiting or view.is_taken("rollout"):
        return {}
    # Rather one that does not train: nothing that it has accumulated can be in the way.
    able = sorted((view.roles[node] == "training", node) for node in view.roles if "rollout" in view.may[node])
    return {node: "rollout" for _, node in able[:1]}


def _leave_rollout(policy: Policy, view: View) -> dict[str, str]:
    generators = [node for node, role in view.roles.items() if role == "rollout"]
    movable = [node for node in generators if len(view.may[node]) > 1]
    live = view.live
    if policy.name == "colocated":
        keep = len(generators) if live else 0
    else:
        keep = max(policy.min_rollout_nodes, -(-live // policy.threshold)) if live else 0
    surplus = min(len(generators) - keep, len(movable))
    if live and policy.name == "threshold":
        scorable = any("inference" in view.may[node] for node in movable)
        surplus = min(surplus, view.to_train + (view.to_score if scorable else 0))
    if surplus <= 0:
        return {}
    leavers = sorted(movable, key=lambda node: (view.running.get(node, 0), node))[:surplus]
    moves: dict[str, str] = {}
    for node in leavers:
        role = _neediest({**view.roles, **moves}, view, view.may[node] - {"rollout"})
        if role is not None:
            moves[node] = role
    return moves


def _neediest(roles: dict[str, str], view: View, choices: frozenset[str]) -> str | None:
    """The role with the most work left per node that has it, among `choices`; None when there is no work at all."""
    work = {
        "inference": INFERENCE_COST * (view.to_score + view.scoring + view.generating),
        "training": TRAINING_COST * (view.to_train + view.training + view.to_score + view.scoring + view.generating),
    }
    if not view.needs_scoring:
        work["inference"] = 0.0
    # Training cannot begin before something is scored: a first scorer comes before a second trainer.
    if "inference" in choices and view.to_score and not view.to_train and not any(r == "inference" for r in roles.values()):
        return "inference"
    have = {role: sum(r == role for r in roles.values()) for role in work}
    candidates = [role for role in choices if work.get(role, 0.0) > 0]
    return max(candidates, key=lambda role: (work[role] / (have[role] + 0.5), role), default=None)


def _balance(view: View) -> dict[str, str]:
    """Move at most one idle node between inference and training, to where work waits."""
    idle_scorers = view.to_score == 0 and view.scoring == 0
    idle_trainers = view.to_train == 0 and view.training == 0
    for node, role in sorted(view.roles.items()):
        others = sum(r == role for n, r in view.roles.items() if n != node)
        if role == "inference" and "training" in view.may[node] and idle_scorers and view.to_train + view.training > 0:
            # The last scorer stays while answers are still being generated: it will be needed again.
            if view.generating == 0 or others:
                return {node: "training"}
        if role == "training" and "inference" in view.may[node] and idle_trainers and view.to_score > 0 \
                and not any(r == "inference" for r in view.roles.values()):
            return {node: "inference"}
    return {}
