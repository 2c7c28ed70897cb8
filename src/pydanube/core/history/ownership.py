"""Who owns a topic, and where its next offset comes from.

    /storage/topics/<ns>/<topic>/owner     {epoch, session, broker_id, start_offset, released}
    /storage/topics/<ns>/<topic>/reserve   {end}        no offset at or beyond it is ever given
    /storage/topics/<ns>/<topic>/state     the seal     how the epoch that was released ended

Every open of a topic is a claim: the owner key is replaced by one with the next epoch, if it still is what was read.
Everything an owner writes compares the key's store revision, so a broker that lost the key writes nothing. The key
outlives the topic (`deleted`), so that epochs never begin again.

Functions here decide on values; who reads and writes the store is `broker/ownership.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

from pydanube.core.plain import fields_of

# A reservation is kept so far ahead of the head: what is expected in so many seconds, and at least so many offsets. All
# of it is skipped if the owner is lost, so a slow topic keeps little; a fast one must not ask the store too often, and
# for a busy one two minutes would be millions.
RESERVE_OFFSETS_MIN: Final = 64
RESERVE_SECONDS: Final = 20.0
RESERVE_SLOW: Final = 6  # times as long, where that is no more than
RESERVE_OFFSETS_SLOW: Final = 20_000
VOIDS_MAX: Final = 50  # that one claim takes away: a transaction has 128 operations at most
RESERVE_GROWTH: Final = 4  # from one extension to the next, at most: one large batch is no traffic yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The value of the owner key. `released`: no broker serves the topic, and the seal says how it was left."""

    epoch: int
    session: int
    broker_id: int
    start_offset: int
    released: bool = False
    deleted: bool = False
    created: int = 0  # the epoch in which the topic of this name was made; what is older was another's
    since: int = 0  # the epoch from which on only this broker has claimed it; 0: an older version wrote this
    since_offset: int = 0  # where it began then: what is below was others'

    def to_bytes(self) -> bytes:
        return json.dumps(fields_of(self)).encode()

    @classmethod
    def from_bytes(cls, value: bytes) -> Self:
        return cls(**_known(cls, value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """How an owner left the topic. `last_committed_offset` is -1 if it has no message.

    `sessions` is the state of idempotent producers (core/commit/sessions.py) in base64. `timestamp` is when, in
    milliseconds since 1970; `append_time`, that of the last batch, in microseconds as in the log.
    """

    sealed: bool = True
    last_committed_offset: int
    next_offset: int
    broker_id: int
    timestamp: int
    epoch: int
    append_time: int = 0
    sessions: str = ""

    def to_bytes(self) -> bytes:
        return json.dumps(fields_of(self)).encode()

    @classmethod
    def from_bytes(cls, value: bytes) -> Self:
        return cls(**_known(cls, value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphan:
    """Offsets [start, end) that a lost owner may have given out: only its disk knows. `start` is in the key."""

    start: int
    end: int
    broker_id: int
    epoch: int

    def to_bytes(self) -> bytes:
        return json.dumps({"end": self.end, "broker": self.broker_id, "epoch": self.epoch}).encode()

    @classmethod
    def from_bytes(cls, start: int, value: bytes) -> Self:
        fields: Mapping[str, Any] = json.loads(value)
        return cls(start=start, end=int(fields["end"]), broker_id=int(fields["broker"]), epoch=int(fields["epoch"]))


def void_to_bytes(end: int, why: str) -> bytes:
    return json.dumps({"end": end, "why": why}).encode()


def void_end(value: bytes) -> int:
    return int(json.loads(value)["end"])


def orphan_left(
    owner: Owner | None, seal: Seal | None, reserved_end: int | None, placed_end: int, *, broker_id: int
) -> Orphan | None:
    """What the claim of `broker_id` leaves behind on the disk of the owner before it; None if nothing is in doubt.

    Below `placed_end` every offset has its place already: an object, an orphan or a void. What the owner sealed is in
    the store, and what this very broker had is on its own disk.
    """
    if owner is None or owner.deleted or owner.broker_id == broker_id or is_sealed(owner, seal):
        return None
    end = max(reserved_end or 0, owner.start_offset)
    if placed_end >= end:
        return None
    return Orphan(start=placed_end, end=end, broker_id=owner.broker_id, epoch=owner.epoch)


def is_sealed(owner: Owner, seal: Seal | None) -> bool:
    """Whether the seal is of the epoch that the owner key shows released. An older one says nothing."""
    return owner.released and seal is not None and seal.epoch == owner.epoch


def _known(kind: type[Owner] | type[Seal], value: bytes) -> dict[str, Any]:
    """The stored fields that this version knows: newer ones may add some."""
    fields: Mapping[str, Any] = json.loads(value)
    return {name: fields[name] for name in kind.__slots__ if name in fields}


def reserve_to_bytes(end: int) -> bytes:
    return json.dumps({"end": end}).encode()


def reserve_from_bytes(value: bytes) -> int:
    return int(json.loads(value)["end"])


@dataclass(frozen=True, slots=True)
class LogStart:
    """Where an epoch begins. `offset` None: where the recovered log ends, which must then be beyond doubt."""

    offset: int | None
    known_end: int  # below this every offset is known to have existed


def start_of_epoch(
    owner: Owner | None, seal: Seal | None, reserved_end: int | None, *, broker_id: int, described_end: int = 0
) -> LogStart:
    """Decides where the epoch after `owner`'s begins.

    The seal counts only if it carries the epoch that the owner key shows released: an older one says nothing about
    what was appended since. A log on this broker's own disk tells where it ended; of another's, only the reservation
    is known to lie beyond everything that was given out.
    """
    if owner is None or owner.deleted:
        # A topic that was deleted begins anew: its old epochs are gone from every disk that matters.
        return LogStart(0 if owner is None else None, 0)
    if seal is not None and is_sealed(owner, seal):
        return LogStart(max(seal.next_offset, described_end), seal.next_offset)
    if owner.broker_id == broker_id and (reserved_end or 0) <= owner.start_offset:
        # Nothing was given out since: the claim was answered and then nothing came, or its answer was lost.
        return LogStart(max(owner.start_offset, described_end), 0)
    if owner.broker_id == broker_id:
        return LogStart(None, max(owner.start_offset, described_end))
    return LogStart(max(reserved_end or owner.start_offset, owner.start_offset, described_end), 0)


def offset_if_unproven(owner: Owner | None, reserved_end: int | None) -> int | None:
    """Where to begin if this broker's own log cannot prove its end: beyond everything it may have given out."""
    return None if owner is None else max(reserved_end or 0, owner.start_offset)


class NextEpoch(NamedTuple):
    """How a topic goes on if it is claimed now."""

    start: LogStart
    offset_if_unproven: int | None
    leaves: Orphan | None  # what the claim leaves behind on the disk of a lost owner
    covered_end: int  # where objects, orphans and voids end


def next_epoch(
    owner: Owner | None,
    seal: Seal | None,
    reserved_end: int | None,
    *,
    broker_id: int,
    placed_end: int,
    orphans: Sequence[Orphan],
    voids: Sequence[tuple[int, int]],
) -> NextEpoch:
    """Decides what a claim of `broker_id` finds. Below `placed_end` all is in objects, or removed by retention."""
    # Objects are described in order, and an orphan begins where all has its place. A void may lie above what only the
    # owner has: damage, or the end of a log that it opened again.
    placed_end = max(placed_end, *(each.end for each in orphans), 0)
    covered_end = max(placed_end, *(end for _, end in voids), 0)
    for first, end in sorted(voids):
        if first <= placed_end:
            placed_end = max(placed_end, end)
    # What is below where it began was others', however it came there; and an older version does not say where that was.
    left_from = max(placed_end, owner.since_offset) if owner is not None and owner.since else covered_end
    if sum(first >= left_from for first, _ in voids) > VOIDS_MAX:
        left_from = covered_end  # more than one transaction can hold
    return NextEpoch(
        start_of_epoch(owner, seal, reserved_end, broker_id=broker_id, described_end=covered_end),
        offset_if_unproven(owner, reserved_end),
        orphan_left(owner, seal, reserved_end, left_from, broker_id=broker_id),
        covered_end,
    )


def next_reservation(head: int, reserved_end: int, needed_end: int, ahead: int) -> int | None:
    """The end to reserve next; None while what is reserved is still far enough ahead.

    Extended when half of what is kept ahead is used up, so that appends never wait for it in a steady stream.
    """
    if needed_end <= reserved_end and reserved_end - head >= ahead // 2:
        return None
    return max(needed_end, head) + ahead


def first_reservation(head: int, reserved_end: int) -> int | None:
    """What a claim reserves for clients that wait for the topic; None if what is reserved will do."""
    return next_reservation(head, reserved_end, head + 1, RESERVE_OFFSETS_MIN)


def next_ahead(before: int, used: int, seconds: float) -> int:
    """How far ahead to reserve, if `used` offsets were asked for in the `seconds` since the last time, when it was
    `before`.
    """
    grown = max(before, RESERVE_OFFSETS_MIN)
    if used >= grown // 2:  # fewer are no traffic to go by
        grown *= RESERVE_GROWTH
    rate = max(used, 0) / max(seconds, 1e-3)
    expected = rate * RESERVE_SECONDS
    wanted = max(min(RESERVE_SLOW * expected, RESERVE_OFFSETS_SLOW), expected)
    return max(RESERVE_OFFSETS_MIN, int(min(wanted, grown)))
