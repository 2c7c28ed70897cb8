"""What becomes of the batches that a lost owner left on its disk: which are new, which were resent since.

    orphan [start, end)     a a a b a ····························
    brought back            a a a b a
    resent to the new owner       b a            sequence ≥ the first that it took from that session
    result                  a a a v v vvvvvvvvvvvvvvvvvvvvvvvvvvvv    v: void

A producer that lost its connection in the crash resends what was not acknowledged, unchanged and in order. So of one
session, from the first sequence on that a later epoch accepted, everything was resent, and what lies on the disk is its
copy. A batch without a producer session (gRPC) is kept: its sender may have sent it again, which is what at-least-once
means.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple, Self


class Numbered(NamedTuple):
    """A stored batch, as far as this decision goes."""

    base_offset: int
    end_offset: int
    producer_id: int
    session: int
    first_sequence: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """The value of a `rescue` key: what a returned broker has stored for the owner to adopt.

    `objects` are names of raw objects in order; `end` is where its log ends; `damaged` are ranges it cannot read.
    """

    broker: int
    objects: tuple[str, ...]
    end: int
    damaged: tuple[tuple[int, int], ...] = ()

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, value: bytes) -> Self | None:
        """None for what is none of ours."""
        try:
            found = json.loads(value)
            return cls(
                broker=int(found["broker"]),
                objects=tuple(str(name) for name in found["objects"]),
                end=int(found["end"]),
                damaged=tuple((int(first), int(end)) for first, end in found.get("damaged", ())),
            )
        except (ValueError, KeyError, TypeError):
            return None


def wanted_to_bytes(broker: int) -> bytes:
    """The first value of a `rescue` key: the owner asks this broker to bring the epoch."""
    return json.dumps({"wanted": broker}).encode()


def wanted_of(value: bytes) -> int | None:
    """Whom the owner asks; None if this was brought, or is none of ours."""
    try:
        return int(json.loads(value)["wanted"])
    except (ValueError, KeyError, TypeError):
        return None


def first_resent(later: Iterable[Numbered]) -> dict[tuple[int, int], int]:
    """(producer, session) to the lowest sequence that epochs after the orphan's accepted."""
    found: dict[tuple[int, int], int] = {}
    for each in later:
        if each.producer_id:
            key = (each.producer_id, each.session)
            found[key] = min(found.get(key, each.first_sequence), each.first_sequence)
    return found


def was_resent(batch: Numbered, resent: Mapping[tuple[int, int], int]) -> bool:
    first = resent.get((batch.producer_id, batch.session)) if batch.producer_id else None
    return first is not None and batch.first_sequence >= first


def runs(kept: Sequence[Numbered]) -> list[tuple[int, int]]:
    """Places [first, end) in `kept` of batches that follow each other without a gap."""
    found: list[tuple[int, int]] = []
    for place, batch in enumerate(kept):
        if found and kept[place - 1].end_offset == batch.base_offset:
            found[-1] = (found[-1][0], place + 1)
        else:
            found.append((place, place + 1))
    return found
