"""One fault on a disk that is well: what it costs, and that it does not stop everybody an hour later."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from pydanube.core.commit.values import CommitReceipt
from pydanube.core.names import TopicName
from pydanube.errors import DiskFull, LogStopped
from pydanube.history.leftovers import remove_files
from pydanube.log.layout import BALLAST
from pydanube.log.wal import TopicLog, Wal, WalConfig
from pydanube.ports import Write, WriteResult
from pydanube.stores.disk.files import FileDisk
from pydanube.stores.work.system import SystemClock, SystemWork
from tests.harness import brokers
from tests.harness.logs import SMALL, TOPIC, LogFixture, batch, contents, fill, numbered, settle, simulated


async def topics(wal: Wal, count: int, epoch: int = 1) -> list[TopicLog]:
    return [await wal.topic(f"/default/t{n}", epoch=epoch) for n in range(count)]


async def append_together(logs: Sequence[TopicLog], payload: str) -> list[CommitReceipt]:
    futures = [log.submit(batch(payload, topic=log.topic)) for log in logs]
    return [await future for future in futures]


# --- a failed sync of the journal -------------------------------------------------------------------


@simulated
async def test_a_journal_whose_sync_failed_is_not_used_again_and_stops_nobody_later() -> None:
    machine = LogFixture()
    wal = await machine.boot(journal_bytes=8192)
    logs = await topics(wal, 5)
    await append_together(logs, "0")
    (failed,) = machine.files(".journal")
    machine.disk.under._failed.add(machine.hardware._find(failed))  # no later sync of this file succeeds
    for n in range(1, 40):
        await append_together(logs, f"{n}")
    assert wal.committer.stopped is None
    made = machine.files(".journal")
    assert failed not in made and len(made) <= 2
    machine.cut_power()
    wal = await machine.boot()
    assert wal.problems == []
    for log in await topics(wal, 5, epoch=2):
        assert await contents(log) == numbered(*map(str, range(40)))


def test_on_real_files_a_failed_sync_of_the_journal_stops_nobody_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fdatasync, failures = os.fdatasync, 1

    def fail_once(fd: int) -> None:
        nonlocal failures
        if failures and os.readlink(f"/proc/self/fd/{fd}").endswith(".journal"):
            failures -= 1
            raise OSError(5, "Input/output error")
        fdatasync(fd)

    async def live() -> None:
        disk = FileDisk(tmp_path)
        wal = await Wal.open(disk, SystemClock(), SystemWork(), WalConfig(**{**SMALL, "journal_bytes": 8192}))  # type: ignore[arg-type]
        logs = await topics(wal, 5)
        monkeypatch.setattr(os, "fdatasync", fail_once)
        for n in range(30):
            await append_together(logs, f"{n}")
        assert wal.committer.stopped is None and failures == 0
        await wal.close()
        disk.close()

    asyncio.run(live())


@simulated
async def test_the_file_for_the_next_journal_is_made_again_if_it_cannot_be_synced() -> None:
    machine = LogFixture()
    wal = await machine.boot(journal_bytes=8192)
    logs = await topics(wal, 5)
    for n in range(10):
        await append_together(logs, f"{n}")
    machine.disk.sync_failures = ["spare"]
    for n in range(10, 30):
        await append_together(logs, f"{n}")
    assert machine.disk.sync_failures == [] and wal.committer.stopped is None
    machine.cut_power()
    wal = await machine.boot()
    for log in await topics(wal, 5, epoch=2):
        assert await contents(log) == numbered(*map(str, range(30)))


@simulated
async def test_two_failures_of_the_file_for_the_next_journal_stop_the_log() -> None:
    machine = LogFixture()
    wal = await machine.boot(journal_bytes=8192)
    logs = await topics(wal, 5)
    await append_together(logs, "0")
    machine.disk.sync_failures = ["spare", "spare"]
    with pytest.raises(LogStopped):
        for n in range(1, 30):
            await append_together(logs, f"{n}")


# --- a close that found no room ---------------------------------------------------------------------


async def unfinished(machine: LogFixture, wal: Wal) -> list[TopicLog]:
    """Three topics with a batch in the journal each; the first could not be closed, and then there is room again."""
    logs = await topics(wal, 3)
    await append_together(logs, "a")
    machine.hardware.capacity_bytes = machine.hardware.used_bytes
    with pytest.raises(DiskFull):
        await logs[0].close()
    machine.hardware.capacity_bytes = None
    return logs


async def rotate(wal: Wal, logs: Sequence[TopicLog]) -> None:
    """Until the journal that knows of the unfinished topic is emptied, and another one too."""
    committer = wal.committer
    first = committer._journal.journals_made
    while committer._journal.journals_made < first + 2:
        await append_together(logs, "more")
    await settle()


@simulated
async def test_a_close_without_room_a_reopen_and_retention_stop_nobody() -> None:
    machine = LogFixture()
    wal = await machine.boot(journal_bytes=8192, ballast_bytes=0)
    _, *others = await unfinished(machine, wal)
    log = await wal.topic("/default/t0", epoch=2)
    assert await contents(log) == numbered("a")
    await fill(log, "b")
    assert await log.truncate(1) == 1
    await rotate(wal, others)
    assert wal.committer.stopped is None
    machine.cut_power()
    log = await machine.reopened("/default/t0", epoch=3)
    assert await contents(log) == numbered("b", first=1)


@simulated
async def test_what_was_brought_home_is_safe_in_its_files_before_anybody_opens_them() -> None:
    machine = LogFixture()
    wal = await machine.boot(ballast_bytes=0)
    logs = await unfinished(machine, wal)
    (old,) = logs[0].segments
    await wal.committer.copy_journal_to_segments("wal/default/t0")
    assert old.synced == old.end
    durable = machine.hardware.durable(old.path)
    assert durable is not None and len(durable) >= old.end


@simulated
async def test_the_files_of_a_topic_that_could_not_be_closed_may_be_removed() -> None:
    machine = LogFixture()
    wal = await machine.boot(journal_bytes=8192, ballast_bytes=0)
    _, *others = await unfinished(machine, wal)
    await remove_files(machine.disk, TopicName("/default/t0"))
    await rotate(wal, others)
    assert wal.committer.stopped is None
    journal = wal.committer._journal
    assert journal.uncopied_bytes == sum(segment.end - segment.copied for segment in journal.uncopied)
    machine.cut_power()
    wal = await machine.boot()
    assert wal.problems == []
    first, second = [await wal.topic(f"/default/t{n}", epoch=2) for n in (1, 2)]
    assert (await contents(first))[0] == (await contents(second))[0] == "a"


@simulated
async def test_the_files_of_a_topic_may_be_removed_while_they_are_copied_or_synced() -> None:
    for step in ("write", "sync"):
        machine = LogFixture()
        wal = await machine.boot(journal_bytes=8192, ballast_bytes=0)
        _, *others = await unfinished(machine, wal)
        removed = False

        async def remove(number: int, machine: LogFixture = machine, step: str = step) -> None:
            nonlocal removed
            last = machine.disk.steps[-1]
            if not removed and last.startswith(step) and "/t0/" in last:
                removed = True
                await remove_files(machine.hardware.process(96), TopicName("/default/t0"))

        machine.disk.before_step = remove
        await rotate(wal, others)
        assert removed and wal.committer.stopped is None


@simulated
async def test_the_file_of_an_open_log_that_vanishes_stops_the_log_and_the_journal_stays() -> None:
    machine = LogFixture()
    wal = await machine.boot(journal_bytes=8192)
    logs = await topics(wal, 3)
    await append_together(logs, "a")
    await machine.remove(logs[0].segments[0].path)
    with pytest.raises(LogStopped):
        await rotate(wal, logs[1:])
    assert machine.files(".journal")


@simulated
async def test_a_stopped_log_does_not_open_again_what_only_its_journal_can_vouch_for() -> None:
    machine = LogFixture()
    wal = await machine.boot(journal_bytes=8192)
    logs = await topics(wal, 3)
    await append_together(logs, "a")
    await machine.clock.sleep(1)  # copied, not synced
    machine.disk.sync_failures = ["/t0/"]
    with pytest.raises(LogStopped):
        await rotate(wal, logs[1:])
    await logs[0].close()
    with pytest.raises(LogStopped):
        await wal.topic("/default/t0", epoch=2)
    machine.cut_power()
    log = await machine.reopened("/default/t0", epoch=2)
    assert await contents(log) == numbered("a")


# --- no room ----------------------------------------------------------------------------------------


@simulated
async def test_a_disk_without_room_for_the_name_of_the_ballast_is_no_reason_to_stop() -> None:
    machine = LogFixture()

    async def full(number: int) -> None:
        if machine.disk.steps[-1] == f"create {BALLAST}":
            raise DiskFull(BALLAST)

    machine.disk.before_step = full
    wal = await machine.open()
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, "a")
    assert wal.committer.stopped is None and BALLAST not in machine.files()


@brokers.simulated
async def test_a_topic_can_be_deleted_on_a_full_disk_and_the_others_go_on() -> None:
    host = brokers.BrokerFixture()
    broker, doomed = await brokers.one_topic(host)
    other = await brokers.make_topic(broker, "/default/other")
    await brokers.publish(doomed, "a", "b")
    disk = host._access
    create, write = disk.create, disk.write

    async def no_name(path: str) -> None:
        raise DiskFull(path)

    async def no_room(writes: Sequence[Write], *, sync: bool) -> list[WriteResult]:
        return [DiskFull(each.path) for each in writes]

    disk.create, disk.write = no_name, no_room  # type: ignore[method-assign]
    await broker.topics.delete(doomed.name)
    disk.create, disk.write = create, write  # type: ignore[method-assign]
    assert not await broker.topics.exists(doomed.name)
    assert [entry.name for entry in await disk.list("wal/default")] == []
    await asyncio.sleep(1)
    assert await brokers.publish(other, "c") == [0]
    assert await brokers.publish(await brokers.make_topic(broker, doomed.name), "new") == [0]
