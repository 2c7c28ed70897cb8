"""History over gRPC: the reference's StorageService on the client port, and our own calls on the admin port."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from pydanube.api.grpc.adapter import RpcRefusal
from pydanube.broker.service import Broker
from pydanube.broker.topic import Topic
from pydanube.core.history.tiers import Descriptor
from pydanube.core.names import NamespaceName, TopicName
from pydanube.errors import DanubeError, InvalidName
from pydanube.history.retention import RetentionChange, RetentionDesk, Rule
from pydanube.history.storage import StorageDesk, StorageListing, Tiers, Verified
from pydanube.history.verify import VerifyProgress
from pydanube.wire._pb.danube import DanubeApi_pb2 as api_pb
from pydanube.wire._pb.pydanube import admin_pb2 as pb
from pydanube.wire.status import Code

SEGMENTS_MAX: Final = 10_000  # in one answer, which must fit 4 MiB; the caller asks for more with `after_offset`
PROGRESS_BYTES: Final = 32 * 1024 * 1024  # between two reports of it
NO_STORE: Final = "this broker has no object store: start it with --storage-url, or set storage.url"


class StorageService:
    def __init__(self, broker: Broker) -> None:
        self._storage = StorageDesk(broker.topics, broker.config.objects_url)

    async def ListSegmentDescriptors(
        self, request: api_pb.ListSegmentDescriptorsRequest
    ) -> api_pb.ListSegmentDescriptorsResponse:
        """Ascending. The segment that holds `after_offset` itself is not repeated unless more of it lies behind."""
        try:
            name = TopicName(f"/{request.topic.removeprefix('/')}")
        except InvalidName:
            return api_pb.ListSegmentDescriptorsResponse()  # no topic can have this name
        try:
            found = await self._storage.descriptors(name)
        except DanubeError as error:
            raise RpcRefusal(Code.INTERNAL, str(error)) from error
        after = request.after_offset
        wanted = [each for each in found if after == 0 or each.end_offset > after]
        return api_pb.ListSegmentDescriptorsResponse(segments=[_segment(each) for each in wanted[:SEGMENTS_MAX]])


def _segment(described: Descriptor) -> api_pb.SegmentDescriptorProto:
    return api_pb.SegmentDescriptorProto(
        segment_id=described.object_id,
        start_offset=described.start_offset,
        end_offset=described.end_offset,
        size=described.size,
        etag=described.etag,
        created_at=described.created_at,
    )


class StorageCalls:
    """The part of `pydanube.admin.v1` that is about history."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._topics = broker.topics
        self._storage = StorageDesk(broker.topics, broker.config.objects_url)
        self._retention = RetentionDesk(broker.topics, broker.configured_policy)

    # --- objects ------------------------------------------------------------------------------------------

    async def StorageList(self, request: pb.StorageListRequest) -> pb.StorageListResponse:
        name = TopicName(request.topic)
        if (found := self._topics.get(name)) is not None and not found.reliable:
            raise _keeps_nothing(name)
        if request.summary:
            topic = await self._reliable(name)
            return pb.StorageListResponse(topic=name, tiers=tiers_message(self._storage.tiers(topic)))
        listing = await self._storage.listing(name)
        return pb.StorageListResponse(
            topic=listing.topic,
            tiers=tiers_message(listing.tiers),
            objects_count=len(listing.objects),
            size_bytes=sum(each.size for each in listing.objects),
            objects=self._objects(listing),
            only_in_log=_ranges(listing.only_in_log),
            orphans=[
                pb.OrphanRange(first=each.start, end=each.end, broker_id=each.broker_id, epoch=each.epoch)
                for each in listing.orphans
            ],
            voids=_ranges(listing.voids),
            epoch=listing.epoch,
            manifest_key=listing.manifest_key,
            upload_failing=listing.upload_failing,
        )

    def _objects(self, listing: StorageListing) -> Iterable[pb.StoredObject]:
        prefix = f"{listing.topic.removeprefix('/')}/"
        for number, each in enumerate(listing.objects):
            key = prefix + each.object_id
            yield pb.StoredObject(
                first=each.start_offset,
                end=each.end,
                key=key,
                url=self._storage.address(key),
                size_bytes=each.size,
                etag=each.etag,
                format=each.format,
                min_publish_time_us=each.min_publish_time,
                max_publish_time_us=each.max_publish_time,
                max_append_time_us=each.max_append_time,
                epoch=each.epoch,
                created_at=each.created_at,
                in_manifest=number < listing.in_manifest,
            )

    async def StorageVerify(self, request: pb.StorageVerifyRequest, context: Any) -> None:
        name = TopicName(request.topic)
        if not self._storage.has_store:
            raise RpcRefusal(Code.FAILED_PRECONDITION, NO_STORE)
        if (found := self._topics.get(name)) is not None and not found.reliable:
            raise _keeps_nothing(name)
        told = VerifyProgress(-1, 0, 0, 0)

        async def on_progress(progress: VerifyProgress) -> None:
            nonlocal told
            moved = progress.bytes_done - told.bytes_done
            if progress.objects_done == told.objects_done and moved < PROGRESS_BYTES:
                return
            told = progress
            await context.write(pb.StorageVerifyResponse(progress=pb.VerifyProgress(**progress._asdict())))

        verified = await self._storage.verify(name, repair=request.repair, on_progress=on_progress)
        await context.write(pb.StorageVerifyResponse(report=_report(verified)))

    # --- retention ----------------------------------------------------------------------------------------

    async def GetRetention(self, request: pb.GetRetentionRequest) -> pb.RetentionResponse:
        if request.WhichOneof("of") == "namespace":
            return _rule(await self._retention.of_namespace(NamespaceName(request.namespace)))
        topic = await self._reliable(request.topic)
        return await self._with_due(topic, await self._retention.of_topic(topic))

    async def SetRetention(self, request: pb.SetRetentionRequest) -> pb.RetentionResponse:
        minutes = request.minutes if request.HasField("minutes") else None
        mb = request.mb if request.HasField("mb") else None
        if request.reset == (minutes is not None or mb is not None):
            raise RpcRefusal(Code.INVALID_ARGUMENT, "say how many minutes or MB to keep, or reset, and not both")
        change = RetentionChange(minutes, mb, request.reset)
        if request.WhichOneof("of") == "namespace":
            return _rule(await self._retention.set_namespace(NamespaceName(request.namespace), change))
        topic = await self._reliable(request.topic)
        return await self._with_due(topic, await self._retention.set_topic(topic, change))

    async def ApplyRetention(self, request: pb.ApplyRetentionRequest) -> pb.ApplyRetentionResponse:
        topic = await self._reliable(request.topic)
        if topic.storage is None:
            raise RpcRefusal(Code.FAILED_PRECONDITION, NO_STORE)
        first_offset, removed = await self._retention.apply(topic)
        return pb.ApplyRetentionResponse(first_offset=first_offset, removed_objects=removed)

    async def _with_due(self, topic: Topic, rule: Rule) -> pb.RetentionResponse:
        answer = _rule(rule)
        due = await self._retention.due(topic)
        answer.due_objects = due.objects
        if due.first_offset is not None:
            answer.due_first_offset = due.first_offset
        return answer

    async def _reliable(self, name: str) -> Topic:
        topic = await self._topics.require(TopicName(name))
        if not topic.reliable:
            raise _keeps_nothing(topic.name)
        return topic


def _keeps_nothing(name: str) -> RpcRefusal:
    return RpcRefusal(
        Code.FAILED_PRECONDITION, f"topic {name} is not reliable: it keeps no messages, so it has no history"
    )


def tiers_message(tiers: Tiers) -> pb.Tiers:
    return pb.Tiers(
        first_offset=tiers.first_offset,
        head=tiers.head,
        has_cloud=tiers.has_cloud,
        cloud=_ranges(tiers.cloud),
        log=_ranges(tiers.log),
        memory_first=tiers.memory_first,
    )


def _ranges(ranges: Sequence[tuple[int, int]]) -> list[pb.Range]:
    return [pb.Range(first=first, end=end) for first, end in ranges]


def _rule(rule: Rule) -> pb.RetentionResponse:
    return pb.RetentionResponse(minutes=rule.minutes, mb=rule.mb, set_by=rule.set_by)


def _report(verified: Verified) -> pb.VerifyReport:
    report = verified.report
    return pb.VerifyReport(
        topic=report.topic,
        epoch=report.epoch,
        first_offset=report.first_offset,
        head=report.head,
        objects=report.objects,
        size_bytes=report.size_bytes,
        messages=report.messages,
        places=[
            pb.Place(first=each.first, end=each.end, where=each.where.value, why=each.why) for each in report.places
        ],
        findings=[pb.Finding(**each._asdict()) for each in report.findings],
        undescribed=[
            pb.Undescribed(
                key=each.key,
                size_bytes=each.size_bytes,
                epoch=each.epoch,
                fate=each.verdict.fate.value,
                why=each.verdict.why,
            )
            for each in report.undescribed
        ],
        removed=report.removed,
        not_served=verified.not_served,
    )
