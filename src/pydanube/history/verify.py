"""Compares a topic's descriptors with the objects in the store, every byte of them, and changes nothing.

    metadata ─► state ─┐
    manifest ──────────┼─► offsets: each has one place            ─┐
    log (the owner's) ─┘                                           ├─► findings
    listing ───────────┬─► descriptors: there, their size, their tag │
                       └─► without descriptor: whose, may it go?    ─┤
    objects ─────────────► footer, row groups, every checksum       ─┘

A finding is a problem (something cannot be read, or will not be) or a note (worth knowing, nothing is wrong). Work goes
on while this reads, so whatever looks wrong is looked up again before it is reported: the owner may have merged or
forgotten the object since.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from pydanube.core import keys
from pydanube.core.history.coverage import CoverageRange, CoverageVerdict, Fate, Where, judge, overlaps, places
from pydanube.core.history.tiers import PARQUET, RAW, Descriptor, epoch_of_name
from pydanube.core.iceberg.manifests import FOLDER, created_of
from pydanube.core.names import TopicName
from pydanube.core.units import MIB
from pydanube.errors import InvalidObject, ObjectDamaged
from pydanube.formats.batch import logical_crc
from pydanube.formats.parquet import COLUMNS, MAGIC, Footer, RowGroup, StoredBatch, footer_length, read_raw, summary
from pydanube.formats.parquet_read import FOOTER_GUESS_BYTES, parse_footer, read_table
from pydanube.history.snapshots import is_snapshot
from pydanube.history.tier_state import TierState, read_manifest, read_state, topic_prefix
from pydanube.ports import Buffer, MetadataStore, ObjectInfo, ObjectStore, Work

VERIFY_READ_BYTES: Final = 8 * MIB
_HASH: Final = re.compile(r'"?[0-9a-f]{32}"?')


class Finding(NamedTuple):
    """`first` and `end` are the offsets it concerns, `key` the object; either may be missing."""

    is_problem: bool
    kind: str
    text: str
    key: str = ""
    first: int | None = None
    end: int | None = None


class Undescribed(NamedTuple):
    """An object in the topic's place that no descriptor names."""

    key: str
    size_bytes: int
    epoch: int | None
    verdict: CoverageVerdict


class VerifyProgress(NamedTuple):
    objects_done: int
    objects: int
    bytes_done: int
    bytes: int


@dataclass(slots=True)
class TierReport:
    topic: str
    epoch: int = 0  # of the owner
    first_offset: int = 0
    head: int = 0
    objects: int = 0
    size_bytes: int = 0
    messages: int = 0  # in objects that verify
    places: list[CoverageRange] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    undescribed: list[Undescribed] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[Finding]:
        return [each for each in self.findings if each.is_problem]

    @property
    def notes(self) -> list[Finding]:
        return [each for each in self.findings if not each.is_problem]

    @property
    def ok(self) -> bool:
        return not self.problems


class OwnersView(NamedTuple):
    """What only the owner knows."""

    head: int
    log: Sequence[tuple[int, int]]  # ranges that its log holds
    unreadable: dict[tuple[int, int], str]  # of these, what cannot be uploaded, and why
    seen: Callable[[Collection[str]], dict[str, float]]  # since how many seconds it knows each to be undescribed


OnProgress = Callable[[VerifyProgress], Awaitable[None]]


async def _no_progress(progress: VerifyProgress) -> None:
    pass


class TierVerifier:
    """One run over one topic. `look` first, while nothing is uploaded; then `read`, which takes its time."""

    def __init__(
        self, topic: TopicName, metadata: MetadataStore, store: ObjectStore, work: Work, *, grace_seconds: float
    ) -> None:
        self.report = TierReport(topic)
        self.state = TierState(topic)
        self._topic = topic
        self._metadata = metadata
        self._store = store
        self._work = work
        self._grace_seconds = grace_seconds
        self._prefix = topic_prefix(topic)
        self._described: list[Descriptor] = []
        self._listed: dict[str, ObjectInfo] = {}
        self.on_progress_: OnProgress = _no_progress
        self._progress = VerifyProgress(0, 0, 0, 0)

    # --- what is said and what is there -------------------------------------------------------------------

    async def look(self, owner: OwnersView | None) -> None:
        """Reads descriptors and lists the bucket. Without an owner its log, and so the topic's end, is not known."""
        # Listed first: what is put and described between the two reads is described by the time we compare.
        listed = {info.key.removeprefix(self._prefix): info async for info in self._store.list(self._prefix)}
        # Files of the table are derived, and its own sweep's.
        self._listed = {name: each for name, each in listed.items() if created_of(name.removeprefix(FOLDER)) is None}
        self.state = state = await read_state(self._metadata, self._topic)
        report = self.report
        report.epoch = state.owner.epoch if state.owner else 0
        report.first_offset = state.history.first_offset
        for key, why in state.unreadable.items():
            self._problem("descriptor", f"the value of {key} in the metadata store cannot be understood: {why}")
        unknown = await self._load_manifest()
        report.head = owner.head if owner else max(state.end, max((each.end for each in self._described), default=0))
        report.objects = len(self._described)
        report.size_bytes = sum(each.size for each in self._described)
        self._check_descriptors()
        self._check_places(owner, unknown)
        self._judge_undescribed(owner, all_known=unknown is None and not state.unreadable)

    async def _load_manifest(self) -> CoverageRange | None:
        """All descriptors. Returns the offsets of which nothing is known because the manifest cannot be read."""
        state = self.state
        manifest: list[Descriptor] = []
        unknown = None
        try:
            manifest = await read_manifest(self._store, state)
        except ObjectDamaged as error:
            self._problem("manifest", str(error), error.key, error.first, error.end)
            unknown = CoverageRange(error.first, error.end, Where.UNKNOWN, "the manifest cannot be read")
        known = [each for each in (*manifest, *state.keyed) if each.end > state.history.first_offset]
        self._described = sorted(known, key=lambda each: (each.start_offset, each.end))
        return unknown

    def _check_descriptors(self) -> None:
        for each in self._described:
            key = self._prefix + each.object_id
            if each.end_offset < each.start_offset or each.size <= 0 or each.format not in (PARQUET, RAW):
                self._problem("descriptor", "its descriptor makes no sense", key, each.start_offset, each.end)
            if epoch_of_name(each.object_id) != each.epoch:
                self._problem(
                    "descriptor",
                    f"its descriptor says epoch {each.epoch}, its name another",
                    key,
                    each.start_offset,
                    each.end,
                )
        for earlier, later in overlaps(self._described):
            self._problem(
                "overlap",
                f"offsets {later.start_offset} up to {min(earlier.end, later.end)} are also described as part of "
                f"{earlier.object_id}",
                self._prefix + later.object_id,
                later.start_offset,
                min(earlier.end, later.end),
            )

    def _check_places(self, owner: OwnersView | None, unknown: CoverageRange | None) -> None:
        state = self.state
        sources = [CoverageRange(each.start_offset, each.end, Where.OBJECTS) for each in self._described]
        claimed = list(sources)
        sources += [CoverageRange(first, end, Where.LOG) for first, end in (owner.log if owner else ())]
        for orphan in state.orphans:
            why = f"on the disk of broker {orphan.broker_id}, epoch {orphan.epoch}: not rescued yet"
            self._check_claim(CoverageRange(orphan.start, orphan.end, Where.ORPHAN, why), claimed)
        for first, end in state.voids:
            self._check_claim(CoverageRange(first, end, Where.VOID, "no message has ever had them"), claimed)
        sources += [place for place in claimed if place.where is not Where.OBJECTS]
        if unknown is not None:
            sources.append(unknown)
        self.report.places = places(state.history.first_offset, self.report.head, sources)
        for first, end, where, _ in self.report.places:
            if where is Where.NOWHERE:
                why = "no object, log, orphan or void has them"
                self._problem("gap", f"offsets {first} up to {end}: {why}", first=first, end=end)
        for (first, end), why in (owner.unreadable if owner else {}).items():
            self._problem("log", f"offsets {first} up to {end} cannot be uploaded: {why}", first=first, end=end)

    def _check_claim(self, place: CoverageRange, claimed: list[CoverageRange]) -> None:
        for other in claimed:
            first, end = max(place.first, other.first), min(place.end, other.end)
            if first < end:
                both = f"{place.where.value} and {other.where.value}"
                self._problem("overlap", f"offsets {first} up to {end} are both {both}", first=first, end=end)
        claimed.append(place)

    def _judge_undescribed(self, owner: OwnersView | None, *, all_known: bool) -> None:
        described = {each.object_id for each in self._described}
        described.add(self.state.history.manifest or "")
        names = [name for name in self._listed if name not in described and not is_snapshot(name)]
        ours = [name for name in names if epoch_of_name(name) is not None]
        seen = owner.seen(ours) if owner else {}
        if self.state.owner is not None and self.state.owner.deleted:
            seen = dict.fromkeys(ours, self._grace_seconds)  # a deleted topic has no readers
        orphaned = {each.epoch for each in self.state.orphans}
        for name in names:
            verdict = judge(
                name,
                owner_epoch=self.report.epoch,
                orphaned=orphaned,
                seen_seconds=seen.get(name, 0.0),
                grace_seconds=self._grace_seconds,
                all_known=all_known,
            )
            info = self._listed[name]
            self.report.undescribed.append(Undescribed(info.key, info.size_bytes, epoch_of_name(name), verdict))
            text = f"nobody describes it; {verdict.why}"
            self.report.findings.append(Finding(verdict.fate is Fate.NEWER, verdict.fate.value, text, info.key))

    # --- every byte ---------------------------------------------------------------------------------------

    async def read(self, on_progress: OnProgress = _no_progress) -> TierReport:
        """Reads every described object. Raises Unreachable if the store stops answering: then nothing is proven."""
        self.on_progress_ = on_progress
        whole = VerifyProgress(0, self.report.objects, 0, self.report.size_bytes)
        for each in self._described:
            await self._reached(whole)
            await self._check_object(each)
            whole = whole._replace(objects_done=whole.objects_done + 1, bytes_done=whole.bytes_done + max(0, each.size))
        await self._reached(whole)
        return self.report

    async def _moved(self, size_bytes: int) -> None:
        await self._reached(self._progress._replace(bytes_done=self._progress.bytes_done + size_bytes))

    async def _reached(self, progress: VerifyProgress) -> None:
        self._progress = progress
        await self.on_progress_(progress)

    async def _check_object(self, described: Descriptor) -> None:
        key = self._prefix + described.object_id
        try:
            info = self._listed.get(described.object_id) or await self._store.head(key)
            if info.size_bytes != described.size:
                raise _Wrong("size", f"it has {info.size_bytes} bytes, its descriptor says {described.size}")
            if described.format == RAW:
                await self._check_raw(described, key)
            else:
                await self._check_parquet(described, key)
            self.report.messages += described.end - described.start_offset
            if info.etag != described.etag:
                await self._compare_tags(described, key, info.etag)
        except FileNotFoundError:
            await self._wrong(described, key, "missing", "it is not in the store")
        except InvalidObject as error:
            await self._wrong(described, key, "damaged", str(error))
        except _Wrong as error:
            await self._wrong(described, key, error.kind, error.text)

    async def _wrong(self, described: Descriptor, key: str, kind: str, text: str) -> None:
        if not await self._is_described(described):
            return  # merged or forgotten since we began
        self._problem(kind, text, key, described.start_offset, described.end)

    async def _is_described(self, described: Descriptor) -> bool:
        item = await self._metadata.get(keys.storage_object(self._topic, described.start_offset))
        if item is not None:
            try:
                return Descriptor.from_bytes(item.value).object_id == described.object_id
            except (ValueError, KeyError, TypeError):
                return False
        now = await read_state(self._metadata, self._topic)
        if described.end <= now.history.first_offset or now.history.manifest is None:
            return False
        try:
            return described in await read_manifest(self._store, now)
        except ObjectDamaged:
            return True  # it was in the manifest when that could be read

    async def _compare_tags(self, described: Descriptor, key: str, found: str) -> None:
        """Some tags are made from the bytes. Others change with every put, and with the parts that came together."""
        text = f"its etag is {found}, its descriptor says {described.etag}: "
        if _HASH.fullmatch(found) and _HASH.fullmatch(described.etag):
            text += "other bytes than those that were uploaded, though what is in them verifies"
            await self._wrong(described, key, "etag", text)
        else:
            text += "it was put there again; what is in it verifies"
            self.report.findings.append(Finding(False, "etag", text, key, described.start_offset, described.end))

    async def _check_raw(self, described: Descriptor, key: str) -> None:
        data = await self._store.get(key)
        batches = await self._work.run(lambda: read_raw(data))
        _check_range(described, [summary(batch) for batch in batches])
        self.report.findings.append(
            Finding(
                False,
                "raw",
                "its messages could not be made Parquet and are kept as the log had them: subscriptions read them, "
                "SQL does not",
                key,
                described.start_offset,
                described.end,
            )
        )

    async def _check_parquet(self, described: Descriptor, key: str) -> None:
        size = described.size
        footer, footer_bytes = await self._footer(described, key)
        _check_footer(self._topic, described, footer)
        if await self._fetch(key, 0, len(MAGIC)) != MAGIC:
            raise InvalidObject("its beginning", f"it does not begin with {MAGIC!r}")
        checks = _BatchChecks(footer.batches)
        position = len(MAGIC)
        for number, group in enumerate(footer.row_groups):
            position = await self._skim(key, position, group.position)
            data = await self._fetch(key, group.position, group.length)
            await self._work.run(lambda: _check_group(footer, number, data, checks))  # noqa: B023
            position = group.position + group.length
            await self._moved(group.length)
        checks.end()
        # What lies between has no checksum of its own: indexes and filters. Reading it proves that it is there.
        await self._skim(key, position, size - footer_bytes)

    async def _footer(self, described: Descriptor, key: str) -> tuple[Footer, int]:
        length = min(FOOTER_GUESS_BYTES, described.size)
        tail = await self._fetch(key, described.size - length, length)
        needed = footer_length(tail)
        if needed > described.size:
            raise InvalidObject("its end", "the footer is longer than the object")
        if needed > length:
            tail = await self._fetch(key, described.size - needed, needed)
        return await self._work.run(lambda: parse_footer(tail, described.size, described.footer_crc)), needed

    async def _skim(self, key: str, position: int, end: int) -> int:
        while position < end:
            length = min(VERIFY_READ_BYTES, end - position)
            await self._fetch(key, position, length)
            position += length
            await self._moved(length)
        return position

    async def _fetch(self, key: str, position: int, length: int) -> Buffer:
        data = await self._store.get_range(key, position, length)
        if len(data) != length:
            raise InvalidObject(f"position {position}", f"{len(data)} bytes are there, {length} must be")
        return data

    def _problem(self, kind: str, text: str, key: str = "", first: int | None = None, end: int | None = None) -> None:
        self.report.findings.append(Finding(True, kind, text, key, first, end))


class _Wrong(Exception):
    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind = kind
        self.text = text


class _BatchChecks:
    """Compares payloads, as they come, with the checksums that each batch had in the log."""

    def __init__(self, batches: Sequence[StoredBatch]) -> None:
        self._todo = list(reversed(batches))
        self._waiting: list[pa.Array] = []  # of a batch that goes over several row groups
        self._held = 0

    def add(self, first_offset: int, payload: pa.Array) -> None:
        row = 0
        while row < len(payload):
            if not self._todo:
                raise InvalidObject(f"offset {first_offset + row}", "no batch holds it")
            batch = self._todo[-1]
            taken = min(batch.rows - self._held, len(payload) - row)
            self._waiting.append(payload.slice(row, taken))
            self._held += taken
            row += taken
            if self._held == batch.rows:
                self._compare(batch)

    def _compare(self, batch: StoredBatch) -> None:
        whole = self._waiting[0] if len(self._waiting) == 1 else pa.concat_arrays(self._waiting)
        if logical_crc(whole) != batch.logical_crc:
            raise InvalidObject(
                f"offsets {batch.base_offset} to {batch.end_offset - 1}", "it is not what the log had (checksum)"
            )
        self._todo.pop()
        self._waiting, self._held = [], 0

    def end(self) -> None:
        if self._todo or self._held:
            raise InvalidObject("its end", "rows are missing")


def _check_group(footer: Footer, number: int, data: Buffer, checks: _BatchChecks) -> None:
    """Every page of every column, the payloads of the group and of each batch, and the offsets."""
    group = footer.row_groups[number]
    table = read_table(footer, number, data, COLUMNS.names)
    _check_offsets(table.column("offset").chunk(0), group)
    checks.add(group.first_offset, table.column("payload").chunk(0))


def _check_offsets(offsets: pa.Array, group: RowGroup) -> None:
    ascending = pc.all(pc.equal(pc.pairwise_diff(offsets), 1), skip_nulls=True, min_count=0).as_py()
    if offsets[0].as_py() != group.first_offset or not ascending:
        raise InvalidObject(f"offsets {group.first_offset} to {group.end_offset - 1}", "the offset column differs")


def _check_footer(topic: str, described: Descriptor, footer: Footer) -> None:
    if footer.topic != topic:
        raise InvalidObject("its footer", f"it is of topic {footer.topic}")
    if (footer.start_offset, footer.end) != (described.start_offset, described.end):
        raise InvalidObject(
            "its footer", f"it holds offsets {footer.start_offset} up to {footer.end}, not what its descriptor says"
        )
    _check_range(described, footer.batches)
    expected = described.start_offset
    for group in footer.row_groups:
        if group.first_offset != expected:
            raise InvalidObject("its footer", f"a row group begins at offset {group.first_offset}, not {expected}")
        expected = group.end_offset
    if expected != described.end or footer.metadata.num_rows != described.end - described.start_offset:
        raise InvalidObject("its footer", "the row groups do not make up the object")
    latest = max(group.max_publish_time for group in footer.row_groups)
    if latest != described.max_publish_time:
        raise _Wrong("descriptor", "its newest message has another publish time than its descriptor says")


def _check_range(described: Descriptor, batches: Sequence[StoredBatch]) -> None:
    expected = described.start_offset
    for batch in batches:
        if batch.base_offset != expected:
            raise InvalidObject("its batches", f"one begins at offset {batch.base_offset}, not {expected}")
        expected = batch.end_offset
    if expected != described.end:
        raise InvalidObject("its batches", f"they end at offset {expected}, the descriptor says {described.end}")
