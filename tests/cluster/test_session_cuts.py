"""Sessions of producers at the broker: ended by it when nobody uses them; counted and said when they do not fit."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from pydanube.broker import hand_over
from pydanube.broker.topic import Topic
from pydanube.core.history.tiers import TierConfig
from pydanube.core.names import ProducerId
from pydanube.errors import SessionUnknown
from pydanube.formats.batch import Batch, encode, rows_of
from pydanube.history import tier
from pydanube.testing.cluster import Cluster
from tests.harness.brokers import ORDERS, BrokerFixture, find_topic, make_topic, message, simulated, small_wal


def batch(producer: int, session: int, sequence: int) -> Batch:
    rows = rows_of([message(f"{producer}-{sequence}")])
    return encode(rows, topic=ORDERS, producer_id=producer, session=session, first_sequence=sequence)


async def ten_producers(topic: Topic) -> None:
    for producer in range(1, 11):
        session = await topic.open_session(ProducerId(producer))
        await topic.submit_batch(batch(producer, session, 0))


@simulated
async def test_sessions_that_do_not_fit_into_a_seal_are_counted_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hand_over, "SESSIONS_BYTES_MAX", 200)
    cluster = await Cluster().start(2)
    topic = await cluster.create(ORDERS, on=1)
    await cluster.publish(topic, ten_producers)
    owner = cluster.node(1).broker
    assert owner is not None
    await cluster.unload(topic, to=2)
    await cluster.until(lambda: cluster.host(topic) is cluster.node(2))
    assert owner.telemetry.wal.sessions_cut["seal"] == 7
    assert "sessions of producers cut in a seal: they begin anew with the next owner" in caplog.messages
    assert len((await cluster.served(topic)).log.sessions) == 10  # those of objects are learned besides


@simulated
async def test_sessions_that_do_not_fit_beside_the_objects_are_counted_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tier, "SESSIONS_BYTES_MAX", 200)
    host = BrokerFixture(tier=TierConfig(upload_seconds=1.0))
    broker = await host.boot()
    topic = await make_topic(broker)
    await ten_producers(topic)
    await asyncio.sleep(5)
    assert broker.telemetry.wal.sessions_cut["objects"] == 7
    await ten_producers(topic)
    await asyncio.sleep(5)
    assert broker.telemetry.wal.sessions_cut["objects"] > 7
    assert caplog.messages.count("sessions of producers cut: a lost owner's are not all known") == 1
    assert broker.telemetry.snapshot().wal.sessions == 10


@simulated
async def test_a_broker_ends_sessions_that_nobody_uses() -> None:
    host = BrokerFixture()
    host.config = replace(host.config, storage=replace(host.config.storage, session_seconds=600))
    with small_wal(watched_seconds=300):
        broker = await host.boot()
    topic = await make_topic(broker)
    session = await topic.open_session(ProducerId(7))
    await topic.submit_batch(batch(7, session, 0))
    await asyncio.sleep(2000)
    assert len(topic.log.sessions) == 0 and broker.telemetry.wal.sessions_ended.value == 1
    with pytest.raises(SessionUnknown):
        await topic.submit_batch(batch(7, session, 0))
    await host.restart()
    assert len((await find_topic(host.broker)).log.sessions) == 0
