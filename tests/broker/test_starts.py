"""A broker that is alone tells starts after an orderly stop from those after a crash."""

from __future__ import annotations

from pydanube.broker.service import Broker
from tests.harness.brokers import BrokerFixture
from tests.harness.member_cluster import simulated


def unexpected(broker: Broker) -> int:
    assert broker.starts is not None
    assert len(broker.starts.unexpected_ms) == broker.starts.crashes()
    line = f'danube_broker_unexpected_starts{{broker="{broker.broker_id}"}} {float(broker.starts.crashes())}'
    assert line in broker.telemetry.snapshot().text().decode()
    return broker.starts.crashes()


@simulated
async def test_only_starts_without_an_orderly_stop_before_are_unexpected() -> None:
    host = BrokerFixture()
    assert unexpected(await host.boot()) == 0
    for is_orderly, count in ((True, 0), (False, 1), (False, 2), (True, 2)):
        if not is_orderly:
            host.kill()
        broker = await (host.restart() if is_orderly else host.boot())
        assert unexpected(broker) == count
        await host.clock.sleep(1.0)  # it is told behind the start
    told = [each.sentence.partition(" ")[2].partition(" ")[2] for each in await broker.events.newest(10)]
    crash, orderly = "began anew, without an orderly stop before", "was restarted, in order"
    assert told == [orderly, crash, crash, orderly]
    await broker.stop()


@simulated
async def test_starts_are_forgotten_after_a_day_and_their_number_is_not() -> None:
    host = BrokerFixture()
    await host.boot()
    host.kill()
    await host.boot()
    host.kill()
    await host.clock.sleep(25 * 3600.0)
    broker = await host.boot()
    assert broker.starts is not None
    assert (broker.starts.crashes(), len(broker.starts.unexpected_ms)) == (2, 1)
    await broker.stop()
