"""The schema registry, a function per call: as `calls.py` for the admin services."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pydanube.client.grpc.connection import GrpcCall
from pydanube.wire._pb.danube import SchemaRegistry_pb2 as pb

REGISTRY: Final = "danube_schema.SchemaRegistry"


def register(
    subject: str, kind: str, definition: bytes, *, description: str = "", tags: Sequence[str] = ()
) -> GrpcCall[pb.RegisterSchemaResponse]:
    request = pb.RegisterSchemaRequest(
        subject=subject, schema_type=kind, schema_definition=definition, description=description, tags=tags
    )
    return GrpcCall(f"{REGISTRY}/RegisterSchema", request, pb.RegisterSchemaResponse, changes=True)


def get(schema_id: int, version: int | None = None) -> GrpcCall[pb.GetSchemaResponse]:
    """Without `version` the latest."""
    request = pb.GetSchemaRequest(schema_id=schema_id, version=version)
    return GrpcCall(f"{REGISTRY}/GetSchema", request, pb.GetSchemaResponse)


def latest(subject: str) -> GrpcCall[pb.GetSchemaResponse]:
    return GrpcCall(f"{REGISTRY}/GetLatestSchema", pb.GetLatestSchemaRequest(subject=subject), pb.GetSchemaResponse)


def versions(subject: str) -> GrpcCall[pb.ListVersionsResponse]:
    return GrpcCall(f"{REGISTRY}/ListVersions", pb.ListVersionsRequest(subject=subject), pb.ListVersionsResponse)


def subjects() -> GrpcCall[pb.ListSubjectsResponse]:
    return GrpcCall(f"{REGISTRY}/ListSubjects", pb.ListSubjectsRequest(), pb.ListSubjectsResponse)


def check(
    subject: str, kind: str, definition: bytes, mode: str | None = None
) -> GrpcCall[pb.CheckCompatibilityResponse]:
    """Without `mode` the subject's own."""
    request = pb.CheckCompatibilityRequest(
        subject=subject, schema_type=kind, new_schema_definition=definition, compatibility_mode=mode
    )
    return GrpcCall(f"{REGISTRY}/CheckCompatibility", request, pb.CheckCompatibilityResponse)


def set_compatibility(subject: str, mode: str) -> GrpcCall[pb.SetCompatibilityModeResponse]:
    request = pb.SetCompatibilityModeRequest(subject=subject, compatibility_mode=mode)
    return GrpcCall(f"{REGISTRY}/SetCompatibilityMode", request, pb.SetCompatibilityModeResponse, changes=True)


def delete_version(subject: str, version: int) -> GrpcCall[pb.DeleteSchemaVersionResponse]:
    request = pb.DeleteSchemaVersionRequest(subject=subject, version=version)
    return GrpcCall(f"{REGISTRY}/DeleteSchemaVersion", request, pb.DeleteSchemaVersionResponse, changes=True)


def configure_topic(
    topic: str, subject: str, policy: str, *, payloads: bool
) -> GrpcCall[pb.ConfigureTopicSchemaResponse]:
    request = pb.ConfigureTopicSchemaRequest(
        topic_name=topic, schema_subject=subject, validation_policy=policy, enable_payload_validation=payloads
    )
    return GrpcCall(f"{REGISTRY}/ConfigureTopicSchema", request, pb.ConfigureTopicSchemaResponse, changes=True)


def update_policy(topic: str, policy: str, *, payloads: bool) -> GrpcCall[pb.UpdateTopicValidationPolicyResponse]:
    request = pb.UpdateTopicValidationPolicyRequest(
        topic_name=topic, validation_policy=policy, enable_payload_validation=payloads
    )
    path = f"{REGISTRY}/UpdateTopicValidationPolicy"
    return GrpcCall(path, request, pb.UpdateTopicValidationPolicyResponse, changes=True)


def topic_config(topic: str) -> GrpcCall[pb.GetTopicSchemaConfigResponse]:
    request = pb.GetTopicSchemaConfigRequest(topic_name=topic)
    return GrpcCall(f"{REGISTRY}/GetTopicSchemaConfig", request, pb.GetTopicSchemaConfigResponse)
