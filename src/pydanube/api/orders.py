"""Records what operators order in the log of events: which call, about what, from where.

Every call of the admin services counts that is no question, and of the native protocol what changes a topic or a
subscription for all. The broker that answered records it, once it has succeeded, and never delays the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

from google.protobuf.descriptor import MethodDescriptor

from pydanube.api.grpc.forward import is_forwarded
from pydanube.broker.outbox import Caller
from pydanube.broker.service import Broker
from pydanube.core.names import TopicName
from pydanube.errors import ConfigError
from pydanube.wire._pb.pydanube import status_pb2 as status_pb
from pydanube.wire._pb.pydanube import stream_pb2 as stream_pb
from pydanube.wire.convert import ASKED_BY_HEADER

QUESTIONS: Final = (
    "Get", "List", "Describe", "Explain", "Peek", "Search", "Find", "Read", "Tail", "Look", "Check", "Validate",
)  # fmt: skip
MORE_QUESTIONS: Final = frozenset(
    {"ClusterStatus", "BrokerStatus", "MovePhases", "TopicState", "RebalancingHistory", "StorageList", "StorageVerify"}
)
# What supervisors of pipelines ask all the time, for themselves.
OF_SUPERVISORS: Final = frozenset(
    {"JoinSupervisor", "RenewSupervisor", "LeaveSupervisor", "ClaimPipeline", "ReleasePipeline", "ReportPipeline"}
)
FIELDS: Final = (
    "topic", "name", "base_name", "partitions", "subscription", "namespace", "to_topic", "offset", "count",
    "topic_name", "schema_subject", "validation_policy", "subject", "schema_type", "version", "compatibility_mode",
    "broker_id", "node_id", "to_broker", "first", "heartbeat", "reason", "paused",
)  # fmt: skip
VALUE_MAX: Final = 100
# Of the native protocol, by the admin services' names. What producers and consumers do for themselves is no order, nor
# is `swap_objects`, the daily work of a pipeline.
NATIVE: Final = {
    "create_topic": "CreateTopic",
    "delete_topic": "DeleteTopic",
    "unsubscribe": "Unsubscribe",
    "seek": "SeekSubscription",
    "change_failure_policy": "ChangeFailurePolicy",
}

NOTED: Final = "NoteOrder"  # names what was done by producing and consuming, as a call
NATIVE_NOTED: Final = "note_order"
CALL: Final = re.compile(r"[A-Z][A-Za-z]{1,39}")

Told: TypeAlias = Callable[[Any, Any], None]


def is_order(method: MethodDescriptor) -> bool:
    if method.containing_service.name == "Peers":
        return False
    return not method.name.startswith(QUESTIONS) and method.name not in MORE_QUESTIONS | OF_SUPERVISORS


class Orders:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def told(self, method: MethodDescriptor) -> Told | None:
        """Called with a request that succeeded, and its context; None for a question."""
        if not is_order(method):
            return None

        def tell(request: Any, context: Any) -> None:
            if is_forwarded(context) or getattr(request, "dry_run", False):
                return
            by = unquote(context.peer() or "").removeprefix("ipv4:").removeprefix("ipv6:")
            for_whom = _asked_by(context)
            call = request.order if method.name == NOTED else method.name
            self._broker.events.record("order", sentence_of(call, request), f"{by} ({for_whom})" if for_whom else by)

        return tell


def tell_native(broker: Broker, command: stream_pb.Command, answer: Mapping[str, Any], caller: Caller) -> None:
    """A request of the native protocol succeeded."""
    kind = command.WhichOneof("kind") or ""
    if kind == NATIVE_NOTED:
        broker.events.record("order", sentence_of(command.note_order.order, command.note_order), caller.address)
    elif kind in NATIVE:
        found = answer.get("offset_found")
        where = f" offset={found.offset}" if found is not None else ""
        broker.events.record("order", sentence_of(NATIVE[kind], getattr(command, kind)) + where, caller.address)


def check_noted(request: status_pb.NoteOrderRequest | stream_pb.NoteOrder) -> None:
    """Raises ConfigError and InvalidName: a sentence among the events is made of nothing but names and numbers."""
    if not CALL.fullmatch(request.order):
        raise ConfigError("order", request.order[:VALUE_MAX], "the name of a call, as RedriveLetters")
    for name in (request.topic, *filter(None, [request.to_topic])):
        TopicName(name)


def _asked_by(context: Any) -> str:
    said = next((value for key, value in context.invocation_metadata() or () if key == ASKED_BY_HEADER), b"")
    text = said.decode("utf-8", "replace") if isinstance(said, bytes) else str(said)
    return "".join(sign for sign in text[:VALUE_MAX] if sign.isprintable())


def sentence_of(call: str, request: Any) -> str:
    """The call and what it was about: `UnloadTopic topic=/default/orders to_broker=17`."""
    present = {field.name for field, _ in request.ListFields()}
    values = [f"{name}={str(getattr(request, name))[:VALUE_MAX]}" for name in FIELDS if name in present]
    return " ".join([call, *values])
