"""What operators order is told to the log of what happened: which call, about what, from where.

Every call of the admin services counts that is no question. It is told by the broker that answered the operator, once
it has succeeded, and never holds the answer up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

from google.protobuf.descriptor import MethodDescriptor

from pydanube.api.forward import is_forwarded
from pydanube.broker.service import Broker

QUESTIONS: Final = (
    "Get", "List", "Describe", "Explain", "Peek", "Search", "Find", "Read", "Tail", "Look", "Check", "Validate",
)  # fmt: skip
MORE_QUESTIONS: Final = frozenset(
    {"ClusterStatus", "BrokerStatus", "MovePhases", "TopicState", "RebalancingHistory", "StorageList", "StorageVerify"}
)
FIELDS: Final = (
    "topic", "name", "subscription", "namespace", "broker_id", "node_id", "to_broker", "first", "heartbeat", "reason",
)  # fmt: skip
VALUE_MAX: Final = 100

Told: TypeAlias = Callable[[Any, Any], None]


def is_order(method: MethodDescriptor) -> bool:
    if method.containing_service.name == "Peers":
        return False
    return not method.name.startswith(QUESTIONS) and method.name not in MORE_QUESTIONS


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
            self._broker.events.tell("order", sentence_of(method, request), by)

        return tell


def sentence_of(method: MethodDescriptor, request: Any) -> str:
    """The call and what it was about: `UnloadTopic topic=/default/orders to_broker=17`."""
    present = {field.name for field, _ in request.ListFields()}
    values = [f"{name}={str(getattr(request, name))[:VALUE_MAX]}" for name in FIELDS if name in present]
    return " ".join([method.name, *values])
