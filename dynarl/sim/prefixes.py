"""Keys and values that a simulated engine still has of requests that left it, in blocks that nobody needs.

A request that comes back goes on from its own; a member of a group from the group's prompt, as long as any other member
runs or is kept. The one that left first is given up first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator


class Prefixes:
    """blocks: that what is kept takes."""

    def __init__(self) -> None:
        self.blocks = 0
        self._kept: dict[str, tuple[str, int, int]] = {}  # sample -> group, tokens, blocks; the oldest first
        self._holders: dict[str, int] = defaultdict(int)  # group -> how many run or are kept

    def tokens(self, sample: str, group: str, prompt_tokens: int) -> int:
        """Tokens that are there of a request's prefix."""
        if kept := self._kept.get(sample):
            return kept[1]
        return prompt_tokens if group in self._holders else 0

    def use(self, sample: str, group: str) -> bool:
        """A request runs, and has for itself what was kept of it. Whether its group's prompt was not there before."""
        if kept := self._kept.pop(sample, None):
            self.blocks -= kept[2]
            return False
        self._holders[group] += 1
        return self._holders[group] == 1

    def keep(self, sample: str, group: str, tokens: int, blocks: int) -> None:
        """A request that ran has left."""
        self._kept[sample] = group, tokens, blocks
        self.blocks += blocks

    def fit(self, blocks: int) -> Iterator[tuple[str, str | None]]:
        """Give up as many as must go to need at most `blocks`. Each sample, and its group if the prompt went too."""
        while self.blocks > blocks:
            sample = next(iter(self._kept))
            group, _, freed = self._kept.pop(sample)
            self.blocks -= freed
            self._holders[group] -= 1
            if gone := not self._holders[group]:
                del self._holders[group]
            yield sample, group if gone else None

    def clear(self) -> None:
        """Nothing may run."""
        self._kept.clear()
        self._holders.clear()
        self.blocks = 0
