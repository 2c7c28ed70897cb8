"""A topic's log that is closed while others have business with it, and a directory that has no descriptor to spare."""

from __future__ import annotations

import asyncio

import pytest

from pydanube.errors import LogClosed
from pydanube.testing.disk_faults import DiskAim
from tests.harness.logs import TOPIC, LogFixture, batch, settle, simulated


@simulated
async def test_who_closes_a_log_that_is_being_closed_waits_until_it_is() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    await log.append(batch("a"))
    machine.disk.hold_syncs("wal.ckpt")
    first = asyncio.create_task(log.close())
    await settle()
    everything = asyncio.create_task(wal.close())
    await settle()
    assert not first.done() and not everything.done(), "the directory was let go while a file was being written"
    machine.disk.release_syncs()
    await asyncio.gather(first, everything)


@simulated
async def test_an_append_that_waits_for_less_to_be_queued_ends_with_its_log() -> None:
    machine = LogFixture()
    wal = await machine.boot(pending_bytes=1024)
    log = await wal.topic(TOPIC, epoch=1)
    await log.append(batch("a"))
    log.reserve(log.head)  # what is queued stays queued
    queued = log.submit(batch("x" * 5000))
    waiting = asyncio.create_task(log.append(batch("b")))
    asking = asyncio.create_task(log.drain())
    await settle()
    assert not waiting.done() and not asking.done()
    await log.close()
    for refused in (queued, waiting):
        with pytest.raises(LogClosed):
            await refused
    await asking


@simulated
async def test_no_descriptor_for_the_ballast_stops_nobody() -> None:
    machine = LogFixture()
    machine.hardware.aims.append(DiskAim("size", 1, "EMFILE", "BALLAST"))
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    assert (await log.append(batch("a"))).offset == 0
    assert wal.committer.stopped is None


@simulated
async def test_a_journal_that_cannot_be_kept_for_lack_of_room_is_removed() -> None:
    machine = LogFixture()
    wal = await machine.boot(journal_bytes=4096)
    logs = [await wal.topic(f"/default/t{n}", epoch=1) for n in range(3)]
    machine.hardware.aims.append(DiskAim("rename", 1, "ENOSPC", "journal/spare.tmp"))
    for n in range(40):
        for future in [log.submit(batch(f"{n}", topic=log.topic)) for log in logs]:
            await future
    assert not machine.hardware.aims, "no journal was emptied"
    assert wal.committer.stopped is None
    await wal.close()
