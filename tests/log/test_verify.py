"""Verifying and walking a data directory: everything wrong is named, and nothing is changed."""

from __future__ import annotations

import asyncio

import pytest

from pydanube.errors import ConfigError, DirectoryInUse, FormatTooNew
from pydanube.formats.segment import GROUP_HEADER_SIZE
from pydanube.log.layout import FORMAT
from pydanube.log.verify import verify, walk
from tests.harness.logs import (
    OTHER_TOPIC,
    TOPIC,
    LogFixture,
    Producer,
    batch,
    fill,
    groups_of,
    settle,
    simulated,
    texts,
)


async def with_two_topics(*, close: bool = True) -> LogFixture:
    """Two topics over two epochs, several segments each."""
    machine = LogFixture()
    for epoch in (1, 2):
        wal = await machine.boot(segment_bytes=2000)
        for topic in (TOPIC, OTHER_TOPIC):
            log = await wal.topic(topic, epoch=epoch)
            producer = await Producer.open(log)
            for n in range(4):
                await log.append(producer.make(f"{epoch}{n}", "second"))
        if close:
            await wal.close()
        else:
            machine.kill()
    return machine


def tree(machine: LogFixture) -> dict[str, bytes]:
    return {path: machine.hardware.content(path) for path in machine.files() if path != "LOCK"}


@simulated
async def test_a_good_directory_verifies_and_every_message_is_counted() -> None:
    for close in (True, False):
        machine = await with_two_topics(close=close)
        report = await machine.verify()
        assert report.ok and report.problems == []
        assert [each.topic for each in report.topics] == sorted([TOPIC, OTHER_TOPIC])
        for each in report.topics:
            assert (each.first_offset, each.head, each.messages, each.batches, each.epochs) == (0, 16, 16, 8, 2)
            assert (each.holes, each.notes, each.problems) == ([], [], [])
            assert each.segments >= 4 and each.size_bytes > 16 * 100


@simulated
async def test_verifying_changes_nothing_whatever_it_finds() -> None:
    machine = await with_two_topics(close=False)
    path = machine.segments()[0]
    machine.hardware.flip(path, groups_of(machine.hardware.content(path))[0].position + 100)
    last = machine.segments()[-1]
    end = groups_of(machine.hardware.content(last))[-1]
    await machine.overwrite(last, end.position + GROUP_HEADER_SIZE + end.length, b"torn")
    before = tree(machine)
    report = await machine.verify()
    assert not report.ok
    assert tree(machine) == before


@simulated
async def test_progress_is_told_while_it_reads() -> None:
    machine = await with_two_topics()
    told: list[tuple[str, int]] = []
    await verify(
        machine.hardware.process(9),
        machine.clock,
        machine.work,
        progress=lambda topic, size: told.append((topic, size)),
    )
    assert {topic for topic, _ in told} == {TOPIC, OTHER_TOPIC}
    assert all(size > 0 for _, size in told)


@simulated
async def test_every_flipped_byte_of_a_segment_is_found_and_named_by_file_position_and_offsets() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, "a", "b", "c")
    await wal.close()
    (path,) = machine.segments()
    groups = groups_of(machine.hardware.content(path))
    for number, group in enumerate(groups):
        for position in range(group.position, group.position + GROUP_HEADER_SIZE + group.length, 23):
            machine.hardware.flip(path, position)
            report = await machine.verify()
            (problem,) = report.topics[0].problems
            assert problem.startswith(f"{path} at position {group.position}: ")
            assert f"offsets {number} up to {number + 1} cannot be read" in problem
            assert report.topics[0].messages == 2  # the walk goes on behind the damage
            machine.hardware.flip(path, position)
    assert (await machine.verify()).ok


@simulated
async def test_a_damaged_header_or_checkpoint_or_a_missing_segment_is_a_problem() -> None:
    for spoil in ("header", "checkpoint", "missing"):
        machine = await with_two_topics()
        victim = machine.segments()[1]
        if spoil == "header":
            machine.hardware.flip(victim, 20)
        elif spoil == "checkpoint":
            victim = machine.files(f"wal{TOPIC}/{2:020}/wal.ckpt")[0]
            machine.hardware.flip(victim, 20)
        else:
            await machine.remove(victim)
        report = await machine.verify()
        assert not report.ok
        (damaged, good) = report.topics
        assert damaged.problems and not good.problems
        if spoil != "missing":
            assert any(victim in problem for problem in damaged.problems)


@simulated
async def test_an_unfinished_write_is_a_note_and_not_a_problem() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, "a")
    end, path = log.segments[0].end, log.segments[0].path
    machine.kill()
    await machine.overwrite(path, end, b"unfinished")
    report = await machine.verify()
    assert report.ok
    assert report.topics[0].notes == [f"{path}: 10 bytes of an unfinished write at position {end}; not acknowledged"]


@simulated
async def test_an_end_that_nothing_proves_is_a_problem() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    await fill(await wal.topic(TOPIC, epoch=1, durability="os"), "a")
    machine.kill()
    report = await machine.verify()
    assert report.topics[0].problems == ["the log cannot prove its end: its durability is os and it was not closed"]


@simulated
async def test_offsets_of_another_owner_are_holes_and_not_problems() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, "a", "b")
    await log.close()
    await fill(await wal.topic(TOPIC, epoch=3, start_offset=10), "c")
    await wal.close()
    report = await machine.verify()
    assert report.ok
    assert (report.topics[0].holes, report.topics[0].head, report.topics[0].messages) == ([(2, 10)], 11, 3)


@simulated
async def test_what_only_the_journals_hold_is_counted_and_stays_there() -> None:
    machine = LogFixture()
    wal = await machine.boot(copy_bytes=1 << 20)
    logs = [await wal.topic(f"/default/t{n}", epoch=1) for n in range(3)]
    for payload in "ab":
        await asyncio.gather(*(log.submit(batch(payload, topic=log.topic)) for log in logs))
    machine.cut_power(4)
    assert machine.files(".journal")
    before = tree(machine)
    report = await machine.verify()
    assert report.ok and [each.messages for each in report.topics] == [2, 2, 2]
    assert tree(machine) == before


@simulated
async def test_a_damaged_journal_is_a_problem_of_the_directory_and_of_every_open_log() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    logs = [await wal.topic(f"/default/t{n}", epoch=1) for n in range(3)]
    for payload in "ab":
        await asyncio.gather(*(log.submit(batch(payload, topic=log.topic)) for log in logs))
    await settle()
    machine.kill()
    (path,) = machine.files(".journal")
    machine.hardware.flip(path, machine.hardware.content(path).index(b"DNJ1") + 300)
    report = await machine.verify()
    assert any(path in problem for problem in report.problems)
    assert all("a commit journal is damaged" in " ".join(each.problems) for each in report.topics)


@simulated
async def test_a_directory_in_use_is_not_verified_and_its_holder_is_named() -> None:
    machine = LogFixture()
    await machine.boot()
    with pytest.raises(DirectoryInUse, match=f"in use by process {machine.disk.under.pid}"):
        await machine.verify()


@simulated
async def test_a_newer_or_unknown_format_is_refused_and_the_lock_given_back() -> None:
    machine = await with_two_topics()
    for text, refusal in ((b'{"format": 99}', FormatTooNew), (b"junk", ConfigError)):
        await machine.replace(FORMAT, text)
        with pytest.raises(refusal):
            await machine.verify()
    await machine.replace(FORMAT, b'{"format": 1}')
    assert (await machine.verify()).ok


# --- walking ----------------------------------------------------------------------------------------


@simulated
async def test_a_walk_yields_the_batches_from_an_offset_on_over_all_epochs() -> None:
    machine = await with_two_topics(close=False)
    before = tree(machine)
    for start in (0, 1, 7, 8, 15, 16):
        disk = machine.hardware.process(9)
        found = [each async for each in walk(disk, machine.clock, machine.work, TOPIC, start) if each.header.rows]
        assert [each.header.base_offset for each in found] == [at for at in range(0, 16, 2) if at + 2 > start]
    disk = machine.hardware.process(9)
    everything = [each async for each in walk(disk, machine.clock, machine.work, TOPIC, 0)]
    assert texts(everything)[:4] == ["10", "second", "11", "second"]
    assert sum(not each.header.rows for each in everything) == 2  # the sessions
    assert tree(machine) == before


@simulated
async def test_a_walk_goes_on_behind_damage_and_names_it() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    await fill(await wal.topic(TOPIC, epoch=1), "a", "b", "c")
    await wal.close()
    (path,) = machine.segments()
    hit = groups_of(machine.hardware.content(path))[1]
    machine.hardware.flip(path, hit.position + 300)
    problems: list[str] = []
    disk = machine.hardware.process(9)
    found = [each async for each in walk(disk, machine.clock, machine.work, TOPIC, 0, problem=problems.append)]
    assert texts(found) == ["a", "c"]
    assert [f"{path} at position {hit.position}" in problem for problem in problems] == [True]
