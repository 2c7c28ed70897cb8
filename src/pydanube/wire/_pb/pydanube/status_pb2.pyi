from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Condition(_message.Message):
    __slots__ = ("name", "severity", "sentence", "todo", "subject", "since_us", "runbook")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SEVERITY_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    TODO_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    SINCE_US_FIELD_NUMBER: _ClassVar[int]
    RUNBOOK_FIELD_NUMBER: _ClassVar[int]
    name: str
    severity: str
    sentence: str
    todo: str
    subject: str
    since_us: int
    runbook: str
    def __init__(self, name: _Optional[str] = ..., severity: _Optional[str] = ..., sentence: _Optional[str] = ..., todo: _Optional[str] = ..., subject: _Optional[str] = ..., since_us: _Optional[int] = ..., runbook: _Optional[str] = ...) -> None: ...

class ClusterStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClusterStatusResponse(_message.Message):
    __slots__ = ("conditions", "brokers", "brokers_alive", "brokers_known", "topics", "topics_unserved", "lag_messages", "orphan_messages_max", "is_standalone")
    CONDITIONS_FIELD_NUMBER: _ClassVar[int]
    BROKERS_FIELD_NUMBER: _ClassVar[int]
    BROKERS_ALIVE_FIELD_NUMBER: _ClassVar[int]
    BROKERS_KNOWN_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    TOPICS_UNSERVED_FIELD_NUMBER: _ClassVar[int]
    LAG_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ORPHAN_MESSAGES_MAX_FIELD_NUMBER: _ClassVar[int]
    IS_STANDALONE_FIELD_NUMBER: _ClassVar[int]
    conditions: _containers.RepeatedCompositeFieldContainer[Condition]
    brokers: _containers.RepeatedCompositeFieldContainer[BrokerState]
    brokers_alive: int
    brokers_known: int
    topics: int
    topics_unserved: int
    lag_messages: Total
    orphan_messages_max: int
    is_standalone: bool
    def __init__(self, conditions: _Optional[_Iterable[_Union[Condition, _Mapping]]] = ..., brokers: _Optional[_Iterable[_Union[BrokerState, _Mapping]]] = ..., brokers_alive: _Optional[int] = ..., brokers_known: _Optional[int] = ..., topics: _Optional[int] = ..., topics_unserved: _Optional[int] = ..., lag_messages: _Optional[_Union[Total, _Mapping]] = ..., orphan_messages_max: _Optional[int] = ..., is_standalone: bool = ...) -> None: ...

class Total(_message.Message):
    __slots__ = ("known", "is_complete")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    IS_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    known: float
    is_complete: bool
    def __init__(self, known: _Optional[float] = ..., is_complete: bool = ...) -> None: ...

class BrokerState(_message.Message):
    __slots__ = ("broker_id", "address", "life", "since_us", "why", "mode", "reason", "is_leader", "topics", "status", "admin_addr", "metrics_addr", "stream_url")
    BROKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    SINCE_US_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    IS_LEADER_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ADMIN_ADDR_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDR_FIELD_NUMBER: _ClassVar[int]
    STREAM_URL_FIELD_NUMBER: _ClassVar[int]
    broker_id: int
    address: str
    life: str
    since_us: int
    why: str
    mode: str
    reason: str
    is_leader: bool
    topics: int
    status: BrokerStatusResponse
    admin_addr: str
    metrics_addr: str
    stream_url: str
    def __init__(self, broker_id: _Optional[int] = ..., address: _Optional[str] = ..., life: _Optional[str] = ..., since_us: _Optional[int] = ..., why: _Optional[str] = ..., mode: _Optional[str] = ..., reason: _Optional[str] = ..., is_leader: bool = ..., topics: _Optional[int] = ..., status: _Optional[_Union[BrokerStatusResponse, _Mapping]] = ..., admin_addr: _Optional[str] = ..., metrics_addr: _Optional[str] = ..., stream_url: _Optional[str] = ...) -> None: ...

class BrokerStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BrokerStatusResponse(_message.Message):
    __slots__ = ("broker_id", "address", "stream_url", "version", "python", "started_us", "cpu_share", "memory_bytes", "disk_used_bytes", "disk_free_bytes", "log_size_bytes", "log_limit_bytes", "upload_lag_seconds", "lease_age_seconds", "publish", "commit", "conditions", "orphans", "orphans_left_out", "lag_messages", "connections", "topics")
    BROKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STREAM_URL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PYTHON_FIELD_NUMBER: _ClassVar[int]
    STARTED_US_FIELD_NUMBER: _ClassVar[int]
    CPU_SHARE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOG_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOG_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_LAG_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    CONDITIONS_FIELD_NUMBER: _ClassVar[int]
    ORPHANS_FIELD_NUMBER: _ClassVar[int]
    ORPHANS_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    LAG_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    broker_id: int
    address: str
    stream_url: str
    version: str
    python: str
    started_us: int
    cpu_share: float
    memory_bytes: int
    disk_used_bytes: int
    disk_free_bytes: int
    log_size_bytes: int
    log_limit_bytes: int
    upload_lag_seconds: float
    lease_age_seconds: float
    publish: Latency
    commit: Latency
    conditions: _containers.RepeatedCompositeFieldContainer[Condition]
    orphans: _containers.RepeatedCompositeFieldContainer[Orphans]
    orphans_left_out: int
    lag_messages: int
    connections: int
    topics: int
    def __init__(self, broker_id: _Optional[int] = ..., address: _Optional[str] = ..., stream_url: _Optional[str] = ..., version: _Optional[str] = ..., python: _Optional[str] = ..., started_us: _Optional[int] = ..., cpu_share: _Optional[float] = ..., memory_bytes: _Optional[int] = ..., disk_used_bytes: _Optional[int] = ..., disk_free_bytes: _Optional[int] = ..., log_size_bytes: _Optional[int] = ..., log_limit_bytes: _Optional[int] = ..., upload_lag_seconds: _Optional[float] = ..., lease_age_seconds: _Optional[float] = ..., publish: _Optional[_Union[Latency, _Mapping]] = ..., commit: _Optional[_Union[Latency, _Mapping]] = ..., conditions: _Optional[_Iterable[_Union[Condition, _Mapping]]] = ..., orphans: _Optional[_Iterable[_Union[Orphans, _Mapping]]] = ..., orphans_left_out: _Optional[int] = ..., lag_messages: _Optional[int] = ..., connections: _Optional[int] = ..., topics: _Optional[int] = ...) -> None: ...

class Latency(_message.Message):
    __slots__ = ("p50_ms", "p95_ms", "p99_ms")
    P50_MS_FIELD_NUMBER: _ClassVar[int]
    P95_MS_FIELD_NUMBER: _ClassVar[int]
    P99_MS_FIELD_NUMBER: _ClassVar[int]
    p50_ms: float
    p95_ms: float
    p99_ms: float
    def __init__(self, p50_ms: _Optional[float] = ..., p95_ms: _Optional[float] = ..., p99_ms: _Optional[float] = ...) -> None: ...

class Orphans(_message.Message):
    __slots__ = ("topic", "ranges", "offsets", "broker_ids")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    BROKER_IDS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    ranges: int
    offsets: int
    broker_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, topic: _Optional[str] = ..., ranges: _Optional[int] = ..., offsets: _Optional[int] = ..., broker_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ListSubscriptionsRequest(_message.Message):
    __slots__ = ("namespace", "topic", "count_max")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    COUNT_MAX_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    topic: str
    count_max: int
    def __init__(self, namespace: _Optional[str] = ..., topic: _Optional[str] = ..., count_max: _Optional[int] = ...) -> None: ...

class ListSubscriptionsResponse(_message.Message):
    __slots__ = ("subscriptions", "left_out", "unknown", "unanswered", "unserved")
    SUBSCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    UNANSWERED_FIELD_NUMBER: _ClassVar[int]
    UNSERVED_FIELD_NUMBER: _ClassVar[int]
    subscriptions: _containers.RepeatedCompositeFieldContainer[SubscriptionState]
    left_out: int
    unknown: _containers.RepeatedCompositeFieldContainer[Unknown]
    unanswered: _containers.RepeatedScalarFieldContainer[str]
    unserved: int
    def __init__(self, subscriptions: _Optional[_Iterable[_Union[SubscriptionState, _Mapping]]] = ..., left_out: _Optional[int] = ..., unknown: _Optional[_Iterable[_Union[Unknown, _Mapping]]] = ..., unanswered: _Optional[_Iterable[str]] = ..., unserved: _Optional[int] = ...) -> None: ...

class SubscriptionState(_message.Message):
    __slots__ = ("topic", "name", "type", "broker_id", "lag_messages", "lag_seconds", "catch_up_seconds", "course", "consumers", "unacked", "waiting", "is_blocked", "missing")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    BROKER_ID_FIELD_NUMBER: _ClassVar[int]
    LAG_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    LAG_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CATCH_UP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COURSE_FIELD_NUMBER: _ClassVar[int]
    CONSUMERS_FIELD_NUMBER: _ClassVar[int]
    UNACKED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    IS_BLOCKED_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    topic: str
    name: str
    type: str
    broker_id: int
    lag_messages: int
    lag_seconds: float
    catch_up_seconds: float
    course: str
    consumers: int
    unacked: int
    waiting: int
    is_blocked: bool
    missing: int
    def __init__(self, topic: _Optional[str] = ..., name: _Optional[str] = ..., type: _Optional[str] = ..., broker_id: _Optional[int] = ..., lag_messages: _Optional[int] = ..., lag_seconds: _Optional[float] = ..., catch_up_seconds: _Optional[float] = ..., course: _Optional[str] = ..., consumers: _Optional[int] = ..., unacked: _Optional[int] = ..., waiting: _Optional[int] = ..., is_blocked: bool = ..., missing: _Optional[int] = ...) -> None: ...

class Unknown(_message.Message):
    __slots__ = ("broker_id", "address", "why", "topics")
    BROKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    broker_id: int
    address: str
    why: str
    topics: int
    def __init__(self, broker_id: _Optional[int] = ..., address: _Optional[str] = ..., why: _Optional[str] = ..., topics: _Optional[int] = ...) -> None: ...

class ListConnectionsRequest(_message.Message):
    __slots__ = ("topic", "count_max")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    COUNT_MAX_FIELD_NUMBER: _ClassVar[int]
    topic: str
    count_max: int
    def __init__(self, topic: _Optional[str] = ..., count_max: _Optional[int] = ...) -> None: ...

class ListConnectionsResponse(_message.Message):
    __slots__ = ("connections", "left_out", "unknown", "unanswered", "unserved")
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    UNANSWERED_FIELD_NUMBER: _ClassVar[int]
    UNSERVED_FIELD_NUMBER: _ClassVar[int]
    connections: _containers.RepeatedCompositeFieldContainer[ConnectionState]
    left_out: int
    unknown: _containers.RepeatedCompositeFieldContainer[Unknown]
    unanswered: _containers.RepeatedScalarFieldContainer[str]
    unserved: int
    def __init__(self, connections: _Optional[_Iterable[_Union[ConnectionState, _Mapping]]] = ..., left_out: _Optional[int] = ..., unknown: _Optional[_Iterable[_Union[Unknown, _Mapping]]] = ..., unanswered: _Optional[_Iterable[str]] = ..., unserved: _Optional[int] = ...) -> None: ...

class ConnectionState(_message.Message):
    __slots__ = ("kind", "name", "topic", "subscription", "address", "client", "protocol", "since_us", "unacked", "rate", "broker_id")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SINCE_US_FIELD_NUMBER: _ClassVar[int]
    UNACKED_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    BROKER_ID_FIELD_NUMBER: _ClassVar[int]
    kind: str
    name: str
    topic: str
    subscription: str
    address: str
    client: str
    protocol: str
    since_us: int
    unacked: int
    rate: float
    broker_id: int
    def __init__(self, kind: _Optional[str] = ..., name: _Optional[str] = ..., topic: _Optional[str] = ..., subscription: _Optional[str] = ..., address: _Optional[str] = ..., client: _Optional[str] = ..., protocol: _Optional[str] = ..., since_us: _Optional[int] = ..., unacked: _Optional[int] = ..., rate: _Optional[float] = ..., broker_id: _Optional[int] = ...) -> None: ...

class ListEventsRequest(_message.Message):
    __slots__ = ("count_max",)
    COUNT_MAX_FIELD_NUMBER: _ClassVar[int]
    count_max: int
    def __init__(self, count_max: _Optional[int] = ...) -> None: ...

class ListEventsResponse(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[Happening]
    def __init__(self, events: _Optional[_Iterable[_Union[Happening, _Mapping]]] = ...) -> None: ...

class Happening(_message.Message):
    __slots__ = ("time_us", "kind", "sentence", "by")
    TIME_US_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    time_us: int
    kind: str
    sentence: str
    by: str
    def __init__(self, time_us: _Optional[int] = ..., kind: _Optional[str] = ..., sentence: _Optional[str] = ..., by: _Optional[str] = ...) -> None: ...

class ForgetBrokerRequest(_message.Message):
    __slots__ = ("broker_id",)
    BROKER_ID_FIELD_NUMBER: _ClassVar[int]
    broker_id: int
    def __init__(self, broker_id: _Optional[int] = ...) -> None: ...

class ForgetBrokerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NoteOrderRequest(_message.Message):
    __slots__ = ("order", "topic", "to_topic", "offset", "count")
    ORDER_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    TO_TOPIC_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    order: str
    topic: str
    to_topic: str
    offset: int
    count: int
    def __init__(self, order: _Optional[str] = ..., topic: _Optional[str] = ..., to_topic: _Optional[str] = ..., offset: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class NoteOrderResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
