from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Lag(_message.Message):
    __slots__ = ("cursor", "head", "lag_messages", "has_lag")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    LAG_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    HAS_LAG_FIELD_NUMBER: _ClassVar[int]
    cursor: int
    head: int
    lag_messages: int
    has_lag: bool
    def __init__(self, cursor: _Optional[int] = ..., head: _Optional[int] = ..., lag_messages: _Optional[int] = ..., has_lag: _Optional[bool] = ...) -> None: ...

class GetSubscriptionLagRequest(_message.Message):
    __slots__ = ("topic", "subscription")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    topic: str
    subscription: str
    def __init__(self, topic: _Optional[str] = ..., subscription: _Optional[str] = ...) -> None: ...

class GetSubscriptionLagResponse(_message.Message):
    __slots__ = ("lag",)
    LAG_FIELD_NUMBER: _ClassVar[int]
    lag: Lag
    def __init__(self, lag: _Optional[_Union[Lag, _Mapping]] = ...) -> None: ...

class ExplainSubscriptionRequest(_message.Message):
    __slots__ = ("topic", "subscription")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    topic: str
    subscription: str
    def __init__(self, topic: _Optional[str] = ..., subscription: _Optional[str] = ...) -> None: ...

class ExplainSubscriptionResponse(_message.Message):
    __slots__ = ("sentence", "lag", "consumers", "unacked", "unacked_max", "undispatched", "waiting", "retry_in_ms", "blocked_offset", "blocked_key", "blocked_keys", "dead_lettering", "rate_limited_for_ms", "first_offset", "missing", "heartbeat")
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    LAG_FIELD_NUMBER: _ClassVar[int]
    CONSUMERS_FIELD_NUMBER: _ClassVar[int]
    UNACKED_FIELD_NUMBER: _ClassVar[int]
    UNACKED_MAX_FIELD_NUMBER: _ClassVar[int]
    UNDISPATCHED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RETRY_IN_MS_FIELD_NUMBER: _ClassVar[int]
    BLOCKED_OFFSET_FIELD_NUMBER: _ClassVar[int]
    BLOCKED_KEY_FIELD_NUMBER: _ClassVar[int]
    BLOCKED_KEYS_FIELD_NUMBER: _ClassVar[int]
    DEAD_LETTERING_FIELD_NUMBER: _ClassVar[int]
    RATE_LIMITED_FOR_MS_FIELD_NUMBER: _ClassVar[int]
    FIRST_OFFSET_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    sentence: str
    lag: Lag
    consumers: int
    unacked: int
    unacked_max: int
    undispatched: int
    waiting: int
    retry_in_ms: int
    blocked_offset: int
    blocked_key: str
    blocked_keys: int
    dead_lettering: int
    rate_limited_for_ms: int
    first_offset: int
    missing: int
    heartbeat: str
    def __init__(self, sentence: _Optional[str] = ..., lag: _Optional[_Union[Lag, _Mapping]] = ..., consumers: _Optional[int] = ..., unacked: _Optional[int] = ..., unacked_max: _Optional[int] = ..., undispatched: _Optional[int] = ..., waiting: _Optional[int] = ..., retry_in_ms: _Optional[int] = ..., blocked_offset: _Optional[int] = ..., blocked_key: _Optional[str] = ..., blocked_keys: _Optional[int] = ..., dead_lettering: _Optional[int] = ..., rate_limited_for_ms: _Optional[int] = ..., first_offset: _Optional[int] = ..., missing: _Optional[int] = ..., heartbeat: _Optional[str] = ...) -> None: ...

class SeekSubscriptionRequest(_message.Message):
    __slots__ = ("topic", "subscription", "earliest", "latest", "offset", "time_us")
    class Earliest(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class Latest(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    EARLIEST_FIELD_NUMBER: _ClassVar[int]
    LATEST_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TIME_US_FIELD_NUMBER: _ClassVar[int]
    topic: str
    subscription: str
    earliest: SeekSubscriptionRequest.Earliest
    latest: SeekSubscriptionRequest.Latest
    offset: int
    time_us: int
    def __init__(self, topic: _Optional[str] = ..., subscription: _Optional[str] = ..., earliest: _Optional[_Union[SeekSubscriptionRequest.Earliest, _Mapping]] = ..., latest: _Optional[_Union[SeekSubscriptionRequest.Latest, _Mapping]] = ..., offset: _Optional[int] = ..., time_us: _Optional[int] = ...) -> None: ...

class SeekSubscriptionResponse(_message.Message):
    __slots__ = ("offset",)
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    offset: int
    def __init__(self, offset: _Optional[int] = ...) -> None: ...

class PeekTopicRequest(_message.Message):
    __slots__ = ("topic", "offset", "count", "payload_max_bytes")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    topic: str
    offset: int
    count: int
    payload_max_bytes: int
    def __init__(self, topic: _Optional[str] = ..., offset: _Optional[int] = ..., count: _Optional[int] = ..., payload_max_bytes: _Optional[int] = ...) -> None: ...

class PeekTopicResponse(_message.Message):
    __slots__ = ("messages", "first_offset", "head")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    FIRST_OFFSET_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[PeekedMessage]
    first_offset: int
    head: int
    def __init__(self, messages: _Optional[_Iterable[_Union[PeekedMessage, _Mapping]]] = ..., first_offset: _Optional[int] = ..., head: _Optional[int] = ...) -> None: ...

class PeekedMessage(_message.Message):
    __slots__ = ("offset", "payload", "payload_size_bytes", "publish_time_us", "append_time_us", "producer_name", "attributes", "schema_id", "schema_version", "routing_key")
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_TIME_US_FIELD_NUMBER: _ClassVar[int]
    APPEND_TIME_US_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_NAME_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_ID_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUTING_KEY_FIELD_NUMBER: _ClassVar[int]
    offset: int
    payload: bytes
    payload_size_bytes: int
    publish_time_us: int
    append_time_us: int
    producer_name: str
    attributes: _containers.ScalarMap[str, str]
    schema_id: int
    schema_version: int
    routing_key: str
    def __init__(self, offset: _Optional[int] = ..., payload: _Optional[bytes] = ..., payload_size_bytes: _Optional[int] = ..., publish_time_us: _Optional[int] = ..., append_time_us: _Optional[int] = ..., producer_name: _Optional[str] = ..., attributes: _Optional[_Mapping[str, str]] = ..., schema_id: _Optional[int] = ..., schema_version: _Optional[int] = ..., routing_key: _Optional[str] = ...) -> None: ...

class SetHeartbeatRequest(_message.Message):
    __slots__ = ("topic", "subscription", "heartbeat")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    topic: str
    subscription: str
    heartbeat: str
    def __init__(self, topic: _Optional[str] = ..., subscription: _Optional[str] = ..., heartbeat: _Optional[str] = ...) -> None: ...

class SetHeartbeatResponse(_message.Message):
    __slots__ = ("heartbeat",)
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    heartbeat: str
    def __init__(self, heartbeat: _Optional[str] = ...) -> None: ...

class MovePhasesRequest(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: str
    def __init__(self, topic: _Optional[str] = ...) -> None: ...

class MovePhasesResponse(_message.Message):
    __slots__ = ("moves",)
    MOVES_FIELD_NUMBER: _ClassVar[int]
    moves: _containers.RepeatedCompositeFieldContainer[Move]
    def __init__(self, moves: _Optional[_Iterable[_Union[Move, _Mapping]]] = ...) -> None: ...

class Move(_message.Message):
    __slots__ = ("topic", "from_broker", "to_broker", "started_at_us", "phases", "failure")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    FROM_BROKER_FIELD_NUMBER: _ClassVar[int]
    TO_BROKER_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_US_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    topic: str
    from_broker: int
    to_broker: int
    started_at_us: int
    phases: _containers.RepeatedCompositeFieldContainer[Phase]
    failure: str
    def __init__(self, topic: _Optional[str] = ..., from_broker: _Optional[int] = ..., to_broker: _Optional[int] = ..., started_at_us: _Optional[int] = ..., phases: _Optional[_Iterable[_Union[Phase, _Mapping]]] = ..., failure: _Optional[str] = ...) -> None: ...

class Phase(_message.Message):
    __slots__ = ("name", "duration_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    duration_ms: int
    def __init__(self, name: _Optional[str] = ..., duration_ms: _Optional[int] = ...) -> None: ...
