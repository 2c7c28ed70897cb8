"""Objects on the disk of the log are written no faster than they must be: publishers wait for the same disk."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest

from pydanube.core.history.tiers import Retention
from pydanube.core.units import MIB
from pydanube.history.uploader import UPLOAD_POLL_SECONDS
from pydanube.stores.disk.memory import MemoryDisk
from pydanube.stores.objects.directory import PIECE_BYTES, FileObjectStore
from pydanube.stores.objects.upload_rate import BURST_BYTES, RATE_MIN, UploadRate
from pydanube.stores.work.memory_clock import MemoryClock
from tests.harness.brokers import one_topic, simulated
from tests.harness.tiers import KIB, SMALL, Teller, TierFixture, carried
from tests.support import run

PATIENT = replace(SMALL, upload_seconds=100.0, object_bytes=64 * MIB, local=Retention(), retention_check_seconds=60.0)


class Sleepless(MemoryClock):
    """Nobody waits, and the time passes all the same."""

    async def sleep(self, seconds: float) -> None:
        self.advance(max(0.0, seconds))


async def seconds_for(size: int, rate: float = 0.0, *, times: int = 1, idle_seconds: float = 0.0) -> float:
    clock = Sleepless()
    pace = UploadRate(clock)
    pace.set_target_rate(rate)
    store = await FileObjectStore.open(MemoryDisk(), "file:///objects", upload_rate=pace)
    clock.advance(idle_seconds)
    begun = clock.elapsed()
    for number in range(times):
        await store.put(f"topic/{number}.parquet", [bytes(size)])
    return clock.elapsed() - begun


def test_a_large_object_takes_its_time() -> None:
    assert run(seconds_for(64 * MIB)) == pytest.approx((64 * MIB - BURST_BYTES) / RATE_MIN, rel=0.01)


def test_the_disk_is_left_alone_between_two_pieces() -> None:
    """Not for a long while at the end."""
    pauses: list[float] = []

    class Noted(Sleepless):
        async def sleep(self, seconds: float) -> None:
            pauses.append(seconds)
            await super().sleep(seconds)

    async def put() -> None:
        store = await FileObjectStore.open(MemoryDisk(), "file:///objects", upload_rate=UploadRate(Noted()))
        await store.put("topic/1.parquet", [bytes(16 * MIB)])

    run(put())
    assert len(pauses) >= (16 * MIB - BURST_BYTES) // PIECE_BYTES
    assert max(pauses) == pytest.approx(PIECE_BYTES / RATE_MIN)


def test_a_small_object_does_not_wait() -> None:
    assert run(seconds_for(BURST_BYTES // 2)) == 0


def test_many_small_objects_are_as_slow_as_a_large_one() -> None:
    assert run(seconds_for(MIB, times=64)) == pytest.approx((64 * MIB - BURST_BYTES) / RATE_MIN, rel=0.01)


def test_an_idle_hour_is_no_credit_for_an_object_at_full_speed() -> None:
    assert run(seconds_for(64 * MIB, idle_seconds=3600.0)) == pytest.approx(run(seconds_for(64 * MIB)))


def test_an_object_that_more_must_follow_is_written_faster() -> None:
    assert run(seconds_for(64 * MIB, 2 * RATE_MIN)) == pytest.approx((64 * MIB - BURST_BYTES) / RATE_MIN / 2, rel=0.01)


def test_nothing_waits_when_nobody_may_wait() -> None:
    assert run(seconds_for(64 * MIB, math.inf)) == 0


@simulated
async def test_the_aim_is_that_what_waits_has_gone_in_one_interval() -> None:
    host = TierFixture(PATIENT)
    _, orders = await one_topic(host)
    aims: list[float] = []
    carried_orders = carried(orders)
    assert orders.storage is not None
    orders.storage.uploader._set_target_rate = aims.append
    await asyncio.sleep(2 * UPLOAD_POLL_SECONDS)
    assert set(aims) == {0.0}, "nothing waits"
    teller = Teller(size=4 * KIB)
    await teller.tell(orders, 20)
    await asyncio.sleep(2 * UPLOAD_POLL_SECONDS)
    assert aims[-1] == carried_orders.lag_bytes / 100 > 20 * 8 * KIB / 100
    await asyncio.sleep(PATIENT.upload_seconds + UPLOAD_POLL_SECONDS)
    assert aims[-1] == 0.0


@simulated
async def test_objects_are_written_at_full_speed_while_the_log_is_too_large() -> None:
    host = TierFixture(PATIENT)
    host.config = replace(host.config, storage=replace(host.config.storage, wal_bytes_max=256 * KIB))
    _, orders = await one_topic(host)
    aims: list[float] = []
    assert orders.storage is not None
    orders.storage.uploader._set_target_rate = aims.append
    host.object_store.away = True
    teller = Teller(size=4 * KIB)
    while orders.storage.uploader._excess_bytes() <= 0:
        await teller.tell(orders)
    await asyncio.sleep(2 * UPLOAD_POLL_SECONDS)
    assert aims[-1] == math.inf
    host.object_store.away = False
