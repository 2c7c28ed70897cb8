"""What is done to a cluster of processes, one kind per round. Each breaks something, waits, and mends it.

Topics move during it (run.py). The broker it hits is drawn at random, mostly one that has a topic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from random import Random
from typing import Final, NamedTuple

from pydanube.testing.history import Fault
from tools.chaos.net import SIDES, Side
from tools.chaos.processes import Broker, EtcdMember
from tools.chaos.recorder import Recorder
from tools.chaos.site import Site

SHORT_SECONDS: Final = 1.0


class Scene(NamedTuple):
    """Where and when a fault happens."""

    site: Site
    recorder: Recorder
    dice: Random
    victim: Broker

    @property
    def long(self) -> float:
        """Until the others have noticed, and some more."""
        return self.site.ttl + self.dice.uniform(2.0, 5.0)


class Kind(NamedTuple):
    run: Callable[[Scene], Awaitable[None]]
    what: str
    private: bool = False  # needs a network and disks of its own
    clean: bool = False  # every broker can store its cursors before it hands a topic over


async def broker_kill(scene: Scene) -> None:
    scene.victim.kill()
    await asyncio.sleep(scene.dice.choice((SHORT_SECONDS, scene.long)))
    scene.victim.start()


async def brokers_kill(scene: Scene) -> None:
    for broker in scene.site.brokers:
        broker.kill()
    await asyncio.sleep(scene.dice.choice((SHORT_SECONDS, scene.long)))
    for broker in scene.site.brokers:
        broker.start()
        await asyncio.sleep(scene.dice.uniform(0.0, SHORT_SECONDS))


async def broker_pause(scene: Scene) -> None:
    scene.victim.pause()
    await asyncio.sleep(scene.long)
    scene.victim.resume()


async def broker_restart(scene: Scene) -> None:
    await scene.victim.stop()
    await asyncio.sleep(SHORT_SECONDS)
    scene.victim.start()


async def rolling_reboot(scene: Scene) -> None:
    """No operator activates a broker during it: one that is back is drained while others serve, or rejoins."""
    site = scene.site
    for broker in site.brokers:
        await broker.stop()
        await asyncio.sleep(scene.long)
        broker.start()
        await site.until_ready(broker)
        if site.rejoin == "active":
            await site.until_active([broker])
    await site.until_active(site.brokers)
    await site.until_served(scene.recorder, site.brokers)


async def last_active(scene: Scene) -> None:
    """The others are drained, for they were away (or have just rejoined); then the one that serves dies."""
    others = [broker for broker in scene.site.brokers if broker is not scene.victim]
    for broker in others:
        broker.kill()
    await asyncio.sleep(scene.long)
    for broker in others:
        broker.start()
        await scene.site.until_ready(broker)
    scene.victim.kill()
    await scene.site.until_active(others)
    await scene.site.until_served(scene.recorder, others)
    scene.victim.start()


async def nothing(scene: Scene) -> None:
    await asyncio.sleep(2 * SHORT_SECONDS)


def cut(*sides: Side) -> Callable[[Scene], Awaitable[None]]:
    async def run(scene: Scene) -> None:
        for side in sides:
            scene.site.network.cut(side, scene.victim.number)
        await asyncio.sleep(scene.long)
        for side in sides:
            scene.site.network.mend(side, scene.victim.number)

    return run


async def _etcd(scene: Scene, victims: list[EtcdMember], seconds: float) -> None:
    for member in victims:
        member.kill()
    await asyncio.sleep(seconds)
    for member in victims:
        member.start()


async def etcd_member(scene: Scene) -> None:
    followers = [member for member in scene.site.etcd if not await member.leads()]
    await _etcd(scene, [scene.dice.choice(followers)], scene.long)


async def etcd_leader(scene: Scene) -> None:
    leaders = [member for member in scene.site.etcd if await member.leads()]
    await _etcd(scene, leaders[:1] or [scene.site.etcd[0]], scene.long)


async def etcd_majority(scene: Scene) -> None:
    await _etcd(scene, scene.dice.sample(scene.site.etcd, 2), scene.dice.choice((SHORT_SECONDS, scene.long)))


async def objects_kill(scene: Scene) -> None:
    scene.site.objects.kill()
    await asyncio.sleep(scene.long)
    scene.site.objects.start()


async def disk_full(scene: Scene) -> None:
    scene.victim.fill()
    await asyncio.sleep(scene.long)
    scene.victim.empty()


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


async def strike(name: str, scene: Scene) -> None:
    scene.recorder.add(Fault(name, scene.victim.number + 1, scene.recorder.now()))
    await FAULTS[name].run(scene)
