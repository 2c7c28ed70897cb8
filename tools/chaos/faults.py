"""What is done to a cluster of processes, one kind per round. Each breaks something, waits, and mends it.

Topics move during it (run.py). The broker it hits is drawn at random, mostly one that has a topic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from random import Random
from typing import Final, NamedTuple

from pydanube.testing.history import Fault
from tools.chaos.cluster import ChaosCluster
from tools.chaos.net import SIDES, Side
from tools.chaos.processes import Broker, EtcdMember
from tools.chaos.recorder import Recorder

SHORT_SECONDS: Final = 1.0


class FaultContext(NamedTuple):
    """Where and when a fault happens."""

    cluster: ChaosCluster
    recorder: Recorder
    rng: Random
    victim: Broker

    @property
    def long(self) -> float:
        """Until the others have noticed, and some more."""
        return self.cluster.ttl + self.rng.uniform(2.0, 5.0)


class Kind(NamedTuple):
    run: Callable[[FaultContext], Awaitable[None]]
    what: str
    private: bool = False  # needs a network and disks of its own
    clean: bool = False  # every broker can store its cursors before it hands a topic over


async def broker_kill(context: FaultContext) -> None:
    context.victim.kill()
    await asyncio.sleep(context.rng.choice((SHORT_SECONDS, context.long)))
    context.victim.start()


async def brokers_kill(context: FaultContext) -> None:
    for broker in context.cluster.brokers:
        broker.kill()
    await asyncio.sleep(context.rng.choice((SHORT_SECONDS, context.long)))
    for broker in context.cluster.brokers:
        broker.start()
        await asyncio.sleep(context.rng.uniform(0.0, SHORT_SECONDS))


async def broker_pause(context: FaultContext) -> None:
    context.victim.pause()
    await asyncio.sleep(context.long)
    context.victim.resume()


async def broker_restart(context: FaultContext) -> None:
    await context.victim.stop()
    await asyncio.sleep(SHORT_SECONDS)
    context.victim.start()


async def rolling_reboot(context: FaultContext) -> None:
    """No operator activates a broker during it: one that is back is drained while others serve, or rejoins."""
    cluster = context.cluster
    for broker in cluster.brokers:
        await broker.stop()
        await asyncio.sleep(context.long)
        broker.start()
        await cluster.until_ready(broker)
        if cluster.rejoin == "active":
            await cluster.until_active([broker])
    await cluster.until_active(cluster.brokers)
    await cluster.until_served(context.recorder, cluster.brokers)


async def last_active(context: FaultContext) -> None:
    """The others are drained, for they were away (or have just rejoined); then the one that serves dies."""
    others = [broker for broker in context.cluster.brokers if broker is not context.victim]
    for broker in others:
        broker.kill()
    await asyncio.sleep(context.long)
    for broker in others:
        broker.start()
        await context.cluster.until_ready(broker)
    context.victim.kill()
    await context.cluster.until_active(others)
    await context.cluster.until_served(context.recorder, others)
    context.victim.start()


async def nothing(context: FaultContext) -> None:
    await asyncio.sleep(2 * SHORT_SECONDS)


def cut(*sides: Side) -> Callable[[FaultContext], Awaitable[None]]:
    async def run(context: FaultContext) -> None:
        for side in sides:
            context.cluster.network.cut(side, context.victim.number)
        await asyncio.sleep(context.long)
        for side in sides:
            context.cluster.network.mend(side, context.victim.number)

    return run


async def _etcd(context: FaultContext, victims: list[EtcdMember], seconds: float) -> None:
    for member in victims:
        member.kill()
    await asyncio.sleep(seconds)
    for member in victims:
        member.start()


async def etcd_member(context: FaultContext) -> None:
    followers = [member for member in context.cluster.etcd if not await member.leads()]
    await _etcd(context, [context.rng.choice(followers)], context.long)


async def etcd_leader(context: FaultContext) -> None:
    leaders = [member for member in context.cluster.etcd if await member.leads()]
    await _etcd(context, leaders[:1] or [context.cluster.etcd[0]], context.long)


async def etcd_majority(context: FaultContext) -> None:
    await _etcd(context, context.rng.sample(context.cluster.etcd, 2), context.rng.choice((SHORT_SECONDS, context.long)))


async def objects_kill(context: FaultContext) -> None:
    context.cluster.objects.kill()
    await asyncio.sleep(context.long)
    context.cluster.objects.start()


async def disk_full(context: FaultContext) -> None:
    context.victim.fill()
    await asyncio.sleep(context.long)
    context.victim.empty()


FAULTS: Final[Mapping[str, Kind]] = {
    "move": Kind(nothing, "topics move, nothing fails", clean=True),
    "broker_restart": Kind(broker_restart, "SIGTERM, and a new start", clean=True),
    "broker_kill": Kind(broker_kill, "kill -9, and a new start before or after the TTL"),
    "brokers_kill": Kind(brokers_kill, "kill -9 of all three"),
    "broker_pause": Kind(broker_pause, "SIGSTOP for longer than the TTL, then SIGCONT"),
    "rolling_reboot": Kind(
        rolling_reboot, "SIGTERM of each in turn, away for longer than the TTL; nobody activates any"
    ),
    "last_active": Kind(last_active, "two were away and are drained, then kill -9 of the last that is active"),
    "cut_all": Kind(cut(*SIDES), "a broker without network", private=True),
    "cut_stores": Kind(cut("back"), "a broker without etcd and object store; clients reach it", private=True),
    "cut_clients": Kind(cut("front"), "a broker without clients and other brokers; it reaches etcd", private=True),
    "etcd_member": Kind(etcd_member, "kill -9 of an etcd member that does not lead"),
    "etcd_leader": Kind(etcd_leader, "kill -9 of the etcd member that leads"),
    "etcd_majority": Kind(etcd_majority, "kill -9 of two etcd members"),
    "objects_kill": Kind(objects_kill, "kill -9 of the object store"),
    "disk_full": Kind(disk_full, "no room on a broker's disk", private=True),
}


async def strike(name: str, context: FaultContext) -> None:
    context.recorder.add(Fault(name, context.victim.number + 1, context.recorder.now()))
    await FAULTS[name].run(context)
