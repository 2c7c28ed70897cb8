"""A broker with an object store in this process, and what tests of Spark do to it."""

from __future__ import annotations

import asyncio
import json
import sys
import sysconfig
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

import pydanube
from pydanube.client.client import Client
from pydanube.client.thread import LoopThread
from pydanube.config import StorageConfig
from pydanube.core import keys
from pydanube.core.history.tiers import Descriptor, TierConfig
from pydanube.history.change import HistoryChange
from pydanube.ports import Delete, Put
from pydanube.testing.brokers import TestBroker
from pydanube.testing.ports import free_ports

NEVER = 1e9


class Place:
    """A broker and its objects. `upload` is the only thing that uploads."""

    def __init__(
        self, directory: Path, thread: LoopThread, url: str | None = None, options: dict[str, object] | None = None
    ) -> None:
        """An empty `url` is that of a broker whose settings name no store: it keeps objects beside its log."""
        self.directory = directory
        self.storage_url = f"file://{directory}/objects" if url is None else url
        self.storage_options = options or {}
        self._thread = thread
        self._broker: TestBroker | None = None
        self._made = 0
        self._orphans: dict[str, Descriptor] = {}

    # --- the broker ---------------------------------------------------------------------------------

    def start(self) -> None:
        tier = TierConfig(upload_seconds=NEVER, sweep_seconds=NEVER, retention_check_seconds=NEVER)
        storage = StorageConfig(url=self.storage_url or None, options=self.storage_options, tier=tier)
        self._broker = self.run(TestBroker(self.directory / "data", storage=storage).start())

    def stop(self) -> None:
        if self._broker is not None:
            broker, self._broker = self._broker, None
            self.run(broker.stop())

    @property
    def admin_url(self) -> str:
        assert self._broker is not None
        return self._broker.admin_url

    @property
    def url(self) -> str:
        assert self._broker is not None
        return self._broker.url

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._thread.call(coroutine)

    def asking(self, question: Any) -> Any:
        """What `question(client)` answers."""

        async def ask() -> Any:
            async with pydanube.connect(self.url) as client:
                return await question(client)

        return self.run(ask())

    # --- topics -------------------------------------------------------------------------------------

    def new_topic(self, name: str = "topic", partitions: int = 0) -> str:
        self._made += 1
        topic = f"/default/{name}-{self._made}"
        self.asking(lambda client: client.create_topic(topic, partitions=partitions))
        return topic

    def send(self, topic: str, payloads: Sequence[bytes], *, keys: Sequence[str | None] = ()) -> None:
        async def send(client: Client) -> None:
            async with client.producer(topic, batch_messages=100) as producer:
                for number, payload in enumerate(payloads):
                    await producer.room()
                    key = keys[number % len(keys)] if keys else None
                    producer.send_nowait(payload, key=key, attributes={"n": str(number)})

        self.asking(send)

    def table(self, topic: str) -> pa.Table:
        """What the broker says is in it."""
        return self.asking(lambda client: client.fetch(topic).table())

    def payloads(self, topic: str) -> list[bytes]:
        found: list[bytes] = self.table(topic).column("payload").to_pylist()
        return found

    def upload(self, topic: str, *, merge: bool = False) -> None:
        """Everything that is committed becomes objects, with descriptors and a snapshot."""
        self.run(self._upload(topic, merge))

    async def _upload(self, topic: str, merge: bool) -> None:
        assert self._broker is not None and self._broker._broker is not None
        cloud = self._broker._broker.cloud
        assert cloud is not None
        for carried in cloud.uploader.topics:
            if carried.tier.topic == topic or carried.tier.topic.startswith(f"{topic}-part-"):
                async with carried.working:
                    await cloud.uploader.upload_all(carried)
                    if merge:
                        while await carried.maintenance.merge() is not None:
                            pass
                    await carried.tier.publish_snapshot()

    def forget_below(self, topic: str, first: int) -> None:
        """As retention does."""
        self.run(self.carried(topic).maintenance.move_first_offset(first))

    def carried(self, topic: str) -> Any:
        """The owner's own object, for tests that make it do what only time does."""
        assert self._broker is not None and self._broker._broker is not None
        cloud = self._broker._broker.cloud
        assert cloud is not None
        [carried] = [each for each in cloud.uploader.topics if each.tier.topic == topic]
        return carried

    def orphan(self, topic: str, start: int) -> None:
        """As if the object that begins at `start` were still on the disk of a broker that is away."""
        self.run(self._orphan(topic, start, rescued=False))

    def rescue(self, topic: str, start: int) -> None:
        self.run(self._orphan(topic, start, rescued=True))

    async def _orphan(self, topic: str, start: int, *, rescued: bool) -> None:
        tier = self.carried(topic).tier
        await tier.refresh_if_stale()
        if rescued:
            described = self._orphans.pop(topic)
            await tier.apply(HistoryChange(added=[described], others=[Delete(keys.orphan(tier.topic, start))]))
        else:
            described = self._orphans[topic] = tier.objects.find(start)
            value = json.dumps({"end": described.end, "broker": 7, "epoch": 1}).encode()
            await tier.apply(HistoryChange(replaced=[described], others=[Put(keys.orphan(tier.topic, start), value)]))
        await tier.load()
        await tier.publish_snapshot()

    def objects(self, topic: str) -> list[Path]:
        return sorted((self.directory / "objects").joinpath(topic[1:]).glob("data-*"))

    def is_described(self, topic: str, name: str) -> bool:
        info = self.asking(lambda client: client.describe_storage(topic))
        return any(each.object_id == name for each in info.objects)

    # --- options ------------------------------------------------------------------------------------

    def options(self, topic: str, **more: str) -> dict[str, str]:
        return {"service.url": self.url, "topic": topic, **more}


@contextmanager
def place_in(directory: Path, url: str | None = None, options: dict[str, object] | None = None) -> Iterator[Place]:
    thread = LoopThread("tests' broker")
    place = Place(directory, thread, url, options)
    try:
        place.start()
        yield place
    finally:
        place.stop()
        thread.stop()


def free_port() -> int:
    [port] = free_ports(1)
    return port


def without_us(directory: Path) -> Path:
    """A Python for executors that has what our package is built on, but not the package: Spark must bring it."""
    made = directory / "python"
    if not made.exists():
        # -S: what makes our checkout known is a file that Python reads with its module `site`.
        packages = sysconfig.get_paths()["purelib"]
        script = f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{packages}" exec {sys.executable} -S "$@"\n'
        made.write_text(script)
        made.chmod(0o755)
    return made


def numbers(first: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, end)]


async def ticks(count: int) -> AsyncIterator[int]:
    for number in range(count):
        await asyncio.sleep(0)
        yield number
