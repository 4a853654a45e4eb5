"""Orders of the controller about model state on its way between layouts; what is done is in transitions.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynarl.agent.roles import Roles
from dynarl.agent.transitions import Transitions

if TYPE_CHECKING:
    from dynarl.agent.agent import Agent


class StateMoves:
    """The training workers of this node hold what moves; where weights are staged, this node itself does."""

    def __init__(self, agent: Agent, roles: Roles):
        self._agent, self._roles = agent, roles
        self.transitions = Transitions(
            agent.rank,
            agent.remapper,
            agent.call_worker,
            lambda device: agent.supervisor.name_of("training", device),
            self._pid_of,
            roles.staging / "mailboxes",
        )

    def _pid_of(self, name: str) -> int | None:
        worker = self._agent.supervisor.workers.get(name)
        return worker.process.pid if worker is not None else None

    def _staged(self, version: int | None) -> str | None:
        return None if version is None else str(self._roles.version_dir(version) / "model.safetensors")

    async def on_prepare_transition(self, peer: str, request: dict, nodes: list[int], limit_s: float) -> dict[str, Any]:
        return await self.transitions.prepare(request, nodes, limit_s)

    async def on_reserve_transition(self, peer: str, key: str, version: int | None, limit_s: float) -> None:
        await self.transitions.reserve(key, limit_s, self._staged(version))

    async def on_run_transition(
        self, peer: str, key: str, number: int, nodes: list[int], version: int | None, limit_s: float
    ) -> dict[str, Any]:
        """version: of the weights that are staged here by it."""
        return await self.transitions.run(
            key, number, nodes, limit_s, destination=self._staged(version), verify=True
        )

    async def on_verify_transition(self, peer: str, key: str, limit_s: float) -> dict[str, int] | None:
        """Positional digests of what was staged here, None where nothing was."""
        return (await self.transitions.verify(key, limit_s, positional=True)).get("staged")

    async def on_finish_transition(
        self,
        peer: str,
        key: str,
        limit_s: float,
        version: int | None = None,
        source: str | None = None,
        keep: list[int] | None = None,
    ) -> None:
        """Staged weights get their name, after the small files (configuration, tokenizer) from the model directory
        `source` on the shared file system; versions that are not in `keep` are dropped."""
        staged = version is not None and self.transitions.stages(key)
        if staged and source is not None:
            self._roles.stage_small_files(version, Path(source))
        await self.transitions.finish(key, limit_s)
        if staged and keep is not None:
            self._roles.keep_versions(keep)

    async def on_abort_transition(self, peer: str, key: str, reason: str, nodes: list[int], limit_s: float) -> None:
        await self.transitions.abort(key, reason, nodes, limit_s)
