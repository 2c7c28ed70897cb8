"""What the object store says about a topic by itself, for readers when no broker runs.

    {ns}/{topic}/_snapshot-{epoch:020}-{number:020}.json
        {format, topic, first_offset, head_uploaded, manifest, manifest_crc, objects, orphans, voids, history_version}

The metadata store is the truth; a snapshot is a copy of it, made after it changed. So it may be a moment old, never
wrong: an object that it names was described when it was written, and one that is gone since is missing, not different.
Epochs grow with owners and numbers within an epoch, so the greatest name is the newest copy, and what an owner that
lost the topic still writes sorts below its successor's.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from pydanube.core.history.tiers import Descriptor, Objects, TopicHistory
from pydanube.errors import DanubeError
from pydanube.ports import ObjectStore

log = logging.getLogger(__name__)

FORMAT: Final = 1
KEPT: Final = 3  # of one topic: a reader may be at the one before
_NAME: Final = re.compile(r"_snapshot-(\d{20})-(\d{20})\.json")


class HistorySnapshot(NamedTuple):
    """Ranges are half-open. `objects` does not repeat what the manifest names."""

    topic: str
    first_offset: int
    head_uploaded: int  # behind the last object
    manifest: str | None
    manifest_crc: int
    objects: Sequence[Descriptor]
    orphans: Sequence[tuple[int, int]] = ()
    voids: Sequence[tuple[int, int]] = ()
    history_version: int = 0

    @classmethod
    def of(
        cls,
        topic: str,
        history: TopicHistory,
        objects: Objects,
        orphans: Sequence[tuple[int, int]],
        voids: Sequence[tuple[int, int]],
    ) -> HistorySnapshot:
        return cls(
            topic,
            history.first_offset,
            objects.end,
            history.manifest,
            history.manifest_crc,
            objects.keyed,
            orphans,
            voids,
            history.history_version,
        )

    def to_bytes(self) -> bytes:
        fields = {**self._asdict(), "format": FORMAT, "objects": [each.to_json() for each in self.objects]}
        return json.dumps(fields).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> HistorySnapshot:
        """Raises ValueError if it is none, or of a newer format."""
        try:
            fields = json.loads(data)
            if fields["format"] != FORMAT:
                raise ValueError(f"format {fields['format']} is not known here ({FORMAT} is)")
            return cls(
                fields["topic"],
                int(fields["first_offset"]),
                int(fields["head_uploaded"]),
                fields["manifest"],
                int(fields["manifest_crc"]),
                [Descriptor.from_json(each) for each in fields["objects"]],
                [(int(first), int(end)) for first, end in fields["orphans"]],
                [(int(first), int(end)) for first, end in fields["voids"]],
                int(fields["history_version"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a snapshot: {error}") from error


def snapshot_name(epoch: int, number: int) -> str:
    return f"_snapshot-{epoch:020}-{number:020}.json"


def is_snapshot(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def epoch_of_snapshot(name: str) -> int | None:
    """The epoch that wrote it; None for the name of something else."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


class Snapshots:
    """Writes the snapshots of one topic in one epoch. A failure is logged, and tried again later."""

    def __init__(self, store: ObjectStore, prefix: str, epoch: int) -> None:
        self._store = store
        self._prefix = prefix
        self._epoch = epoch
        self._number = 0
        self._written: list[str] | None = None  # names that are there, oldest first; None: not looked yet

    async def publish(self, snapshot: HistorySnapshot) -> bool:
        """Whether it is written. Never raises: an upload does not fail because its copy for readers did."""
        try:
            await self._publish(snapshot)
        except DanubeError as error:
            log.warning("snapshot not written", extra={"topic": snapshot.topic, "why": str(error)})
            return False
        return True

    async def _publish(self, snapshot: HistorySnapshot) -> None:
        if self._written is None:
            self._written = [name for name in await _names(self._store, self._prefix) if self._is_ours(name)]
        self._number += 1
        name = snapshot_name(self._epoch, self._number)
        await self._store.put(self._prefix + name, [snapshot.to_bytes()])
        self._written.append(name)
        while len(self._written) > KEPT:
            await self._store.delete(self._prefix + self._written[0])
            del self._written[0]

    def _is_ours(self, name: str) -> bool:
        """Of this epoch, or an older one. A newer owner's are none of our business."""
        found = _NAME.fullmatch(name)
        return found is not None and int(found[1]) <= self._epoch


async def read_snapshot(store: ObjectStore, prefix: str) -> HistorySnapshot | None:
    """The newest; None if there is none. Raises ValueError if it cannot be understood."""
    for _ in range(KEPT):
        names = await _names(store, prefix)
        if not names:
            return None
        try:
            return HistorySnapshot.from_bytes(await store.get(prefix + names[-1]))
        except FileNotFoundError:
            continue  # the owner has written newer ones since we looked
    return None


async def _names(store: ObjectStore, prefix: str) -> list[str]:
    found = [info.key.removeprefix(prefix) async for info in store.list(prefix + "_snapshot-")]
    return sorted(name for name in found if _NAME.fullmatch(name))
