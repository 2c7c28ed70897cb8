"""The gRPC service SchemaRegistry, on both ports: subjects from any broker, a topic's schema from its owner.

What a topic has is its owner's to change, so those calls are passed on to it (`forward.py`): when the answer comes, the
change is in force for every producer that is open.
"""

from __future__ import annotations

from pydanube.api.grpc.adapter import RpcRefusal
from pydanube.broker.overview import Overview
from pydanube.broker.schemas import SchemaRegistry
from pydanube.broker.service import Broker
from pydanube.core.names import TopicName
from pydanube.core.schemas.enforcing import TopicSchema
from pydanube.core.schemas.kinds import policy, subject_name
from pydanube.core.schemas.refusals import SchemaUnknown
from pydanube.core.schemas.subjects import SchemaVersion, SubjectRecord
from pydanube.errors import Refused, TopicUnknown
from pydanube.wire._pb.danube import SchemaRegistry_pb2 as pb
from pydanube.wire.status import Code


class SchemaCalls:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._topics = broker.topics
        self._schemas: SchemaRegistry = broker.schemas

    # --- subjects -----------------------------------------------------------------------------------

    async def RegisterSchema(self, request: pb.RegisterSchemaRequest) -> pb.RegisterSchemaResponse:
        done = await self._schemas.register(
            request.subject,
            request.schema_type,
            request.schema_definition,
            description=request.description,
            created_by=request.created_by,
            tags=list(request.tags),
        )
        return pb.RegisterSchemaResponse(
            schema_id=done.record.schema_id,
            version=done.version,
            is_new_version=done.is_new,
            fingerprint=done.fingerprint,
        )

    async def GetSchema(self, request: pb.GetSchemaRequest) -> pb.GetSchemaResponse:
        """A deleted version too: messages refer to it."""
        record = await self._schemas.of_id(request.schema_id)
        number = request.version if request.HasField("version") else None
        return _schema(record, await self._schemas.version(record, number))

    async def GetLatestSchema(self, request: pb.GetLatestSchemaRequest) -> pb.GetSchemaResponse:
        record = await self._schemas.record(request.subject)
        return _schema(record, await self._schemas.version(record))

    async def ListVersions(self, request: pb.ListVersionsRequest) -> pb.ListVersionsResponse:
        record = await self._schemas.record(request.subject)
        versions = [
            pb.SchemaVersionInfo(
                version=each.number,
                created_at=each.created_at,
                created_by=each.created_by,
                description=each.description,
                fingerprint=each.fingerprint,
                schema_id=record.schema_id,
            )
            for each in await self._schemas.versions(record)
        ]
        return pb.ListVersionsResponse(versions=versions)

    async def ListSubjects(self, request: pb.ListSubjectsRequest) -> pb.ListSubjectsResponse:
        subjects = [
            pb.SubjectSummary(
                subject=each.subject,
                schema_type=each.type.value,
                latest_version=each.latest,
                compatibility_mode=each.compatibility.mode.value,
                schema_id=each.schema_id,
                tags=each.tags,
            )
            for each in await self._schemas.subjects()
        ]
        return pb.ListSubjectsResponse(subjects=subjects)

    async def CheckCompatibility(self, request: pb.CheckCompatibilityRequest) -> pb.CheckCompatibilityResponse:
        mode = request.compatibility_mode if request.HasField("compatibility_mode") else None
        if mode == "":
            raise RpcRefusal(Code.INVALID_ARGUMENT, "compatibility_mode is empty: leave it out for the subject's own")
        found = await self._schemas.check(request.subject, request.schema_type, request.new_schema_definition, mode)
        return pb.CheckCompatibilityResponse(is_compatible=not found, errors=[str(each) for each in found])

    async def DeleteSchemaVersion(self, request: pb.DeleteSchemaVersionRequest) -> pb.DeleteSchemaVersionResponse:
        try:
            await self._schemas.delete_version(request.subject, request.version)
        except SchemaUnknown:
            raise
        except Refused as error:
            raise RpcRefusal(Code.FAILED_PRECONDITION, str(error)) from error
        return pb.DeleteSchemaVersionResponse(
            success=True, message=f"Deleted version {request.version} for subject {request.subject}"
        )

    async def SetCompatibilityMode(self, request: pb.SetCompatibilityModeRequest) -> pb.SetCompatibilityModeResponse:
        asked = await self._schemas.set_compatibility(request.subject, request.compatibility_mode)
        return pb.SetCompatibilityModeResponse(
            success=True, message=f"Set compatibility mode to {asked} for subject {request.subject}"
        )

    # --- topics -------------------------------------------------------------------------------------

    async def ConfigureTopicSchema(self, request: pb.ConfigureTopicSchemaRequest) -> pb.ConfigureTopicSchemaResponse:
        name, asked = TopicName(request.topic_name), policy(request.validation_policy)
        if await self._schemas.find(subject_name(request.schema_subject)) is None:
            raise SchemaUnknown(f"schema subject {request.schema_subject}")
        topic = await self._topics.require(name)
        await topic.set_schema(TopicSchema(request.schema_subject, asked, request.enable_payload_validation))
        return pb.ConfigureTopicSchemaResponse(
            success=True, message=f"Topic {name} has schema subject {request.schema_subject}, policy {asked}"
        )

    async def UpdateTopicValidationPolicy(
        self, request: pb.UpdateTopicValidationPolicyRequest
    ) -> pb.UpdateTopicValidationPolicyResponse:
        name, asked = TopicName(request.topic_name), policy(request.validation_policy)
        topic = await self._topics.require(name)
        if not await topic.set_schema_policy(asked, checks_payloads=request.enable_payload_validation):
            raise RpcRefusal(
                Code.FAILED_PRECONDITION, f"topic {name} has no schema subject yet: configure one with the policy"
            )
        return pb.UpdateTopicValidationPolicyResponse(success=True, message=f"Topic {name} has policy {asked}")

    async def GetTopicSchemaConfig(self, request: pb.GetTopicSchemaConfigRequest) -> pb.GetTopicSchemaConfigResponse:
        name = TopicName(request.topic_name)
        if not await self._topics.exists(name):
            raise TopicUnknown(name)
        stored = await Overview(self._broker).schema(name)
        record = await self._schemas.find(stored.subject) if stored.subject is not None else None
        return pb.GetTopicSchemaConfigResponse(
            schema_subject=stored.subject or "",
            validation_policy=stored.policy.value,
            enable_payload_validation=stored.checks_payloads,
            schema_id=record.schema_id if record is not None else 0,
        )


def _schema(record: SubjectRecord, version: SchemaVersion) -> pb.GetSchemaResponse:
    return pb.GetSchemaResponse(
        schema_id=record.schema_id,
        version=version.number,
        subject=record.subject,
        schema_type=version.type.value,
        schema_definition=version.definition,
        description=version.description,
        created_at=version.created_at,
        created_by=version.created_by,
        tags=version.tags,
        fingerprint=version.fingerprint,
        compatibility_mode=record.compatibility.mode.value,
    )
