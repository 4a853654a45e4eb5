"""One iteration's samples on their way through the roles: prompts out, answers in, scores, gradients.

The ledger says where each sample is; this hands out what can be handed out, to nodes whose active role takes it and
which are not about to leave it, and lets the policy change roles as the work shifts. Every hand-out is a background
call; what comes back are events.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, AsyncIterator, Awaitable, Callable, Iterable, Iterator

from dynarl import wire
from dynarl.config.schema import Config, Policy
from dynarl.controller.epochs import Epochs, Outcome, Weights
from dynarl.controller.fleet import Fleet
from dynarl.controller.leases import Leases, ReplicaTorn
from dynarl.controller.replicas import Replica, inside_nodes
from dynarl.controller.requests import Requests
from dynarl.controller.router import Router
from dynarl.controller.telemetry import Monitor
from dynarl.controller.turns import Turns
from dynarl.dataflow import channels
from dynarl.dataflow.ledger import Group, Ledger
from dynarl.dataflow.minibatches import Minibatch, Minibatches
from dynarl.hypergraph import workflow
from dynarl.rl.advantages import group_advantages, is_flat
from dynarl.rl.truncation import judge
from dynarl.scheduler.policy import ROLES, View, decide, take_turns
from dynarl.scheduler.published import Boundaries, in_turn

log = logging.getLogger(__name__)

# How often hand-outs and policy look when nothing happens, while something may change without being told: requests wait
# for a place, workers are down; and while all that can happen is told.
TICK_S, CALM_TICK_S = 0.1, 1.0
# Before work that could not be handed out is offered again.
RETRY_PAUSE_S = 0.2


@dataclass
class Tally:
    """What an iteration adds up for its metrics. `score_stats` has the keys that the workers report (sums; `*_max`
    maxima). Times are the monitor's clock's.
    """

    started: float
    score_stats: dict[str, float] = field(default_factory=dict)
    correct: int = 0
    timed_out: int = 0
    prompt_tokens: int = 0
    tool_calls: list[int] = field(default_factory=list)  # of each answer
    tool_seconds: float = 0.0
    generated_at: float = 0.0
    scored_at: float = 0.0
    switches: list[Outcome] = field(default_factory=list)
    node_seconds: dict[str, float] = field(default_factory=dict)

    def add(self, into: dict[str, float], stats: dict[str, float]) -> None:
        for name, value in stats.items():
            into[name] = max(into.get(name, value), value) if name.endswith("_max") else into.get(name, 0.0) + value


class Iteration:
    """Runs samples until each is trained (or, with `train=False`, only generated).

    may: roles each node can take; weights: the version that everything here is on; down: {(node, role)} without
    workers; replicas: role -> copies of its model (by default one per `training.tp` devices of each node); router: what
    the job has learned of its requests; lease_numbers: of a job whose leases must not be taken for another's.
    """

    def __init__(self, config: Config, fleet: Fleet, epochs: Epochs, weights: Weights, may: dict[str, frozenset[str]],
                 down: set[tuple[str, str]], samples: list[str], *, split: str = "train", temperature: float = 1.0,
                 train: bool = True, scored_by_inference: bool = True, policy: Policy | None = None,
                 replicas: dict[str, list[Replica]] | None = None, router: Router | None = None,
                 monitor: Monitor | None = None, lease_numbers: Iterator[int] = Ledger.LEASES):
        self._config, self._fleet, self._epochs, self.weights = config, fleet, epochs, weights
        self._may, self._down, self._train = may, down, train
        self._policy = policy or config.policy
        self._monitor = monitor or Monitor(config)
        self._clock = self._monitor.clock
        self.ledger = Ledger(samples, scored_by_inference=scored_by_inference, leases=lease_numbers)
        self._num_samples = len(samples)
        algorithm = config.algorithm
        self._minibatches = Minibatches(
            list(self.ledger.groups.values()), algorithm.minibatches, algorithm.membership == "completion"
        )
        self.requests = Requests(
            config, fleet, self.ledger, router or Router(config, self._monitor.lengths), split, temperature,
            self._at_work, self._spawn, self._monitor.stopwatch
        )
        self.leases = Leases(fleet, self.ledger, self._monitor, replicas or {
            role: inside_nodes(may, config.cluster.devices_per_node, config.training.tp)
            for role in ("inference", "training")
        }, self._spawn)
        self._needs_scoring = scored_by_inference
        shared = self._policy.switching == "node" and train
        self._turns = Turns(fleet, epochs, self.ledger, self.leases, list(ROLES)) if shared else None
        self._into = {
            role: channels.into(
                workflow.declared(config.algorithm.workflow), role, config.dataflow.chunk, len(self.ledger.groups)
            )
            for role in ("inference", "training")
        }
        self._boundaries = Boundaries(self._policy, epochs.home)
        self._minibatch = 0
        self.tally = Tally(self._clock())
        self.training_weights = weights
        self._leaving: set[str] = set()
        self._places: dict[str, list[str]] = {}  # what `_at_work` has found
        self._places_state: tuple = ()  # of what it has found that
        self._changed = asyncio.Event()
        self._alarm: asyncio.TimerHandle | None = None  # when to look, though nothing has happened
        self._tasks: set[asyncio.Task] = set()
        self._error: BaseException | None = None
        self._change: asyncio.Task | None = None
        self._given_up = False  # a fault ended it; a change of roles that is under way comes to its end
        self._last_change = 0.0
        self._completed: list[Group] = []  # in the order in which they became complete
        self._advantages: dict[str, dict[str, tuple[float, float]]] = {}  # group -> sample -> (advantage, weight)
        self._masked: dict[str, int] = {}  # sample -> its tokens that tools wrote
        self._stats: dict[str, dict[str, float]] = {}
        self.num_flat_groups = 0
        self._counted_at, self._counted_roles = self._clock(), dict(epochs.roles)

    # --- running

    async def generate(self) -> None:
        """Until every answer is finished."""
        await self._until(lambda: not self.ledger.num_in_state("generating"), Minibatch(0))

    async def accumulate(self, index: int) -> list[Group]:
        """Until the gradients of a minibatch are in the trainers' buffers. Returns its groups."""
        if self._turns is not None:
            weights = {role: self.training_weights if role == "training" else self.weights for role in ROLES}
            await self._turns.begin(weights)
        self._minibatch, batch = index, self._minibatches[index]
        self._consider(batch)  # before anything of it is handed out
        await self._until(lambda: self._is_accumulated(index), batch)
        return batch.groups

    async def awake(self, index: int, owners: Iterable[str]) -> list[Group]:
        """Until those that a step on this minibatch needs are in the training role: `owners`, and whoever holds
        gradients. What dies with a worker meanwhile is accumulated again. Returns the groups."""
        batch, turns = self._minibatches[index], self._turns

        def asleep() -> dict[str, str]:
            if not self._is_accumulated(index):
                return {}
            needed = {*owners, *(group.node for group in batch.groups)}
            return {node: "training" for node in sorted(needed) if self._epochs.roles[node] != "training"}

        if turns is None:
            await self._until(lambda: self._is_accumulated(index) and not asleep(), batch, asleep)
            return batch.groups

        def settled() -> bool:
            # Lost gradients may take roles that no node is in: not while all hold still.
            return not self._is_accumulated(index) or (not asleep() and turns.are_settled())

        while True:
            turns.hold_still()
            await self._until(settled, batch, lambda: turns.only_free(asleep()))
            if index + 1 == self._config.algorithm.minibatches:
                await turns.end()
            if self._is_accumulated(index):
                return batch.groups
            await self.accumulate(index)

    def _is_accumulated(self, index: int) -> bool:
        batch = self._minibatches[index]
        # First what is counted already: minibatches are trained one after another.
        return self.ledger.num_in_state("accumulated", "trained") >= (index + 1) * batch.size and batch.is_accumulated

    async def _until(self, reached: Callable[[], bool], to_train: Minibatch,
                     needed: Callable[[], dict[str, str]] = lambda: {}) -> None:
        """Hand out and move nodes until `reached`. needed: moves that it takes, whatever the policy wants."""
        try:
            while True:
                self._raise_error()
                if reached() and self._change is None:
                    return
                self._hand_out(to_train)
                if (moves := needed()) and self._change is None and self._is_possible(moves):
                    self._begin(moves)
                self._consider(to_train)
                await self._something_happens()
        except BaseException:
            self._give_up()
            if self._turns is not None:
                await asyncio.shield(self._turns.end())
            raise
        finally:
            self._silence()

    @asynccontextmanager
    async def going_on(self) -> AsyncIterator[None]:
        """Around an optimizer step: requests and groups to be scored are handed out meanwhile, roles stay. When that
        fails the step is cancelled, and the failure raised: a step that is not on record yet never was."""
        failed: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                handing_out = group.create_task(self._keep_handing_out())
                yield
                handing_out.cancel()
        except BaseExceptionGroup as errors:
            failed = errors.exceptions[0]  # raised below, so that it keeps the cause that it has
        except BaseException:
            self._give_up()
            raise
        finally:
            self._silence()
        if failed is not None:
            self._give_up()
            raise failed

    async def _keep_handing_out(self) -> None:
        while True:
            self._raise_error()
            self._hand_out(Minibatch(0))
            await self._something_happens()

    def _raise_error(self) -> None:
        """What ended in the background with an error ends the iteration."""
        if self._error is not None:
            raise self._error

    def _give_up(self) -> None:
        """Nothing that is under way is for this iteration any more."""
        self._given_up = True
        for task in self._tasks:
            task.cancel()

    async def _something_happens(self) -> None:
        """Until then, or until it is time to look."""
        self._changed.clear()
        loop = asyncio.get_running_loop()
        due = loop.time() + self._pause_s()
        # One that rings too early does no harm, and to set another for every event would cost more than most events.
        if self._alarm is None or self._alarm.when() > due:
            self._silence()
            self._alarm = loop.call_at(due, self._ring)
        await self._changed.wait()

    def _ring(self) -> None:
        self._alarm = None
        self._changed.set()

    def _silence(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _pause_s(self) -> float:
        """How long to wait when nothing happens."""
        if self.ledger.num_waiting or self._down or self._change is not None:
            return TICK_S
        now, due = self._clock(), [self.requests.rebalance_at]
        if self._policy.name != "static":
            due += [self._last_change + self._policy.dwell_s, self._monitor.look_at]
        return max(TICK_S, min([CALM_TICK_S, *(at - now for at in due if at > now)]))

    def _wake(self) -> None:
        self._changed.set()

    def _spawn(self, work: Awaitable[Any], undo: Callable[[], None]) -> None:
        """Run a hand-out. A worker that died is reported by its own event; any other failure ends the job."""

        async def guarded() -> None:
            try:
                await work
            except ReplicaTorn:
                raise
            except (wire.CallError, TimeoutError) as error:
                log.warning("a hand-out failed: %s", error)
                await asyncio.sleep(RETRY_PAUSE_S)
                undo()
                self._wake()

        task = asyncio.ensure_future(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._finished_task)

    def _finished_task(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._error = task.exception()
            self._wake()

    def _at_work(self, role: str) -> list[str]:
        """Nodes that take work of `role` now."""
        turns = self._turns
        state = (
            self._epochs.num_changes, turns and turns.num_changes, frozenset(self._leaving), frozenset(self._down)
        )
        if state != self._places_state:
            self._places_state, self._places = state, {}
        if role not in self._places:
            away = self._leaving | {n for n, r in self._down if r == role}
            takers = [n for n, r in self._epochs.roles.items() if r == role] if turns is None else turns.take_work(role)
            self._places[role] = [node for node in takers if node not in away]
        return self._places[role]

    # --- handing out

    def _hand_out(self, to_train: Minibatch) -> None:
        with self._monitor.overhead("routing"):
            self.requests.hand_out(rebalance=self._policy.rebalance and self._change is None)
        if not self._train:
            return
        if self._needs_scoring and self.ledger.num_in_state("generated") and (takers := self._at_work("inference")):
            self.leases.hand_out("inference", self._to_score(), takers, lambda sample: {})
        even = self._policy.shares == "even"
        # Shares are of the trainer as it is once a change is over.
        if self.ledger.num_in_state("scored") and not (even and self._change is not None):
            among = to_train.groups if even else None
            groups = self._to_train(to_train) if even else self._longest_first(to_train)
            self.leases.hand_out("training", groups, self._at_work("training"), self._of_sample, among)

    def _to_score(self) -> Iterator[Group]:
        """Groups that inference may take now."""
        return (group for group in self.ledger.in_state("generated") if self._is_offered(group))

    def _to_train(self, batch: Minibatch) -> Iterator[Group]:
        """Groups of a minibatch that training may take now."""
        return (group for group in self.ledger.in_state("scored") if group.name in batch.names and self._is_offered(group))

    def _longest_first(self, batch: Minibatch) -> Iterator[Group]:
        """These, so that the last ones, for which all but a few nodes wait before a step, are short."""
        yield from sorted(self._to_train(batch), key=lambda group: -group.num_tokens)

    def _is_offered(self, group: Group) -> bool:
        """Whether the chunk is full in which a generated or scored group goes on."""
        return group.name in self._into["inference" if group.state == "generated" else "training"].offered

    def _of_sample(self, sample: str) -> dict[str, float]:
        advantage, weight = self._advantages[wire.group_of(sample)][sample]
        return {"advantage": advantage, "weight": weight}

    # --- what comes back

    def event_finished(self, node: str, *, sample: str, reward: float, correct: bool, timed_out: bool, tokens: int,
                       prompt_tokens: int, finish: str, version: int, masked_tokens: int = 0, tool_calls: int = 0,
                       tool_seconds: float = 0.0) -> None:
        group = self.ledger.groups.get(wire.group_of(sample))
        if group is None or self.ledger.running.get(sample) != node or version != self.weights.version:
            return
        full = self.ledger.finished(sample, node, reward=reward, tokens=tokens, finish=finish)
        if self._train:
            self._monitor.finished(
                sample, tokens, masked_tokens, prompt_tokens=prompt_tokens, tool_calls=tool_calls,
                tool_seconds=tool_seconds)
        self.tally.correct += correct
        self.tally.timed_out += timed_out
        self.tally.prompt_tokens += prompt_tokens
        self.requests.router.finished(sample, prompt_tokens)
        self.tally.tool_calls.append(tool_calls)
        self.tally.tool_seconds += tool_seconds
        self._masked[sample] = masked_tokens
        if full is not None:
            self._completed.append(full)
            self._minibatches.completed(full)
            self._settle(full)
            for name in self._into["inference"].put(full.name):
                if not self._needs_scoring:
                    self._into["training"].put(name)
        if not self.ledger.num_live:
            self.tally.generated_at = self._clock()
        self._wake()

    def _settle(self, group: Group) -> None:
        """Advantages of a complete group."""
        settled = [judge(self._config.algorithm.truncated, group.rewards[s], group.finish[s]) for s in group.samples]
        rewards = [outcome.reward for outcome in settled]
        self.num_flat_groups += is_flat(rewards)
        advantages = group_advantages(rewards, self._config.algorithm.normalize_std)
        self._advantages[group.name] = {
            sample: (advantage, outcome.weight)
            for sample, advantage, outcome in zip(group.samples, advantages, settled)
        }

    def counted_tokens(self, groups: list[Group]) -> int:
        """Response tokens of these groups that count in the loss."""
        return sum(int((group.tokens[s] - self._masked[s]) * self._advantages[group.name][s][1])
                   for group in groups for s in group.samples)

    @property
    def num_masked_tokens(self) -> int:
        """Response tokens that tools wrote."""
        return sum(self._masked.values())

    def advantages(self) -> list[float]:
        return [advantage for group in self._advantages.values() for advantage, _ in group.values()]

    def event_scored(self, node: str, *, lease: int, stats: dict[str, float] | None = None) -> None:
        self.leases.done(lease)
        if (group := self.ledger.scored(lease)) is not None:
            self._into["training"].put(group.name)
            self.tally.add(self.tally.score_stats, stats or {})
            self.tally.scored_at = self._clock()
        self._wake()

    def event_trained(self, node: str, *, lease: int, stats: dict[str, float]) -> None:
        if (whole := self.leases.part(node, lease, stats)) is None:
            return
        self.leases.done(lease)
        group = self.ledger.accumulated(lease)
        if group is not None:
            # By group: one whose gradient is lost with its worker is trained, and counted, again.
            self._stats[group.name] = whole
        self._wake()

    def stats(self) -> dict[str, float]:
        """Sums over all trained groups."""
        total: dict[str, float] = {}
        for stats in self._stats.values():
            self.tally.add(total, stats)
        return total

    def stage_ends(self) -> dict[str, float]:
        """Seconds from the start to the last answer and to the last score, as far as they are there."""
        ends = {"rollout": self.tally.generated_at, "inference": self.tally.scored_at}
        return {role: round(end - self.tally.started, 3) for role, end in ends.items() if end}

    def worker_lost(self, node: str, role: str, held: Iterable[str] = ()) -> None:
        """Offer again what a dead worker had. held: requests whose answer so far is recorded on its node."""
        if role == "environment":
            return
        if role == "rollout":
            self.requests.worker_lost(node, held)
        else:
            self.ledger.worker_lost(node, role)
        self.leases.worker_lost(node)
        self._wake()

    # --- roles

    def _consider(self, to_train: Minibatch) -> None:
        if self._change is not None:
            return
        # Once all answers are there nodes go one way, and nothing can swing.
        if self.ledger.num_live and self._clock() - self._last_change < self._policy.dwell_s:
            return
        if not self._train or self._policy.name == "static":
            return
        if self._turns is not None:
            moves = take_turns(self.view(to_train), self._turns.free())
            if given := {n: r for n, r in moves.items() if (n, r) not in self._down}:
                self._turns.give(given)
                self._hand_out(to_train)  # now: no event says that they take work
            return
        with self._monitor.overhead("decisions"):
            if self._policy.name == "adaptive":
                moves = self._monitor.consult(
                    self._policy, self.ledger, self._epochs.roles, self._may, self._down,
                    lambda group: self._is_offered(group) and (group.state == "generated" or group.name in to_train.names),
                    self._needs_scoring, self.leases.replicas, self._clock() - self._last_change, self._bound)
            elif self._policy.name == "published":
                moves = self._boundaries.decide(self.view(to_train))
            elif self._policy.name == "in_turn":
                moves = in_turn(self.view(to_train))
            else:
                moves = decide(self._policy, self.view(to_train))
        # A role without living workers on that node is no destination.
        moves = {node: role for node, role in moves.items() if (node, role) not in self._down}
        if moves:
            self._begin(moves)

    def _bound(self) -> frozenset[str]:
        """Nodes that the next optimizer step needs: its owners, and who has gradients of it or is about to."""
        owners = {node for node, role in self._epochs.home.items() if role == "training"}
        return frozenset(owners | {group.node for group in self.ledger.in_state("training", "accumulated")})

    def _begin(self, moves: dict[str, str]) -> None:
        self._leaving |= set(moves)
        self._change = asyncio.ensure_future(self._move(moves))

    def _is_possible(self, moves: dict[str, str]) -> bool:
        """Whether the workers live, and somebody goes on generating while there is something to generate; nodes that
        switch by themselves come back to that after the step."""
        roles = self._epochs.roles
        generating = any(role == "rollout" and node not in moves for node, role in roles.items())
        safe = self._turns is not None or generating or not self._num_to_generate()
        return self._down.isdisjoint(moves.items()) and safe

    def view(self, to_train: Minibatch) -> View:
        count = self.ledger.num_in_state
        roles = self._epochs.roles if self._turns is None else self._turns.given
        if self._down:
            roles = {n: r for n, r in roles.items() if (n, r) not in self._down}
        return View(
            roles=roles, may=self._may, waiting=self.ledger.num_waiting, generating=count("generating"),
            running=self.ledger.num_running,
            needs_scoring=self._needs_scoring, to_score=count("generated") - self._into["inference"].num_gathered,
            scoring=count("scoring"),
            to_train=sum(1 for _ in self._to_train(to_train)) if count("scored") else 0, training=count("training"),
            minibatch=self._minibatch, num_samples=self._num_samples, num_groups=len(self.ledger.groups),
            num_complete=len(self.ledger.groups) - count("generating"))

    def count_node_seconds(self) -> None:
        """Add the time since the last call to the roles that the nodes have had since then."""
        now = self._clock()
        for role in self._counted_roles.values():
            self.tally.node_seconds[role] = self.tally.node_seconds.get(role, 0.0) + now - self._counted_at
        self._counted_at, self._counted_roles = now, dict(self._epochs.roles)

    def event_switched(self, node: str, *, source: str, target: str, phases: dict[str, float]) -> None:
        """A node has given its devices to another role by itself."""
        outcome = self._epochs.switched(node, target, phases)
        self.tally.switches.append(outcome)
        self._monitor.moved({node: source}, {node: target}, outcome)
        self.count_node_seconds()
        self._wake()

    async def _move(self, moves: dict[str, str]) -> None:
        try:
            if self._turns is not None:
                await self._take(moves)
                return
            reason = f"{self.ledger.num_live} requests live, " + ", ".join(
                f"{self.ledger.num_in_state(s)} groups {s}" for s in ("generated", "scored", "accumulated"))
            for weights, part in self._by_weights(moves):
                if part and not self._given_up:
                    sources = dict(self._epochs.roles)
                    with self.requests.asking(part):
                        outcome = await self._epochs.change(
                            part, weights, reason, self._take_back, self._num_to_generate)
                    self.tally.switches.append(outcome)
                    self._monitor.moved(sources, part, outcome)
                    if not outcome.committed:
                        # One that is refused takes no time, and the next look would want the same.
                        await asyncio.sleep(RETRY_PAUSE_S)
        except BaseException as error:
            self._error = error
            raise
        finally:
            self.count_node_seconds()
            self._leaving -= set(moves)
            self._last_change = self._clock()
            self._change = None
            self._wake()

    async def _take(self, moves: dict[str, str]) -> None:
        try:
            await self._turns.take(moves)
        except wire.CallError as error:  # it is wanted again as long as it is needed
            log.warning("a node did not switch: %s", error)
            await asyncio.sleep(RETRY_PAUSE_S)

    def _by_weights(self, moves: dict[str, str]) -> list[tuple[Weights, dict[str, str]]]:
        """These moves as changes of roles: one, where all need the same weights."""
        if self.training_weights == self.weights:
            return [(self.weights, moves)]
        # After the first minibatch trainers are ahead of the weights that generated and score.
        return [(self.training_weights, {n: r for n, r in moves.items() if r == "training"}),
                (self.weights, {n: r for n, r in moves.items() if r != "training"})]

    def _num_to_generate(self) -> int:
        """Requests that need a rollout node. One that a node has finished while it left is not among them, though its
        report is still on its way.
        """
        at_work = [node for node, role in self._epochs.roles.items() if role == "rollout"]
        running = sum(self.ledger.num_running_on(node) for node in at_work)
        return self.ledger.num_waiting + running + len(self.ledger.stranded(at_work))

    def _take_back(self, outcome: Outcome) -> None:
        for node, given_up in outcome.given_up.items():
            for partial in given_up:
                if self.requests.returned(node, partial):
                    self._monitor.given_up(**partial)
        for leases in outcome.unstarted.values():
            for lease in leases:
                self.leases.back(lease)
        self._wake()
