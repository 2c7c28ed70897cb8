"""Where every offset of a topic lies, and what to do with an object without a descriptor.

    [0, first_offset)        forgotten: retention
    [first_offset, head)     each offset in an object, the owner's log, an orphan or a void; anything else is lost

An operator asks this (`storage verify`); nothing is decided here for the tier itself (`core/history/tiers.py` does
that).
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from pydanube.core.dispatch.ranges import OffsetRanges
from pydanube.core.history.tiers import Descriptor, epoch_of_name


class Where(enum.Enum):
    """Values are what people and scripts are shown."""

    FORGOTTEN = "forgotten"  # by retention
    OBJECTS = "objects"
    LOG = "log"
    ORPHAN = "orphan"
    VOID = "void"
    UNKNOWN = "unknown"  # a descriptor could not be read
    NOWHERE = "nowhere"


class CoverageRange(NamedTuple):
    first: int
    end: int
    where: Where
    why: str = ""


def places(first_offset: int, head: int, sources: Iterable[CoverageRange]) -> list[CoverageRange]:
    """[0, head) in order, each offset once. Of two sources that hold an offset the earlier in the list is named."""
    left = OffsetRanges([(first_offset, head)])
    found = [CoverageRange(0, min(first_offset, head), Where.FORGOTTEN)] if first_offset and head else []
    for source in sources:
        for first, end in left.overlap(source.first, source.end):
            left.remove(first, end)
            found.append(CoverageRange(first, end, source.where, source.why))
    found += [CoverageRange(first, end, Where.NOWHERE) for first, end in left]
    return _joined(sorted(found))


def _joined(found: Sequence[CoverageRange]) -> list[CoverageRange]:
    """Neighbours of one kind as one."""
    joined: list[CoverageRange] = []
    for place in found:
        last = joined[-1] if joined else None
        if last is not None and (last.end, last.where, last.why) == (place.first, place.where, place.why):
            joined[-1] = last._replace(end=place.end)
        else:
            joined.append(place)
    return joined


def overlaps(descriptors: Iterable[Descriptor]) -> list[tuple[Descriptor, Descriptor]]:
    """Pairs that claim the same offset: never the case unless descriptors were written by hand."""
    found = []
    furthest: Descriptor | None = None
    for each in sorted(descriptors, key=lambda descriptor: (descriptor.start_offset, descriptor.end)):
        if furthest is not None and each.start_offset < furthest.end:
            found.append((furthest, each))
        if furthest is None or each.end > furthest.end:
            furthest = each
    return found


# --- objects without a descriptor ------------------------------------------------------------------------


class Fate(enum.Enum):
    """Values are what people and scripts are shown."""

    FOREIGN = "foreign"
    UNKNOWN = "unknown"
    NEWER = "newer"
    ORPHANED = "orphaned"
    YOUNG = "young"
    GARBAGE = "garbage"


class CoverageVerdict(NamedTuple):
    fate: Fate
    why: str


def judge(
    name: str,
    *,
    owner_epoch: int,
    orphaned: Collection[int],
    seen_seconds: float,
    grace_seconds: float,
    all_known: bool = True,
) -> CoverageVerdict:
    """Whether an object without a descriptor may go. Only GARBAGE may: everything else could still be wanted.

    `seen_seconds` is for how long the owner has known it to be undescribed, `orphaned` the epochs that may be rescued;
    `all_known` is False if some descriptor could not be read.
    """
    epoch = epoch_of_name(name)
    if epoch is None:
        return CoverageVerdict(Fate.FOREIGN, "PyDanube does not give such names: it stays")
    if not all_known:
        return CoverageVerdict(Fate.UNKNOWN, "a descriptor that cannot be read may name it: it stays")
    if epoch > owner_epoch:
        return CoverageVerdict(
            Fate.NEWER,
            f"it is of epoch {epoch}, the owner's is {owner_epoch}: somebody else wrote it, or the metadata store is "
            "older than the bucket; it stays",
        )
    if epoch in orphaned:
        return CoverageVerdict(Fate.ORPHANED, f"messages of epoch {epoch} may still be rescued: it stays")
    if seen_seconds < grace_seconds:
        wait = grace_seconds - seen_seconds
        return CoverageVerdict(Fate.YOUNG, f"epoch {epoch}: somebody may still read it; it may go in {wait:.0f} s")
    return CoverageVerdict(Fate.GARBAGE, f"epoch {epoch}: left over from a merge, a retry or a crash; it may go")
