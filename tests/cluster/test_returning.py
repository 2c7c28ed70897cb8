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
from tests.harness.member_cluster import TTL, MemberCluster, MemberNode, simulate, simulated

ORDERED = {("drained", "no_topics"), ("drained", "drain_complete")}
TOPICS = [f"/default/t{number}" for number in range(6)]


async def reboot(cluster: MemberCluster, node: MemberNode, seconds: float = 2 * TTL) -> MemberNode:
    """SIGTERM, away for longer than the lease, started again."""
    await node.stop()
    await asyncio.sleep(seconds)
    return await cluster.boot_one(node.broker)


def returns(cluster: MemberCluster, broker: int) -> tuple[BrokerMode, int] | None:
    """What it is, and how often it came back by itself."""
    value = cluster.metadata.at(keys.broker_state(BrokerId(broker)))
    state = BrokerState.from_bytes(value) if value else None
    return (state.mode, state.rejoins) if state else None


async def until_back(cluster: MemberCluster, broker: int, times: int) -> None:
    for _ in range(20 * round(TTL)):
        if returns(cluster, broker) == (BrokerMode.ACTIVE, times):
            return
        await asyncio.sleep(1)
    raise AssertionError(f"it is {returns(cluster, broker)}")


def served(cluster: MemberCluster) -> bool:
    return all(len(cluster.hosts(topic)) == 1 for topic in map(str, TOPICS))  # type: ignore[arg-type]


@simulated
async def test_three_reboots_one_after_the_other_end_with_every_topic_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = MemberCluster()
    nodes = await cluster.boot(1, 2, 3)
    await cluster.create(*TOPICS)
    await cluster.until(lambda: served(cluster), 60)
    for node in list(nodes):
        await reboot(cluster, node)
        await asyncio.sleep(10)
    await cluster.until(lambda: served(cluster), 60)
    await asyncio.sleep(TTL)
    # The first two were drained while the third served; when it stopped, all that were away came back.
    states = [await cluster.state(broker) for broker in (1, 2)]
    assert states == [("active", "no_active_broker")] * 2
    assert await cluster.state(3) in {("drained", "stale_restart"), ("active", "no_active_broker")}
    assert "no active broker was left: the leader activated one that had been away" in caplog.text


@simulated
async def test_two_drained_and_the_last_active_one_killed_leaves_the_two_serving() -> None:
    cluster = MemberCluster()
    one, two, three = await cluster.boot(1, 2, 3)
    await cluster.create(*TOPICS)
    await cluster.until(lambda: served(cluster), 60)
    for node in (one, two):
        await reboot(cluster, node)
        await asyncio.sleep(5)
    assert await cluster.state(1) == await cluster.state(2) == ("drained", "stale_restart")
    assert all(cluster.hosts(topic) == [3] for topic in three.owned)
    three.kill()
    took = await cluster.until(lambda: served(cluster), 3 * TTL)
    assert took > TTL / 2  # nobody takes them before it was declared dead
    await asyncio.sleep(TTL)
    assert await cluster.state(1) == await cluster.state(2) == ("active", "no_active_broker")


@simulated
async def test_the_leader_activates_itself_when_nobody_else_is_left() -> None:
    cluster = MemberCluster()
    one, two = await cluster.boot(1, 2)
    await cluster.create(*TOPICS)
    await cluster.until(lambda: served(cluster), 60)
    await reboot(cluster, one)
    await asyncio.sleep(5)
    two.kill()
    await cluster.until(lambda: served(cluster), 3 * TTL)
    assert [leader.broker for leader in cluster.leaders] == [1]
    assert await cluster.state(1) == ("active", "no_active_broker")


@simulated
async def test_a_broker_that_an_operator_drained_stays_so_though_nobody_is_active_and_over_a_reboot() -> None:
    cluster = MemberCluster()
    one, two = await cluster.boot(1, 2)
    await cluster.create(*TOPICS)
    await cluster.until(lambda: served(cluster), 60)
    await two.process.call(two.cluster.requests.drain(BrokerId(1)))
    await asyncio.sleep(30)
    one = await reboot(cluster, one)
    assert (one.entry.mode, one.entry.reason) == (BrokerMode.DRAINED, "drain_complete")
    two.kill()
    await asyncio.sleep(4 * TTL)
    assert await cluster.state(1) == ("drained", "drain_complete")
    assert not served(cluster)
    await one.process.call(one.cluster.requests.activate(BrokerId(1)))
    await cluster.until(lambda: served(cluster), 60)


@simulated
async def test_an_operator_who_drains_a_broker_that_was_away_keeps_it_out_though_nobody_is_active() -> None:
    cluster = MemberCluster()
    one, two, three = await cluster.boot(1, 2, 3)
    await cluster.create(*TOPICS)
    await cluster.until(lambda: served(cluster), 60)
    for node in (one, two):
        node = await reboot(cluster, node)
        await asyncio.sleep(5)
        if node.broker == 1:
            await node.process.call(node.cluster.requests.drain(BrokerId(1)))
            assert await cluster.state(1) == ("drained", "no_topics")
    three.kill()
    await cluster.until(lambda: served(cluster), 3 * TTL)
    await asyncio.sleep(TTL)
    assert await cluster.state(1) == ("drained", "no_topics")
    with pytest.raises(MoveRefused, match="no other broker is active"):
        await cluster.nodes[-1].process.call(cluster.nodes[-1].cluster.requests.drain(BrokerId(2)))


@pytest.mark.parametrize("seed", range(12))
def test_an_operator_and_the_leader_at_the_same_moment_leave_one_of_the_two_states(seed: int) -> None:
    async def history() -> None:
        cluster = MemberCluster(seed=seed)
        one, two, three = await cluster.boot(1, 2, 3)
        await cluster.create(*TOPICS)
        await cluster.until(lambda: served(cluster), 60)
        one = await reboot(cluster, one)
        two = await reboot(cluster, two)
        await asyncio.sleep(5)
        three.kill()
        # Around the moment in which the leader sees that it is gone.
        await cluster.until(lambda: keys.registration(BrokerId(3)) not in cluster.metadata.keys, 2 * TTL)
        await asyncio.sleep(cluster.rng.uniform(0.0, 0.4))
        refused = False
        try:
            await one.process.call(one.cluster.requests.drain(BrokerId(1)))
        except MoveRefused:  # the leader was first, and the other is not active yet
            refused = True
        await asyncio.sleep(3 * TTL)
        state = await cluster.state(1)
        assert state == ("active", "no_active_broker") if refused else state in ORDERED
        assert await cluster.state(2) == ("active", "no_active_broker")
        assert served(cluster)

    simulate(history(), seed)


@simulated
async def test_a_leader_that_was_not_told_of_an_active_broker_activates_nobody() -> None:
    """Its watch drops everything: what it sees is old, and it looks once more before it writes."""
    cluster = MemberCluster()
    one, two = await cluster.boot(1, 2)
    await asyncio.sleep(1)
    one = await reboot(cluster, one)
    await asyncio.sleep(TTL)
    [leader] = cluster.leaders
    assert leader is two
    for node in cluster.nodes:
        node.metadata.drop_every = 1
    # 2 is drained for having been away, too, and active again before the leader hears of the second.
    key = keys.broker_state(BrokerId(2))
    item = await cluster.metadata.get(key)
    state = BrokerState.from_bytes(item.value) if item else None
    assert state is not None
    gone = Put(key, state.drained("registration_expired").to_bytes())
    revision = await cluster.metadata.transact([], [gone])
    await cluster.metadata.transact([], [Put(key, state.to_bytes())])
    assert revision is not None
    two.cluster.view.notice([gone], revision)
    assert two.cluster.view.active() == []
    await asyncio.sleep(5)
    assert await cluster.state(1) == ("drained", "stale_restart")


@simulated
async def test_a_lease_that_flaps_carries_topics_to_and_fro_seldom() -> None:
    """Alone in the cluster, and cut off for two TTLs again and again, as soon as it is active."""
    cluster = MemberCluster()
    one, two = await cluster.boot(1, 2)
    await cluster.create(*TOPICS)
    await cluster.until(lambda: served(cluster), 60)
    one = await reboot(cluster, one)
    two.kill()
    # A second, drained by an operator, lives beside it and leads: it declares the other dead.
    observer = await cluster.boot_one(9, join=True)
    await asyncio.sleep(3 * TTL)
    begun, back = asyncio.get_running_loop().time(), []
    while asyncio.get_running_loop().time() - begun < 3600:
        times = (returns(cluster, 1) or (None, 0))[1]
        one.metadata.cut = True
        await asyncio.sleep(1.5 * TTL)
        one.metadata.cut = False
        await until_back(cluster, 1, times + 1)
        back.append(asyncio.get_running_loop().time())
    assert observer.process.alive
    pauses = [round(later - earlier) for earlier, later in itertools.pairwise(back)]
    assert 4 <= len(back) <= 10
    assert pauses == sorted(pauses) and pauses[-1] >= 15 * TTL


# --- rejoin: active -----------------------------------------------------------------------------------------------


@simulated
async def test_with_rejoin_active_a_broker_takes_topics_again_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    cluster = MemberCluster()
    cluster.rejoins = True
    one, _ = await cluster.boot(1, 2)
    one = await reboot(cluster, one)
    assert (one.entry.mode, one.entry.reason) == (BrokerMode.DRAINED, "stale_restart")
    await asyncio.sleep(15)
    assert await cluster.state(1) == ("active", "rejoined")
    assert "it takes topics by itself" in caplog.text


@simulated
async def test_a_broker_that_is_not_home_stays_drained_and_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    cluster = MemberCluster()
    cluster.rejoins = True
    one, two = await cluster.boot(1, 2)
    two.not_home = "a topic is not in the store yet"
    await asyncio.sleep(1)
    two.metadata.cut = True
    await asyncio.sleep(2 * TTL)
    two.metadata.cut = False
    await asyncio.sleep(3 * TTL)
    assert await cluster.state(2) == ("drained", "registration_expired")
    assert caplog.text.count("broker stays drained for now") == 1
    two.not_home = ""
    await asyncio.sleep(15)
    assert await cluster.state(2) == ("active", "rejoined")
    assert one.process.alive


@simulated
async def test_with_rejoin_active_a_joining_broker_and_one_that_was_drained_wait_for_an_operator() -> None:
    cluster = MemberCluster()
    cluster.rejoins = True
    one, two = await cluster.boot(1, 2)
    await cluster.boot_one(3, join=True)
    await two.process.call(two.cluster.requests.drain(BrokerId(1)))
    await reboot(cluster, one)
    await asyncio.sleep(10 * TTL)
    assert await cluster.state(3) == ("drained", "join")
    assert await cluster.state(1) == ("drained", "no_topics")


@simulated
async def test_a_broker_that_comes_back_by_itself_again_and_again_takes_longer_each_time() -> None:
    cluster = MemberCluster()
    cluster.rejoins = True
    _, two = await cluster.boot(1, 2)
    back: list[float] = []
    for times in range(1, 6):
        two.metadata.cut = True
        await asyncio.sleep(1.5 * TTL)
        two.metadata.cut = False
        await until_back(cluster, 2, times)
        back.append(asyncio.get_running_loop().time())
    pauses = [round(later - earlier) for earlier, later in itertools.pairwise(back)]
    assert pauses == sorted(pauses) and pauses[-1] >= 8 * TTL


@simulated
async def test_how_often_a_broker_came_back_is_kept_over_its_restarts() -> None:
    cluster = MemberCluster()
    cluster.rejoins = True
    one, _ = await cluster.boot(1, 2)
    for times in (1, 2):
        one = await reboot(cluster, one)
        await asyncio.sleep(10 * TTL)
        assert returns(cluster, 1) == (BrokerMode.ACTIVE, times)
