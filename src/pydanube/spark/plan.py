"""What a query reads, as values: where each offset is, how far one trigger goes, who reads which part. No Spark.

    TopicState   what is known of a topic now: objects, orphans, voids, head
    Offsets      where a stream stands; its JSON is what Spark keeps in the checkpoint
    RangeSource  offsets [first, end) that are in one object, or that a broker has
    TaskShare    pieces that one task reads

    offsets     0 ............ 4 999 | 5 000 .. 5 099 | 5 100 ...... 9 999 | 10 000 .... 12 345
                object               | void           | object            | broker
                read from the store  | stepped over   | read from the     | through the native
                                     | and counted    | store             | protocol

Objects win: an offset that is in one is read from it, whatever else is said about it. So the moment at which a range
changes its tier, or a rescued orphan becomes an object, changes where an offset is read and never whether.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, TypeAlias

from pydanube.core.history.tiers import Descriptor, LogRun
from pydanube.errors import ConfigError
from pydanube.spark.errors import MessagesLost, NotUploaded, OffsetsWrong
from pydanube.spark.options import EARLIEST, LATEST, AtTime, Everywhere, Orphans, PerTopic, Place

MIB: Final = 1 << 20
ROW_BYTES: Final = 256  # a guess, for a topic of which no broker tells a size and nothing is uploaded
FORMAT: Final = 1

Range: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TopicState:
    """A topic, or a partition of one. `live`: a broker serves what is in no object."""

    topic: str
    first_offset: int
    head: int
    objects: Sequence[Descriptor] = ()
    orphans: Sequence[Range] = ()
    voids: Sequence[Range] = ()
    live: bool = True
    storage_url: str | None = None
    history_version: int = 0
    log: Sequence[LogRun] = ()  # sizes and epochs of what a broker has, in order, as far as it tells
    ends: Sequence[int] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ends", [each.end for each in self.objects])

    @property
    def row_bytes(self) -> float:
        """A guess from what is uploaded, for offsets that `log` does not tell."""
        rows = sum(each.end - each.start_offset for each in self.objects)
        return sum(each.size for each in self.objects) / rows if rows else ROW_BYTES

    def runs_in(self, first: int, end: int) -> Iterator[LogRun]:
        """What `log` tells of [first, end), cut to it."""
        place = bisect_right(self.log, first, key=lambda run: run.end)
        for run in self.log[place:]:
            if run.first >= end:
                return
            cut_first, cut_end = max(first, run.first), min(end, run.end)
            yield LogRun(cut_first, cut_end, round(run.row_bytes * (cut_end - cut_first)), run.epoch)


class RangeSource(NamedTuple):
    """Offsets [first, end) of a topic. `described` None: ask the broker.

    `row_bytes` is of what a broker has; `epoch` of all messages in it, 0 if that is not known yet.
    """

    topic: str
    first: int
    end: int
    described: Descriptor | None
    row_bytes: float = ROW_BYTES
    epoch: int = 0

    @property
    def rows(self) -> int:
        return self.end - self.first

    @property
    def size_bytes(self) -> int:
        if self.described is None:
            return round(self.rows * self.row_bytes)
        whole = self.described.end - self.described.start_offset
        return self.described.size * self.rows // whole


class HistoryLayout(NamedTuple):
    """A range, taken apart: what can be read, what never can, what perhaps can later, what needs a broker."""

    pieces: Sequence[RangeSource]
    voids: Sequence[Range]
    orphans: Sequence[Range]
    missing: Sequence[Range]

    @property
    def rows(self) -> int:
        return sum(piece.rows for piece in self.pieces)


def layout(state: TopicState, first: int, end: int) -> HistoryLayout:
    """Where the offsets [first, end) of a topic are. Nothing is left out and nothing is there twice."""
    pieces: list[RangeSource] = []
    rest: list[Range] = []
    at = first
    for each in state.objects[bisect_right(state.ends, first) :]:
        if each.start_offset >= end:
            break
        if each.start_offset > at:
            rest.append((at, each.start_offset))
            at = each.start_offset
        upto = min(end, each.end)
        pieces.append(RangeSource(state.topic, at, upto, each, epoch=_epoch_in(state, at, upto)))
        at = upto
    if at < end:
        rest.append((at, end))
    voids, rest = _split(rest, state.voids)
    orphans, rest = _split(rest, state.orphans)
    missing: list[Range] = []
    if state.live:
        for gap_first, gap_end in rest:
            pieces += _served(state, gap_first, gap_end)
        pieces.sort(key=lambda piece: piece.first)
    else:
        missing = rest
    return HistoryLayout(pieces, voids, orphans, missing)


def _served(state: TopicState, first: int, end: int) -> Iterator[RangeSource]:
    """[first, end), which a broker has, cut where sizes or epochs change."""
    for run in state.runs_in(first, end):
        if first < run.first:
            yield RangeSource(state.topic, first, run.first, None, state.row_bytes)
        yield RangeSource(state.topic, run.first, run.end, None, run.row_bytes, run.epoch)
        first = run.end
    if first < end:
        yield RangeSource(state.topic, first, end, None, state.row_bytes)


def _epoch_in(state: TopicState, first: int, end: int) -> int:
    """Of the messages of an object, if the log of the broker still has them too, and all are of one; else 0."""
    found = next(state.runs_in(first, end), None)
    return found.epoch if found is not None and (found.first, found.end) == (first, end) else 0


def _split(ranges: Iterable[Range], others: Sequence[Range]) -> tuple[list[Range], list[Range]]:
    """The parts of `ranges` that lie in `others`, and those that do not. Both are in order."""
    inside: list[Range] = []
    outside: list[Range] = []
    ordered = sorted(others)
    for first, end in ranges:
        for other_first, other_end in ordered:
            if other_end <= first or other_first >= end:
                continue
            if other_first > first:
                outside.append((first, other_first))
            inside.append((max(first, other_first), min(end, other_end)))
            first = min(end, other_end)
        if first < end:
            outside.append((first, end))
    return inside, outside


# --- where a stream stands --------------------------------------------------------------------------------


class Mark(NamedTuple):
    """A message that was read, and its epoch: by it a topic is known.

    Epochs grow with offsets, and go on when a topic is deleted and made again under its name. So all messages of the
    new one have greater epochs than all of the old one.
    """

    offset: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Offsets:
    """The next offset of every topic. Only ever grows.

    `skipped`: orphans that were passed and are still to be read. `gaps` and `lost` count, over the whole life of the
    query, offsets that never held a message, and offsets that were gone before they were read. `marks`: the last
    message of each topic that was read, as far as that is known.
    """

    next: Mapping[str, int]
    skipped: Mapping[str, Sequence[Range]] = field(default_factory=dict)
    gaps: Mapping[str, int] = field(default_factory=dict)
    lost: Mapping[str, int] = field(default_factory=dict)
    marks: Mapping[str, Mark] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"format": FORMAT, "offsets": dict(sorted(self.next.items()))}
        skipped = {topic: [list(each) for each in ranges] for topic, ranges in sorted(self.skipped.items()) if ranges}
        if skipped:
            found["skipped"] = skipped
        for name, counts in (("gaps", self.gaps), ("lost", self.lost)):
            if any(counts.values()):
                found[name] = {topic: count for topic, count in sorted(counts.items()) if count}
        if self.marks:
            found["marks"] = {topic: list(mark) for topic, mark in sorted(self.marks.items())}
        return found

    @classmethod
    def from_json(cls, fields: Mapping[str, Any] | str) -> Offsets:
        """Raises OffsetsWrong: a checkpoint is another program's file until it was understood."""
        try:
            found = json.loads(fields) if isinstance(fields, str) else fields
            if found["format"] != FORMAT:
                raise OffsetsWrong("the checkpoint", f"its offsets have format {found['format']}, known is {FORMAT}")
            return cls(
                next={str(topic): int(offset) for topic, offset in found["offsets"].items()},
                skipped={
                    str(topic): [(int(first), int(end)) for first, end in ranges]
                    for topic, ranges in found.get("skipped", {}).items()
                },
                gaps={str(topic): int(count) for topic, count in found.get("gaps", {}).items()},
                lost={str(topic): int(count) for topic, count in found.get("lost", {}).items()},
                marks={
                    str(topic): Mark(int(offset), int(epoch))
                    for topic, (offset, epoch) in found.get("marks", {}).items()
                },
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise OffsetsWrong("the checkpoint", f"its offsets cannot be understood: {error}") from error


def resolve(
    place: Place, states: Sequence[TopicState], times: Mapping[str, int], *, ending: bool = False
) -> dict[str, int]:
    """Offsets of a starting or ending place. `times` has what the broker, or the objects, found for `AtTime`."""
    option = "endingOffsets" if ending else "startingOffsets"
    if isinstance(place, PerTopic):
        known = {state.topic for state in states}
        unknown = sorted(set(place.offsets) - known)
        absent = sorted(known - set(place.offsets))
        if unknown:
            raise ConfigError(option, unknown[0], f"a topic that is read; those are {', '.join(sorted(known))}")
        if absent:
            raise ConfigError(option, dict(place.offsets), f"it must name every topic; {absent[0]} is missing")
    found = {}
    for state in states:
        match place:
            case Everywhere(edge="earliest"):
                offset = state.first_offset
            case Everywhere():
                offset = state.head
            case AtTime():
                offset = times[state.topic]
            case PerTopic(offsets=offsets):
                offset = offsets[state.topic]
                if offset == EARLIEST:
                    offset = state.first_offset
                elif offset == LATEST:
                    offset = state.head
                elif offset > state.head:
                    raise OffsetsWrong(
                        state.topic,
                        f"{option} says {offset}, and there are messages up to {state.head} only; "
                        "give an offset that exists, or latest",
                    )
        found[state.topic] = offset
    return found


# --- how far -----------------------------------------------------------------------------------------------


class Advance(NamedTuple):
    """Where a trigger ends, and what a person should know about it."""

    end: Offsets
    notes: Sequence[str]
    rows: int


def advance(
    states: Sequence[TopicState],
    start: Offsets,
    *,
    rows_max: int | None = None,
    bytes_max: int | None = None,
    orphans: Orphans = "wait",
    fail_on_data_loss: bool = True,
    upto: Mapping[str, int] | None = None,
) -> Advance:
    """The offsets up to which the next trigger reads.

    A topic that is not in `start` is new and begins where its history does. One that is not in `states` any more stays
    where it is. `upto` bounds every topic: what was there when AvailableNow began. Without a broker nobody knows what
    is not uploaded yet: a topic that ends too early, or is missing, is waited for.
    """
    notes: list[str] = []
    nexts, gaps, lost = dict(start.next), dict(start.gaps), dict(start.lost)
    skipped = {topic: list(ranges) for topic, ranges in start.skipped.items()}
    known = {state.topic: state for state in states}
    if all(state.live for state in states):
        for topic in sorted(set(start.next) - set(known)):
            loses(topic, start.next[topic], start.next[topic] + 1, "the topic is gone", fail_on_data_loss, notes)
    backlog = _backlog(states, start, upto, orphans, fail_on_data_loss, notes)
    total = sum(each.rows for each in backlog.values())
    size = sum(each.size_bytes for each in backlog.values())
    rows_left = rows_max if rows_max is not None else total
    bytes_left = bytes_max if bytes_max is not None else size
    rows = 0
    for topic, found in backlog.items():
        state = known[topic]
        # By its part of what waits, but at least one, so that a quiet topic is never starved by a busy one.
        quota = found.rows if total <= rows_left else max(1, rows_left * found.rows // total) if found.rows else 0
        rescued = [each for each in skipped.get(topic, ()) if not _is_orphan(state, each)]
        skipped[topic] = [each for each in skipped.get(topic, ()) if _is_orphan(state, each)]
        rows += sum(layout(state, *each).rows for each in rescued)
        end = _end_of(found, quota)
        if size > bytes_left:
            end = min(end, _end_within(found, bytes_left * found.size_bytes // size))
        passed = layout(state, max(found.first, nexts.get(topic, found.first)), end)
        skipped[topic] += passed.orphans
        gaps[topic] = gaps.get(topic, 0) + sum(last - first for first, last in passed.voids)
        lost[topic] = lost.get(topic, 0) + found.lost
        nexts[topic] = end
        rows += passed.rows
    left = {topic: ranges for topic, ranges in skipped.items() if ranges}
    end_offsets = Offsets(next=nexts, skipped=left, gaps=gaps, lost=lost, marks=start.marks)
    return Advance(end_offsets, notes, rows)


@dataclass(frozen=True, slots=True)
class _Waiting:
    first: int
    end: int
    lost: int
    pieces: Sequence[RangeSource]

    @property
    def rows(self) -> int:
        return sum(piece.rows for piece in self.pieces)

    @property
    def size_bytes(self) -> int:
        return sum(piece.size_bytes for piece in self.pieces)


def _backlog(
    states: Sequence[TopicState],
    start: Offsets,
    upto: Mapping[str, int] | None,
    orphans: Orphans,
    fail_on_data_loss: bool,
    notes: list[str],
) -> dict[str, _Waiting]:
    found = {}
    for state in states:
        topic = state.topic
        first = start.next.get(topic, 0)
        head = state.head if upto is None else min(state.head, upto.get(topic, state.first_offset))
        lost = 0
        if first < state.first_offset:
            lost = state.first_offset - first
            if topic in start.next:  # one that is new to the query has a past that the query did not ask for
                loses(topic, first, state.first_offset, "retention has removed them", fail_on_data_loss, notes)
            first = state.first_offset
        if state.head < first and state.live:
            why = f"the topic ends at offset {state.head}: it was made anew, or has lost data"
            loses(topic, state.head, first, why, fail_on_data_loss, notes)
        end = max(first, head)
        taken = layout(state, first, end)
        if taken.missing:
            end = taken.missing[0][0]
        if orphans == "wait" and taken.orphans and taken.orphans[0][0] < end:
            orphan_first, orphan_end = taken.orphans[0]
            end = orphan_first
            notes.append(
                f"{topic} stops in front of offsets {orphan_first} to {orphan_end - 1}, which a broker that is away "
                "still has: start it, or discard them, or read on with the option orphans = skip"
            )
        found[topic] = _Waiting(first, end, lost, [piece for piece in taken.pieces if piece.first < end])
    return found


def _end_of(waiting: _Waiting, quota: int) -> int:
    """Behind the `quota`th message. Gaps behind the last one that is read are passed too if everything is."""
    if quota >= waiting.rows:
        return waiting.end
    for piece in waiting.pieces:
        if piece.rows >= quota:
            return piece.first + quota
        quota -= piece.rows
    raise AssertionError("fewer messages than were counted")


def _end_within(waiting: _Waiting, size_bytes: int) -> int:
    """Behind the last message that fits, and behind the first one in any case."""
    end = waiting.first
    for number, piece in enumerate(waiting.pieces):
        if piece.size_bytes > size_bytes:
            fitting = size_bytes * piece.rows // piece.size_bytes
            return piece.first + max(1, fitting) if fitting or not number else end
        size_bytes -= piece.size_bytes
        end = piece.end
    return waiting.end


def _is_orphan(state: TopicState, skipped: Range) -> bool:
    """Whether some of it is neither rescued nor known never to have been."""
    return bool(layout(state, *skipped).orphans)


def loses(topic: str, first: int, end: int, why: str, fails: bool, notes: list[str]) -> None:
    if fails:
        raise MessagesLost(topic, first, end, why)
    notes.append(str(MessagesLost(topic, first, end, why)).partition(". Start")[0] + ": the query goes on without them")


def hold_back(advanced: Advance, start: Offsets, *, rows_min: int | None, waited: float, delay_max: float) -> bool:
    """Whether a trigger is too small to begin now. One that only rescues or steps over something is not held back."""
    if rows_min is None or advanced.rows >= rows_min or waited >= delay_max:
        return False
    return advanced.rows > 0 or advanced.end == start


# --- who reads what ----------------------------------------------------------------------------------------


def between(
    states: Sequence[TopicState], start: Offsets, end: Offsets, *, fail_on_data_loss: bool = True
) -> list[RangeSource]:
    """The messages of one trigger: the same for the same two offsets, wherever they are by now.

    Raises MessagesLost, if that is wanted, and NotUploaded, if some of them cannot be read any more.
    """
    known = {state.topic: state for state in states}
    pieces: list[RangeSource] = []
    for topic, last in sorted(end.next.items()):
        state = known.get(topic)
        if state is None:
            begun = start.next.get(topic, 0)
            if begun < last and not all(each.live for each in states):
                raise NotUploaded(topic, begun, last)
            if begun < last and fail_on_data_loss:
                raise MessagesLost(topic, begun, last, "the topic is gone")
            continue
        # What was lost was counted when the end was decided; it lies at the front.
        lost = max(0, end.lost.get(topic, 0) - start.lost.get(topic, 0))
        first = start.next.get(topic, 0) + lost
        still = {*map(tuple, end.skipped.get(topic, ()))}
        rescued = [each for each in start.skipped.get(topic, ()) if tuple(each) not in still]
        for part_first, part_end in [*rescued, *_without(first, last, sorted(still))]:
            pieces += readable(state, part_first, part_end, fail_on_data_loss=fail_on_data_loss)
    return pieces


def last_pieces(pieces: Iterable[RangeSource]) -> dict[str, RangeSource]:
    """Of each topic the one that ends last."""
    found: dict[str, RangeSource] = {}
    for piece in pieces:
        if piece.topic not in found or piece.end > found[piece.topic].end:
            found[piece.topic] = piece
    return found


def readable(state: TopicState, first: int, end: int, *, fail_on_data_loss: bool) -> Sequence[RangeSource]:
    """Where [first, end) is now."""
    if first < state.first_offset and first < end:
        if fail_on_data_loss:
            raise MessagesLost(state.topic, first, min(end, state.first_offset), "retention has removed them")
        first = min(end, state.first_offset)
    found = layout(state, first, end)
    if found.missing:
        raise NotUploaded(state.topic, *found.missing[0])
    if found.orphans:
        raise NotUploaded(state.topic, *found.orphans[0])
    return found.pieces


def _without(first: int, end: int, holes: Sequence[tuple[int, ...]]) -> Iterator[Range]:
    for hole_first, hole_end in holes:
        if hole_end <= first or hole_first >= end:
            continue
        if first < hole_first:
            yield first, hole_first
        first = hole_end
    if first < end:
        yield first, end


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a filter leaves: offsets [first, end), publish times [time_first, time_end) in µs, topics, one key."""

    first: int = 0
    end: int = 1 << 63
    time_first: int = -(1 << 62)
    time_end: int = 1 << 62
    topics: frozenset[str] | None = None
    key: str | None = None

    def narrowed(self, **changes: Any) -> Bounds:
        """Both bounds together."""
        kept = dict(changes)
        for name in ("first", "time_first"):
            if name in kept:
                kept[name] = max(kept[name], getattr(self, name))
        for name in ("end", "time_end"):
            if name in kept:
                kept[name] = min(kept[name], getattr(self, name))
        if "topics" in kept and self.topics is not None:
            kept["topics"] = kept["topics"] & self.topics
        return replace(self, **kept)

    def of(self, pieces: Sequence[RangeSource]) -> list[RangeSource]:
        """Without what cannot pass the filter. An object whose times lie outside is not even opened."""
        found = []
        for piece in pieces:
            first, end = max(piece.first, self.first), min(piece.end, self.end)
            if first >= end or (self.topics is not None and piece.topic not in self.topics):
                continue
            each = piece.described
            if each and (each.max_publish_time < self.time_first or each.min_publish_time >= self.time_end):
                continue
            found.append(piece._replace(first=first, end=end))
        return found


class TaskShare(NamedTuple):
    """What one task reads, in order."""

    pieces: Sequence[RangeSource]

    @property
    def rows(self) -> int:
        return sum(piece.rows for piece in self.pieces)
