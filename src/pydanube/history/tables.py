"""Topics as Iceberg tables: derived on request, from what the metadata store says at that moment.

    load    read the topic's state ─► derive manifests, list and metadata ─► put what is not there ─► answer
    sweep   list the folder ─► what no load has needed for the window goes

Nothing is committed: the descriptor is the only commit, and what is put is named by its content (docs/adr/0012).

    what happens                                      files                       what follows
    ────────────────────────────────────────────────  ──────────────────────────  ────────────────────────────────────
    the process ends between two puts                 some that no table names      the next load finds them there, or a
                                                                                  sweep removes them
    two brokers derive the same change                same names, same bytes      the second is told "exists"
    two brokers derive different changes              both whole                  both tables are right; ids differ
    a sweep removes what a load believes to be there  missing                     put again when it was put longer ago
                                                                                  than half of the window
    the store is away                                 –                           Unreachable; nothing is answered
    a descriptor or the manifest cannot be read       –                           ObjectDamaged: a table without those
                                                                                  rows would look whole
    the topic is deleted and made anew                others: names begin with    the old ones go with the objects of
                                                      the epoch of its making     the old topic
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

from pydanube.core.history.tiers import Descriptor, Objects
from pydanube.core.iceberg.manifests import FOLDER, Manifest, created_of, cut, in_table, manifest
from pydanube.core.iceberg.table import Derived, Share, derived, readable, snapshot_id, table
from pydanube.core.names import TopicName
from pydanube.errors import Conflict, NotATable, ObjectDamaged, TopicUnknown
from pydanube.history.tier_state import (
    TierState,
    get_manifest,
    parse_manifest,
    read_partitions,
    read_state,
    topic_prefix,
)
from pydanube.ports import Clock, MetadataStore, ObjectStore, Work

log = logging.getLogger(__name__)

TABLES_MAX: Final = 256  # that are remembered
PUTS_AT_ONCE: Final = 8
KEEPS_NOTHING: Final = "it is non-reliable, and keeps nothing"
_ANY_NAME: Final = "x.x"
_METADATA_NAME: Final = re.compile(r"(\d+)-(\d{20})-[0-9a-f]{32}\.metadata\.json")


class Loaded(NamedTuple):
    """A table as it is now. `location` is where its metadata is a file, too."""

    metadata: Mapping[str, Any]
    location: str
    etag: str
    topics: Sequence[TopicName]  # whose rows it has: itself, or its partitions


class _Listed(NamedTuple):
    """What the topic's own manifest names, which is read and derived once."""

    manifest: str | None
    first_offset: int
    descriptors: Sequence[Descriptor]
    manifests: Sequence[Manifest]


@dataclass(slots=True)
class _Known:
    """What is remembered of one table. Forgetting it costs time, nothing else."""

    working: asyncio.Lock = field(default_factory=asyncio.Lock)
    identity: tuple[int, int] = (0, 0)  # created, snapshot
    derived: Derived | None = None
    listed: dict[TopicName, _Listed] = field(default_factory=dict)
    seen_ms: dict[int, int] = field(default_factory=dict)  # when a snapshot was last found to be the current one
    put_at: dict[str, float] = field(default_factory=dict)
    unneeded: dict[str, float] = field(default_factory=dict)  # files in the folder, since when
    swept_at: float | None = None


class Tables:
    """`address` is what other programs call an object of the store. `window_seconds`: for how long replaced objects and
    the snapshots that name them can be read. `upload_seconds`: the interval of uploads, which tables state.
    `keeps` says of a topic that has no history whether it will ever have one.
    """

    def __init__(
        self,
        metadata: MetadataStore,
        store: ObjectStore,
        clock: Clock,
        work: Work,
        address: Callable[[str], str],
        window_seconds: float,
        upload_seconds: float = 0.0,
        keeps: Callable[[TopicName], Awaitable[bool]] | None = None,
    ) -> None:
        self._metadata = metadata
        self._store = store
        self._clock = clock
        self._work = work
        self._address = address
        self._window = window_seconds
        self._upload_seconds = upload_seconds
        self._keeps = keeps
        self._known: OrderedDict[TopicName, _Known] = OrderedDict()

    async def load(self, name: TopicName) -> Loaded:
        """Raises TopicUnknown for one that was never opened, NotATable, ObjectDamaged, Unreachable."""
        states = await read_table(self._metadata, name)
        if not states:
            raise TopicUnknown(name)
        is_new = not any(each.history.epoch for each in states)
        if is_new and self._keeps is not None and not await self._keeps(states[0].topic):
            raise NotATable(name, KEEPS_NOTHING)
        known = self._remembered(name)
        async with known.working:
            identity = (_created(states), snapshot_id([each.history for each in states]))
            if identity < known.identity:
                states = await read_table(self._metadata, name) or states  # it was read before another reader's turn
                identity = (_created(states), snapshot_id([each.history for each in states]))
            if known.derived is None or identity != known.identity or self._has_aged(known):
                known.derived = await self._derive(name, states, known)
                known.identity = identity
            known.seen_ms[identity[1]] = self._clock.time_us() // 1000
            await self._put(name, known)
            await self._sweep_if_due(name, known)
            found = known.derived
        location = self._folder(name) + found.metadata_name
        topics = [each.topic for each in states]
        return Loaded(found.metadata, location, found.metadata_name.partition(".")[0], topics)

    def _remembered(self, name: TopicName) -> _Known:
        known = self._known.setdefault(name, _Known())
        self._known.move_to_end(name)
        if len(self._known) > TABLES_MAX:
            oldest = next(iter(self._known))
            if not self._known[oldest].working.locked():
                del self._known[oldest]
        return known

    # --- deriving ---------------------------------------------------------------------------------------

    async def _derive(self, name: TopicName, states: Sequence[TierState], known: _Known) -> Derived:
        """Reads what it takes, and computes in a thread: 10,000 objects take longer than a message should wait."""
        created = _created(states)
        listed = [await self._listed(state, known, created=created, base=name) for state in states]
        before = known.derived.metadata if known.derived else await self._stored(name, created)
        build = partial(self._build, name, list(zip(states, listed, strict=True)), before, dict(known.seen_ms))
        found = await self._work.run(build)
        named = {each["snapshot-id"] for each in found.metadata["snapshots"]}
        known.seen_ms = {each: at for each, at in known.seen_ms.items() if each in named}
        return found

    def _build(
        self,
        name: TopicName,
        parts: Sequence[tuple[TierState, _Listed]],
        before: Mapping[str, Any] | None,
        seen_ms: Mapping[int, int],
    ) -> Derived:
        shares: list[Share] = []
        manifests: list[Manifest] = []
        created = _created([state for state, _ in parts])
        for state, listed in parts:
            objects = _objects(state, [*listed.descriptors, *state.keyed])
            shares.append(Share(_part(state, name), state.owner.created if state.owner else 0, state.history, objects))
            manifests += listed.manifests
            keyed = {each.object_id for each in state.keyed}
            if rows := [each for each in objects if each.object_id in keyed and in_table(each)]:
                manifests.append(self._manifest(state, rows, name, created))
        location = self._inside(topic_prefix(name)).removesuffix("/")
        given = table(name, location, self._folder(name), shares, manifests, self._upload_seconds)
        return derived(given, before, self._since_ms(), seen_ms)

    async def _listed(self, state: TierState, known: _Known, *, created: int, base: TopicName) -> _Listed:
        remembered = known.listed.get(state.topic)
        key = (state.history.manifest, state.history.first_offset)
        if remembered is not None and (remembered.manifest, remembered.first_offset) == key:
            return remembered
        data = await get_manifest(self._store, state.topic, state.history) if state.history.manifest else None

        def listed() -> _Listed:
            found = parse_manifest(state.topic, state.history, data) if data is not None else []
            kept = sorted((each for each in found if each.end > key[1]), key=lambda each: each.start_offset)
            runs = cut([each for each in kept if in_table(each)])
            return _Listed(*key, kept, [self._manifest(state, run, base, created) for run in runs])

        known.listed[state.topic] = await self._work.run(listed)
        return known.listed[state.topic]

    def _manifest(self, state: TierState, rows: Sequence[Descriptor], base: TopicName, created: int) -> Manifest:
        return manifest(created, self._inside(topic_prefix(state.topic)), rows, _part(state, base))

    async def _stored(self, name: TopicName, created: int) -> Mapping[str, Any] | None:
        """The newest metadata that another process put, whose snapshots may still be read."""
        newest: tuple[int, str] | None = None
        async for info in self._store.list(topic_prefix(name) + FOLDER + f"{created}-"):
            found = _METADATA_NAME.fullmatch(info.key.rpartition("/")[2])
            if found and int(found[1]) == created:
                newest = max(newest or (0, ""), (int(found[2]), info.key))
        if newest is None:
            return None
        try:
            metadata: Mapping[str, Any] = json.loads(await self._store.get(newest[1]))
        except (FileNotFoundError, ValueError):  # another's sweep was faster; or it is none of ours
            return None
        return metadata

    def _has_aged(self, known: _Known) -> bool:
        """Whether it names a snapshot that may not be read any more."""
        assert known.derived is not None
        snapshots = known.derived.metadata["snapshots"]
        return len(readable(snapshots, self._since_ms(), known.seen_ms)) < len(snapshots)

    def _since_ms(self) -> int:
        return self._clock.time_us() // 1000 - int(self._window * 1000)

    def _folder(self, name: TopicName) -> str:
        return self._inside(topic_prefix(name) + FOLDER)

    def _inside(self, prefix: str) -> str:
        """What stands before the names of objects below a prefix: a store in a directory changes some of it."""
        return self._address(prefix + _ANY_NAME).removesuffix(_ANY_NAME)

    # --- files ------------------------------------------------------------------------------------------

    async def _put(self, name: TopicName, known: _Known) -> None:
        """All that the metadata names, and then itself, are in the store when this returns."""
        assert known.derived is not None
        now, files = self._clock.elapsed(), known.derived.files
        due = [each for each in files if now - known.put_at.get(each, -self._window) >= self._window / 2]
        known.put_at = {each: at for each, at in known.put_at.items() if each in files}
        turns = asyncio.Semaphore(PUTS_AT_ONCE)

        async def put(each: str) -> None:
            async with turns:
                with suppress(Conflict):  # its name says what is in it
                    await self._store.put(topic_prefix(name) + FOLDER + each, [files[each]], create=True)
                known.put_at[each] = now

        for outcome in await asyncio.gather(*map(put, due[:-1]), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
        for each in due[-1:]:  # the metadata itself comes last
            await put(each)

    async def _sweep_if_due(self, name: TopicName, known: _Known) -> None:
        now = self._clock.elapsed()
        if known.swept_at is not None and now - known.swept_at < self._window / 2:
            return
        known.swept_at = now
        assert known.derived is not None
        prefix = topic_prefix(name) + FOLDER
        seen: dict[str, float] = {}
        async for info in self._store.list(prefix):
            each = info.key.removeprefix(prefix)
            if created_of(each) is not None and each not in known.derived.files:
                seen[each] = known.unneeded.get(each, now)
        doomed = [each for each, since in seen.items() if now - since >= self._window]
        for each in doomed:
            await self._store.delete(prefix + each)
            del seen[each]
        known.unneeded = seen
        if doomed:
            log.info("files of a table removed", extra={"topic": name, "files": len(doomed)})


async def read_table(metadata: MetadataStore, name: TopicName) -> list[TierState]:
    """The topic's state, or those of its partitions in order, of one moment; none of what does not exist."""
    states = [await read_state(metadata, name)]
    if states[0].owner is None:
        states = await read_partitions(metadata, name)
    for state in states:
        for key, why in state.unreadable.items():
            raise ObjectDamaged(state.topic, key, state.history.first_offset, state.end, why)
    return [each for each in states if each.owner is not None and not each.owner.deleted]


def _created(states: Sequence[TierState]) -> int:
    assert states[0].owner is not None
    return states[0].owner.created


def _part(state: TierState, name: TopicName) -> int | None:
    return None if state.topic == name else state.topic.partition_number


def _objects(state: TierState, descriptors: Sequence[Descriptor]) -> Objects:
    kept = [each for each in descriptors if each.end > state.history.first_offset]
    try:
        return Objects(kept)
    except ValueError as error:
        raise ObjectDamaged(
            state.topic, str(state.manifest_key or ""), state.history.first_offset, state.end, str(error)
        ) from error
