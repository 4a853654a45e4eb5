"""What a plan consists of: fragments, and who does what with them when."""

from __future__ import annotations

from typing import Literal, NamedTuple

from dynarl.vps.box import Box


class Fragment(NamedTuple):
    """A box of one kind of one tensor (by its index in spec.tensors). It lies in one piece at the source and one at the
    destination."""

    kind: str
    tensor: int
    box: Box


class Exchange(NamedTuple):
    """What a rank does with one peer in one round: both directions at once, each one message.

    A message is its fragments in this order, each row-major, nothing between them. A fragment that this rank does not
    hold at the source is passed on: it arrived in an earlier step.
    """

    round: int
    peer: int
    out: list[Fragment]
    into: list[Fragment]


class Local(NamedTuple):
    """What a rank does by itself in a step. keep: its own source (or `held` copy) becomes destination. derive: cast
    from the master, which has arrived by the end of that step.
    """

    how: Literal["keep", "derive"]
    step: int
    fragment: Fragment


class Step(NamedTuple):
    """In this order: keep, exchange round by round, derive, release (source memory that is not needed any more)."""

    number: int
    keep: list[Fragment]
    exchanges: list[Exchange]
    derive: list[Fragment]
    release: list[Fragment]


class Pair(NamedTuple):
    """One message of a round."""

    sender: int
    receiver: int
    nbytes: int


class Round(NamedTuple):
    """One matching: no rank is in two pairs, but for the two directions of the same."""

    number: int
    pairs: list[Pair]
