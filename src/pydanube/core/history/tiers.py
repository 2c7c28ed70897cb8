"""The cloud tier of one topic as values: which object holds an offset; when to upload, merge, move and forget.

    offsets   0 ........ 4 999 | 5 000 ........ 20 191 | 20 192 ........... 20 480
    tier      cloud, manifest  | cloud, descriptors    | the owner's log (and memory)
              one object names   one key per object      committed, not uploaded yet
              old descriptors

A descriptor is the commit: what has none does not exist, whatever lies in the bucket. All descriptors of a topic are in
order and never overlap; where they leave offsets out, those are an orphan, a void, or lie in the log.

Functions here decide on values. Who reads, writes and waits is `history/tier.py`.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, NamedTuple, Self

from pydanube.core.plain import fields_of
from pydanube.core.units import MIB

MERGED_BYTES: Final = 64 * MIB  # neighbours that are smaller become one object of about this size
MERGE_COUNT_MIN: Final = 8  # fewer are not worth writing them again
MERGE_COUNT_MAX: Final = 100  # so that the swap fits one transaction
_SIZE_CLASSES: Final = (MIB // 64, MIB // 8, MIB, 8 * MIB)

DESCRIPTORS_MAX: Final = 256  # keys per topic; older ones move to the manifest
DESCRIPTORS_MOVED: Final = 100  # at a time: they are deleted in one transaction

GARBAGE_SECONDS: Final = 600.0  # readers that still use a replaced object have so long

CATCH_UP: Final = 1.05  # how much faster than time itself a clock that was set ahead is believed

PARQUET: Final = "parquet"
RAW: Final = "raw"
_NAME: Final = re.compile(r"data-(\d+)-(\d+)-(\d+)(?:-m?\d+)?\.(parquet|raw)")
_RESCUE_NAME: Final = re.compile(r"rescue-(\d+)-(\d+)-([0-9a-f]{16})\.raw")
_MANIFEST_NAME: Final = re.compile(r"manifest-(\d+)-(\d+)\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptor:
    """One object and what is in it. Stored in the metadata store, so `end_offset` is inclusive, as the seeds have it.

    Times are microseconds since 1970, `created_at` seconds. `epoch` is the one in which it was written; its rows may be
    of older ones. `footer_crc` (crc32c of a Parquet footer, to the object's end; 0: not known) is the beginning of a
    chain: the footer has the checksums of everything else.
    """

    start_offset: int
    end_offset: int
    object_id: str
    size: int
    etag: str
    min_publish_time: int
    max_publish_time: int
    epoch: int
    created_at: int
    max_append_time: int = 0
    format: str = PARQUET
    footer_crc: int = 0

    @property
    def end(self) -> int:
        """The offset behind it."""
        return self.end_offset + 1

    def to_json(self) -> dict[str, Any]:
        return fields_of(self)

    def to_bytes(self) -> bytes:
        return json.dumps(self.to_json()).encode()

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Fields of newer versions are ignored."""
        return cls(**{name: fields[name] for name in cls.__slots__ if name in fields})

    @classmethod
    def from_bytes(cls, value: bytes) -> Self:
        return cls.from_json(json.loads(value))


class LogRun(NamedTuple):
    """Offsets [first, end) of a log: how many bytes they have as stored, and the epoch of all of them; 0: not known."""

    first: int
    end: int
    size_bytes: int
    epoch: int

    @property
    def row_bytes(self) -> float:
        return self.size_bytes / (self.end - self.first)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicHistory:
    """The `history` key: where kept history begins, and the object with the descriptors that have no key any more.

    It is written with every change of descriptors, and every change compares it with the one before. `epoch` and
    `change` make each value the only one of its kind, so that a writer that got no answer can tell what became of its
    write. `changed_at` is when that was, in microseconds since 1970 by the owner's clock, and never less than before; 0
    as older versions wrote it: not known.
    """

    first_offset: int = 0
    history_version: int = 0  # grows when history appears behind readers: rescued messages
    manifest: str | None = None
    manifest_end: int = 0  # what has an object below is in the manifest
    manifest_crc: int = 0  # crc32c of its bytes
    epoch: int = 0
    change: int = 0
    changed_at: int = 0

    def changed(self, epoch: int, change: int, now_us: int) -> Self:
        """The same as the value of another change."""
        return replace(self, epoch=epoch, change=change, changed_at=max(now_us, self.changed_at))

    def to_bytes(self) -> bytes:
        return json.dumps(fields_of(self)).encode()

    @classmethod
    def from_bytes(cls, value: bytes) -> Self:
        fields: Mapping[str, Any] = json.loads(value)
        return cls(**{name: fields[name] for name in cls.__slots__ if name in fields})


class Objects:
    """A topic's descriptors in order. Those of the objects that `listed` names have no key: the manifest has them.

    Raises ValueError if two overlap.
    """

    __slots__ = ("_ends", "_items", "_listed")

    def __init__(self, descriptors: Iterable[Descriptor] = (), listed: Collection[str] = ()) -> None:
        self._items = sorted(descriptors, key=lambda each: each.start_offset)
        self._ends = [each.end for each in self._items]
        self._listed = frozenset(listed)
        for earlier, later in pairwise(self._items):
            if later.start_offset < earlier.end:
                raise ValueError(f"{later.object_id} overlaps {earlier.object_id}")

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Descriptor]:
        return iter(self._items)

    def __getitem__(self, place: slice) -> Sequence[Descriptor]:
        return self._items[place]

    @property
    def keyed(self) -> Sequence[Descriptor]:
        """Those with a key of their own."""
        return [each for each in self._items if each.object_id not in self._listed] if self._listed else self._items

    @property
    def listed(self) -> Sequence[Descriptor]:
        """Those in the manifest."""
        return [each for each in self._items if each.object_id in self._listed] if self._listed else []

    @property
    def end(self) -> int:
        """The offset behind the last one; 0 if there is none."""
        return self._ends[-1] if self._ends else 0

    def find(self, offset: int) -> Descriptor | None:
        place = bisect_right(self._ends, offset)
        if place < len(self._items) and self._items[place].start_offset <= offset:
            return self._items[place]
        return None

    def after(self, offset: int) -> Descriptor | None:
        """The first that begins at or behind `offset`."""
        place = bisect_left(self._items, offset, key=lambda each: each.start_offset)
        return self._items[place] if place < len(self._items) else None

    def missing(self, first: int, end: int) -> list[tuple[int, int]]:
        """The parts of [first, end) that no object holds, in order."""
        gaps = []
        for each in self._items[bisect_right(self._ends, first) :]:
            if each.start_offset >= end:
                break
            if each.start_offset > first:
                gaps.append((first, each.start_offset))
            first = each.end
        if first < end:
            gaps.append((first, end))
        return gaps

    def with_added(self, *added: Descriptor) -> Objects:
        return Objects([*self._items, *added], self._listed)

    def with_replaced(self, old: Sequence[Descriptor], *new: Descriptor) -> Objects:
        gone = {each.object_id for each in old}
        return Objects([*(each for each in self._items if each.object_id not in gone), *new], self._listed)

    def with_listed(self, moved: Sequence[Descriptor]) -> Objects:
        """`moved` are in the manifest now, with those that were in it before."""
        return Objects(self._items, {each.object_id for each in (*self.listed, *moved)})

    def from_offset(self, first_offset: int) -> Objects:
        """Without those that lie wholly below."""
        return Objects(self._items[bisect_right(self._ends, first_offset) :], self._listed)


# --- names ------------------------------------------------------------------------------------------------


def object_name(
    start: int, end_offset: int, epoch: int, *, attempt: int = 0, merged: int = 0, raw: bool = False
) -> str:
    """Never used again: an epoch is used once, and within it every attempt and every merge has its number."""
    suffix = f"-m{merged}" if merged else f"-{attempt}" if attempt else ""
    return f"data-{start}-{end_offset}-{epoch}{suffix}.{RAW if raw else PARQUET}"


def rescue_name(start: int, epoch: int, number: int) -> str:
    """Of what a returned broker has of a lost epoch. Wanted as long as that is an orphan."""
    return f"rescue-{start}-{epoch}-{number:016x}.{RAW}"


def manifest_name(epoch: int, number: int) -> str:
    return f"manifest-{epoch}-{number}.json"


def epoch_of_name(name: str) -> int | None:
    """The epoch that wrote an object or a manifest of this name, or a lost epoch that was brought under it; None for a
    name that is not ours.
    """
    if found := _NAME.fullmatch(name):
        return int(found[3])
    if found := _RESCUE_NAME.fullmatch(name):
        return int(found[2])
    found = _MANIFEST_NAME.fullmatch(name)
    return int(found[1]) if found else None


def manifest_to_bytes(descriptors: Sequence[Descriptor]) -> bytes:
    return json.dumps({"format": 1, "objects": [each.to_json() for each in descriptors]}).encode()


def manifest_from_bytes(data: bytes) -> list[Descriptor]:
    """Raises ValueError if it is none."""
    try:
        return [Descriptor.from_json(fields) for fields in json.loads(data)["objects"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a manifest: {error}") from error


# --- decisions --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What may be forgotten. None: never for that reason."""

    seconds: float | None = None
    size_bytes: int | None = None


LOCAL: Final = Retention(seconds=2880 * 60, size_bytes=20480 * MIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """Of a broker. Small values are for tests."""

    upload_seconds: float = 30.0
    object_bytes: int = 64 * MIB  # of log; an object is made when so much waits, whatever the interval
    merged_bytes: int = MERGED_BYTES
    merge_count_min: int = MERGE_COUNT_MIN
    descriptors_max: int = DESCRIPTORS_MAX
    descriptors_moved: int = DESCRIPTORS_MOVED
    garbage_seconds: float = GARBAGE_SECONDS
    local: Retention = LOCAL  # of what is in the store too, per topic
    retention_check_seconds: float = 300.0
    sweep_seconds: float = 3600.0

    @property
    def garbage_sweep_seconds(self) -> float:
        """So often it is looked whether garbage may go."""
        return self.sweep_seconds / 6

    @property
    def garbage_gone_seconds(self) -> float:
        """By then an owner that stays has removed what it swapped away: its turn comes every `upload_seconds`."""
        return self.garbage_seconds + self.garbage_sweep_seconds + self.upload_seconds


def merge_next(
    descriptors: Sequence[Descriptor], config: TierConfig, *, spared: Collection[str] = ()
) -> Sequence[Descriptor]:
    """Neighbours to make one object of; empty if there is nothing worth it.

    The small ones first, and only into something several times as large as each of them, so that a byte is written
    again a few times in its life and not once per upload. A gap, a raw object, one that is large already, and one of
    the `spared` (they cannot be read) end a run.
    """
    full = config.merged_bytes
    for bound in [each for each in _SIZE_CLASSES if each < full] + [full]:
        for run in _runs(descriptors, bound, full, spared):
            # Older neighbours tend to be larger: one that is too large to be written again yet is left out.
            for first in range(len(run) - 1):
                if _worth_merging(run[first:], config, last=bound == full):
                    return run[first:]
    return []


def _runs(
    descriptors: Sequence[Descriptor], bound: int, merged_bytes: int, spared: Collection[str]
) -> Iterator[list[Descriptor]]:
    """Neighbours below `bound` that fit into one object, as long as they can be."""
    run: list[Descriptor] = []
    size = 0
    for each in descriptors:
        joins = each.size < bound and each.format == PARQUET and each.object_id not in spared
        fits = size + each.size <= merged_bytes and len(run) < MERGE_COUNT_MAX
        if run and not (joins and fits and each.start_offset == run[-1].end):
            yield run
            run, size = [], 0
        if joins:
            run.append(each)
            size += each.size
    yield run


def _worth_merging(run: Sequence[Descriptor], config: TierConfig, *, last: bool) -> bool:
    size = sum(each.size for each in run)
    largest = max(each.size for each in run)
    if len(run) >= config.merge_count_min and 2 * size >= config.merge_count_min * largest:
        return True
    # Few, but they make an object that is large enough to be left alone from now on.
    return last and size >= config.merged_bytes // 2 and 2 * size >= 3 * largest


def descriptors_to_move(keyed: int, config: TierConfig) -> int:
    """How many of the oldest descriptors go to the manifest now."""
    return config.descriptors_moved if keyed > config.descriptors_max else 0


def first_kept(descriptors: Sequence[Descriptor], retention: Retention, now_us: int) -> int | None:
    """Where history is to begin now; None if nothing is to go. Whole objects only, oldest first."""
    total = sum(each.size for each in descriptors)
    first: int | None = None
    for each in descriptors:
        too_old = retention.seconds is not None and each.max_append_time + retention.seconds * 1e6 < now_us
        too_much = retention.size_bytes is not None and total > retention.size_bytes
        if not (too_old or too_much):
            break
        total -= each.size
        first = each.end
    return first


class SteadyTime:
    """Wall-clock time that a jump forward does not move: it goes on as fast as the clock that cannot jump.

    Retention asks it, so that a clock that was set a day ahead by mistake deletes nothing. A real correction is caught
    up with slowly.
    """

    __slots__ = ("_elapsed", "_now_us")

    def __init__(self, wall_us: int, elapsed: float) -> None:
        self._now_us = wall_us
        self._elapsed = elapsed

    def at(self, wall_us: int, elapsed: float) -> int:
        believable = self._now_us + int((elapsed - self._elapsed) * CATCH_UP * 1e6)
        self._now_us = min(wall_us, believable)
        self._elapsed = elapsed
        return self._now_us
