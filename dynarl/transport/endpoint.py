"""What executes a plan needs of whoever holds the state. Executors differ in how bytes travel, not in this.

The bytes of a fragment are those of its box, row-major; those of a message are its fragments one after the other,
nothing between them. A fragment that is sent and not held at the source is one that arrived before: it is passed on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from dynarl.transport.memory import Span
from dynarl.vps.box import Box, volume
from dynarl.vps.spec import ModelSpec

Fragment = tuple[str, int, Box]  # (kind, index of the tensor in ModelSpec.tensors, box); plan.Fragment is one


class Endpoint(Protocol):
    """State as logical pieces: of a source layout, of a destination layout, or of both."""

    def pack(self, fragments: Sequence[Fragment], out: memoryview) -> None:
        """Write the bytes of the fragments to `out`. Raises KeyError for one that is neither held nor has arrived."""

    def unpack(self, fragments: Sequence[Fragment], data: memoryview) -> None:
        """Put the bytes of the fragments where they belong at the destination."""

    def spans(self, fragments: Sequence[Fragment], arriving: bool) -> list[Span] | None:
        """Where the bytes of the fragments lie in this process's memory, or are to go (`arriving`); None: they have to
        be packed or unpacked. What is said stays so while the plan is executed."""

    def copy_local(self, local: Iterable[Any]) -> None:
        """Do what a plan leaves to this rank alone, in order: items have `how` ("keep", "derive") and `fragment`."""

    def digests(self) -> dict[str, int]:
        """{kind: positional digest} of the destination; of the source where there is no destination."""


def num_bytes(spec: ModelSpec, fragments: Iterable[Fragment]) -> int:
    """Size of a message."""
    return sum(volume(box) * spec.itemsize(kind) for kind, _, box in fragments)
