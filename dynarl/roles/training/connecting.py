"""Groups of the next layout, made in the background while this one trains."""

from __future__ import annotations

import threading

import torch.distributed as dist

from dynarl.roles.training.groups import Groups, build_groups
from dynarl.roles.training.torch_world import Draft
from dynarl.vps.train_layout import TrainLayout


class Connecting:
    """Groups of a transition, made by a thread: other ranks may come to them late, and this one trains meanwhile."""

    def __init__(self, draft: Draft, source: TrainLayout, layout: TrainLayout):
        self.source, self.layout, self.draft = source, layout, draft
        self.both: dist.ProcessGroup | None = None
        self._ranks = sorted({*source.ranks, *layout.ranks})
        self._groups: Groups | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="connect", daemon=True)
        if draft.rank in self._ranks:
            self._thread.start()

    def _run(self) -> None:
        try:
            self.both = self.draft.group(self._ranks)
            if self.draft.rank in self.layout.ranks:
                self._groups = build_groups(self.layout, self.draft)
        except BaseException as error:
            self._error = error

    def wait(self, limit_s: float | None) -> Groups | None:
        """The groups, None on a rank that is not in the layout."""
        if self._thread.ident is not None:
            self._thread.join(limit_s)
            if self._thread.is_alive():
                raise TimeoutError(f"the groups of {self.layout} are not up after {limit_s} s")
        if self._error is not None:
            raise RuntimeError(f"the groups of {self.layout} could not be built: {self._error}") from self._error
        return self._groups
