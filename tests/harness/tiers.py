"""A broker with a cloud tier that can be stopped at any call to a store, a store that misbehaves, and what must hold.

host = TierFixture(SMALL)
broker, orders = await one_topic(host)
host.trap.set(17, after=True)      # the 17th call to a store from now on is the last thing this process does
...
await check_stored(host)           # descriptors, objects and names are as they must be
assert await read_everything(host) == told
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from random import Random
from typing import Any, Final, TypeVar

import pytest

from pydanube.broker.service import Broker
from pydanube.broker.topic import Topic
from pydanube.core.history.tiers import PARQUET, Descriptor, Objects, Retention, TierConfig, manifest_from_bytes
from pydanube.core.policies import SubscriptionKind as Kind
from pydanube.errors import Unreachable
from pydanube.formats.parquet_read import check_bytes, open_object
from pydanube.history import object_maker
from pydanube.history.tier_state import TierState, read_state
from pydanube.history.upload_state import UploadState
from pydanube.ports import Buffer, ObjectInfo, StoreOpener
from pydanube.stores.disk.memory import MemoryDisk
from pydanube.stores.objects.memory import MemoryObjectStore
from pydanube.testing.loop import SimWork
from tests.harness.brokers import ORDERS, BrokerFixture, Metadata, Mortal, Stream, consume, find_topic, message

T = TypeVar("T")

KIB: Final = 1024

# Everything that happens in a week happens in a minute: an upload a second, two make one, two keys are too many.
SMALL: Final = TierConfig(
    upload_seconds=1.0,
    object_bytes=256 * KIB,
    merged_bytes=64 * KIB,
    merge_count_min=2,
    descriptors_max=1,
    descriptors_moved=1,
    garbage_seconds=4.0,
    local=Retention(seconds=0.0),
    retention_check_seconds=2.0,
    sweep_seconds=6.0,
)
# Nothing happens by itself, except uploads.
STILL: Final = replace(SMALL, merged_bytes=KIB, descriptors_max=10**6, sweep_seconds=1e9, retention_check_seconds=1e9)


# --- stores -------------------------------------------------------------------------------------------


class ObjectStoreFixture(MemoryObjectStore):
    """Remembers all that was ever put under a name, and misbehaves when it is told to."""

    opens_in_workers = False

    def __init__(self) -> None:
        super().__init__()
        self.contents: defaultdict[str, set[bytes]] = defaultdict(set)
        self.deleted: list[str] = []
        self.calls = 0
        self.away = False
        self.put_fails = 0  # so many puts are stored, and reported as failed
        self.put_late = 0  # so many are reported as failed, and stored when `land` is called
        self.put_lost = 0  # so many are acknowledged and not stored
        self.put_flipped = 0  # so many are stored with one bit changed
        self._flying: list[tuple[str, bytes]] = []

    async def put(self, key: str, data: Sequence[Buffer], *, create: bool = False) -> ObjectInfo:
        self._answer()
        stored = b"".join(data)
        if self.put_late:
            self.put_late -= 1
            self._flying.append((key, stored))
            raise Unreachable("object store", "it does not answer")
        if self.put_lost:
            self.put_lost -= 1
            return ObjectInfo(key, len(stored), "etag")
        if self.put_flipped:
            self.put_flipped -= 1
            stored = flipped(stored, len(stored) // 3)
        info = await super().put(key, [stored], create=create)
        self.contents[key].add(stored)
        if self.put_fails:
            self.put_fails -= 1
            raise Unreachable("object store", "the answer was lost")
        return info

    async def land(self) -> None:
        """What was under way arrives."""
        for key, stored in self._flying:
            await super().put(key, [stored], create=True)
            self.contents[key].add(stored)
        self._flying.clear()

    async def get(self, key: str) -> bytes:
        self._answer()
        return await super().get(key)

    async def get_range(self, key: str, position: int, length: int) -> bytes:
        self._answer()
        return await super().get_range(key, position, length)

    async def head(self, key: str) -> ObjectInfo:
        self._answer()
        return await super().head(key)

    async def delete(self, key: str) -> None:
        self._answer()
        self.deleted.append(key)
        await super().delete(key)

    def _answer(self) -> None:
        self.calls += 1
        if self.away:
            raise Unreachable("object store", "it is away")

    async def names(self, topic: str = ORDERS) -> list[str]:
        """Data and manifests, without the snapshots for readers."""
        prefix = topic[1:] + "/"
        found = [info.key.removeprefix(prefix) async for info in self.list(prefix)]
        return [name for name in found if not name.startswith("_")]


def flipped(data: bytes, place: int, bit: int = 0) -> bytes:
    changed = bytearray(data)
    changed[place] ^= 1 << bit
    return bytes(changed)


def store_in_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every object is large, and is made and stored by another process: one that dies with ours, and has our traps."""
    monkeypatch.setattr(object_maker, "WORKER_BYTES_MIN", 0)
    monkeypatch.setattr(ObjectStoreFixture, "opens_in_workers", True)


class Trap:
    """Stops a process at one of its calls to a store: before it takes effect, or when the answer is under way."""

    def __init__(self) -> None:
        self.count = 0
        self.calls: list[str] = []
        self.sprung = asyncio.Event()
        self.gate = asyncio.Event()
        self._at = 0
        self._after = False
        self._then: Callable[[], None] = lambda: None

    def set(self, at: int, *, after: bool, then: Callable[[], None] = lambda: None) -> None:
        """`then` is called when it springs; the call goes on when `gate` is set."""
        self.count = 0
        self.calls.clear()
        self._at, self._after, self._then = at, after, then

    async def through(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        self.count += 1
        self.calls.append(name)
        here = self.count == self._at
        if here and not self._after:
            await self._spring()
        answer = await call()
        if here and self._after:
            await self._spring()
        return answer

    async def _spring(self) -> None:
        self._then()
        self.sprung.set()
        await self.gate.wait()


class Trapped(Mortal):
    def __init__(self, under: Any, trap: Trap) -> None:
        super().__init__(under)
        self._trap = trap

    def list(self, prefix: str, **named: Any) -> Any:
        if isinstance(self._under, Metadata):
            return self._through("list", lambda: self._under.list(prefix, **named))
        return _TrappedListing(self, self._under.list(prefix, **named))

    async def opener(self) -> StoreOpener | None:
        return (lambda: nullcontext(self)) if self._under.opens_in_workers else None  # type: ignore[return-value]

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._under, name)

        async def call(*arguments: Any, **named: Any) -> Any:
            return await self._through(name, lambda: method(*arguments, **named))

        return call

    async def _through(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        if self.dead:
            await asyncio.get_running_loop().create_future()
        return await self._trap.through(name, call)


class _TrappedListing:
    def __init__(self, port: Trapped, listing: Any) -> None:
        self._port = port
        self._listing = listing
        self._begun = False

    def __aiter__(self) -> _TrappedListing:
        return self

    async def __anext__(self) -> ObjectInfo:
        if not self._begun:
            self._begun = True
            found: ObjectInfo = await self._port._through("list", self._listing.__anext__)
            return found
        return await self._listing.__anext__()  # type: ignore[no-any-return]


class TierFixture(BrokerFixture):
    """A BrokerFixture with a trap at its stores. Another one may share them: another broker, with its own disk."""

    def __init__(
        self, tier: TierConfig = SMALL, *, shares: TierFixture | None = None, seed: int = 1, **named: Any
    ) -> None:
        self.object_store = shares.object_store if shares else ObjectStoreFixture()  # type: ignore[has-type]
        super().__init__(
            tier=tier, objects=self.object_store, **{"unacked_max": 10_000, "segment_bytes": 4 * KIB, **named}
        )
        if shares is not None:
            self.metadata: Metadata = shares.metadata
        self.work = SimWork(Random(seed))
        self.trap = Trap()

    def port(self, under: Any) -> Mortal:
        return Trapped(under, self.trap)

    def kill(self) -> None:
        super().kill()
        self.trap.set(0, after=False)

    async def lose_log(self, topic: str = ORDERS) -> None:
        """The disk forgets a topic, while no process runs."""
        await remove_tree(self.disk, f"wal{topic}")
        await remove_tree(self.disk, "journal")


async def remove_tree(disk: MemoryDisk, path: str) -> None:
    for entry in await disk.list(path):
        inner = f"{path}/{entry.name}"
        if entry.is_directory:
            await remove_tree(disk, inner)
        else:
            await disk.remove(inner)


def carried(topic: Topic) -> UploadState:
    assert topic.storage is not None
    found = topic.storage.uploader.get(topic.name)
    assert found is not None
    return found


# --- messages -----------------------------------------------------------------------------------------


class Teller:
    """Publishes messages that cannot be compressed much, and remembers what was acknowledged, by offset."""

    def __init__(self, seed: int = 7, size: int = 16 * KIB) -> None:
        self._rng = Random(seed)
        self._size = size
        self._number = 0
        self.told: dict[int, str] = {}

    async def tell(self, topic: Topic, count: int = 1, label: str = "") -> None:
        producer = await topic.add_producer("producer")
        for _ in range(count):
            self._number += 1
            text = f"{label}{self._number}:{self._rng.randbytes(self._size).hex()}"
            self.told[await topic.publish(producer, message(text))] = text


async def until_sprung(host: TierFixture, work: Awaitable[Any]) -> bool:
    """Runs `work` until it is done, or the trap springs. Whether it did."""
    working = asyncio.ensure_future(work)
    springing = asyncio.ensure_future(host.trap.sprung.wait())
    await asyncio.wait({working, springing}, return_when=asyncio.FIRST_COMPLETED)
    springing.cancel()
    if host.trap.sprung.is_set():
        working.cancel()
        return True
    await working
    return False


# --- what must hold -------------------------------------------------------------------------------------


async def state_of(host: TierFixture, topic: Any = ORDERS) -> tuple[TierState, list[Descriptor]]:
    """What is stored, and every descriptor of kept history."""
    state = await read_state(host.metadata, topic)
    assert not state.unreadable
    known = list(state.keyed)
    if state.history.manifest is not None:
        known += manifest_from_bytes(await host.object_store.get(f"{topic[1:]}/{state.history.manifest}"))
    return state, sorted(
        (each for each in known if each.end > state.history.first_offset), key=lambda d: d.start_offset
    )


async def check_stored(host: TierFixture, topic: Any = ORDERS) -> list[Descriptor]:
    """No offset has two descriptors, every described object is whole, and no name ever meant two things."""
    _, described = await state_of(host, topic)
    Objects(described)  # raises if two overlap
    assert len({each.object_id for each in described}) == len(described)
    for each in described:
        key = f"{topic[1:]}/{each.object_id}"
        data = await MemoryObjectStore.get(host.object_store, key)
        assert len(data) == each.size
        if each.format == PARQUET:
            check_bytes(data, each.footer_crc)
            footer = open_object(data)
            assert (footer.start_offset, footer.end, footer.topic) == (each.start_offset, each.end, topic)
    twice = [key for key, contents in host.object_store.contents.items() if len(contents) > 1 and "/_" not in key]
    assert not twice
    return described


def covered(described: Sequence[Descriptor]) -> list[tuple[int, int]]:
    """The ranges that objects hold, neighbours joined."""
    ranges: list[tuple[int, int]] = []
    for each in described:
        if ranges and ranges[-1][1] == each.start_offset:
            ranges[-1] = (ranges[-1][0], each.end)
        else:
            ranges.append((each.start_offset, each.end))
    return ranges


async def read_everything(topic: Topic, *, name: str = "reader", kind: Kind = Kind.EXCLUSIVE) -> dict[int, str]:
    """What a subscriber from earliest gets, by offset. Nothing comes twice."""
    stream = await consume(topic, name, kind, start=0, acks=True)
    await caught_up(stream)
    offsets = stream.offsets
    assert len(set(offsets)) == len(offsets), "an offset came twice"
    stream.leave()
    return dict(zip(offsets, stream.texts, strict=True))


async def caught_up(stream: Stream, seconds: float = 60.0) -> None:
    for _ in range(int(seconds * 5)):
        if stream.subscription.get_lag_info().lag_messages == 0:
            return
        await asyncio.sleep(0.2)
    raise AssertionError(stream.subscription.explain())


async def all_uploaded(topic: Topic, seconds: float = 120.0) -> None:
    found = carried(topic)
    for _ in range(int(seconds)):
        if found.uploads.waiting(found.log) is None and not found.working.locked():
            return
        await asyncio.sleep(1)
    raise AssertionError(f"not uploaded: {found.failing}")


async def tell_and_upload(topic: Topic, teller: Teller, times: int = 1, count: int = 1) -> None:
    """One object at a time, before anything is merged."""
    for _ in range(times):
        await teller.tell(topic, count)
        await all_uploaded(topic)


async def recovered(host: TierFixture, told: Mapping[int, str]) -> Topic:
    """Starts a broker on what a killed one left, and finds everything that was acknowledged: first as it is, then
    from the object store alone.
    """
    orders = await find_topic(await host.boot())
    await all_uploaded(orders)
    await check_stored(host)
    _check_told(await read_everything(orders, name="first"), told, orders.first_offset)
    host.kill()
    await host.lose_log()
    orders = await find_topic(await host.boot())
    _check_told(await read_everything(orders, name="second"), told, orders.first_offset)
    return orders


def _check_told(found: Mapping[int, str], told: Mapping[int, str], first_offset: int) -> None:
    """`found` may have more: what was stored and never answered."""
    kept = {offset: text for offset, text in told.items() if offset >= first_offset}
    wrong = {offset for offset, text in kept.items() if found.get(offset) != text}
    assert not wrong, f"lost or changed: {sorted(wrong)}"
    assert len(set(found.values())) == len(found), "a message came under two offsets"


async def boot_and_find(host: TierFixture) -> tuple[Broker, Topic]:
    broker = await host.boot()
    return broker, await find_topic(broker)
