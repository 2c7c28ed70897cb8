"""What an operator asks about the history of topics: where it is, whether it is whole, what may go.

    list      descriptors, and what is only in the log
    verify    `history/verify.py`, with what only the owner knows; repairs are the owner's too

Nothing here is on the way of a message. While a topic's bucket is listed its uploads wait, as they do for a sweep.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from posixpath import normpath
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from pydanube.core import keys
from pydanube.core.dispatch.ranges import OffsetRange, OffsetRanges
from pydanube.core.history.coverage import Fate
from pydanube.core.history.object_keys import path_of
from pydanube.core.history.ownership import Orphan
from pydanube.core.history.tiers import Descriptor
from pydanube.core.names import TopicName
from pydanube.errors import Conflict, DanubeError, ObjectDamaged, TopicUnknown
from pydanube.history.served import Cloud, ServedTopic, ServedTopics, keeps_history
from pydanube.history.tier_state import all_descriptors, read_state
from pydanube.history.upload_state import UploadState
from pydanube.history.verify import Finding, OnProgress, OwnersView, TierReport, TierVerifier
from pydanube.ports import Compare

log = logging.getLogger(__name__)


class Tiers(NamedTuple):
    """Half-open ranges. An offset may be in both: the log keeps it until local retention frees it."""

    first_offset: int
    head: int
    has_cloud: bool
    cloud: Sequence[OffsetRange]
    log: Sequence[OffsetRange]
    memory_first: int | None = None  # from here up to the head it is in memory too


class StorageListing(NamedTuple):
    topic: TopicName
    tiers: Tiers
    objects: Sequence[Descriptor]
    in_manifest: int  # the first so many of them
    only_in_log: Sequence[OffsetRange]
    orphans: Sequence[Orphan]
    voids: Sequence[tuple[int, int]]
    epoch: int
    manifest_key: str
    upload_failing: str


class Verified(NamedTuple):
    report: TierReport
    not_served: str  # why the owner was not asked; empty: it was


class StorageDesk:
    """`url` is that of the object store."""

    def __init__(self, topics: ServedTopics, url: str) -> None:
        self._topics = topics
        self._metadata = topics.context.metadata
        self._url = url

    @property
    def has_store(self) -> bool:
        return self._topics.context.cloud is not None

    def address(self, key: str) -> str:
        """What other programs call an object: a path if the store is a directory, else a URL."""
        parts = urlsplit(self._url)
        if parts.scheme == "file":
            return f"{normpath(unquote(parts.path))}/{path_of(key)}"
        return f"{self._url.rstrip('/')}/{key}"

    # --- list ---------------------------------------------------------------------------------------------

    async def descriptors(self, name: TopicName) -> Sequence[Descriptor]:
        """In order; none of a topic that is not known. Raises ObjectDamaged, or Unreachable while the store is away."""
        topic = self._topics.get(name)
        if keeps_history(topic) and topic.storage is not None:
            return (await topic.storage.tier.load_manifest())[:]
        cloud = self._topics.context.cloud
        if cloud is None:
            return []
        return await all_descriptors(cloud.store, await read_state(self._metadata, name))

    def tiers(self, topic: ServedTopic) -> Tiers:
        """From what is in memory: calls no store."""
        objects = topic.storage.tier.objects if topic.storage else ()
        described = OffsetRanges((each.start_offset, each.end) for each in objects)
        return Tiers(
            topic.first_offset,
            topic.head,
            topic.storage is not None,
            list(described),
            [OffsetRange(first, end) for first, end in topic.log.held()],
            topic.log.memory_first,
        )

    async def listing(self, name: TopicName) -> StorageListing:
        """Raises TopicUnknown, ObjectDamaged, Unreachable."""
        topic = self._topics.get(name)
        if topic is None and not await self._topics.exists(name):
            raise TopicUnknown(name)
        state = await read_state(self._metadata, name)
        objects = await self.descriptors(name)
        described = OffsetRanges((each.start_offset, each.end) for each in objects)
        if keeps_history(topic):
            tiers = self.tiers(topic)._replace(cloud=list(described))
        else:
            head = max([state.end, *(each.end for each in objects)])
            tiers = Tiers(state.history.first_offset, head, self._topics.context.cloud is not None, list(described), [])
        only_in_log = [
            gap for first, end in tiers.log for gap in described.gaps(max(first, state.history.first_offset), end)
        ]
        upload_state = self._upload_state(topic) if keeps_history(topic) else None
        keyed = {each.object_id for each in state.keyed}
        return StorageListing(
            name,
            tiers,
            objects,
            sum(each.object_id not in keyed for each in objects) if state.history.manifest else 0,
            only_in_log,
            state.orphans,
            state.voids,
            state.owner.epoch if state.owner else 0,
            state.manifest_key or "",
            upload_state.failing if upload_state else "",
        )

    # --- verify -------------------------------------------------------------------------------------------

    async def verify(self, name: TopicName, *, repair: bool, on_progress: OnProgress) -> Verified:
        """Raises TopicUnknown, and Unreachable if the store does not answer: then nothing is proven.

        A topic that was deleted is known by what it left in the bucket. One that cannot be opened is checked without
        its log.
        """
        cloud = self._topics.context.cloud
        assert cloud is not None, "ask has_store first"
        context, grace_seconds = self._topics.context, cloud.config.garbage_seconds
        verifier = TierVerifier(name, self._metadata, cloud.store, context.work, grace_seconds=grace_seconds)
        topic: ServedTopic | None = None
        not_served = ""
        try:
            found = await self._topics.require(name)
            topic = found if keeps_history(found) else None
        except TopicUnknown:
            if not await self._was_deleted(name):
                raise
            not_served = "the topic was deleted"
        except DanubeError as error:
            not_served = str(error)
        upload_state = self._upload_state(topic) if topic is not None else None
        if topic is None or upload_state is None:
            await verifier.look(None)
            report = await verifier.read(on_progress)
            if repair and verifier.state.owner is not None and verifier.state.owner.deleted:
                await self._remove_deleted(cloud, verifier)
            elif repair:
                report.findings.append(Finding(False, "repair", f"nothing was removed: {not_served}"))
            return Verified(report, not_served)
        tier = upload_state.tier
        async with upload_state.working:
            view = OwnersView(topic.head, topic.log.held(), dict(upload_state.uploads.unreadable), tier.garbage.ages)
            await verifier.look(view)
        report = await verifier.read(on_progress)
        if repair:
            async with upload_state.working:
                await self._remove(cloud, topic, verifier)
        return Verified(report, "")

    async def _remove(self, cloud: Cloud, topic: ServedTopic, verifier: TierVerifier) -> None:
        """Removes what was judged garbage and still is: by what is stored, by what the owner knows, and if it owns."""
        assert topic.storage is not None
        report, tier = verifier.report, topic.storage.tier
        if not _garbage(report, ()):
            return
        await tier.fence()  # still ours, and no descriptor that was given up on comes late
        state = await read_state(self._metadata, topic.name)
        try:
            stored = await all_descriptors(cloud.store, state)
            known = (await tier.load_manifest())[:]
        except ObjectDamaged as error:
            report.findings.append(Finding(False, "repair", f"nothing was removed: {error}"))
            return
        described = {tier.key(each.object_id) for each in (*stored, *known)}
        described |= {state.manifest_key or "", tier.key(tier.history.manifest or "")}
        await self._delete(cloud, report, _garbage(report, described))

    async def _remove_deleted(self, cloud: Cloud, verifier: TierVerifier) -> None:
        """Of a topic that was deleted. One that is created again begins with a newer epoch, so these are not needed."""
        item = await self._metadata.get(keys.owner(verifier.state.topic))
        revision = item.revision if item else 0
        doomed = _garbage(verifier.report, ())
        if await self._metadata.transact([Compare(keys.owner(verifier.state.topic), revision)], []) is None:
            raise Conflict(keys.owner(verifier.state.topic))
        await self._delete(cloud, verifier.report, doomed)

    async def _delete(self, cloud: Cloud, report: TierReport, doomed: Sequence[str]) -> None:
        for key in doomed:
            await cloud.store.delete(key)
            report.removed.append(key)
        if doomed:
            log.info("undescribed objects removed", extra={"topic": report.topic, "objects": len(doomed)})

    async def _was_deleted(self, name: TopicName) -> bool:
        owner = (await read_state(self._metadata, name)).owner
        return owner is not None and owner.deleted

    def _upload_state(self, topic: ServedTopic) -> UploadState | None:
        return topic.storage.uploader.get(topic.name) if topic.storage is not None else None


def _garbage(report: TierReport, described: Sequence[str] | set[str]) -> list[str]:
    return [each.key for each in report.undescribed if each.verdict.fate is Fate.GARBAGE and each.key not in described]
