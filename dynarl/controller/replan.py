"""The split of the nodes, planned again while the job runs: what each iteration took is held against the plan, and
where that is off for good another split is made and carried out between two iterations.

The trainer grows or shrinks by a change of its layout (`Recut`), its state moves live; other nodes get another home
role and take it when the next iteration begins. No checkpoint is written or read.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

from dynarl.config.degrees import Degrees
from dynarl.controller.iteration import Iteration
from dynarl.controller.nodes import with_inference
from dynarl.errors import ConfigError
from dynarl.scheduler import replan
from dynarl.scheduler.policy import ROLES
from dynarl.scheduler.replan import Proposal, Seen

if TYPE_CHECKING:
    from dynarl.controller.job import Job

log = logging.getLogger(__name__)

# Seconds that a change keeps the job from its work, before there was one.
FIRST_CHANGE_S = 5.0


class Replanner:
    """Of one job, from a start or a checkpoint on. `job.progress.plan` says what it has decided."""

    def __init__(self, job: Job):
        self._job, self._config = job, job.config.plan
        planned = job.progress.plan.get("stage_s", self._config.stage_s)
        self._watch = replan.Watch(planned, self._config.tolerance, self._config.window)
        self._seen: Seen | None = None  # the last iteration
        self._step_s = 0.0
        self._change_s = FIRST_CHANGE_S

    def note(self, run: Iteration, steps: list[dict[str, Any]]) -> dict[str, float]:
        """An iteration is over. Returns its metrics: seconds that each stage has worked, on its nodes."""
        job, algorithm = self._job, self._job.config.algorithm
        nodes, work = self._nodes(), job.monitor.worked
        step_s = sum(step["seconds"] for step in steps)
        seconds = {"rollout": run.tally.generated_at - run.tally.started}
        for role in ("inference", "training"):
            if nodes.get(role):
                seconds[role] = work[role] / nodes[role] + (step_s if role == "training" else 0.0)
        answers = [group.tokens[s] for group in run.ledger.groups.values() for s in group.samples]
        devices = job.config.cluster.devices_per_node
        self._seen = Seen(
            seconds, nodes, algorithm.prompts_per_step, len(answers), sum(answers), max(answers),
            job.config.rollout.max_running * devices, -(-len(job.trainer.replicas[0].places) // devices), step_s,
        )
        self._watch.note(seconds)
        return {f"timing_s/stage/{role}": value for role, value in seconds.items()}

    async def before(self, number: int) -> None:
        """Plan again before iteration `number`, if that is called for."""
        if not self._config.replan or not self._watch.is_full:
            return
        off = self._watch.deviations()
        if self._watch.planned and not off:
            return
        job, measured = self._job, self._watch.measured()
        told = {
            "iteration": number,
            "planned_s": dict(self._watch.planned),
            "measured_s": {stage: round(seconds, 4) for stage, seconds in measured.items()},
            "off": {stage: round(share, 3) for stage, share in off.items()},
            "split": self._nodes(),
            "window": self._config.window,
        }
        try:
            seen = self._seen._replace(seconds=measured)
            proposal = replan.propose(seen, job.monitor.costs.step, self._chunks(seen.items))
        except ConfigError as error:
            self._stay(told, measured, str(error))
            return
        told |= {"proposed": proposal.nodes, "now_s": round(proposal.now_s, 4), "then_s": round(proposal.then_s, 4)}
        if proposal.nodes == self._nodes():
            self._stay(told, measured, "no other split is faster")
        elif not proposal.pays(job.config.run.iterations - number + 1, self._change_s):
            self._stay(told, measured, f"it would save {proposal.gain_s:.2f} s an iteration, too little for a change")
        elif (reason := await self._change(number, proposal)) is None:
            self._watch.plan(proposal.seconds)
            told |= {"home": job.home, "cost_s": round(self._change_s, 3)}
            job.journal.append("replanned", state="committed", **told, durable=True)
            log.info("another split from iteration %d on: %s", number, proposal.nodes)
        else:
            self._stay(told, measured, reason, "cancelled")

    async def _change(self, number: int, proposal: Proposal) -> str | None:
        """Carry it out. None: done; else why not, and everything is as it was."""
        job, before, began = self._job, self._job.progress.plan, self._job.clock()
        trainer, base, now = job.trainer, job.trainer.base_home, job.trainer.layout
        wanted = Degrees(now.tp, now.pp, now.ep, proposal.nodes["training"])
        try:
            trainer.rebase(with_inference(base, proposal.nodes.get("inference", 0)))
            layout = trainer.layout_of(wanted)
        except ConfigError as error:
            trainer.rebase(base)
            return str(error)
        plan = {"layout": str(wanted), "inference": proposal.nodes.get("inference", 0), "stage_s": proposal.seconds}
        job.progress.plan = plan
        await job.recut.before(number)
        if trainer.layout != layout:
            job.progress.plan = before
            trainer.rebase(base)
            return f"the trainer could not change to layout {wanted}"
        trainer.rehome()
        job.settle()
        self._change_s = job.clock() - began
        return None

    def _stay(self, told: dict[str, Any], measured: dict[str, float], reason: str, state: str = "kept") -> None:
        """The split remains; what was measured is what is expected from here on."""
        self._job.journal.append("replanned", state=state, reason=reason, **told, durable=True)
        log.info("the split stays: %s", reason)
        self._watch.plan(measured)

    def _nodes(self) -> dict[str, int]:
        homes = Counter(self._job.home.values())
        return {role: homes[role] for role in ROLES if homes[role]}

    def _chunks(self, items: int) -> dict[str, int]:
        """Groups that each stage is offered together."""
        chunk = self._job.config.dataflow.chunk
        named = {"inference": chunk.get("trajectories", 1), "training": chunk.get("scored", 1)}
        return {role: items if size == "all" else min(size, items) for role, size in named.items()}
