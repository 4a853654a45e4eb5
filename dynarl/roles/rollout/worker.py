"""The rollout worker: one engine, driven between calls by the worker's loop.

`load` builds the engine the first time. Later loads update the weights in place. The first load may carry the job's
configuration (the whole of it, as a dict); without it the local engine on CPU with its defaults is used.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import time
from typing import Any

import msgspec

from dynarl.roles.rollout.engine import ABORT, Engine, Output, Request
from dynarl.roles.worker import Worker, main
from dynarl.scheduler.telemetry import figures_interval_s

# At most so much of an answer is sampled again when a worker dies.
PARTS_INTERVAL_S = 1.0
# tokens_per_s is measured over at least this long: shorter spans are dominated by prefills.
RATE_SPAN_S = 1.0


class RolloutWorker(Worker):
    """Events: finished (one per answer), figures (at most 4 per second while busy, fewer the more workers there are, and
    one when the last answer is out; made_s: when, by this worker's clock), parts (once a second: what was sampled for the answers that go on).
    """

    role = "rollout"

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._engine: Engine | None = None
        self._figures_sent = self._parts_sent = 0.0
        self._figures_s = figures_interval_s(1)
        self._requests = self._resumed = 0  # since the last weights
        self._rate = 0.0
        self._rate_from = (0.0, 0)  # (time, tokens) where the present measurement began

    def work(self) -> bool:
        engine = self._engine
        if engine is None or not engine.busy():
            return False
        self._report(engine.step())
        now = time.monotonic()
        busy = engine.busy()
        if now - self._parts_sent >= PARTS_INTERVAL_S:
            self._parts_sent = now
            if parts := engine.parts():
                self.emit("parts", parts=msgspec.to_builtins(parts, builtin_types=(bytes,)))
        if now - self._figures_sent >= self._figures_s or not busy:
            self._figures_sent = now
            figures = engine.figures()
            self._measure(now, figures.tokens)
            self.emit("figures", made_s=now, **msgspec.to_builtins(figures))
        return busy

    def do_load(self, model_dir: str, version: int, config: dict[str, Any] | None = None) -> None:
        began = time.monotonic()
        if first := self._engine is None:
            self._engine = make_engine(model_dir, version, config or {})
            cluster = (config or {}).get("cluster", {})
            self._figures_s = figures_interval_s(cluster.get("nodes", 1) * cluster.get("devices_per_node", 1))
        else:
            self._engine.load(model_dir, version)
        if self._requests:
            logging.info("requests since the last weights: %d, of which %d were begun elsewhere", self._requests, self._resumed)
            self._requests = self._resumed = 0
        what = "engine started with weights of" if first else "weights updated in place to"
        logging.info("%s version %d in %.2f s", what, version, time.monotonic() - began)

    def do_submit(self, requests: list[dict[str, Any]]) -> None:
        engine = self._loaded()
        if not engine.busy():
            self._rate_from = (time.monotonic(), engine.figures().tokens)
        engine.submit(msgspec.convert(requests, list[Request]))
        self._requests += len(requests)
        self._resumed += sum(bool(request.get("response")) for request in requests)

    def do_abort(self, samples: list[str] | None = None) -> list[dict[str, Any]]:
        if self._engine is None:  # just restarted
            return []
        outputs = self._engine.abort(samples)
        # Finished while it was being aborted: the event goes out before the answer to this call.
        self._report([output for output in outputs if output.finish != ABORT])
        return [msgspec.to_builtins(output, builtin_types=(bytes,)) for output in outputs if output.finish == ABORT]

    def do_sleep(self) -> None:
        if self._engine is not None:
            self._engine.sleep()

    def do_wake(self) -> None:
        if self._engine is not None:
            self._engine.wake()

    def do_figures(self) -> dict[str, Any]:
        engine = self._loaded()
        figures = engine.figures()
        self._measure(time.monotonic(), figures.tokens)
        return {
            "running": figures.running,
            "waiting": figures.waiting,
            "tokens": figures.tokens,
            "kv_used_tokens": figures.kv_used_tokens,
            "kv_total_tokens": figures.kv_total_tokens,
            "prefill_tokens": figures.prefill_tokens,
            "reused_tokens": figures.reused_tokens,
            "tokens_per_s": self._rate if engine.busy() else 0.0,
        }

    def run(self) -> None:
        try:
            super().run()
        finally:
            if self._engine is not None:
                self._engine.close()

    def _loaded(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("the rollout worker has no model yet: call load first")
        return self._engine

    def _report(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.emit("finished", **msgspec.to_builtins(output, builtin_types=(bytes,)))

    def _measure(self, now: float, tokens: int) -> None:
        since, before = self._rate_from
        if now - since >= RATE_SPAN_S or not self._rate:
            self._rate = (tokens - before) / max(now - since, 1e-6)
            self._rate_from = (now, tokens)


def make_engine(model_dir: str, version: int, config: dict[str, Any]) -> Engine:
    """The engine that `config["rollout"]["engine"]` names. Imports only what that one needs: import time is start time."""
    rollout, cluster = config.get("rollout", {}), config.get("cluster", {})
    device, max_running = cluster.get("device", "cpu"), rollout.get("max_running", 32)
    if rollout.get("engine", "local") == "sglang":
        if importlib.util.find_spec("sglang") is None:
            raise ModuleNotFoundError(
                f"{sys.executable} has no sglang: set rollout.python to an interpreter that has, such as bin/install-sglang makes")
        from dynarl.roles.rollout.sglang_engine import SGLangEngine

        return SGLangEngine(
            model_dir, version, max_running, device, tuple(rollout.get("args", ())), rollout.get("start_timeout_s", 600.0)
        )
    from dynarl.roles.rollout.local_engine import LocalEngine

    return LocalEngine(model_dir, version, max_running, device)


if __name__ == "__main__":
    main(RolloutWorker)
