"""What segments hold, told in few numbers."""

from __future__ import annotations

from itertools import pairwise

from pydanube.core.history.tiers import LogRun
from pydanube.formats.segment import SegmentHeader
from pydanube.log.catalog import SegmentFile, runs_of


def segment(first: int, end: int, size: int, epoch: int = 1, points: tuple[tuple[int, int], ...] = ()) -> SegmentFile:
    header = SegmentHeader(first, 0, epoch, first, 0, 0, 0, 0, 0, 0, b"")
    made = SegmentFile("path", header, start=96, end=96 + size, end_offset=end)
    for offset, position in points:
        made.index.add(offset, 96 + position)
    return made


def test_neighbours_of_one_epoch_with_rows_of_similar_size_are_one_run() -> None:
    assert runs_of([segment(0, 10, 1000), segment(10, 20, 1100), segment(20, 20, 0)], 0) == [LogRun(0, 20, 2100, 1)]


def test_a_run_ends_where_the_epoch_the_size_of_rows_or_the_log_does() -> None:
    segments = [
        segment(0, 10, 1000),
        segment(10, 20, 1000, epoch=2),
        segment(20, 30, 9000, epoch=2),
        segment(40, 50, 9000, 2),
    ]
    assert runs_of(segments, 0) == [
        LogRun(0, 10, 1000, 1),
        LogRun(10, 20, 1000, 2),
        LogRun(20, 30, 9000, 2),
        LogRun(40, 50, 9000, 2),
    ]


def test_inside_a_segment_sizes_are_told_by_its_index_unless_it_is_uploaded() -> None:
    step = 256 * 1024
    mixed = segment(0, 1010, 2 * step, points=((0, 0), (1000, step)))
    assert runs_of([mixed], 0) == [LogRun(0, 1000, step, 1), LogRun(1000, 1010, step, 1)]
    assert runs_of([mixed], 1010) == [LogRun(0, 1010, 2 * step, 1)]


def test_many_runs_become_fewer_and_keep_every_offset_and_byte() -> None:
    segments = [segment(10 * n, 10 * n + 10, 100 if n % 2 else 9000) for n in range(100)]
    found = runs_of(segments, 0, count_max=16)
    assert len(found) <= 16
    assert (found[0].first, found[-1].end, sum(run.size_bytes for run in found)) == (0, 1000, 455_000)
    assert all(one.end == other.first for one, other in pairwise(found))
    epochs = [segment(n, n + 1, 100, epoch=n) for n in range(100)]
    assert [run.epoch for run in runs_of(epochs, 0, count_max=16)] == list(range(84, 100))
