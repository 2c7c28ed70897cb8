"""A whole cluster of processes: three etcd members, an object store, three brokers; and what an operator does to it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from pydanube.admin import calls
from pydanube.client.grpc.connection import GrpcConnection
from pydanube.errors import DanubeError
from tools.chaos.net import Network
from tools.chaos.processes import (
    START_SECONDS,
    Broker,
    ChaosFailed,
    ObjectServer,
    Server,
    etcd_members,
    until,
)
from tools.chaos.recorder import Recorder
from tools.cluster_processes import ProcessesOf

BROKER_COUNT: Final = 3
CALL_SECONDS: Final = 10.0
MOVE_SECONDS: Final = 20
VERIFY_SECONDS: Final = 120.0


class ChaosCluster(ProcessesOf[Broker]):
    def __init__(self, directory: Path, network: Network, ttl: int, rejoin: str) -> None:
        self.directory = directory
        self.network = network
        self.ttl = ttl
        self.rejoin = rejoin
        self.etcd = etcd_members(directory, network)
        self.objects = ObjectServer(directory, network)
        super().__init__(
            Broker(number, directory, network, self.etcd, self.objects, ttl, rejoin) for number in range(BROKER_COUNT)
        )
        self.exits: list[str] = []  # servers that ended by themselves and were started again, and how
        self.moved = self.not_moved = 0

    @property
    def servers(self) -> Sequence[Server]:
        return [*self.brokers, self.objects, *self.etcd]

    async def start(self) -> None:
        """Raises ChaosFailed."""
        self.objects.start()
        for member in self.etcd:
            member.start()
        for member in self.etcd:
            await self._until_up(member, member.healthy)
        await self._until_up(self.objects, self.objects.healthy)
        self.objects.make_bucket()
        for broker in self.brokers:
            broker.start()
        for broker in self.brokers:
            await self._until_up(broker, broker.ready)

    async def _until_up(self, server: Server, healthy: Callable[[], Awaitable[bool]]) -> None:
        async def is_up() -> bool:
            if not server.running:
                raise ChaosFailed(f"{server.name} ended with {server.exit_code}:\n{server.tail()}")
            return await healthy()

        await until(is_up, f"{server.name} answers", START_SECONDS)

    async def until_ready(self, broker: Broker) -> None:
        """Started, and a member of the cluster: active, or drained for having been away. Raises ChaosFailed."""
        await self._until_up(broker, broker.ready)

    async def until_active(self, brokers: Sequence[Broker]) -> None:
        """One of these is given topics, without an order. Raises ChaosFailed."""
        deadline = asyncio.get_running_loop().time() + 3 * self.ttl + START_SECONDS
        ids = {str(broker.broker_id) for broker in brokers}
        listed: list[str] = []
        while asyncio.get_running_loop().time() < deadline:
            with contextlib.suppress(DanubeError, TimeoutError):
                async with asyncio.timeout(CALL_SECONDS), GrpcConnection(brokers[0].admin_url) as asked:
                    found = await asked.ask(calls.list_brokers())
                    listed = [f"{each.broker_id} {each.broker_status}" for each in found.brokers]
                    if any(each.broker_id in ids and each.broker_status == "active" for each in found.brokers):
                        return
            await asyncio.sleep(0.5)
        raise ChaosFailed(f"no broker became active by itself: {', '.join(listed) or 'nobody answers'}")

    async def until_served(self, recorder: Recorder, brokers: Sequence[Broker]) -> None:
        """Every topic is served by one of these, without an order. Raises ChaosFailed."""

        async def is_served() -> bool:
            hosts = [self.host(recorder, topic) for topic in recorder.topics]
            return all(host in brokers for host in hosts) and not any(
                recorder.owners[topic].released for topic in recorder.topics
            )

        await until(is_served, "every topic is served again", 3 * self.ttl + START_SECONDS)

    def kill(self) -> None:
        """Everything, without waiting."""
        for server in self.servers:
            server.kill()
        self.objects.remove_sockets()
        for broker in self.brokers:
            if broker.small_disk:
                self.network.remove_disk(broker.data)

    def numbers(self) -> dict[int, int]:
        """Brokers by their id. Histories count from 1: 0 is no broker."""
        return {broker.broker_id: broker.number + 1 for broker in self.brokers if broker.broker_id}

    def host(self, recorder: Recorder, topic: str) -> Broker | None:
        owner = recorder.owners.get(topic)
        return self.by_id(owner.broker_id) if owner is not None and owner.broker_id else None

    # --- the operator -------------------------------------------------------------------------------------------

    async def move(self, topic: str, asked: Broker) -> bool:
        """Another broker shall serve the topic. It may not be possible just now."""
        call = calls.move_topic(topic, wait=True, timeout_seconds=MOVE_SECONDS)
        moved = False
        with contextlib.suppress(DanubeError, TimeoutError):
            async with asyncio.timeout(MOVE_SECONDS + CALL_SECONDS), GrpcConnection(asked.admin_url) as broker:
                async for answer in broker.follow(call):
                    moved = answer.HasField("result") and not answer.result.failure
        self.moved += moved
        self.not_moved += not moved
        return moved

    async def tend(self) -> str:
        """What an operator does: starts what has ended, lets brokers that were lost serve again.

        Empty when nothing is left to do; else what is not well yet.
        """
        for server in self.servers:
            if not server.running:
                self.exits.append(f"{server.name} ({server.exit_code})")
                server.start()
                return f"{server.name} had ended"
        for member in self.etcd:
            if not await member.healthy():
                return f"{member.name} is not healthy"
        if not await self.objects.healthy():
            return "the object store does not answer"
        for broker in self.brokers:
            if not await broker.alive():
                return f"{broker.name} does not answer"
        try:
            if unwell := await self._activate():
                return unwell
        except DanubeError as error:
            return str(error)
        for broker in self.brokers:
            if not await broker.ready():
                return f"{broker.name} is not ready"
        return ""

    async def _activate(self) -> str:
        async with GrpcConnection(self.brokers[0].admin_url) as broker:
            listed = await broker.ask(calls.list_brokers())
            for each in listed.brokers:
                if each.broker_status != "active":
                    await broker.ask(calls.activate_broker(each.broker_id, "the fault is over"))
                    return f"broker {each.broker_id} was {each.broker_status}"
        here = len(listed.brokers)
        return "" if here == len(self.brokers) else f"{here} of {len(self.brokers)} brokers are registered"

    async def problems(self, topic: str, asked: Broker) -> list[str]:
        """What is wrong with the objects that hold the topic's history, every byte of them read. Raises DanubeError."""
        call = calls.verify_storage(topic, repair=False)
        found: list[str] = []
        async with asyncio.timeout(VERIFY_SECONDS), GrpcConnection(asked.admin_url) as broker:
            async for answer in broker.follow(call):
                found += [each.text for each in answer.report.findings if each.is_problem]
        return found

    def keep_data(self) -> None:
        """Copies small disks, which are gone with the harness, for a person to look at."""
        for broker in self.brokers:
            if broker.small_disk:
                kept = self.directory / f"{broker.name}.kept"
                shutil.copytree(
                    broker.data, kept, ignore=shutil.ignore_patterns("filler", "BALLAST"), dirs_exist_ok=True
                )
