"""Brokers that were away come back: by the leader when nobody is active, by themselves with `rejoin: active`."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from pydanube.core import keys
from pydanube.core.cluster.lifecycle import BrokerMode, BrokerState
from pydanube.core.names import BrokerId
from pydanube.errors import MoveRefused
from pydanube.ports import Put
from tests.harness.nodes import TTL, Node, Town, simulate, simulated

ORDERED = {("drained", "no_topics"), ("drained", "drain_complete")}
TOPICS = [f"/default/t{number}" for number in range(6)]


async def reboot(town: Town, node: Node, seconds: float = 2 * TTL) -> Node:
    """SIGTERM, away for longer than the lease, started again."""
    await node.stop()
    await asyncio.sleep(seconds)
    return await town.boot_one(node.broker)


def returns(town: Town, broker: int) -> tuple[BrokerMode, int] | None:
    """What it is, and how often it came back by itself."""
    value = town.store.at(keys.broker_state(BrokerId(broker)))
    state = BrokerState.from_bytes(value) if value else None
    return (state.mode, state.rejoins) if state else None


async def until_back(town: Town, broker: int, times: int) -> None:
    for _ in range(20 * round(TTL)):
        if returns(town, broker) == (BrokerMode.ACTIVE, times):
            return
        await asyncio.sleep(1)
    raise AssertionError(f"it is {returns(town, broker)}")


def served(town: Town) -> bool:
    return all(len(town.hosts(topic)) == 1 for topic in map(str, TOPICS))  # type: ignore[arg-type]


@simulated
async def test_three_reboots_one_after_the_other_end_with_every_topic_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    town = Town()
    nodes = await town.boot(1, 2, 3)
    await town.create(*TOPICS)
    await town.until(lambda: served(town), 60)
    for node in list(nodes):
        await reboot(town, node)
        await asyncio.sleep(10)
    await town.until(lambda: served(town), 60)
    await asyncio.sleep(TTL)
    # The first two were drained while the third served; when it stopped, all that were away came back.
    states = [await town.state(broker) for broker in (1, 2)]
    assert states == [("active", "no_active_broker")] * 2
    assert await town.state(3) in {("drained", "stale_restart"), ("active", "no_active_broker")}
    assert "no active broker was left: the leader activated one that had been away" in caplog.text


@simulated
async def test_two_drained_and_the_last_active_one_killed_leaves_the_two_serving() -> None:
    town = Town()
    one, two, three = await town.boot(1, 2, 3)
    await town.create(*TOPICS)
    await town.until(lambda: served(town), 60)
    for node in (one, two):
        await reboot(town, node)
        await asyncio.sleep(5)
    assert await town.state(1) == await town.state(2) == ("drained", "stale_restart")
    assert all(town.hosts(topic) == [3] for topic in three.owned)
    three.kill()
    took = await town.until(lambda: served(town), 3 * TTL)
    assert took > TTL / 2  # nobody takes them before it was declared dead
    await asyncio.sleep(TTL)
    assert await town.state(1) == await town.state(2) == ("active", "no_active_broker")


@simulated
async def test_the_leader_activates_itself_when_nobody_else_is_left() -> None:
    town = Town()
    one, two = await town.boot(1, 2)
    await town.create(*TOPICS)
    await town.until(lambda: served(town), 60)
    await reboot(town, one)
    await asyncio.sleep(5)
    two.kill()
    await town.until(lambda: served(town), 3 * TTL)
    assert [leader.broker for leader in town.leaders] == [1]
    assert await town.state(1) == ("active", "no_active_broker")


@simulated
async def test_a_broker_that_an_operator_drained_stays_so_though_nobody_is_active_and_over_a_reboot() -> None:
    town = Town()
    one, two = await town.boot(1, 2)
    await town.create(*TOPICS)
    await town.until(lambda: served(town), 60)
    await two.process.call(two.cluster.requests.drain(BrokerId(1)))
    await asyncio.sleep(30)
    one = await reboot(town, one)
    assert (one.entry.mode, one.entry.reason) == (BrokerMode.DRAINED, "drain_complete")
    two.kill()
    await asyncio.sleep(4 * TTL)
    assert await town.state(1) == ("drained", "drain_complete")
    assert not served(town)
    await one.process.call(one.cluster.requests.activate(BrokerId(1)))
    await town.until(lambda: served(town), 60)


@simulated
async def test_an_operator_who_drains_a_broker_that_was_away_keeps_it_out_though_nobody_is_active() -> None:
    town = Town()
    one, two, three = await town.boot(1, 2, 3)
    await town.create(*TOPICS)
    await town.until(lambda: served(town), 60)
    for node in (one, two):
        node = await reboot(town, node)
        await asyncio.sleep(5)
        if node.broker == 1:
            await node.process.call(node.cluster.requests.drain(BrokerId(1)))
            assert await town.state(1) == ("drained", "no_topics")
    three.kill()
    await town.until(lambda: served(town), 3 * TTL)
    await asyncio.sleep(TTL)
    assert await town.state(1) == ("drained", "no_topics")
    with pytest.raises(MoveRefused, match="no other broker is active"):
        await town.nodes[-1].process.call(town.nodes[-1].cluster.requests.drain(BrokerId(2)))


@pytest.mark.parametrize("seed", range(12))
def test_an_operator_and_the_leader_at_the_same_moment_leave_one_of_the_two_states(seed: int) -> None:
    async def history() -> None:
        town = Town(seed=seed)
        one, two, three = await town.boot(1, 2, 3)
        await town.create(*TOPICS)
        await town.until(lambda: served(town), 60)
        one = await reboot(town, one)
        two = await reboot(town, two)
        await asyncio.sleep(5)
        three.kill()
        # Around the moment in which the leader sees that it is gone.
        await town.until(lambda: keys.registration(BrokerId(3)) not in town.store.keys, 2 * TTL)
        await asyncio.sleep(town.dice.uniform(0.0, 0.4))
        refused = False
        try:
            await one.process.call(one.cluster.requests.drain(BrokerId(1)))
        except MoveRefused:  # the leader was first, and the other is not active yet
            refused = True
        await asyncio.sleep(3 * TTL)
        state = await town.state(1)
        assert state == ("active", "no_active_broker") if refused else state in ORDERED
        assert await town.state(2) == ("active", "no_active_broker")
        assert served(town)

    simulate(history(), seed)


@simulated
async def test_a_leader_that_was_not_told_of_an_active_broker_activates_nobody() -> None:
    """Its watch drops everything: what it sees is old, and it looks once more before it writes."""
    town = Town()
    one, two = await town.boot(1, 2)
    await asyncio.sleep(1)
    one = await reboot(town, one)
    await asyncio.sleep(TTL)
    [leader] = town.leaders
    assert leader is two
    for node in town.nodes:
        node.store.drop_every = 1
    # 2 is drained for having been away, too, and active again before the leader hears of the second.
    key = keys.broker_state(BrokerId(2))
    item = await town.store.get(key)
    state = BrokerState.from_bytes(item.value) if item else None
    assert state is not None
    gone = Put(key, state.drained("registration_expired").to_bytes())
    revision = await town.store.transact([], [gone])
    await town.store.transact([], [Put(key, state.to_bytes())])
    assert revision is not None
    two.cluster.view.notice([gone], revision)
    assert two.cluster.view.active() == []
    await asyncio.sleep(5)
    assert await town.state(1) == ("drained", "stale_restart")


@simulated
async def test_a_lease_that_flaps_carries_topics_to_and_fro_seldom() -> None:
    """Alone in the cluster, and cut off for two TTLs again and again, as soon as it is active."""
    town = Town()
    one, two = await town.boot(1, 2)
    await town.create(*TOPICS)
    await town.until(lambda: served(town), 60)
    one = await reboot(town, one)
    two.kill()
    # A second, drained by an operator, lives beside it and leads: it declares the other dead.
    observer = await town.boot_one(9, join=True)
    await asyncio.sleep(3 * TTL)
    begun, back = asyncio.get_running_loop().time(), []
    while asyncio.get_running_loop().time() - begun < 3600:
        times = (returns(town, 1) or (None, 0))[1]
        one.store.cut = True
        await asyncio.sleep(1.5 * TTL)
        one.store.cut = False
        await until_back(town, 1, times + 1)
        back.append(asyncio.get_running_loop().time())
    assert observer.process.alive
    pauses = [round(later - earlier) for earlier, later in itertools.pairwise(back)]
    assert 4 <= len(back) <= 10
    assert pauses == sorted(pauses) and pauses[-1] >= 15 * TTL


# --- rejoin: active -----------------------------------------------------------------------------------------------


@simulated
async def test_with_rejoin_active_a_broker_takes_topics_again_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    town = Town()
    town.rejoins = True
    one, _ = await town.boot(1, 2)
    one = await reboot(town, one)
    assert (one.entry.mode, one.entry.reason) == (BrokerMode.DRAINED, "stale_restart")
    await asyncio.sleep(15)
    assert await town.state(1) == ("active", "rejoined")
    assert "it takes topics by itself" in caplog.text


@simulated
async def test_a_broker_that_is_not_home_stays_drained_and_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    town = Town()
    town.rejoins = True
    one, two = await town.boot(1, 2)
    two.not_home = "a topic is not in the store yet"
    await asyncio.sleep(1)
    two.store.cut = True
    await asyncio.sleep(2 * TTL)
    two.store.cut = False
    await asyncio.sleep(3 * TTL)
    assert await town.state(2) == ("drained", "registration_expired")
    assert caplog.text.count("broker stays drained for now") == 1
    two.not_home = ""
    await asyncio.sleep(15)
    assert await town.state(2) == ("active", "rejoined")
    assert one.process.alive


@simulated
async def test_with_rejoin_active_a_joining_broker_and_one_that_was_drained_wait_for_an_operator() -> None:
    town = Town()
    town.rejoins = True
    one, two = await town.boot(1, 2)
    await town.boot_one(3, join=True)
    await two.process.call(two.cluster.requests.drain(BrokerId(1)))
    await reboot(town, one)
    await asyncio.sleep(10 * TTL)
    assert await town.state(3) == ("drained", "join")
    assert await town.state(1) == ("drained", "no_topics")


@simulated
async def test_a_broker_that_comes_back_by_itself_again_and_again_takes_longer_each_time() -> None:
    town = Town()
    town.rejoins = True
    _, two = await town.boot(1, 2)
    back: list[float] = []
    for times in range(1, 6):
        two.store.cut = True
        await asyncio.sleep(1.5 * TTL)
        two.store.cut = False
        await until_back(town, 2, times)
        back.append(asyncio.get_running_loop().time())
    pauses = [round(later - earlier) for earlier, later in itertools.pairwise(back)]
    assert pauses == sorted(pauses) and pauses[-1] >= 8 * TTL


@simulated
async def test_how_often_a_broker_came_back_is_kept_over_its_restarts() -> None:
    town = Town()
    town.rejoins = True
    one, _ = await town.boot(1, 2)
    for times in (1, 2):
        one = await reboot(town, one)
        await asyncio.sleep(10 * TTL)
        assert returns(town, 1) == (BrokerMode.ACTIVE, times)
