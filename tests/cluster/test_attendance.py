"""The leader remembers who was there, and whoever leads next knows it too."""

from __future__ import annotations

import asyncio

from pydanube.core import keys
from pydanube.core.cluster.presence import Presence
from tests.harness.member_cluster import TTL, MemberCluster, MemberNode, simulated


def seen(node: MemberNode) -> dict[int, Presence]:
    return {int(broker): found.value for broker, found in node.cluster.view.seen.items()}


@simulated
async def test_a_broker_that_dies_stays_known_to_all() -> None:
    cluster = MemberCluster()
    a, b, c = await cluster.boot(1, 2, 3)
    await cluster.until(lambda: len(seen(a)) == 3, 10.0)
    assert all(each.gone_ms is None for each in seen(b).values())
    dead = next(node for node in (c, b, a) if node not in cluster.leaders)
    dead.kill()
    left = [node for node in (a, b, c) if node is not dead]
    await cluster.until(lambda: all(seen(node)[dead.broker].gone_ms is not None for node in left), 2 * TTL)
    assert not seen(left[0])[dead.broker].in_order


@simulated
async def test_the_death_of_the_leader_is_written_down_by_the_next_one() -> None:
    cluster = MemberCluster()
    nodes = await cluster.boot(1, 2, 3)
    await cluster.until(lambda: len(seen(nodes[0])) == 3, 10.0)
    [leader] = cluster.leaders
    leader.kill()
    left = [node for node in nodes if node is not leader]
    await cluster.until(lambda: all(seen(node)[leader.broker].gone_ms is not None for node in left), 4 * TTL)


@simulated
async def test_one_that_stops_in_order_is_written_down_as_that_and_nothing_is_written_while_nothing_changes() -> None:
    cluster = MemberCluster()
    nodes = await cluster.boot(1, 2)
    await cluster.until(lambda: len(seen(nodes[0])) == 2, 10.0)
    [leader] = cluster.leaders
    other = next(node for node in nodes if node is not leader)
    before = leader.cluster.view.revision(keys.seen(other.cluster.broker))
    await asyncio.sleep(10 * TTL)
    assert leader.cluster.view.revision(keys.seen(other.cluster.broker)) == before
    await other.stop()
    await cluster.until(lambda: seen(leader)[other.broker].gone_ms is not None, 2 * TTL)
    assert seen(leader)[other.broker].in_order
