"""Reading: from any offset, from memory and files, while the log goes on and while retention cuts it."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from pydanube.errors import LogClosed, LogDamaged, OffsetOutOfRange
from pydanube.formats.batch import Batch
from pydanube.log.catalog import INDEX_STEP_BYTES
from pydanube.log.wal import TopicLog, Wal
from tests.harness.logs import (
    OTHER_TOPIC,
    TOPIC,
    LogFixture,
    Producer,
    batch,
    contents,
    fill,
    numbered,
    settle,
    simulated,
    sized,
    texts,
)

CACHES = {"memory": 1 << 20, "files": 0, "both": 8 * 1024}
every_cache = pytest.mark.parametrize("cache", CACHES)


async def with_rows(machine: LogFixture, cache_bytes: int, **config: int) -> tuple[TopicLog, list[str]]:
    """A log of batches with one to four rows in small segments."""
    wal = await machine.boot(cache_bytes=cache_bytes, segment_bytes=4000, **config)
    log = await wal.topic(TOPIC, epoch=1)
    expected: list[str] = []
    for n in range(30):
        rows = [f"{n}.{row}" for row in range(1 + n % 4)]
        expected += rows
        await log.append(batch(*rows))
    return log, expected


def reads_of_files(machine: LogFixture) -> int:
    return sum(step.startswith("read wal") for step in machine.disk.steps)


# --- from any offset --------------------------------------------------------------------------------


@every_cache
@simulated
async def test_reading_from_any_offset_begins_with_the_batch_that_holds_it(cache: str) -> None:
    machine = LogFixture()
    log, expected = await with_rows(machine, CACHES[cache])
    everything = numbered(*expected)
    for offset in range(log.head):
        got = await log.read(offset, bytes_max=2000)
        assert got[0].header.base_offset <= offset < got[0].header.end_offset
        for before, after in pairwise(got):
            assert before.header.end_offset == after.header.base_offset
        first = got[0].header.base_offset
        assert numbered(*texts(got), first=first).items() <= everything.items()
        assert await contents(log, offset, bytes_max=1) == {at: text for at, text in everything.items() if at >= first}
    assert (reads_of_files(machine) == 0) == (cache == "memory")


@every_cache
@simulated
async def test_at_and_beyond_the_head_there_is_nothing_yet(cache: str) -> None:
    log, _ = await with_rows(LogFixture(), CACHES[cache])
    assert await log.read(log.head) == []
    assert await log.read(log.head + 100) == []


@simulated
async def test_below_what_is_kept_the_error_names_what_is() -> None:
    wal = await LogFixture().boot()
    log = await wal.topic(TOPIC, epoch=1, start_offset=50)
    await fill(log, "a", "b")
    with pytest.raises(OffsetOutOfRange, match=r"offset 49 of .* is not kept: offsets 50 up to 52 are"):
        await log.read(49)


@every_cache
@simulated
async def test_a_batch_larger_than_asked_for_is_returned_whole(cache: str) -> None:
    wal = await LogFixture().boot(cache_bytes=CACHES[cache])
    log = await wal.topic(TOPIC, epoch=1)
    for size in (10, 200_000, 10):
        await log.append(sized(size, f"{size}"))
    (large,) = await log.read(1, bytes_max=100)
    assert texts([large]) == ["200000"]
    assert await contents(log, bytes_max=1) == numbered("10", "200000", "10")


@simulated
async def test_a_group_of_many_batches_is_read_in_pieces() -> None:
    machine = LogFixture()
    wal = await machine.boot(cache_bytes=0, group_bytes=2 << 20, segment_bytes=4 << 20)
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, "first")
    await asyncio.gather(*(log.submit(sized(10_000, f"{n}")) for n in range(100)))
    assert wal.committer.groups == 2
    longest = 0
    reader = log.reader(0)
    found: list[str] = []
    while got := await reader.read(64 * 1024):
        longest = max(longest, sum(each.header.size_bytes for each in got))
        found += texts(got)
    assert found == ["first", *map(str, range(100))]
    assert longest <= 64 * 1024
    assert texts(await log.read(77, bytes_max=1))[0] == "76"


@simulated
async def test_a_start_far_inside_a_large_segment_scans_no_more_than_one_index_step() -> None:
    machine = LogFixture()
    wal = await machine.boot(cache_bytes=0, segment_bytes=8 << 20)
    log = await wal.topic(TOPIC, epoch=1)
    for n in range(100):
        await log.append(sized(20_000, f"{n}"))
    before = reads_of_files(machine)
    assert texts(await log.read(99, bytes_max=1)) == ["99"]
    assert reads_of_files(machine) - before <= INDEX_STEP_BYTES // (64 * 1024) + 2


@simulated
async def test_session_records_are_not_handed_to_readers() -> None:
    for cache_bytes in (0, 1 << 20):
        wal = await LogFixture().boot(cache_bytes=cache_bytes)
        log = await wal.topic(TOPIC, epoch=1)
        for n in range(5):
            producer = await Producer.open(log, n + 1)
            await log.append(producer.make(f"{n}"))
        got = await log.read(0)
        assert all(each.header.rows for each in got)
        assert await contents(log) == numbered(*"01234")


# --- the cache --------------------------------------------------------------------------------------


@simulated
async def test_the_cache_is_bounded_in_bytes_over_all_topics_and_everything_can_be_read() -> None:
    machine = LogFixture()
    wal = await machine.boot(cache_bytes=20_000, copy_bytes=1024)
    logs = [await wal.topic(f"/default/t{n}", epoch=1) for n in range(5)]
    for n in range(20):
        for log in logs:
            await log.append(batch(f"{n}", topic=log.topic))
            assert wal._cache.size_bytes <= 20_000
    for log in logs:
        assert await contents(log) == numbered(*map(str, range(20)))


@simulated
async def test_a_quiet_topic_leaves_the_cache_to_a_busy_one() -> None:
    machine = LogFixture()
    wal = await machine.boot(cache_bytes=10_000)
    quiet, busy = await wal.topic(TOPIC, epoch=1), await wal.topic(OTHER_TOPIC, epoch=1)
    await fill(quiet, "quiet")
    await fill(busy, *map(str, range(20)))
    before = reads_of_files(machine)
    assert texts(await busy.read(19)) == ["19"]
    assert reads_of_files(machine) == before
    assert texts(await quiet.read(0)) == ["quiet"]
    assert reads_of_files(machine) > before


@simulated
async def test_what_is_only_in_the_journal_is_never_dropped_from_memory() -> None:
    machine = LogFixture()
    wal = await machine.boot(cache_bytes=0, copy_bytes=1 << 20)
    logs = [await wal.topic(f"/default/t{n}", epoch=1) for n in range(4)]
    for n in range(3):
        done = [log.submit(batch(f"{n}", topic=log.topic)) for log in logs]
        await asyncio.gather(*done)
        for log in logs:
            assert await contents(log) == numbered(*map(str, range(n + 1)))
    assert wal.committer.journaled_groups == 3


@simulated
async def test_a_closed_topic_gives_its_part_of_the_cache_back() -> None:
    machine = LogFixture()
    wal = await machine.boot(cache_bytes=10_000)
    log, other = await wal.topic(TOPIC, epoch=1), await wal.topic(OTHER_TOPIC, epoch=1)
    await fill(log, *"abcd")
    await log.close()
    assert log.tail.batches == []
    await fill(other, *map(str, range(30)))
    assert wal._cache.size_bytes <= 10_000
    assert await contents(log) == numbered(*"abcd")  # what is closed can still be read, from its files


# --- following --------------------------------------------------------------------------------------


@every_cache
@simulated
async def test_a_stream_reads_what_is_there_then_follows_and_ends_with_the_log(cache: str) -> None:
    machine = LogFixture()
    wal = await machine.boot(cache_bytes=CACHES[cache], segment_bytes=2000)
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, *"abc")
    got: list[str] = []

    async def follow() -> None:
        async for each in log.follow(1):
            got.extend(texts([each]))

    following = asyncio.ensure_future(follow())
    await settle()
    assert got == ["b", "c"]
    await fill(log, "d")
    await settle()
    assert got == ["b", "c", "d"]
    await fill(log, *"efgh")
    await log.close()
    await following
    assert got == list("bcdefgh")


@simulated
async def test_a_stream_that_starts_beyond_the_head_waits_for_its_offset() -> None:
    wal = await LogFixture().boot()
    log = await wal.topic(TOPIC, epoch=1)
    following = asyncio.ensure_future(anext(aiter(log.follow(2))))
    await fill(log, "a", "b")
    await settle()
    assert not following.done()
    await fill(log, "c")
    assert texts([await following]) == ["c"]


@simulated
async def test_many_streams_at_different_places_all_see_everything_in_order() -> None:
    machine = LogFixture()
    wal = await machine.boot(cache_bytes=6000, segment_bytes=4000)
    log = await wal.topic(TOPIC, epoch=1)
    seen: dict[int, list[int]] = {start: [] for start in range(0, 40, 5)}

    async def follow(start: int) -> None:
        async for each in log.follow(start, bytes_max=1500):
            seen[start].append(each.header.base_offset)
            await asyncio.sleep(0.001 * (start % 3))

    readers = [asyncio.ensure_future(follow(start)) for start in seen]
    for n in range(60):
        await log.append(batch(f"{n}"))
    await log.close()
    await asyncio.gather(*readers)
    assert all(offsets == list(range(start, 60)) for start, offsets in seen.items())


@simulated
async def test_a_stream_of_a_log_that_is_closed_ends_at_once_behind_its_last_batch() -> None:
    wal = await LogFixture().boot()
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, "a", "b")
    await log.close()
    assert [texts([each])[0] async for each in log.follow(0)] == ["a", "b"]


# --- while the log changes --------------------------------------------------------------------------


@simulated
async def test_reading_goes_on_while_appends_roll_and_retention_cuts_behind_the_reader() -> None:
    machine = LogFixture()
    wal = await machine.boot(cache_bytes=0, segment_bytes=2000)
    log = await wal.topic(TOPIC, epoch=1)
    got: list[int] = []

    async def follow() -> None:
        async for each in log.follow(0, bytes_max=1000):
            got.append(each.header.base_offset)

    following = asyncio.ensure_future(follow())
    for n in range(80):
        await log.append(batch(f"{n}"))
        if n % 10 == 9:
            await settle()
            await log.truncate(len(got) - 5)
    await log.close()
    await following
    assert got == list(range(80))
    assert log.first_offset > 60


@simulated
async def test_a_reader_that_retention_overtakes_is_told_what_is_kept() -> None:
    machine = LogFixture()
    wal = await machine.boot(cache_bytes=0, segment_bytes=2000)
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, *"abcdefgh")
    reader = log.reader(0)
    await reader.read(1)

    async def cut(path: str) -> None:
        machine.disk.before_read = None
        await log.truncate(6)

    machine.disk.before_read = cut
    with pytest.raises(OffsetOutOfRange) as refusal:
        while await reader.read(1):
            pass
    assert (refusal.value.first, refusal.value.end) == (6, 8)
    assert await contents(log) == numbered("g", "h", first=6)


@simulated
async def test_a_read_sees_only_what_is_committed_while_a_group_is_being_written() -> None:
    machine = LogFixture()
    wal = await machine.boot(cache_bytes=0)
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, "a")
    machine.disk.hold_syncs()
    done = log.submit(batch("b"))
    await settle()
    assert await contents(log) == numbered("a")
    machine.disk.release_syncs()
    await done
    assert await contents(log) == numbered("a", "b")


# --- what is wrong is not handed out ----------------------------------------------------------------


async def closed_and_reopened(machine: LogFixture, wal: Wal) -> TopicLog:
    await wal.close()
    wal = await machine.boot(cache_bytes=0)
    return await wal.topic(TOPIC, epoch=2)


@simulated
async def test_every_flipped_byte_of_a_segment_is_found_before_it_is_served() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, "a", "b")
    start, end, path = log.segments[0].start, log.segments[0].end, log.segments[0].path
    log = await closed_and_reopened(machine, wal)
    good = machine.hardware.content(path)
    everything = [each.to_bytes() for each in await log.read(0)]
    for position in range(start, end, 7):
        machine.hardware.flip(path, position, position % 8)
        got: list[Batch] = []
        reader = log.reader(0)
        with pytest.raises(LogDamaged) as damage:
            while more := await reader.read(1):
                got += more
        assert damage.value.path == path
        assert damage.value.position <= position
        assert damage.value.first == len(got)
        assert [each.to_bytes() for each in got] == everything[: len(got)]
        machine.hardware.flip(path, position, position % 8)
    assert machine.hardware.content(path) == good


@simulated
async def test_a_file_that_was_cut_short_is_damage() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, "a", "b")
    path, end = log.segments[0].path, log.segments[0].end
    log = await closed_and_reopened(machine, wal)
    await machine.replace(path, machine.hardware.content(path)[: end - 100])
    assert texts((await log.read(0, bytes_max=1))[:1]) == ["a"]
    with pytest.raises(LogDamaged) as damage:
        await log.read(1)
    assert (damage.value.first, damage.value.end) == (1, 2)


@simulated
async def test_two_damaged_places_in_one_segment_are_told_apart() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    ends = []
    for payload in "abcde":
        await fill(log, payload)
        ends.append(log.segments[0].end)
    path = log.segments[0].path
    log = await closed_and_reopened(machine, wal)
    for group in (1, 3):
        machine.hardware.flip(path, ends[group] - 50)
    for offset, text in ((0, "a"), (2, "c"), (4, "e")):
        assert texts(await log.read(offset)) == [text]
    for offset in (1, 3):
        with pytest.raises(LogDamaged) as damage:
            await log.read(offset)
        assert (damage.value.first, damage.value.end) == (offset, offset + 1)


@simulated
async def test_a_reader_of_a_closed_log_does_not_call_files_damaged_that_the_next_opener_removed() -> None:
    machine = LogFixture()
    wal = await machine.boot(cache_bytes=0, segment_bytes=4000)
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, *(f"{n} " + "x" * 500 for n in range(30)))
    reader = log.reader(0)
    assert await reader.read(1)
    await log.close()
    again = await wal.topic(TOPIC, epoch=2)
    await again.append(batch("x"))
    await again.truncate(again.head)
    with pytest.raises(LogClosed):
        while await reader.read(1):
            pass
