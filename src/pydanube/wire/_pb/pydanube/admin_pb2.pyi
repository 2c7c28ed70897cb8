from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Lag(_message.Message):
    __slots__ = ("cursor", "head", "lag_messages", "has_lag", "lag_seconds", "catch_up_seconds", "course")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    LAG_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    HAS_LAG_FIELD_NUMBER: _ClassVar[int]
    LAG_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CATCH_UP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COURSE_FIELD_NUMBER: _ClassVar[int]
    cursor: int
    head: int
    lag_messages: int
    has_lag: bool
    lag_seconds: float
    catch_up_seconds: float
    course: str
    def __init__(self, cursor: _Optional[int] = ..., head: _Optional[int] = ..., lag_messages: _Optional[int] = ..., has_lag: bool = ..., lag_seconds: _Optional[float] = ..., catch_up_seconds: _Optional[float] = ..., course: _Optional[str] = ...) -> None: ...

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
    __slots__ = ("sentence", "lag", "consumers", "unacked", "unacked_max", "undispatched", "waiting", "retry_in_ms", "blocked_offset", "blocked_key", "blocked_keys", "dead_lettering", "rate_limited_for_ms", "first_offset", "missing", "heartbeat", "tiers")
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
    TIERS_FIELD_NUMBER: _ClassVar[int]
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
    tiers: Tiers
    def __init__(self, sentence: _Optional[str] = ..., lag: _Optional[_Union[Lag, _Mapping]] = ..., consumers: _Optional[int] = ..., unacked: _Optional[int] = ..., unacked_max: _Optional[int] = ..., undispatched: _Optional[int] = ..., waiting: _Optional[int] = ..., retry_in_ms: _Optional[int] = ..., blocked_offset: _Optional[int] = ..., blocked_key: _Optional[str] = ..., blocked_keys: _Optional[int] = ..., dead_lettering: _Optional[int] = ..., rate_limited_for_ms: _Optional[int] = ..., first_offset: _Optional[int] = ..., missing: _Optional[int] = ..., heartbeat: _Optional[str] = ..., tiers: _Optional[_Union[Tiers, _Mapping]] = ...) -> None: ...

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
    __slots__ = ("topic", "from_broker", "to_broker", "started_at_us", "phases", "failure", "notes")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    FROM_BROKER_FIELD_NUMBER: _ClassVar[int]
    TO_BROKER_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_US_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    topic: str
    from_broker: int
    to_broker: int
    started_at_us: int
    phases: _containers.RepeatedCompositeFieldContainer[Phase]
    failure: str
    notes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, topic: _Optional[str] = ..., from_broker: _Optional[int] = ..., to_broker: _Optional[int] = ..., started_at_us: _Optional[int] = ..., phases: _Optional[_Iterable[_Union[Phase, _Mapping]]] = ..., failure: _Optional[str] = ..., notes: _Optional[_Iterable[str]] = ...) -> None: ...

class Phase(_message.Message):
    __slots__ = ("name", "duration_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    duration_ms: float
    def __init__(self, name: _Optional[str] = ..., duration_ms: _Optional[float] = ...) -> None: ...

class UnloadTopicRequest(_message.Message):
    __slots__ = ("topic", "to_broker", "wait", "timeout_seconds")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    TO_BROKER_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    to_broker: int
    wait: bool
    timeout_seconds: int
    def __init__(self, topic: _Optional[str] = ..., to_broker: _Optional[int] = ..., wait: bool = ..., timeout_seconds: _Optional[int] = ...) -> None: ...

class UnloadTopicResponse(_message.Message):
    __slots__ = ("progress", "result")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    progress: UnloadProgress
    result: UnloadResult
    def __init__(self, progress: _Optional[_Union[UnloadProgress, _Mapping]] = ..., result: _Optional[_Union[UnloadResult, _Mapping]] = ...) -> None: ...

class UnloadProgress(_message.Message):
    __slots__ = ("topic", "sentence")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    topic: str
    sentence: str
    def __init__(self, topic: _Optional[str] = ..., sentence: _Optional[str] = ...) -> None: ...

class UnloadResult(_message.Message):
    __slots__ = ("topic", "from_broker", "to_broker", "phases", "failure", "notes")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    FROM_BROKER_FIELD_NUMBER: _ClassVar[int]
    TO_BROKER_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    topic: str
    from_broker: int
    to_broker: int
    phases: _containers.RepeatedCompositeFieldContainer[Phase]
    failure: str
    notes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, topic: _Optional[str] = ..., from_broker: _Optional[int] = ..., to_broker: _Optional[int] = ..., phases: _Optional[_Iterable[_Union[Phase, _Mapping]]] = ..., failure: _Optional[str] = ..., notes: _Optional[_Iterable[str]] = ...) -> None: ...

class RebalancingHistoryRequest(_message.Message):
    __slots__ = ("count_max",)
    COUNT_MAX_FIELD_NUMBER: _ClassVar[int]
    count_max: int
    def __init__(self, count_max: _Optional[int] = ...) -> None: ...

class RebalancingHistoryResponse(_message.Message):
    __slots__ = ("moves",)
    MOVES_FIELD_NUMBER: _ClassVar[int]
    moves: _containers.RepeatedCompositeFieldContainer[RebalancingMove]
    def __init__(self, moves: _Optional[_Iterable[_Union[RebalancingMove, _Mapping]]] = ...) -> None: ...

class RebalancingMove(_message.Message):
    __slots__ = ("topic", "from_broker", "to_broker", "estimated_load", "reason", "time_ms")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    FROM_BROKER_FIELD_NUMBER: _ClassVar[int]
    TO_BROKER_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_LOAD_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    from_broker: int
    to_broker: int
    estimated_load: float
    reason: str
    time_ms: int
    def __init__(self, topic: _Optional[str] = ..., from_broker: _Optional[int] = ..., to_broker: _Optional[int] = ..., estimated_load: _Optional[float] = ..., reason: _Optional[str] = ..., time_ms: _Optional[int] = ...) -> None: ...

class TopicStateRequest(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: str
    def __init__(self, topic: _Optional[str] = ...) -> None: ...

class TopicStateResponse(_message.Message):
    __slots__ = ("topic", "state", "sentence", "phase", "broker_id", "to_broker", "epoch", "orphans", "live", "waits", "heartbeat")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    BROKER_ID_FIELD_NUMBER: _ClassVar[int]
    TO_BROKER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ORPHANS_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    topic: str
    state: str
    sentence: str
    phase: str
    broker_id: int
    to_broker: int
    epoch: int
    orphans: _containers.RepeatedCompositeFieldContainer[OrphanState]
    live: Live
    waits: bool
    heartbeat: str
    def __init__(self, topic: _Optional[str] = ..., state: _Optional[str] = ..., sentence: _Optional[str] = ..., phase: _Optional[str] = ..., broker_id: _Optional[int] = ..., to_broker: _Optional[int] = ..., epoch: _Optional[int] = ..., orphans: _Optional[_Iterable[_Union[OrphanState, _Mapping]]] = ..., live: _Optional[_Union[Live, _Mapping]] = ..., waits: bool = ..., heartbeat: _Optional[str] = ...) -> None: ...

class SetOnCrashRequest(_message.Message):
    __slots__ = ("topic", "wait")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    topic: str
    wait: bool
    def __init__(self, topic: _Optional[str] = ..., wait: bool = ...) -> None: ...

class SetOnCrashResponse(_message.Message):
    __slots__ = ("topics",)
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    topics: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, topics: _Optional[_Iterable[str]] = ...) -> None: ...

class Live(_message.Message):
    __slots__ = ("first_offset", "head", "producers", "consumers")
    FIRST_OFFSET_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    PRODUCERS_FIELD_NUMBER: _ClassVar[int]
    CONSUMERS_FIELD_NUMBER: _ClassVar[int]
    first_offset: int
    head: int
    producers: int
    consumers: int
    def __init__(self, first_offset: _Optional[int] = ..., head: _Optional[int] = ..., producers: _Optional[int] = ..., consumers: _Optional[int] = ...) -> None: ...

class OrphanState(_message.Message):
    __slots__ = ("first", "end", "broker_id", "epoch", "sentence")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    BROKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    first: int
    end: int
    broker_id: int
    epoch: int
    sentence: str
    def __init__(self, first: _Optional[int] = ..., end: _Optional[int] = ..., broker_id: _Optional[int] = ..., epoch: _Optional[int] = ..., sentence: _Optional[str] = ...) -> None: ...

class DiscardOrphanRequest(_message.Message):
    __slots__ = ("topic", "first")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    topic: str
    first: int
    def __init__(self, topic: _Optional[str] = ..., first: _Optional[int] = ...) -> None: ...

class DiscardOrphanResponse(_message.Message):
    __slots__ = ("first", "end")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    first: int
    end: int
    def __init__(self, first: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Range(_message.Message):
    __slots__ = ("first", "end")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    first: int
    end: int
    def __init__(self, first: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Tiers(_message.Message):
    __slots__ = ("first_offset", "head", "has_cloud", "cloud", "log", "memory_first")
    FIRST_OFFSET_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    HAS_CLOUD_FIELD_NUMBER: _ClassVar[int]
    CLOUD_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIRST_FIELD_NUMBER: _ClassVar[int]
    first_offset: int
    head: int
    has_cloud: bool
    cloud: _containers.RepeatedCompositeFieldContainer[Range]
    log: _containers.RepeatedCompositeFieldContainer[Range]
    memory_first: int
    def __init__(self, first_offset: _Optional[int] = ..., head: _Optional[int] = ..., has_cloud: bool = ..., cloud: _Optional[_Iterable[_Union[Range, _Mapping]]] = ..., log: _Optional[_Iterable[_Union[Range, _Mapping]]] = ..., memory_first: _Optional[int] = ...) -> None: ...

class StorageListRequest(_message.Message):
    __slots__ = ("topic", "summary")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    topic: str
    summary: bool
    def __init__(self, topic: _Optional[str] = ..., summary: bool = ...) -> None: ...

class StorageListResponse(_message.Message):
    __slots__ = ("topic", "tiers", "objects_count", "size_bytes", "objects", "only_in_log", "orphans", "voids", "epoch", "manifest_key", "upload_failing")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_COUNT_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    ONLY_IN_LOG_FIELD_NUMBER: _ClassVar[int]
    ORPHANS_FIELD_NUMBER: _ClassVar[int]
    VOIDS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_KEY_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_FAILING_FIELD_NUMBER: _ClassVar[int]
    topic: str
    tiers: Tiers
    objects_count: int
    size_bytes: int
    objects: _containers.RepeatedCompositeFieldContainer[StoredObject]
    only_in_log: _containers.RepeatedCompositeFieldContainer[Range]
    orphans: _containers.RepeatedCompositeFieldContainer[OrphanRange]
    voids: _containers.RepeatedCompositeFieldContainer[Range]
    epoch: int
    manifest_key: str
    upload_failing: str
    def __init__(self, topic: _Optional[str] = ..., tiers: _Optional[_Union[Tiers, _Mapping]] = ..., objects_count: _Optional[int] = ..., size_bytes: _Optional[int] = ..., objects: _Optional[_Iterable[_Union[StoredObject, _Mapping]]] = ..., only_in_log: _Optional[_Iterable[_Union[Range, _Mapping]]] = ..., orphans: _Optional[_Iterable[_Union[OrphanRange, _Mapping]]] = ..., voids: _Optional[_Iterable[_Union[Range, _Mapping]]] = ..., epoch: _Optional[int] = ..., manifest_key: _Optional[str] = ..., upload_failing: _Optional[str] = ...) -> None: ...

class StoredObject(_message.Message):
    __slots__ = ("first", "end", "key", "url", "size_bytes", "etag", "format", "min_publish_time_us", "max_publish_time_us", "max_append_time_us", "epoch", "created_at", "in_manifest")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    MIN_PUBLISH_TIME_US_FIELD_NUMBER: _ClassVar[int]
    MAX_PUBLISH_TIME_US_FIELD_NUMBER: _ClassVar[int]
    MAX_APPEND_TIME_US_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    IN_MANIFEST_FIELD_NUMBER: _ClassVar[int]
    first: int
    end: int
    key: str
    url: str
    size_bytes: int
    etag: str
    format: str
    min_publish_time_us: int
    max_publish_time_us: int
    max_append_time_us: int
    epoch: int
    created_at: int
    in_manifest: bool
    def __init__(self, first: _Optional[int] = ..., end: _Optional[int] = ..., key: _Optional[str] = ..., url: _Optional[str] = ..., size_bytes: _Optional[int] = ..., etag: _Optional[str] = ..., format: _Optional[str] = ..., min_publish_time_us: _Optional[int] = ..., max_publish_time_us: _Optional[int] = ..., max_append_time_us: _Optional[int] = ..., epoch: _Optional[int] = ..., created_at: _Optional[int] = ..., in_manifest: bool = ...) -> None: ...

class OrphanRange(_message.Message):
    __slots__ = ("first", "end", "broker_id", "epoch")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    BROKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    first: int
    end: int
    broker_id: int
    epoch: int
    def __init__(self, first: _Optional[int] = ..., end: _Optional[int] = ..., broker_id: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class StorageVerifyRequest(_message.Message):
    __slots__ = ("topic", "repair")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    REPAIR_FIELD_NUMBER: _ClassVar[int]
    topic: str
    repair: bool
    def __init__(self, topic: _Optional[str] = ..., repair: bool = ...) -> None: ...

class StorageVerifyResponse(_message.Message):
    __slots__ = ("progress", "report")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    progress: VerifyProgress
    report: VerifyReport
    def __init__(self, progress: _Optional[_Union[VerifyProgress, _Mapping]] = ..., report: _Optional[_Union[VerifyReport, _Mapping]] = ...) -> None: ...

class VerifyProgress(_message.Message):
    __slots__ = ("objects_done", "objects", "bytes_done", "bytes")
    OBJECTS_DONE_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    objects_done: int
    objects: int
    bytes_done: int
    bytes: int
    def __init__(self, objects_done: _Optional[int] = ..., objects: _Optional[int] = ..., bytes_done: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class VerifyReport(_message.Message):
    __slots__ = ("topic", "epoch", "first_offset", "head", "objects", "size_bytes", "messages", "places", "findings", "undescribed", "removed", "not_served")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_OFFSET_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    UNDESCRIBED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    NOT_SERVED_FIELD_NUMBER: _ClassVar[int]
    topic: str
    epoch: int
    first_offset: int
    head: int
    objects: int
    size_bytes: int
    messages: int
    places: _containers.RepeatedCompositeFieldContainer[Place]
    findings: _containers.RepeatedCompositeFieldContainer[Finding]
    undescribed: _containers.RepeatedCompositeFieldContainer[Undescribed]
    removed: _containers.RepeatedScalarFieldContainer[str]
    not_served: str
    def __init__(self, topic: _Optional[str] = ..., epoch: _Optional[int] = ..., first_offset: _Optional[int] = ..., head: _Optional[int] = ..., objects: _Optional[int] = ..., size_bytes: _Optional[int] = ..., messages: _Optional[int] = ..., places: _Optional[_Iterable[_Union[Place, _Mapping]]] = ..., findings: _Optional[_Iterable[_Union[Finding, _Mapping]]] = ..., undescribed: _Optional[_Iterable[_Union[Undescribed, _Mapping]]] = ..., removed: _Optional[_Iterable[str]] = ..., not_served: _Optional[str] = ...) -> None: ...

class Place(_message.Message):
    __slots__ = ("first", "end", "where", "why")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    first: int
    end: int
    where: str
    why: str
    def __init__(self, first: _Optional[int] = ..., end: _Optional[int] = ..., where: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class Finding(_message.Message):
    __slots__ = ("is_problem", "kind", "text", "key", "first", "end")
    IS_PROBLEM_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    is_problem: bool
    kind: str
    text: str
    key: str
    first: int
    end: int
    def __init__(self, is_problem: bool = ..., kind: _Optional[str] = ..., text: _Optional[str] = ..., key: _Optional[str] = ..., first: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Undescribed(_message.Message):
    __slots__ = ("key", "size_bytes", "epoch", "fate", "why")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FATE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    key: str
    size_bytes: int
    epoch: int
    fate: str
    why: str
    def __init__(self, key: _Optional[str] = ..., size_bytes: _Optional[int] = ..., epoch: _Optional[int] = ..., fate: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class GetRetentionRequest(_message.Message):
    __slots__ = ("topic", "namespace")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    topic: str
    namespace: str
    def __init__(self, topic: _Optional[str] = ..., namespace: _Optional[str] = ...) -> None: ...

class SetRetentionRequest(_message.Message):
    __slots__ = ("topic", "namespace", "minutes", "mb", "reset")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    MINUTES_FIELD_NUMBER: _ClassVar[int]
    MB_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    topic: str
    namespace: str
    minutes: int
    mb: int
    reset: bool
    def __init__(self, topic: _Optional[str] = ..., namespace: _Optional[str] = ..., minutes: _Optional[int] = ..., mb: _Optional[int] = ..., reset: bool = ...) -> None: ...

class RetentionResponse(_message.Message):
    __slots__ = ("minutes", "mb", "set_by", "due_objects", "due_first_offset")
    MINUTES_FIELD_NUMBER: _ClassVar[int]
    MB_FIELD_NUMBER: _ClassVar[int]
    SET_BY_FIELD_NUMBER: _ClassVar[int]
    DUE_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    DUE_FIRST_OFFSET_FIELD_NUMBER: _ClassVar[int]
    minutes: int
    mb: int
    set_by: str
    due_objects: int
    due_first_offset: int
    def __init__(self, minutes: _Optional[int] = ..., mb: _Optional[int] = ..., set_by: _Optional[str] = ..., due_objects: _Optional[int] = ..., due_first_offset: _Optional[int] = ...) -> None: ...

class ApplyRetentionRequest(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: str
    def __init__(self, topic: _Optional[str] = ...) -> None: ...

class ApplyRetentionResponse(_message.Message):
    __slots__ = ("first_offset", "removed_objects")
    FIRST_OFFSET_FIELD_NUMBER: _ClassVar[int]
    REMOVED_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    first_offset: int
    removed_objects: int
    def __init__(self, first_offset: _Optional[int] = ..., removed_objects: _Optional[int] = ...) -> None: ...

class NamespaceLimits(_message.Message):
    __slots__ = ("max_producers_per_topic", "max_subscriptions_per_topic", "max_consumers_per_topic", "max_consumers_per_subscription", "max_publish_rate", "max_subscription_dispatch_rate", "max_message_size")
    MAX_PRODUCERS_PER_TOPIC_FIELD_NUMBER: _ClassVar[int]
    MAX_SUBSCRIPTIONS_PER_TOPIC_FIELD_NUMBER: _ClassVar[int]
    MAX_CONSUMERS_PER_TOPIC_FIELD_NUMBER: _ClassVar[int]
    MAX_CONSUMERS_PER_SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    MAX_PUBLISH_RATE_FIELD_NUMBER: _ClassVar[int]
    MAX_SUBSCRIPTION_DISPATCH_RATE_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    max_producers_per_topic: int
    max_subscriptions_per_topic: int
    max_consumers_per_topic: int
    max_consumers_per_subscription: int
    max_publish_rate: int
    max_subscription_dispatch_rate: int
    max_message_size: int
    def __init__(self, max_producers_per_topic: _Optional[int] = ..., max_subscriptions_per_topic: _Optional[int] = ..., max_consumers_per_topic: _Optional[int] = ..., max_consumers_per_subscription: _Optional[int] = ..., max_publish_rate: _Optional[int] = ..., max_subscription_dispatch_rate: _Optional[int] = ..., max_message_size: _Optional[int] = ...) -> None: ...

class SetNamespaceLimitsRequest(_message.Message):
    __slots__ = ("namespace", "limits", "reset")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    limits: NamespaceLimits
    reset: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, namespace: _Optional[str] = ..., limits: _Optional[_Union[NamespaceLimits, _Mapping]] = ..., reset: _Optional[_Iterable[str]] = ...) -> None: ...

class NamespaceLimitsResponse(_message.Message):
    __slots__ = ("changes", "limits", "set_here", "topics")
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    SET_HERE_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    changes: _containers.RepeatedCompositeFieldContainer[Change]
    limits: NamespaceLimits
    set_here: _containers.RepeatedScalarFieldContainer[str]
    topics: int
    def __init__(self, changes: _Optional[_Iterable[_Union[Change, _Mapping]]] = ..., limits: _Optional[_Union[NamespaceLimits, _Mapping]] = ..., set_here: _Optional[_Iterable[str]] = ..., topics: _Optional[int] = ...) -> None: ...

class Change(_message.Message):
    __slots__ = ("name", "before", "after")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    name: str
    before: str
    after: str
    def __init__(self, name: _Optional[str] = ..., before: _Optional[str] = ..., after: _Optional[str] = ...) -> None: ...

class ChangeFailurePolicyRequest(_message.Message):
    __slots__ = ("topic", "subscription", "max_redelivery_count", "ack_timeout_ms", "base_redelivery_delay_ms", "max_redelivery_delay_ms", "backoff_strategy", "dead_letter_topic", "poison_policy")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    MAX_REDELIVERY_COUNT_FIELD_NUMBER: _ClassVar[int]
    ACK_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    BASE_REDELIVERY_DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_REDELIVERY_DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    BACKOFF_STRATEGY_FIELD_NUMBER: _ClassVar[int]
    DEAD_LETTER_TOPIC_FIELD_NUMBER: _ClassVar[int]
    POISON_POLICY_FIELD_NUMBER: _ClassVar[int]
    topic: str
    subscription: str
    max_redelivery_count: int
    ack_timeout_ms: int
    base_redelivery_delay_ms: int
    max_redelivery_delay_ms: int
    backoff_strategy: str
    dead_letter_topic: str
    poison_policy: str
    def __init__(self, topic: _Optional[str] = ..., subscription: _Optional[str] = ..., max_redelivery_count: _Optional[int] = ..., ack_timeout_ms: _Optional[int] = ..., base_redelivery_delay_ms: _Optional[int] = ..., max_redelivery_delay_ms: _Optional[int] = ..., backoff_strategy: _Optional[str] = ..., dead_letter_topic: _Optional[str] = ..., poison_policy: _Optional[str] = ...) -> None: ...

class ChangeFailurePolicyResponse(_message.Message):
    __slots__ = ("changes",)
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    changes: _containers.RepeatedCompositeFieldContainer[Change]
    def __init__(self, changes: _Optional[_Iterable[_Union[Change, _Mapping]]] = ...) -> None: ...

class ReadCatalogRequest(_message.Message):
    __slots__ = ("method", "target", "headers")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    METHOD_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    method: str
    target: str
    headers: _containers.ScalarMap[str, str]
    def __init__(self, method: _Optional[str] = ..., target: _Optional[str] = ..., headers: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ReadCatalogResponse(_message.Message):
    __slots__ = ("code", "headers", "body")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CODE_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    code: int
    headers: _containers.ScalarMap[str, str]
    body: bytes
    def __init__(self, code: _Optional[int] = ..., headers: _Optional[_Mapping[str, str]] = ..., body: _Optional[bytes] = ...) -> None: ...
