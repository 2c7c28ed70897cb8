"""Large objects and the process beside the broker that makes and stores them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pydanube.errors import ProcessEnded, Unreachable
from pydanube.history import object_maker
from pydanube.stores.work.pickle_pipe import dumped, loaded
from tests.harness.brokers import (
    one_topic,
    simulated,
)
from tests.harness.tiers import (
    KIB,
    SMALL,
    STILL,
    Teller,
    TierFixture,
    carried,
    check_stored,
    covered,
    recovered,
    store_in_workers,
    tell_and_upload,
)


@simulated
async def test_what_is_large_is_made_in_another_process_unless_somebody_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    apart = 0

    async def run_in_worker(function: Callable[[], Any]) -> Any:
        nonlocal apart
        apart += 1
        return loaded(dumped(loaded(dumped(function))()))

    async def await_in_worker(function: Callable[[], Any]) -> Any:
        nonlocal apart
        apart += 1
        return loaded(dumped(await function()))

    host = TierFixture(replace(STILL, object_bytes=KIB * KIB))
    monkeypatch.setattr(host.work, "run_in_worker", run_in_worker)
    monkeypatch.setattr(host.work, "await_in_worker", await_in_worker)
    monkeypatch.setattr(object_maker, "WORKER_BYTES_MIN", 20_000)
    _, orders = await one_topic(host)
    teller = Teller(size=100)
    await tell_and_upload(orders, teller, count=10)
    assert apart == 0
    await tell_and_upload(orders, teller, count=100)
    assert apart == 1
    await teller.tell(orders, 100)
    assert await carried(orders).uploads.upload(orders.log, urgent=True) is not None
    assert apart == 1
    assert covered(await check_stored(host)) == [(0, 210)]
    host.kill()
    await recovered(host, teller.told)


@simulated
async def test_what_a_process_was_storing_when_it_died_is_stored_here_under_another_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store_in_workers(monkeypatch)
    host = TierFixture(STILL)
    is_dying = True
    calls = 0
    under = host.work.await_in_worker

    async def await_in_worker(function: Callable[[], Any]) -> Any:
        nonlocal calls
        calls += 1
        found = await under(function)
        if is_dying:
            raise ProcessEnded("it was killed")
        return found

    monkeypatch.setattr(host.work, "await_in_worker", await_in_worker)
    _, orders = await one_topic(host)
    teller = Teller()
    await teller.tell(orders)
    await asyncio.sleep(2.5)
    assert [each.object_id for each in await check_stored(host)] == ["data-0-0-1-1.parquet"]
    assert "data-0-0-1.parquet" in await host.object_store.names()  # nobody knew that it was there
    await teller.tell(orders)
    await asyncio.sleep(2.5)
    assert (calls, covered(await check_stored(host))) == (1, [(0, 2)])  # not asked again so soon
    await asyncio.sleep(object_maker.HERE_SECONDS)
    is_dying = False
    await teller.tell(orders)
    await asyncio.sleep(2.5)
    assert (calls, covered(await check_stored(host))) == (2, [(0, 3)])
    host.kill()
    await recovered(host, teller.told)


@simulated
async def test_uploads_merges_and_sweeps_go_on_while_every_process_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    store_in_workers(monkeypatch)
    monkeypatch.setattr(object_maker, "HERE_SECONDS", 3.0)
    host = TierFixture(SMALL)

    async def await_in_worker(function: Callable[[], Any]) -> Any:
        raise ProcessEnded("it was killed")

    monkeypatch.setattr(host.work, "await_in_worker", await_in_worker)
    _, orders = await one_topic(host)
    teller = Teller()
    for _ in range(30):
        await teller.tell(orders)
        await asyncio.sleep(1.0)
    await asyncio.sleep(2.0)
    found = carried(orders)
    assert (found.failing, found.lag_offsets) == ("", 0)
    assert any("-m" in each.object_id for each in await check_stored(host))
    assert orders.log.first_offset > 20
    host.kill()
    await recovered(host, teller.told)


@simulated
async def test_what_a_store_says_to_a_process_is_as_if_it_were_said_to_us(monkeypatch: pytest.MonkeyPatch) -> None:
    store_in_workers(monkeypatch)
    host = TierFixture(STILL)
    _, orders = await one_topic(host)
    host.object_store.put_fails = 1
    await Teller().tell(orders)
    with pytest.raises(Unreachable, match="the answer was lost"):
        await carried(orders).uploads.upload(orders.log)
    assert await carried(orders).uploads.maker.opener() is not None
