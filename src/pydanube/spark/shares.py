"""Who reads what: the messages of a query, or of one trigger, as shares for tasks. No Spark.

The number of tasks follows the cluster, as with Spark's own files: as many as it runs at once, if there is enough to
read for each; more if a share would get too large. `minPartitions` and `maxRecordsPerPartition` say otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from pydanube.spark.plan import MIB, RangeSource, TaskShare

SHARE_BYTES: Final = 64 * MIB  # as stored
SHARE_ROWS: Final = 2_000_000
# What is worth a task of its own, if the cluster has nothing better to do: tens of milliseconds of work.
ENOUGH_BYTES: Final = 4 * MIB
ENOUGH_ROWS: Final = 50_000


def shares(
    pieces: Sequence[RangeSource],
    *,
    partitions_min: int | None = None,
    rows_max: int | None = None,
    parallelism: int = 1,
) -> list[TaskShare]:
    """Pieces for tasks: many small objects for one, a large object for several. Never two topics for one task.

    `parallelism` is what the cluster runs at once, for a query that does not say `partitions_min`.
    """
    total = sum(piece.rows for piece in pieces)
    tasks = partitions_min or _worthwhile(total, sum(piece.size_bytes for piece in pieces), parallelism)
    limit = min(SHARE_ROWS, rows_max or SHARE_ROWS, max(1, -(-total // tasks)))
    found: list[list[RangeSource]] = []
    rows = size = 0
    for piece in _cut(pieces, limit):
        open_share = found[-1] if found else None
        fits = rows + piece.rows <= limit and size + piece.size_bytes <= SHARE_BYTES
        if open_share is None or open_share[-1].topic != piece.topic or not fits:
            found.append([])
            rows = size = 0
        found[-1].append(piece)
        rows += piece.rows
        size += piece.size_bytes
    return [TaskShare(tuple(share)) for share in found]


def _worthwhile(rows: int, size_bytes: int, parallelism: int) -> int:
    """How many tasks have enough to do."""
    return max(1, min(parallelism, max(rows // ENOUGH_ROWS, size_bytes // ENOUGH_BYTES)))


def _cut(pieces: Sequence[RangeSource], rows_max: int) -> Iterator[RangeSource]:
    """None with more than `rows_max`; a large one is cut into equal parts."""
    for piece in pieces:
        parts = -(-piece.rows // rows_max)
        if piece.size_bytes > SHARE_BYTES:
            parts = max(parts, -(-piece.size_bytes // SHARE_BYTES))
        first = piece.first
        for number in range(1, parts + 1):
            end = piece.first + piece.rows * number // parts
            if end > first:
                yield piece._replace(first=first, end=end)
            first = end
