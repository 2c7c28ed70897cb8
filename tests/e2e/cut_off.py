"""Three brokers, each with its etcd member inside and a network of its own; one is cut off for longer than its lease.

    python -m tests.e2e.cut_off DIRECTORY drained|active

Prints one JSON object: what was seen. A program of its own, because it leaves the machine's network.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pydanube
from pydanube.admin import calls
from pydanube.client.grpc.connection import GrpcConnection
from pydanube.errors import DanubeError
from tools.chaos.net import SIDES, Network
from tools.chaos.processes import Server, answers, until

TTL: Final = 6
SECONDS: Final = 120.0  # on a machine that has much else to do
TOPIC: Final = "/default/orders"
RAFT, CLIENT, STREAM, ADMIN, METRICS = 7650, 6650, 6651, 50051, 9040


class Member(Server):
    """A broker whose etcd member runs beside it, in the same network."""

    def __init__(self, number: int, directory: Path, network: Network, rejoin: str) -> None:
        super().__init__(f"broker{number}", directory, network, number)
        self.number = number
        self.host = network.address("front", number)
        self.stream_url = f"danube://{self.host}:{STREAM}"
        self.admin_url = f"http://{self.host}:{ADMIN}"
        seeds = ",".join(f"{network.address('front', each)}:{RAFT}" for each in range(3))
        settings = directory / f"{self.name}.yml"
        settings.write_text(json.dumps({"cluster": {"rejoin": rejoin}}))
        self._command = [
            *(sys.executable, "-m", "pydanube", "broker", "--mode", "cluster", "--config-file", str(settings)),
            *("--data-dir", str(directory / f"{self.name}.data"), "--storage-url", (directory / "store").as_uri()),
            *("--seed-nodes", seeds, "--raft-addr", f"{self.host}:{RAFT}"),
            *("--broker-addr", f"{self.host}:{CLIENT}", "--stream-addr", f"{self.host}:{STREAM}"),
            *("--admin-addr", f"{self.host}:{ADMIN}", "--prom-exporter", f"{self.host}:{METRICS}"),
            *("--web-addr", "off", "--registration-ttl", str(TTL), "--upload-interval", "600"),
        ]

    def command(self) -> Sequence[str]:
        return self._command

    async def ready(self) -> bool:
        return self.running and await answers(f"http://{self.host}:{METRICS}/health/ready")


async def states(asked: Member) -> dict[str, str]:
    """Of every registered broker, by its admin address; empty if it does not answer."""
    try:
        async with asyncio.timeout(10), GrpcConnection(asked.admin_url) as broker:
            listed = await broker.ask(calls.list_brokers())
            return {each.admin_addr: each.broker_status for each in listed.brokers}
    except (DanubeError, TimeoutError):
        return {}


async def send(members: Sequence[Member], *texts: str) -> None:
    url = ",".join(each.stream_url for each in members)
    async with pydanube.connect(url, timeout=SECONDS) as client, client.producer(TOPIC, reliable=True) as producer:
        for text in texts:
            await producer.send(text.encode())


async def received(members: Sequence[Member], count: int) -> list[str]:
    url = ",".join(each.stream_url for each in members)
    found: list[str] = []
    async with (
        asyncio.timeout(SECONDS),
        pydanube.connect(url, timeout=SECONDS) as client,
        client.consumer(TOPIC, subscription="all", start="earliest") as consumer,
    ):
        async for message in consumer:
            found.append(message.payload.decode())
            await message.ack()
            if len(set(found)) >= count:
                return sorted(found)
    raise AssertionError("a consumer does not end")


async def story(directory: Path, network: Network, rejoin: str) -> dict[str, Any]:
    members = [Member(number, directory, network, rejoin) for number in range(3)]
    try:
        for each in members:
            each.start()
        for each in members:
            await until(each.ready, f"{each.name} is ready", SECONDS)
        await send(members, "a", "b", "c")

        async def owner() -> Member | None:
            for each in members:
                metrics = f"http://{each.host}:{METRICS}/metrics"
                if await answers(metrics, b"danube_broker_topics_owned{") and await answers(
                    metrics, b'topic="' + TOPIC.encode() + b'"'
                ):
                    return each
            return None

        victim = await owner()
        assert victim is not None, "nobody has the topic"
        others = [each for each in members if each is not victim]
        for side in SIDES:
            network.cut(side, victim.number)
        try:
            await send(others, "d")  # as soon as somebody else has the topic

            async def is_gone() -> bool:
                return victim.admin_url not in (await states(others[0]) or {victim.admin_url: ""})

            await until(is_gone, "the others see that it is gone", SECONDS)
            await asyncio.sleep(TTL)
            lived = victim.running
        finally:
            for side in SIDES:
                network.mend(side, victim.number)
        wanted = "active" if rejoin == "active" else "drained"

        async def is_back() -> bool:
            return (await states(others[0])).get(victim.admin_url) == wanted

        await until(is_back, f"it is {wanted}", SECONDS)
        return {
            "lived": lived,
            "state": wanted,
            "ready": await victim.ready(),
            "received": await received(others, 4),
            "log": victim.log.read_text(errors="replace"),
        }
    finally:
        await asyncio.gather(*(each.stop() for each in members if each.running))


def main() -> None:
    directory, rejoin = Path(sys.argv[1]), sys.argv[2]
    network = Network(3)
    if not network.private:
        print(json.dumps({"skipped": network.why_not}))
        return
    print(json.dumps(asyncio.run(story(directory, network, rejoin))))


if __name__ == "__main__":
    main()
