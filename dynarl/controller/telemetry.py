"""What the scheduler knows: measured step times, seconds per token and pauses, lengths of answers; and its decisions
on record.

One `Monitor` for the whole job: what one iteration teaches, the next one uses. It is told what happens (`figures` of
the rollout workers, answers, leases, moves) under every policy; the adaptive one also asks it what to do.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dynarl import wire
from dynarl.config.schema import Config, Policy
from dynarl.controller.epochs import Outcome
from dynarl.controller.overhead import Overhead
from dynarl.controller.replicas import Replica
from dynarl.controller.trace import Trace
from dynarl.dataflow.ledger import Group, Ledger
from dynarl.hypergraph.journal import Journal
from dynarl.scheduler import adaptive, policy as rules
from dynarl.scheduler.costs import Costs, GroupDelay, WorkRate
from dynarl.scheduler.situation import Decision, Queue, Situation
from dynarl.scheduler.survival import Lengths
from dynarl.scheduler.telemetry import Instance, figures_interval_s, summarize

# Of the controller's time, the most that decisions take: after one that took 2 ms the next is 0.4 s later, unless a
# component has run out of work.
DECISION_SHARE = 0.005
# The same where a component has work for more or fewer of its nodes than at the last look.
URGENT_SHARE = 0.05
# Nor does it matter, before so much of what is left of the iteration has passed.
REST_SHARE = 0.004
LOOK_S = 0.1
# A node whose rate at its load is so many times below the median is named as slow.
SLOW = 2.0
# Of two figures further apart than this many intervals, and this many seconds, the second says nothing about a step: the
# engine had nothing to do in between.
FIGURES_GAP, FIGURES_GAP_S = 2.5, 1.0
STAY_RECORD_S = 1.0


class Monitor:
    """Knowledge and record of the scheduler. `journal` None: nothing is recorded. clock: seconds of the job, which its
    event loop has too; stopwatch: seconds that this process has worked, for what decisions take.
    """

    def __init__(
        self,
        config: Config,
        journal: Journal | None = None,
        first_number: int = 0,
        clock: Callable[[], float] = time.monotonic,
        stopwatch: Callable[[], float] = time.process_time,
        figures_gap_s: float | None = None,
    ):
        self._config, self._journal, self.clock = config, journal, clock
        self.stopwatch = stopwatch
        self.numbers = itertools.count(first_number + 1)  # of decisions on record
        self._max_running = config.rollout.max_running * config.cluster.devices_per_node
        self._max_queued = config.rollout.max_queued * config.cluster.devices_per_node
        self.costs = Costs(stages={"inference": WorkRate(), "training": WorkRate()})
        workers = config.cluster.nodes * config.cluster.devices_per_node
        self.figures_gap_s = figures_gap_s or max(FIGURES_GAP_S, FIGURES_GAP * figures_interval_s(workers))
        self.lengths = Lengths(config.algorithm.max_response_tokens)
        self.delay = GroupDelay(config.algorithm.prompts_per_step, config.algorithm.group_size)
        self.overhead = Overhead()
        self._workers: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)  # node -> worker -> its last figures
        self._rates: dict[str, float] = {}
        self._partial: dict[str, int] = {}  # sample -> sampled tokens of the answer that its node gave up
        self._written, self._sampled = 0, 0  # tokens of all finished answers, and without those of tools
        self._tool_s = 0.0  # that all finished answers have waited for tools
        self._leases: dict[int, tuple[str, Replica, float, float]] = {}  # lease -> (role, replica, tokens, when)
        self._free_at: dict[Replica, float] = {}
        self.begin(0)

    def begin(self, iteration: int) -> None:
        """Another iteration, on other weights."""
        self.iteration, self._began = iteration, self.clock()
        self.overhead.clear()
        self._workers.clear()
        self._partial.clear()
        self._leases.clear()
        self.delay.next_iteration()
        self.trace = Trace()
        self.worked: Counter[str] = Counter()  # role -> seconds of nodes with its leases
        self._open: list[tuple[int, float, Decision, list[float]]] = []
        self._last_stay, self._stay_at = "", -math.inf
        self.look_at = self._urgent_at = -math.inf
        self._state = self._needed = None
        self._nodes: Counter[str] = Counter()  # by role, in this state
        self.lengths.next_iteration()

    # --- what happens

    def figures(
        self,
        node: str,
        *,
        worker: str,
        running: int,
        waiting: int,
        tokens: int,
        kv_used_tokens: int,
        kv_total_tokens: int | None = None,
        lengths: Sequence[int] = (),
        prefill_tokens: int = 0,
        made_s: float | None = None,
        **_: Any,
    ) -> None:
        """Load of one rollout worker, a few times a second; lengths: tokens sampled so far of (some of) its requests;
        made_s: seconds on the worker's own clock, None: it was made now. On the way reports catch up with each other.
        """
        now, last = self.clock(), self._workers[node].get(worker)
        made_s = now if made_s is None else made_s
        elapsed_s = made_s - last["made_s"] if last else 0.0
        if last and last["running"] and running and tokens > last["tokens"] and 0 < elapsed_s < self.figures_gap_s:
            mean = 0.5 * (running + last["running"])
            step_s = elapsed_s * mean / (tokens - last["tokens"])
            devices = self._config.cluster.devices_per_node
            if prefill_tokens - last["prefilled"] <= tokens - last["tokens"]:  # else requests have moved there
                self.costs.step.observe(mean * devices, step_s, 0.5 * (kv_used_tokens + last["kv"]) * devices)
            self.trace.decoded(mean, tokens - last["tokens"], prefill_tokens - last["prefilled"], elapsed_s)
            self._rates[node] = mean / step_s
        self.trace.kv_tokens = max(self.trace.kv_tokens, kv_total_tokens or 0)
        self._workers[node][worker] = {
            "at": now,
            "made_s": made_s,
            "running": running,
            "waiting": waiting,
            "tokens": tokens,
            "prefilled": prefill_tokens,
            "lengths": lengths,
            "kv": kv_used_tokens,
            "kv_total": kv_total_tokens,
        }

    def finished(self, sample: str, tokens: int, masked_tokens: int = 0, *, prompt_tokens: int = 0,
                 tool_calls: int = 0, tool_seconds: float = 0.0) -> None:
        """masked_tokens: those that tools wrote; no decode step was made for them."""
        self._partial.pop(sample, None)
        self.lengths.finished(tokens - masked_tokens)
        self.delay.finished(wire.group_of(sample))
        self._written += tokens
        self._sampled += tokens - masked_tokens
        self._tool_s += tool_seconds
        at_s = round(self.clock() - self._began, 4)
        self.trace.answers.append([sample, prompt_tokens, tokens, masked_tokens, tool_calls, tool_seconds, at_s])

    def given_up(self, sample: str, tokens: int, masked_tokens: int = 0) -> None:
        self._partial[sample] = tokens - masked_tokens

    @property
    def written_per_sampled(self) -> float:
        """Tokens of an answer for each that was sampled; 1 without tools."""
        return self._written / self._sampled if self._sampled else 1.0

    @property
    def wait_s(self) -> float:
        """Seconds that an answer waits for tools, for each token that is sampled."""
        return self._tool_s / self._sampled if self._sampled else 0.0

    def leased(self, lease: int, role: str, replica: Replica, tokens: float) -> None:
        self._leases[lease] = (role, replica, tokens, self.clock())

    def done(self, lease: int, replicas_beside: int) -> None:
        """A lease came back. replicas_beside: copies of the model on its node, which work at the same time."""
        if (entry := self._leases.pop(lease, None)) is None:
            return
        role, replica, tokens, since = entry
        now = self.clock()
        # A second lease waits in the worker while it does the first.
        seconds = now - max(since, self._free_at.get(replica, 0.0))
        self._free_at[replica] = now
        node_seconds = seconds * len(replica.nodes) / replicas_beside
        self.worked[role] += node_seconds
        self.costs.stages[role].observe(tokens, node_seconds)
        self.trace.leases.append([role, tokens, round(node_seconds, 5)])

    def moved(self, sources: Mapping[str, str], moves: Mapping[str, str], outcome: Outcome) -> None:
        """A change of roles came to its end. sources: roles before it."""
        if not outcome.committed:
            self._state = None  # nothing is as it was decided, so that is not put off
            return
        pause_s = 1e-3 * outcome.pause_ms
        for node, target in moves.items():
            self._workers.pop(node, None)  # between these figures and the next ones it was away
            self.costs.moves.observe(sources[node], target, pause_s)
        if self._open:
            self._open[-1][3].append(pause_s)

    # --- what is asked

    def consult(
        self,
        policy: Policy,
        ledger: Ledger,
        roles: Mapping[str, str],
        may: Mapping[str, frozenset[str]],
        down: set[tuple[str, str]],
        wanted: Callable[[Group], bool],
        needs_scoring: bool,
        replicas: Mapping[str, list[Replica]],
        since_move_s: float,
        bound: Callable[[], frozenset[str]] = frozenset,
    ) -> dict[str, str]:
        """The moves that the adaptive policy wants now; none while it is not time to look. down: {(node, role)}
        without workers; wanted: whether a component may take a group now; bound: nodes without which the
        optimizer cannot step. The answer is put on record."""
        if down:
            roles = {node: role for node, role in roles.items() if (node, role) not in down}
        count = ledger.num_in_state
        # What cannot wait for the next look: a component got work or ran out of it, or nodes are others; and, if the last
        # look is a while ago, that it has work for other numbers of its nodes.
        state = not ledger.num_live, not count("generated"), not count("scored"), roles
        now, same = self.clock(), state == self._state
        if same and now < self._urgent_at:
            return {}
        if not same:
            self._nodes = Counter(roles.values())
        nodes = self._nodes
        needed = min(count("generated", "scoring"), nodes["inference"]), min(count("scored", "training"), nodes["training"])
        if same and now < self.look_at and needed == self._needed:
            return {}
        if count("generating") == len(ledger.groups) and nodes["rollout"] == len(roles):
            return {}  # there is nothing else to do
        roles = dict(roles)
        state = (*state[:-1], roles)
        if down:
            may = {node: frozenset(role for role in may[node] if (node, role) not in down) for node in roles}
        units = {role: max((len(r.nodes) for r in copies), default=1) for role, copies in replicas.items()}
        began = self.stopwatch()
        seen = self.situation(ledger, roles, may, wanted, needs_scoring, units, bound())
        decision = adaptive.decide(policy, seen, self.lengths.survival(seen.lengths), self.costs, since_move_s)
        seconds = self.stopwatch() - began
        self.look_at = now + max(LOOK_S, seconds / DECISION_SHARE)
        rest_s = decision.finish_s if math.isfinite(decision.finish_s) else 0.0
        self._urgent_at = now + max(seconds / URGENT_SHARE, rest_s * REST_SHARE)
        self._state, self._needed = state, needed
        self._record(decision, now, seconds, seen)
        return decision.moves

    def _record(self, decision: Decision, now: float, seconds: float, situation: Situation) -> None:
        if not decision.moves:
            text = decision.reason.partition(";")[0]
            if text == self._last_stay or now - self._stay_at < STAY_RECORD_S or not decision.candidates:
                return
            self._last_stay, self._stay_at = text, now
        number = next(self.numbers)
        if decision.moves:
            self._open.append((number, now, decision, []))
            self._last_stay = ""
        if self._journal is not None:
            self._journal.append(
                "decision",
                number=number,
                iteration=self.iteration,
                at_s=round(now - self._began, 3),
                seconds=round(seconds, 5),
                seen=decision.seen | self.summary(situation),
                reason=decision.reason,
                chosen=decision.chosen,
                candidates=[
                    {
                        "moves": c.moves,
                        "finish_s": _finite(c.finish_s),
                        "cost_s": round(c.cost_s, 3),
                        "gain_s": _finite(c.gain_s),
                    }
                    for c in decision.candidates
                ],
            )

    def conclude(self) -> None:
        """The iteration's last gradient is there: how good were the forecasts of its moves?"""
        now = self.clock()
        for number, at, decision, pauses in self._open:
            if math.isfinite(decision.finish_s):
                self.costs.finish.add(decision.finish_s, now - at)
            if self._journal is not None:
                cost_s = decision.candidates[decision.chosen].cost_s if decision.candidates else 0.0
                self._journal.append(
                    "decision_outcome",
                    number=number,
                    predicted_finish_s=_finite(decision.finish_s),
                    actual_finish_s=round(now - at, 3),
                    predicted_cost_s=round(cost_s, 3),
                    actual_cost_s=round(sum(pauses), 3),
                )
        self._open = []

    def start_roles(
        self,
        policy: Policy,
        home: Mapping[str, str],
        may: Mapping[str, frozenset[str]],
        groups: int,
        size: int,
        scored: bool,
    ) -> dict[str, str]:
        """Roles for the next iteration's beginning, from what the former ones taught."""
        if policy.name != "adaptive" or not self.costs.step.known:
            return rules.start_roles(policy, dict(home))
        stages = ("inference", "training") if scored else ("training",)
        situation = Situation(
            home,
            may,
            dict.fromkeys(stages, Queue()),
            waiting=groups * size,
            lengths=[0] * (groups * size),
            live_members={size: groups},
            written_per_sampled=self.written_per_sampled,
            wait_s=self.wait_s,
            max_running=self._max_running,
            max_queued=self._max_queued,
            group_delay=self.delay.estimate,
        )
        return adaptive.start_roles(policy, home, situation, self.lengths.survival([]), self.costs)

    # --- what is seen

    def situation(
        self,
        ledger: Ledger,
        roles: Mapping[str, str],
        may: Mapping[str, frozenset[str]],
        wanted: Callable[[Group], bool],
        needs_scoring: bool,
        units: Mapping[str, int],
        bound: frozenset[str] = frozenset(),
    ) -> Situation:
        """The iteration as the adaptive policy sees it."""
        running = {node: ledger.num_running_on(node) for node, role in roles.items() if role == "rollout"}
        lengths = [self.lengths_on(node, count) for node, count in running.items() if count]
        waiting = ledger.waiting() + ledger.stranded(running)
        lengths.append(np.array([self._partial.get(sample, 0) for sample in waiting], int))

        def queue(waiting: str, working: str) -> Queue:
            here, in_work = ledger.in_state(waiting), ledger.in_state(working)
            tokens = sum(g.num_tokens for g in here) + 0.5 * sum(g.num_tokens for g in in_work)
            # Groups of later minibatches, or of a chunk that is not full, are work, but none to begin now.
            ready = sum(map(wanted, here))
            return Queue(ready, len(in_work), tokens)

        generating = ledger.in_state("generating")
        queues = {"inference": queue("generated", "scoring")} if needs_scoring else {}
        return Situation(
            roles,
            may,
            queues | {"training": queue("scored", "training")},
            running=running,
            waiting=len(waiting),
            lengths=np.concatenate(lengths),
            live_members=Counter(len(g.samples) - len(g.holders) for g in generating),
            finished_tokens=sum(g.num_tokens for g in generating),
            prompt_tokens=self._config.algorithm.max_prompt_tokens,
            written_per_sampled=self.written_per_sampled,
            wait_s=self.wait_s,
            one_by_one=ledger.num_in_state("trained") > 0,
            max_running=self._max_running,
            max_queued=self._max_queued,
            kv_tokens=self.kv_tokens(),
            units=units,
            slow=self.slow(running),
            bound=bound,
            group_delay=self.delay.estimate,
            finished_share=1.0 - ledger.num_live / max(sum(len(g.samples) for g in ledger.groups.values()), 1),
        )

    def lengths_on(self, node: str, count: int) -> np.ndarray:
        """Tokens so far of the `count` requests on a node: what its workers have told, and a token for each step since
        then."""
        now, step_s, most = self.clock(), self.costs.step.seconds(count), self.lengths.max_tokens - 1
        told = [
            np.asarray(figures["lengths"], int) + int((now - figures["at"]) / step_s)
            for figures in self._workers[node].values()
            if len(figures["lengths"])
        ]
        if not told:
            return np.full(count, min(int((now - self._began) / step_s), most))
        known = np.sort(np.minimum(np.concatenate(told), most))
        return known[(2 * np.arange(count) + 1) * len(known) // (2 * count)]

    def kv_tokens(self) -> float | None:
        """What the requests of a node may take of KV memory, those queued in their turn; None while no engine has told.
        """
        totals = [
            sum(f["kv_total"] for f in workers.values())
            for workers in self._workers.values()
            if workers and all(f["kv_total"] for f in workers.values())
        ]
        return min(totals) * (1.0 + self._max_queued / self._max_running) if totals else None

    def slow(self, running: Mapping[str, int]) -> frozenset[str]:
        found = summarize("rollout", self._instances(running), expected_rate=self._expected(running))
        return frozenset({found.slowest}) if found.behind > SLOW else frozenset()

    def summary(self, situation: Situation) -> dict[str, float]:
        """What the journal has of rollout beside what a decision rests on: utilisation, also of the fullest and
        slowest."""
        running = situation.running
        found = summarize("rollout", self._instances(running), expected_rate=self._expected(running))
        return {
            name: value
            for name, value in found.flat().items()
            if name.split("/")[1] in ("tokens_per_s", "kv_mean", "kv_p90", "kv_max", "behind")
        }

    def _instances(self, running: Mapping[str, int]) -> dict[str, Instance]:
        out = {}
        for node, count in running.items():
            figures = self._workers[node].values()
            total = sum(f["kv_total"] or 0 for f in figures)
            out[node] = Instance(
                count,
                sum(f["waiting"] for f in figures),
                self._rates.get(node, 0.0) if count else 0.0,
                sum(f["kv"] for f in figures) / total if total else 0.0,
            )
        return out

    def _expected(self, running: Mapping[str, int]) -> dict[str, float]:
        rates = {count: max(self.costs.step.tokens_per_s(count), 1e-9) for count in set(running.values())}
        return {node: rates[count] for node, count in running.items()}


def _finite(seconds: float) -> float | None:
    """None in the journal stands for never."""
    return round(seconds, 3) if math.isfinite(seconds) else None
