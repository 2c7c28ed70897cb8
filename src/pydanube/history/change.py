"""A change of a topic's history, as a value: what one transaction writes, and what its owner knows afterwards.

Everything here is a plain function of plain values. Only `TopicTier.apply` carries a change out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pydanube.core import keys
from pydanube.core.commit.sessions import Sessions
from pydanube.core.history.ownership import void_to_bytes
from pydanube.core.history.tiers import Descriptor, Objects, TopicHistory
from pydanube.core.names import TopicName
from pydanube.ports import Delete, Put


class Void(NamedTuple):
    """Offsets [first, end) that no message has or ever will have."""

    first: int
    end: int
    why: str


class StoredManifest(NamedTuple):
    """An object that is stored, and lists descriptors."""

    name: str
    end: int  # behind the last of them
    crc: int  # crc32c of its bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryChange:
    """What is to be different. One of nothing changes only the history key: a fence.

    added, replaced     these objects are described, in the place of those; theirs is the first key of those
    listed, manifest    these descriptors have no key any more: the new manifest has them, and all that were listed
    relisted            these objects are described by the new manifest, in the place of those in `replaced`
    first_offset        history begins there: objects below are described no more, their keys expire
    expired             expired keys that go
    voids, others       as they are written; `others` are keys of orphans and rescues
    sessions            where producers stand in what objects hold then
    appears             readers may have passed what is there now: the history version grows
    """

    added: Sequence[Descriptor] = ()
    replaced: Sequence[Descriptor] = ()
    listed: Sequence[Descriptor] = ()
    manifest: StoredManifest | None = None
    relisted: Sequence[Descriptor] = ()
    first_offset: int | None = None
    expired: Sequence[Descriptor] = ()
    voids: Sequence[Void] = ()
    others: Sequence[Put | Delete] = ()
    sessions: Sessions | None = None
    appears: bool = False

    def operations(self, topic: TopicName) -> list[Put | Delete]:
        """All but the sessions and the history key."""
        written = {each.start_offset for each in self.added}
        replaced = () if self.relisted else self.replaced  # what the manifest lists has no key
        gone = [each.start_offset for each in (*replaced, *self.listed, *self.expired)]
        return [
            *(Put(keys.storage_object(topic, each.start_offset), each.to_bytes()) for each in self.added),
            *(Delete(keys.storage_object(topic, start)) for start in gone if start not in written),
            *(Put(keys.void(topic, each.first), void_to_bytes(each.end, each.why)) for each in self.voids),
            *self.others,
        ]


@dataclass(frozen=True, slots=True)
class KnownHistory:
    """What is known of a topic's history. `objects` has what the manifest lists only if that was read."""

    history: TopicHistory = field(default_factory=TopicHistory)
    objects: Objects = field(default_factory=Objects)
    sessions: Sessions = field(default_factory=Sessions)
    expired: Sequence[Descriptor] = ()  # below first_offset, and their keys are still there

    def after(self, change: HistoryChange) -> KnownHistory:
        """What is known when the change is made. Raises ValueError if objects would overlap."""
        history, objects, expired = self.history, self.objects, self.expired
        if change.replaced:
            objects = objects.with_replaced(change.replaced, *change.added, *change.relisted)
        elif change.added:
            objects = objects.with_added(*change.added)
        if change.manifest is not None:
            objects = objects.with_listed([*change.listed, *change.relisted])
            name, end, crc = change.manifest
            history = replace(history, manifest=name, manifest_end=end, manifest_crc=crc)
        if change.expired:
            gone = {each.start_offset for each in change.expired}
            expired = [each for each in expired if each.start_offset not in gone]
        if change.first_offset is not None:
            listed = {each.object_id for each in objects.listed}
            kept = objects.from_offset(change.first_offset)
            below = objects[: len(objects) - len(kept)]
            expired = [*expired, *(each for each in below if each.object_id not in listed)]
            history = replace(history, first_offset=change.first_offset)
            if not kept.listed and history.manifest is not None:
                history = replace(history, manifest=None, manifest_end=0, manifest_crc=0)
            objects = kept
        if change.appears:
            history = replace(history, history_version=history.history_version + 1)
        sessions = self.sessions if change.sessions is None else change.sessions
        return KnownHistory(history, objects, sessions, expired)

    def undescribed(self, change: HistoryChange) -> list[str]:
        """Names of objects that the change leaves without a descriptor."""
        gone = [each.object_id for each in change.replaced]
        if change.first_offset is not None:
            gone += [each.object_id for each in self.objects if each.end <= change.first_offset]
        before, now = self.history.manifest, self.after(change).history.manifest
        if before is not None and before != now:
            gone.append(before)
        return gone
