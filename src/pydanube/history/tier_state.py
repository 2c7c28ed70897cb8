"""What the metadata store says of a topic's history, all of one moment.

The owner has the same in memory (`TopicTier`). This is for brokers that are not the owner, and to check
that the two agree: nothing here trusts that descriptors are whole, in order or apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from crc32c import crc32c

from pydanube.core import keys
from pydanube.core.history.ownership import Orphan, Owner, void_end
from pydanube.core.history.tiers import Descriptor, TopicHistory, manifest_from_bytes
from pydanube.core.names import TopicName
from pydanube.errors import ObjectDamaged
from pydanube.ports import Item, MetadataStore, ObjectStore


def topic_prefix(topic: str) -> str:
    """Where a topic's objects are: "default/orders/" for /default/orders."""
    return topic[1:] + "/"


@dataclass(slots=True)
class TierState:
    """`keyed` are the descriptors that have a key of their own; older ones are in the manifest."""

    topic: TopicName
    owner: Owner | None = None
    history: TopicHistory = field(default_factory=TopicHistory)
    keyed: list[Descriptor] = field(default_factory=list)
    orphans: list[Orphan] = field(default_factory=list)
    voids: list[tuple[int, int]] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)  # keys whose value means nothing, and why

    @property
    def manifest_key(self) -> str | None:
        return None if self.history.manifest is None else topic_prefix(self.topic) + self.history.manifest

    @property
    def end(self) -> int:
        """Behind everything that the store knows of."""
        ends = [each.end for each in self.keyed] + [each.end for each in self.orphans] + [end for _, end in self.voids]
        return max(ends, default=self.history.first_offset)


async def read_state(metadata: MetadataStore, topic: TopicName) -> TierState:
    """One read, so one moment: a descriptor is in its key or in the manifest that is named, never in neither."""
    state = TierState(topic)
    for item in await metadata.list(keys.below_storage(topic)):
        take(state, item)
    return state


async def read_partitions(metadata: MetadataStore, base: TopicName) -> list[TierState]:
    """Of every partition that has a state, in order; one read, so one moment."""
    states: dict[TopicName, TierState] = {}
    for item in await metadata.list(f"{keys.below_storage(base).removesuffix('/')}-part-"):
        name = keys.topic_above(item.key)
        if name is not None and name.is_partition_of(base):
            take(states.setdefault(name, TierState(name)), item)
    return sorted(states.values(), key=lambda each: each.topic.partition_number or 0)


def take(state: TierState, item: Item) -> None:
    """One key's value; what means nothing is noted as unreadable."""
    try:
        _take(state, item)
    except (ValueError, KeyError, TypeError) as error:  # JSON of another shape
        state.unreadable[item.key] = f"{type(error).__name__}: {error}"


def _take(state: TierState, item: Item) -> None:
    start = keys.start_of(item.key)
    if item.key == keys.owner(state.topic):
        state.owner = Owner.from_bytes(item.value)
    elif item.key == keys.history(state.topic):
        state.history = TopicHistory.from_bytes(item.value)
    elif start is None:
        return
    elif item.key.startswith(keys.storage_objects(state.topic)):
        state.keyed.append(Descriptor.from_bytes(item.value))
    elif item.key.startswith(keys.orphans(state.topic)):
        state.orphans.append(Orphan.from_bytes(start, item.value))
    else:
        state.voids.append((start, void_end(item.value)))


async def read_manifest(store: ObjectStore, state: TierState) -> list[Descriptor]:
    """The descriptors that have no key any more. Raises ObjectDamaged, or Unreachable while the store is away."""
    if state.history.manifest is None:
        return []
    listed = await fetch_manifest(store, state.topic, state.history)
    return [each for each in listed if each.end > state.history.first_offset]


async def fetch_manifest(store: ObjectStore, topic: TopicName, history: TopicHistory) -> list[Descriptor]:
    """All that it lists, also what lies below where history begins now. Raises as `read_manifest` does."""
    return parse_manifest(topic, history, await get_manifest(store, topic, history))


async def get_manifest(store: ObjectStore, topic: TopicName, history: TopicHistory) -> bytes:
    """For `parse_manifest`, which takes its time if it lists much. Raises as `read_manifest` does."""
    assert history.manifest is not None
    try:
        return await store.get(topic_prefix(topic) + history.manifest)
    except FileNotFoundError as error:
        raise manifest_damaged(topic, history, "it is missing") from error


def parse_manifest(topic: TopicName, history: TopicHistory, data: bytes) -> list[Descriptor]:
    """All that it lists. Raises ObjectDamaged."""
    try:
        if history.manifest_crc and crc32c(data) != history.manifest_crc:
            raise ValueError("its checksum differs")
        return manifest_from_bytes(data)
    except ValueError as error:
        raise manifest_damaged(topic, history, str(error)) from error


def manifest_damaged(topic: TopicName, history: TopicHistory, why: str) -> ObjectDamaged:
    key = topic_prefix(topic) + (history.manifest or "")
    return ObjectDamaged(topic, key, history.first_offset, history.manifest_end, why)


async def read_gaps(metadata: MetadataStore, topic: TopicName) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Orphans and voids, as [first, end): offsets that no object holds."""
    orphans = await metadata.list(keys.orphans(topic))
    voids = await metadata.list(keys.voids(topic))
    return (
        [(start, Orphan.from_bytes(start, item.value).end) for start, item in _placed(orphans)],
        [(start, void_end(item.value)) for start, item in _placed(voids)],
    )


def _placed(items: Sequence[Item]) -> list[tuple[int, Item]]:
    return [(start, item) for item in items if (start := keys.start_of(item.key)) is not None]


async def all_descriptors(store: ObjectStore, state: TierState) -> list[Descriptor]:
    """In order, from the manifest and from keys; none of a topic that was deleted. Raises as `read_manifest` does."""
    if state.owner is not None and state.owner.deleted:
        return []
    known = [*await read_manifest(store, state), *state.keyed]
    kept = [each for each in known if each.end > state.history.first_offset]
    return sorted(kept, key=lambda each: (each.start_offset, each.end))
