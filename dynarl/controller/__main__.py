"""Program of the head node: `python -m dynarl.controller --config FILE [--run-dir DIR] [--resume]`, exec'ed by the job
script.

It owns the run until the job ends, is cancelled, or nears its time limit; then it saves, records why, and leaves with
the exit code of that end:

    0 completed or cancelled    1 failed    3 bad configuration    4 Slurm refused    75 requeued (EX_TEMPFAIL)
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

# Before anything slow is imported: USR1 would end the process, and it may come up to a minute early.
_pending_usr1: list[int] = []
signal.signal(signal.SIGUSR1, lambda number, frame: _pending_usr1.append(number))

import msgspec  # noqa: E402

from dynarl import keys, rundir  # noqa: E402
from dynarl.agent.__main__ import own_address  # noqa: E402
from dynarl.config import load, validate  # noqa: E402
from dynarl.config.schema import Config  # noqa: E402
from dynarl.controller.fleet import Fleet, StepLost  # noqa: E402
from dynarl.controller.job import Job  # noqa: E402
from dynarl.controller.nodes import allocated_nodes, assign_homes, surviving_nodes  # noqa: E402
from dynarl.controller.workers import JobFailed, OwnerLost  # noqa: E402
from dynarl.errors import ConfigError, DynarlError  # noqa: E402
from dynarl.hypergraph.journal import Journal  # noqa: E402
from dynarl.report.metrics import MetricsWriter  # noqa: E402
from dynarl.slurm import environ  # noqa: E402
from dynarl.wire import CallError  # noqa: E402

log = logging.getLogger("dynarl.controller")

EXIT_REQUEUED = 75
# Steps that may be lost (a dead node) before the job is given up.
MAX_RESTEPS = 5
CANCEL_POLL_S = 0.5


class Cancelled(RuntimeError):
    """Somebody asked for the end."""


class TimeLimitNear(RuntimeError):
    """Slurm announced the time limit."""


class Controller:
    """One start of the controller on one run."""

    def __init__(self, config: Config, run: Path, resume: bool, job_class: type[Job] = Job):
        self.config, self.run_dir, self.job_class = config, run, job_class
        self.attempt = rundir.new_attempt(run)
        self._setup_logging()
        keys.create(rundir.keys(run))
        self.journal = Journal(rundir.journal(run))
        self.resume_from = rundir.newest_checkpoint(run) if resume else None
        self.writer = MetricsWriter(
            run, rundir.checkpoint_iteration(self.resume_from) + 1 if self.resume_from else None
        )
        self.cancel_file = run / "control" / "cancel"
        self.cancel_file.parent.mkdir(exist_ok=True)
        self.cancel_file.unlink(missing_ok=True)
        self.time_limit = asyncio.Event()

    def _setup_logging(self) -> None:
        file = logging.FileHandler(rundir.controller_log(self.run_dir, self.attempt))
        handlers = [file, logging.StreamHandler(sys.stderr)]
        logging.basicConfig(
            level=logging.INFO, format="%(asctime)s controller %(levelname)s %(message)s", handlers=handlers, force=True
        )

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, self.time_limit.set)
        if _pending_usr1:
            self.time_limit.set()
        nodes = allocated_nodes()
        validate.check_allocation(self.config, len(nodes))
        self.journal.append(
            "run_started",
            run=self.run_dir.name,
            config=msgspec.to_builtins(self.config),
            nodes=nodes,
            job_id=os.environ.get("SLURM_JOB_ID"),
            attempt=self.attempt,
            iterations=self.config.run.iterations,
        )
        self.fleet = Fleet(
            self.config, self.run_dir, self.attempt, own_address(self.config.cluster.interface, socket.gethostname())
        )
        state, reason, code = "failed", "", 1
        try:
            for restep in range(MAX_RESTEPS + 1):
                lost = await self._one_step(assign_homes(self.config, nodes))
                if lost is None:
                    state, code = "completed", 0
                    break
                if restep == MAX_RESTEPS:
                    raise JobFailed(f"{lost}; that was restart {restep} of at most {MAX_RESTEPS}")
                log.warning("starting the step again: %s", lost)
                nodes = surviving_nodes([n for n in nodes if n not in lost.nodes])
                self.resume_from = rundir.newest_checkpoint(self.run_dir)
                if self.resume_from is None:
                    self.journal.append("resumed", iteration=0, checkpoint=None, durable=True)
        except Cancelled:
            state, reason, code = "cancelled", "asked for", 0
        except TimeLimitNear:
            state, reason, code = self._requeue()
        except (JobFailed, DynarlError) as error:
            reason, code = str(error), getattr(error, "exit_code", 1)
            log.error("%s", error)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            log.exception("the controller failed")
        await self.fleet.close()
        self.journal.append("run_ended", state=state, reason=reason, exit_code=code, durable=True)
        self.writer.close()
        self.journal.close()
        if state == "requeued":
            # Now Slurm may end this process; before, the record would not have been written.
            subprocess.run(
                ["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=False, env=environ.for_srun(os.environ)
            )
            time.sleep(60)
        return code

    async def _one_step(self, home: dict[str, str]) -> StepLost | None:
        """Run the job in one step. None: completed. Else why another step has to be started."""
        job = self.job_class(
            self.config,
            self.run_dir,
            self.attempt,
            home,
            self.fleet,
            self.journal,
            self.writer,
            self.resume_from,
            self.journal.graph.last_number,
        )
        try:
            try:
                await self._race(job.set_up(), job, starting=True)
            except (OwnerLost, CallError, TimeoutError) as error:
                if self.journal.graph.ready_t is None:  # what has never worked is no accident
                    raise
                return StepLost(f"the step could not be set up again: {error}")
            sound = True
            while True:
                try:
                    await self._race(job.body() if sound else job.recover_owners(), job)
                    if sound:
                        return None
                    sound = True
                # Owners seldom die alone: the next death may be reported while the first is being mended.
                except (OwnerLost, CallError, TimeoutError) as error:
                    log.warning("the trainer starts again from the newest checkpoint: %s", error)
                    sound = False
        except StepLost as error:
            # Before the way out, which takes time: an agent that was cut off sees from it that the run goes on without it.
            self.journal.append("step_lost", reason=str(error), nodes=sorted(error.nodes))
            return error
        except (Cancelled, TimeLimitNear):
            await self._save(job)
            raise
        finally:
            await job.close()

    async def _race(self, work, job: Job, starting: bool = False) -> None:
        """Run `work` until it is done or something interrupts it. What wins raises its reason."""
        body = asyncio.create_task(work)
        reasons = [job.fault(), self._cancel_asked(), self._limit_near(), job.fleet.lost()]
        if not starting:
            reasons.append(job.silence())
        watchers = [asyncio.create_task(reason) for reason in reasons]
        try:
            await asyncio.wait([body, *watchers], return_when=asyncio.FIRST_COMPLETED)
            winner = next((w for w in watchers if w.done()), body)
            # Errors that follow from a lost step (calls without an answer) are not the reason; the end of the step is.
            if winner is body and body.exception() is not None:
                await asyncio.wait(watchers, timeout=2.0, return_when=asyncio.FIRST_COMPLETED)
                winner = next((w for w in watchers if w.done()), body)
            if winner is not body:
                async with job.critical:
                    body.cancel()
                await asyncio.gather(body, return_exceptions=True)
            winner.result()
        finally:
            for task in [body, *watchers]:
                task.cancel()
            await asyncio.gather(body, *watchers, return_exceptions=True)

    async def _cancel_asked(self) -> None:
        while not self.cancel_file.exists():
            os.listdir(self.cancel_file.parent)  # drops a cached "not there" on NFS
            await asyncio.sleep(CANCEL_POLL_S)
        raise Cancelled("cancel was asked for")

    async def _limit_near(self) -> None:
        await self.time_limit.wait()
        if self.cancel_file.exists():  # `dynarl cancel` also sends the signal, in case this process looks nowhere else
            raise Cancelled("cancel was asked for")
        raise TimeLimitNear("the time limit is near")

    async def _save(self, job: Job) -> None:
        """A last checkpoint, if there is something to save and the trainer still answers."""
        if job.progress.iteration == 0 and not job.progress.warm_start_done:
            return
        try:
            await asyncio.wait_for(job.checkpoints.save_interrupted(), self.config.cluster.signal_before_s * 0.7)
        except Exception as error:
            log.error("no checkpoint on the way out, the newest older one counts: %s: %s", type(error).__name__, error)

    def _requeue(self) -> tuple[str, str, int]:
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        if not self.config.cluster.requeue:
            return (
                "failed",
                "time limit reached; cluster.requeue is off. Go on with: dynarl submit --resume " + self.run_dir.name,
                1,
            )
        if restarts >= self.config.cluster.max_requeues:
            return "failed", f"time limit reached after {restarts} requeues (cluster.max_requeues)", 1
        return "requeued", "time limit near", EXIT_REQUEUED


def find_run(config_path: Path, config: Config, run_dir: Path | None) -> tuple[Path, bool]:
    """The run directory and whether it is one to go on with: a requeued job finds the one of its first start."""
    root = rundir.runs_root(config.run.root)
    if run_dir is not None:
        return run_dir, False
    # Job ids come round again (a new cluster, a wrapped counter), so the id alone does not say that this is a restart.
    if int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0:
        for run in reversed(rundir.all_runs(root)):
            if os.environ["SLURM_JOB_ID"] in rundir.job_ids(run):
                return run, True
    return rundir.create(root, config.run.name), False


def main(job_class: type[Job] = Job) -> int:
    parser = argparse.ArgumentParser(prog="dynarl.controller")
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    try:
        config = load.load(args.config)
        validate.check(config)
        run, again = find_run(args.config, config, args.run_dir)
        restarted = again or int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0
        if rundir.journal(run).exists() and not (args.resume or restarted):
            raise ConfigError(f"{run} holds a run already; give --resume to go on with it, or another directory")
    except DynarlError as error:
        print(f"dynarl: {error}", file=sys.stderr)
        return error.exit_code
    if not rundir.config(run).exists():
        rundir.config(run).write_text(load.dump(config))
    if (job_id := os.environ.get("SLURM_JOB_ID")) and job_id not in rundir.job_ids(run):
        rundir.add_job(run, job_id)
    rundir.set_latest(run)

    async def start() -> int:
        return await Controller(config, run, args.resume or restarted, job_class).run()

    try:
        return asyncio.run(start())
    except DynarlError as error:
        print(f"dynarl: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
