from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Code(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CODE_UNSPECIFIED: _ClassVar[Code]
    INTERNAL: _ClassVar[Code]
    REFUSED: _ClassVar[Code]
    PROTOCOL_VIOLATION: _ClassVar[Code]
    INVALID_NAME: _ClassVar[Code]
    INVALID_BATCH: _ClassVar[Code]
    CONFIG_ERROR: _ClassVar[Code]
    OFFSET_OUT_OF_RANGE: _ClassVar[Code]
    OFFSET_TAKEN: _ClassVar[Code]
    OUT_OF_SEQUENCE: _ClassVar[Code]
    PRODUCER_FENCED: _ClassVar[Code]
    SESSION_UNKNOWN: _ClassVar[Code]
    TOPIC_UNKNOWN: _ClassVar[Code]
    TOPIC_EXISTS: _ClassVar[Code]
    NAMESPACE_UNKNOWN: _ClassVar[Code]
    NAMESPACE_EXISTS: _ClassVar[Code]
    NAMESPACE_NOT_EMPTY: _ClassVar[Code]
    DELIVERY_MISMATCH: _ClassVar[Code]
    SCHEMA_MISMATCH: _ClassVar[Code]
    SUBSCRIPTION_UNKNOWN: _ClassVar[Code]
    SUBSCRIPTION_BUSY: _ClassVar[Code]
    PRODUCER_EXISTS: _ClassVar[Code]
    LIMIT_REACHED: _ClassVar[Code]
    MESSAGE_TOO_LARGE: _ClassVar[Code]
    BROKER_UNKNOWN: _ClassVar[Code]
    MOVE_REFUSED: _ClassVar[Code]
    ACK_OUTDATED: _ClassVar[Code]
    NOT_A_TABLE: _ClassVar[Code]
    SCHEMA_UNKNOWN: _ClassVar[Code]
    SUBJECT_MISSING: _ClassVar[Code]
    SCHEMA_INVALID: _ClassVar[Code]
    SCHEMA_INCOMPATIBLE: _ClassVar[Code]
    PARSER_MISSING: _ClassVar[Code]
    SCHEMA_REFUSED: _ClassVar[Code]
    UNAVAILABLE: _ClassVar[Code]
    DISK_FULL: _ClassVar[Code]
    LOG_CLOSED: _ClassVar[Code]
    LEASE_LOST: _ClassVar[Code]
    CONFLICT: _ClassVar[Code]
    UNREACHABLE: _ClassVar[Code]
    NOT_SERVED: _ClassVar[Code]
    OWNERSHIP_LOST: _ClassVar[Code]
    PRODUCER_UNKNOWN: _ClassVar[Code]
    CONSUMER_UNKNOWN: _ClassVar[Code]
    RATE_LIMITED: _ClassVar[Code]
    LOG_FULL: _ClassVar[Code]
    LOG_BUSY: _ClassVar[Code]
    DATA_DAMAGED: _ClassVar[Code]
    DISK_FAILED: _ClassVar[Code]
    LOG_STOPPED: _ClassVar[Code]
    LOG_DAMAGED: _ClassVar[Code]
    TAIL_UNPROVEN: _ClassVar[Code]
    DIRECTORY_IN_USE: _ClassVar[Code]
    FORMAT_TOO_NEW: _ClassVar[Code]
    INVALID_OBJECT: _ClassVar[Code]
    OBJECT_DAMAGED: _ClassVar[Code]
    NODE_ID_IN_USE: _ClassVar[Code]
    MOVE_FAILED: _ClassVar[Code]

class Durability(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DURABILITY_UNSPECIFIED: _ClassVar[Durability]
    MEMORY: _ClassVar[Durability]
    OS: _ClassVar[Durability]
    FSYNC: _ClassVar[Durability]

class Edge(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LATEST: _ClassVar[Edge]
    EARLIEST: _ClassVar[Edge]

class SubscriptionType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXCLUSIVE: _ClassVar[SubscriptionType]
    SHARED: _ClassVar[SubscriptionType]
    FAILOVER: _ClassVar[SubscriptionType]
    KEY_SHARED: _ClassVar[SubscriptionType]
CODE_UNSPECIFIED: Code
INTERNAL: Code
REFUSED: Code
PROTOCOL_VIOLATION: Code
INVALID_NAME: Code
INVALID_BATCH: Code
CONFIG_ERROR: Code
OFFSET_OUT_OF_RANGE: Code
OFFSET_TAKEN: Code
OUT_OF_SEQUENCE: Code
PRODUCER_FENCED: Code
SESSION_UNKNOWN: Code
TOPIC_UNKNOWN: Code
TOPIC_EXISTS: Code
NAMESPACE_UNKNOWN: Code
NAMESPACE_EXISTS: Code
NAMESPACE_NOT_EMPTY: Code
DELIVERY_MISMATCH: Code
SCHEMA_MISMATCH: Code
SUBSCRIPTION_UNKNOWN: Code
SUBSCRIPTION_BUSY: Code
PRODUCER_EXISTS: Code
LIMIT_REACHED: Code
MESSAGE_TOO_LARGE: Code
BROKER_UNKNOWN: Code
MOVE_REFUSED: Code
ACK_OUTDATED: Code
NOT_A_TABLE: Code
SCHEMA_UNKNOWN: Code
SUBJECT_MISSING: Code
SCHEMA_INVALID: Code
SCHEMA_INCOMPATIBLE: Code
PARSER_MISSING: Code
SCHEMA_REFUSED: Code
UNAVAILABLE: Code
DISK_FULL: Code
LOG_CLOSED: Code
LEASE_LOST: Code
CONFLICT: Code
UNREACHABLE: Code
NOT_SERVED: Code
OWNERSHIP_LOST: Code
PRODUCER_UNKNOWN: Code
CONSUMER_UNKNOWN: Code
RATE_LIMITED: Code
LOG_FULL: Code
LOG_BUSY: Code
DATA_DAMAGED: Code
DISK_FAILED: Code
LOG_STOPPED: Code
LOG_DAMAGED: Code
TAIL_UNPROVEN: Code
DIRECTORY_IN_USE: Code
FORMAT_TOO_NEW: Code
INVALID_OBJECT: Code
OBJECT_DAMAGED: Code
NODE_ID_IN_USE: Code
MOVE_FAILED: Code
DURABILITY_UNSPECIFIED: Durability
MEMORY: Durability
OS: Durability
FSYNC: Durability
LATEST: Edge
EARLIEST: Edge
EXCLUSIVE: SubscriptionType
SHARED: SubscriptionType
FAILOVER: SubscriptionType
KEY_SHARED: SubscriptionType

class Command(_message.Message):
    __slots__ = ("request_id", "hello", "welcome", "ping", "pong", "goodbye", "error", "done", "lookup", "located", "moved", "open_producer", "producer_opened", "produce", "receipt", "close_producer", "subscribe", "subscribed", "flow", "deliver", "ack", "nack", "close_consumer", "unsubscribe", "seek", "handed", "fetch", "fetched", "find_offset", "offset_found", "recall", "returned", "create_topic", "delete_topic", "describe_topic", "topic_info", "list_topics", "topic_list", "get_lag", "lag", "describe_storage", "storage_info", "swap_objects", "note_order", "flush_log", "log_flushed", "describe_storages", "storage_infos", "change_failure_policy")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    LOCATED_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    OPEN_PRODUCER_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_OPENED_FIELD_NUMBER: _ClassVar[int]
    PRODUCE_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    CLOSE_PRODUCER_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBE_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBED_FIELD_NUMBER: _ClassVar[int]
    FLOW_FIELD_NUMBER: _ClassVar[int]
    DELIVER_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    NACK_FIELD_NUMBER: _ClassVar[int]
    CLOSE_CONSUMER_FIELD_NUMBER: _ClassVar[int]
    UNSUBSCRIBE_FIELD_NUMBER: _ClassVar[int]
    SEEK_FIELD_NUMBER: _ClassVar[int]
    HANDED_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    FETCHED_FIELD_NUMBER: _ClassVar[int]
    FIND_OFFSET_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FOUND_FIELD_NUMBER: _ClassVar[int]
    RECALL_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    CREATE_TOPIC_FIELD_NUMBER: _ClassVar[int]
    DELETE_TOPIC_FIELD_NUMBER: _ClassVar[int]
    DESCRIBE_TOPIC_FIELD_NUMBER: _ClassVar[int]
    TOPIC_INFO_FIELD_NUMBER: _ClassVar[int]
    LIST_TOPICS_FIELD_NUMBER: _ClassVar[int]
    TOPIC_LIST_FIELD_NUMBER: _ClassVar[int]
    GET_LAG_FIELD_NUMBER: _ClassVar[int]
    LAG_FIELD_NUMBER: _ClassVar[int]
    DESCRIBE_STORAGE_FIELD_NUMBER: _ClassVar[int]
    STORAGE_INFO_FIELD_NUMBER: _ClassVar[int]
    SWAP_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    NOTE_ORDER_FIELD_NUMBER: _ClassVar[int]
    FLUSH_LOG_FIELD_NUMBER: _ClassVar[int]
    LOG_FLUSHED_FIELD_NUMBER: _ClassVar[int]
    DESCRIBE_STORAGES_FIELD_NUMBER: _ClassVar[int]
    STORAGE_INFOS_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FAILURE_POLICY_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    hello: Hello
    welcome: Welcome
    ping: Ping
    pong: Pong
    goodbye: Goodbye
    error: Error
    done: Done
    lookup: Lookup
    located: Located
    moved: Moved
    open_producer: OpenProducer
    producer_opened: ProducerOpened
    produce: Produce
    receipt: Receipt
    close_producer: CloseProducer
    subscribe: Subscribe
    subscribed: Subscribed
    flow: Flow
    deliver: Deliver
    ack: Ack
    nack: Nack
    close_consumer: CloseConsumer
    unsubscribe: Unsubscribe
    seek: Seek
    handed: Handed
    fetch: Fetch
    fetched: Fetched
    find_offset: FindOffset
    offset_found: OffsetFound
    recall: Recall
    returned: Returned
    create_topic: CreateTopic
    delete_topic: DeleteTopic
    describe_topic: DescribeTopic
    topic_info: TopicInfo
    list_topics: ListTopics
    topic_list: TopicList
    get_lag: GetLag
    lag: Lag
    describe_storage: DescribeStorage
    storage_info: StorageInfo
    swap_objects: SwapObjects
    note_order: NoteOrder
    flush_log: FlushLog
    log_flushed: LogFlushed
    describe_storages: DescribeStorages
    storage_infos: StorageInfos
    change_failure_policy: ChangeFailurePolicy
    def __init__(self, request_id: _Optional[int] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., lookup: _Optional[_Union[Lookup, _Mapping]] = ..., located: _Optional[_Union[Located, _Mapping]] = ..., moved: _Optional[_Union[Moved, _Mapping]] = ..., open_producer: _Optional[_Union[OpenProducer, _Mapping]] = ..., producer_opened: _Optional[_Union[ProducerOpened, _Mapping]] = ..., produce: _Optional[_Union[Produce, _Mapping]] = ..., receipt: _Optional[_Union[Receipt, _Mapping]] = ..., close_producer: _Optional[_Union[CloseProducer, _Mapping]] = ..., subscribe: _Optional[_Union[Subscribe, _Mapping]] = ..., subscribed: _Optional[_Union[Subscribed, _Mapping]] = ..., flow: _Optional[_Union[Flow, _Mapping]] = ..., deliver: _Optional[_Union[Deliver, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., nack: _Optional[_Union[Nack, _Mapping]] = ..., close_consumer: _Optional[_Union[CloseConsumer, _Mapping]] = ..., unsubscribe: _Optional[_Union[Unsubscribe, _Mapping]] = ..., seek: _Optional[_Union[Seek, _Mapping]] = ..., handed: _Optional[_Union[Handed, _Mapping]] = ..., fetch: _Optional[_Union[Fetch, _Mapping]] = ..., fetched: _Optional[_Union[Fetched, _Mapping]] = ..., find_offset: _Optional[_Union[FindOffset, _Mapping]] = ..., offset_found: _Optional[_Union[OffsetFound, _Mapping]] = ..., recall: _Optional[_Union[Recall, _Mapping]] = ..., returned: _Optional[_Union[Returned, _Mapping]] = ..., create_topic: _Optional[_Union[CreateTopic, _Mapping]] = ..., delete_topic: _Optional[_Union[DeleteTopic, _Mapping]] = ..., describe_topic: _Optional[_Union[DescribeTopic, _Mapping]] = ..., topic_info: _Optional[_Union[TopicInfo, _Mapping]] = ..., list_topics: _Optional[_Union[ListTopics, _Mapping]] = ..., topic_list: _Optional[_Union[TopicList, _Mapping]] = ..., get_lag: _Optional[_Union[GetLag, _Mapping]] = ..., lag: _Optional[_Union[Lag, _Mapping]] = ..., describe_storage: _Optional[_Union[DescribeStorage, _Mapping]] = ..., storage_info: _Optional[_Union[StorageInfo, _Mapping]] = ..., swap_objects: _Optional[_Union[SwapObjects, _Mapping]] = ..., note_order: _Optional[_Union[NoteOrder, _Mapping]] = ..., flush_log: _Optional[_Union[FlushLog, _Mapping]] = ..., log_flushed: _Optional[_Union[LogFlushed, _Mapping]] = ..., describe_storages: _Optional[_Union[DescribeStorages, _Mapping]] = ..., storage_infos: _Optional[_Union[StorageInfos, _Mapping]] = ..., change_failure_policy: _Optional[_Union[ChangeFailurePolicy, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("magic", "version_min", "version_max", "client", "token", "frame_size_max", "envelope_version")
    MAGIC_FIELD_NUMBER: _ClassVar[int]
    VERSION_MIN_FIELD_NUMBER: _ClassVar[int]
    VERSION_MAX_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FRAME_SIZE_MAX_FIELD_NUMBER: _ClassVar[int]
    ENVELOPE_VERSION_FIELD_NUMBER: _ClassVar[int]
    magic: int
    version_min: int
    version_max: int
    client: str
    token: str
    frame_size_max: int
    envelope_version: int
    def __init__(self, magic: _Optional[int] = ..., version_min: _Optional[int] = ..., version_max: _Optional[int] = ..., client: _Optional[str] = ..., token: _Optional[str] = ..., frame_size_max: _Optional[int] = ..., envelope_version: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("version", "broker_id", "frame_size_max", "in_flight_max", "keepalive_seconds", "broker", "notes_orders", "commands", "envelope_version")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BROKER_ID_FIELD_NUMBER: _ClassVar[int]
    FRAME_SIZE_MAX_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_MAX_FIELD_NUMBER: _ClassVar[int]
    KEEPALIVE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BROKER_FIELD_NUMBER: _ClassVar[int]
    NOTES_ORDERS_FIELD_NUMBER: _ClassVar[int]
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    ENVELOPE_VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    broker_id: int
    frame_size_max: int
    in_flight_max: int
    keepalive_seconds: int
    broker: str
    notes_orders: bool
    commands: _containers.RepeatedScalarFieldContainer[str]
    envelope_version: int
    def __init__(self, version: _Optional[int] = ..., broker_id: _Optional[int] = ..., frame_size_max: _Optional[int] = ..., in_flight_max: _Optional[int] = ..., keepalive_seconds: _Optional[int] = ..., broker: _Optional[str] = ..., notes_orders: bool = ..., commands: _Optional[_Iterable[str]] = ..., envelope_version: _Optional[int] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Pong(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "retryable", "sentence", "fields", "producer", "consumer")
    class FieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Value
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...
    CODE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    code: Code
    retryable: bool
    sentence: str
    fields: _containers.MessageMap[str, Value]
    producer: int
    consumer: int
    def __init__(self, code: _Optional[_Union[Code, str]] = ..., retryable: bool = ..., sentence: _Optional[str] = ..., fields: _Optional[_Mapping[str, Value]] = ..., producer: _Optional[int] = ..., consumer: _Optional[int] = ...) -> None: ...

class Value(_message.Message):
    __slots__ = ("text", "integer", "natural", "real", "flag")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    INTEGER_FIELD_NUMBER: _ClassVar[int]
    NATURAL_FIELD_NUMBER: _ClassVar[int]
    REAL_FIELD_NUMBER: _ClassVar[int]
    FLAG_FIELD_NUMBER: _ClassVar[int]
    text: str
    integer: int
    natural: int
    real: float
    flag: bool
    def __init__(self, text: _Optional[str] = ..., integer: _Optional[int] = ..., natural: _Optional[int] = ..., real: _Optional[float] = ..., flag: bool = ...) -> None: ...

class Lookup(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: str
    def __init__(self, topic: _Optional[str] = ...) -> None: ...

class Located(_message.Message):
    __slots__ = ("topic", "connect_url", "stream_url", "is_local", "partitions")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    CONNECT_URL_FIELD_NUMBER: _ClassVar[int]
    STREAM_URL_FIELD_NUMBER: _ClassVar[int]
    IS_LOCAL_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    connect_url: str
    stream_url: str
    is_local: bool
    partitions: int
    def __init__(self, topic: _Optional[str] = ..., connect_url: _Optional[str] = ..., stream_url: _Optional[str] = ..., is_local: bool = ..., partitions: _Optional[int] = ...) -> None: ...

class Moved(_message.Message):
    __slots__ = ("topic", "stream_url")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    STREAM_URL_FIELD_NUMBER: _ClassVar[int]
    topic: str
    stream_url: str
    def __init__(self, topic: _Optional[str] = ..., stream_url: _Optional[str] = ...) -> None: ...

class OpenProducer(_message.Message):
    __slots__ = ("topic", "producer_name", "reliable", "create", "exclusive", "schema_subject", "session", "without_session", "seen_epoch", "schema_version", "schema_min_version")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_NAME_FIELD_NUMBER: _ClassVar[int]
    RELIABLE_FIELD_NUMBER: _ClassVar[int]
    CREATE_FIELD_NUMBER: _ClassVar[int]
    EXCLUSIVE_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_SUBJECT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_SESSION_FIELD_NUMBER: _ClassVar[int]
    SEEN_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    topic: str
    producer_name: str
    reliable: bool
    create: bool
    exclusive: bool
    schema_subject: str
    session: int
    without_session: bool
    seen_epoch: int
    schema_version: int
    schema_min_version: int
    def __init__(self, topic: _Optional[str] = ..., producer_name: _Optional[str] = ..., reliable: bool = ..., create: bool = ..., exclusive: bool = ..., schema_subject: _Optional[str] = ..., session: _Optional[int] = ..., without_session: bool = ..., seen_epoch: _Optional[int] = ..., schema_version: _Optional[int] = ..., schema_min_version: _Optional[int] = ...) -> None: ...

class ProducerOpened(_message.Message):
    __slots__ = ("producer", "producer_id", "session", "topic_hash", "durability", "message_size_max", "epoch", "schema_id", "schema_version")
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TOPIC_HASH_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_SIZE_MAX_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_ID_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    producer: int
    producer_id: int
    session: int
    topic_hash: int
    durability: Durability
    message_size_max: int
    epoch: int
    schema_id: int
    schema_version: int
    def __init__(self, producer: _Optional[int] = ..., producer_id: _Optional[int] = ..., session: _Optional[int] = ..., topic_hash: _Optional[int] = ..., durability: _Optional[_Union[Durability, str]] = ..., message_size_max: _Optional[int] = ..., epoch: _Optional[int] = ..., schema_id: _Optional[int] = ..., schema_version: _Optional[int] = ...) -> None: ...

class Produce(_message.Message):
    __slots__ = ("producer",)
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    producer: int
    def __init__(self, producer: _Optional[int] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("offset", "rows", "epoch", "durability", "duplicate")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    offset: int
    rows: int
    epoch: int
    durability: Durability
    duplicate: bool
    def __init__(self, offset: _Optional[int] = ..., rows: _Optional[int] = ..., epoch: _Optional[int] = ..., durability: _Optional[_Union[Durability, str]] = ..., duplicate: bool = ...) -> None: ...

class CloseProducer(_message.Message):
    __slots__ = ("producer",)
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    producer: int
    def __init__(self, producer: _Optional[int] = ...) -> None: ...

class Place(_message.Message):
    __slots__ = ("edge", "offset", "time_us")
    EDGE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TIME_US_FIELD_NUMBER: _ClassVar[int]
    edge: Edge
    offset: int
    time_us: int
    def __init__(self, edge: _Optional[_Union[Edge, str]] = ..., offset: _Optional[int] = ..., time_us: _Optional[int] = ...) -> None: ...

class Subscribe(_message.Message):
    __slots__ = ("topic", "subscription", "type", "consumer_name", "key_filters", "start", "messages", "bytes", "hands_over", "first_messages", "seen_epoch")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_NAME_FIELD_NUMBER: _ClassVar[int]
    KEY_FILTERS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    HANDS_OVER_FIELD_NUMBER: _ClassVar[int]
    FIRST_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    SEEN_EPOCH_FIELD_NUMBER: _ClassVar[int]
    topic: str
    subscription: str
    type: SubscriptionType
    consumer_name: str
    key_filters: _containers.RepeatedScalarFieldContainer[str]
    start: Place
    messages: int
    bytes: int
    hands_over: bool
    first_messages: int
    seen_epoch: int
    def __init__(self, topic: _Optional[str] = ..., subscription: _Optional[str] = ..., type: _Optional[_Union[SubscriptionType, str]] = ..., consumer_name: _Optional[str] = ..., key_filters: _Optional[_Iterable[str]] = ..., start: _Optional[_Union[Place, _Mapping]] = ..., messages: _Optional[int] = ..., bytes: _Optional[int] = ..., hands_over: bool = ..., first_messages: _Optional[int] = ..., seen_epoch: _Optional[int] = ...) -> None: ...

class Subscribed(_message.Message):
    __slots__ = ("consumer", "consumer_id", "type", "next_unacked", "created", "hands_over", "messages")
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_ID_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    NEXT_UNACKED_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    HANDS_OVER_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    consumer: int
    consumer_id: int
    type: SubscriptionType
    next_unacked: int
    created: int
    hands_over: bool
    messages: int
    def __init__(self, consumer: _Optional[int] = ..., consumer_id: _Optional[int] = ..., type: _Optional[_Union[SubscriptionType, str]] = ..., next_unacked: _Optional[int] = ..., created: _Optional[int] = ..., hands_over: bool = ..., messages: _Optional[int] = ...) -> None: ...

class Flow(_message.Message):
    __slots__ = ("consumer", "messages", "bytes")
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    consumer: int
    messages: int
    bytes: int
    def __init__(self, consumer: _Optional[int] = ..., messages: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class Deliver(_message.Message):
    __slots__ = ("consumer", "ranges", "attempt", "seeks")
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SEEKS_FIELD_NUMBER: _ClassVar[int]
    consumer: int
    ranges: _containers.RepeatedScalarFieldContainer[int]
    attempt: int
    seeks: int
    def __init__(self, consumer: _Optional[int] = ..., ranges: _Optional[_Iterable[int]] = ..., attempt: _Optional[int] = ..., seeks: _Optional[int] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("consumer", "ranges", "seeks")
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    SEEKS_FIELD_NUMBER: _ClassVar[int]
    consumer: int
    ranges: _containers.RepeatedScalarFieldContainer[int]
    seeks: int
    def __init__(self, consumer: _Optional[int] = ..., ranges: _Optional[_Iterable[int]] = ..., seeks: _Optional[int] = ...) -> None: ...

class Nack(_message.Message):
    __slots__ = ("consumer", "ranges", "delay_ms", "reason", "seeks")
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SEEKS_FIELD_NUMBER: _ClassVar[int]
    consumer: int
    ranges: _containers.RepeatedScalarFieldContainer[int]
    delay_ms: int
    reason: str
    seeks: int
    def __init__(self, consumer: _Optional[int] = ..., ranges: _Optional[_Iterable[int]] = ..., delay_ms: _Optional[int] = ..., reason: _Optional[str] = ..., seeks: _Optional[int] = ...) -> None: ...

class Handed(_message.Message):
    __slots__ = ("consumer", "ranges", "seeks", "extend_ms")
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    SEEKS_FIELD_NUMBER: _ClassVar[int]
    EXTEND_MS_FIELD_NUMBER: _ClassVar[int]
    consumer: int
    ranges: _containers.RepeatedScalarFieldContainer[int]
    seeks: int
    extend_ms: int
    def __init__(self, consumer: _Optional[int] = ..., ranges: _Optional[_Iterable[int]] = ..., seeks: _Optional[int] = ..., extend_ms: _Optional[int] = ...) -> None: ...

class Recall(_message.Message):
    __slots__ = ("consumer", "ranges", "seeks", "taken")
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    SEEKS_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    consumer: int
    ranges: _containers.RepeatedScalarFieldContainer[int]
    seeks: int
    taken: int
    def __init__(self, consumer: _Optional[int] = ..., ranges: _Optional[_Iterable[int]] = ..., seeks: _Optional[int] = ..., taken: _Optional[int] = ...) -> None: ...

class Returned(_message.Message):
    __slots__ = ("consumer", "ranges", "seeks", "stop", "taken")
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    SEEKS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    consumer: int
    ranges: _containers.RepeatedScalarFieldContainer[int]
    seeks: int
    stop: bool
    taken: int
    def __init__(self, consumer: _Optional[int] = ..., ranges: _Optional[_Iterable[int]] = ..., seeks: _Optional[int] = ..., stop: bool = ..., taken: _Optional[int] = ...) -> None: ...

class CloseConsumer(_message.Message):
    __slots__ = ("consumer",)
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    consumer: int
    def __init__(self, consumer: _Optional[int] = ...) -> None: ...

class Unsubscribe(_message.Message):
    __slots__ = ("topic", "subscription")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    topic: str
    subscription: str
    def __init__(self, topic: _Optional[str] = ..., subscription: _Optional[str] = ...) -> None: ...

class Seek(_message.Message):
    __slots__ = ("topic", "subscription", "to")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    topic: str
    subscription: str
    to: Place
    def __init__(self, topic: _Optional[str] = ..., subscription: _Optional[str] = ..., to: _Optional[_Union[Place, _Mapping]] = ...) -> None: ...

class Fetch(_message.Message):
    __slots__ = ("topic", "start", "end", "bytes_max", "wait_ms")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    start: int
    end: int
    bytes_max: int
    wait_ms: int
    def __init__(self, topic: _Optional[str] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., bytes_max: _Optional[int] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class Fetched(_message.Message):
    __slots__ = ("next_offset", "head", "first_offset")
    NEXT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    FIRST_OFFSET_FIELD_NUMBER: _ClassVar[int]
    next_offset: int
    head: int
    first_offset: int
    def __init__(self, next_offset: _Optional[int] = ..., head: _Optional[int] = ..., first_offset: _Optional[int] = ...) -> None: ...

class FindOffset(_message.Message):
    __slots__ = ("topic", "at")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    topic: str
    at: Place
    def __init__(self, topic: _Optional[str] = ..., at: _Optional[_Union[Place, _Mapping]] = ...) -> None: ...

class OffsetFound(_message.Message):
    __slots__ = ("offset", "seeks")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SEEKS_FIELD_NUMBER: _ClassVar[int]
    offset: int
    seeks: int
    def __init__(self, offset: _Optional[int] = ..., seeks: _Optional[int] = ...) -> None: ...

class CreateTopic(_message.Message):
    __slots__ = ("topic", "reliable", "partitions", "schema_subject")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    RELIABLE_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_SUBJECT_FIELD_NUMBER: _ClassVar[int]
    topic: str
    reliable: bool
    partitions: int
    schema_subject: str
    def __init__(self, topic: _Optional[str] = ..., reliable: bool = ..., partitions: _Optional[int] = ..., schema_subject: _Optional[str] = ...) -> None: ...

class DeleteTopic(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: str
    def __init__(self, topic: _Optional[str] = ...) -> None: ...

class DescribeTopic(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: str
    def __init__(self, topic: _Optional[str] = ...) -> None: ...

class TopicInfo(_message.Message):
    __slots__ = ("topic", "reliable", "partitions", "first_offset", "head", "durability", "schema_subject", "message_size_max", "subscriptions", "producers", "consumers")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    RELIABLE_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    FIRST_OFFSET_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_SUBJECT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_SIZE_MAX_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    PRODUCERS_FIELD_NUMBER: _ClassVar[int]
    CONSUMERS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    reliable: bool
    partitions: int
    first_offset: int
    head: int
    durability: Durability
    schema_subject: str
    message_size_max: int
    subscriptions: int
    producers: int
    consumers: int
    def __init__(self, topic: _Optional[str] = ..., reliable: bool = ..., partitions: _Optional[int] = ..., first_offset: _Optional[int] = ..., head: _Optional[int] = ..., durability: _Optional[_Union[Durability, str]] = ..., schema_subject: _Optional[str] = ..., message_size_max: _Optional[int] = ..., subscriptions: _Optional[int] = ..., producers: _Optional[int] = ..., consumers: _Optional[int] = ...) -> None: ...

class ListTopics(_message.Message):
    __slots__ = ("namespace", "after", "count_max")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    COUNT_MAX_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    after: str
    count_max: int
    def __init__(self, namespace: _Optional[str] = ..., after: _Optional[str] = ..., count_max: _Optional[int] = ...) -> None: ...

class TopicList(_message.Message):
    __slots__ = ("topics", "more")
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    topics: _containers.RepeatedScalarFieldContainer[str]
    more: bool
    def __init__(self, topics: _Optional[_Iterable[str]] = ..., more: bool = ...) -> None: ...

class ChangeFailurePolicy(_message.Message):
    __slots__ = ("topic", "subscription", "max_redelivery_count", "ack_timeout_ms", "base_redelivery_delay_ms", "max_redelivery_delay_ms", "backoff_strategy", "poison_policy", "dead_letter_topic")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    MAX_REDELIVERY_COUNT_FIELD_NUMBER: _ClassVar[int]
    ACK_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    BASE_REDELIVERY_DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_REDELIVERY_DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    BACKOFF_STRATEGY_FIELD_NUMBER: _ClassVar[int]
    POISON_POLICY_FIELD_NUMBER: _ClassVar[int]
    DEAD_LETTER_TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: str
    subscription: str
    max_redelivery_count: int
    ack_timeout_ms: int
    base_redelivery_delay_ms: int
    max_redelivery_delay_ms: int
    backoff_strategy: str
    poison_policy: str
    dead_letter_topic: str
    def __init__(self, topic: _Optional[str] = ..., subscription: _Optional[str] = ..., max_redelivery_count: _Optional[int] = ..., ack_timeout_ms: _Optional[int] = ..., base_redelivery_delay_ms: _Optional[int] = ..., max_redelivery_delay_ms: _Optional[int] = ..., backoff_strategy: _Optional[str] = ..., poison_policy: _Optional[str] = ..., dead_letter_topic: _Optional[str] = ...) -> None: ...

class GetLag(_message.Message):
    __slots__ = ("topic", "subscription")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    topic: str
    subscription: str
    def __init__(self, topic: _Optional[str] = ..., subscription: _Optional[str] = ...) -> None: ...

class Lag(_message.Message):
    __slots__ = ("cursor", "head", "lag_messages", "has_lag", "sentence", "scheduled")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    LAG_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    HAS_LAG_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    SCHEDULED_FIELD_NUMBER: _ClassVar[int]
    cursor: int
    head: int
    lag_messages: int
    has_lag: bool
    sentence: str
    scheduled: int
    def __init__(self, cursor: _Optional[int] = ..., head: _Optional[int] = ..., lag_messages: _Optional[int] = ..., has_lag: bool = ..., sentence: _Optional[str] = ..., scheduled: _Optional[int] = ...) -> None: ...

class DescribeStorage(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: str
    def __init__(self, topic: _Optional[str] = ...) -> None: ...

class StorageInfo(_message.Message):
    __slots__ = ("topic", "first_offset", "head", "storage_url", "history_version", "descriptors", "manifest", "manifest_crc", "orphans", "voids", "log", "tag", "unchanged")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    FIRST_OFFSET_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    STORAGE_URL_FIELD_NUMBER: _ClassVar[int]
    HISTORY_VERSION_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTORS_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_CRC_FIELD_NUMBER: _ClassVar[int]
    ORPHANS_FIELD_NUMBER: _ClassVar[int]
    VOIDS_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    UNCHANGED_FIELD_NUMBER: _ClassVar[int]
    topic: str
    first_offset: int
    head: int
    storage_url: str
    history_version: int
    descriptors: _containers.RepeatedScalarFieldContainer[bytes]
    manifest: str
    manifest_crc: int
    orphans: _containers.RepeatedScalarFieldContainer[int]
    voids: _containers.RepeatedScalarFieldContainer[int]
    log: _containers.RepeatedScalarFieldContainer[int]
    tag: str
    unchanged: bool
    def __init__(self, topic: _Optional[str] = ..., first_offset: _Optional[int] = ..., head: _Optional[int] = ..., storage_url: _Optional[str] = ..., history_version: _Optional[int] = ..., descriptors: _Optional[_Iterable[bytes]] = ..., manifest: _Optional[str] = ..., manifest_crc: _Optional[int] = ..., orphans: _Optional[_Iterable[int]] = ..., voids: _Optional[_Iterable[int]] = ..., log: _Optional[_Iterable[int]] = ..., tag: _Optional[str] = ..., unchanged: bool = ...) -> None: ...

class DescribeStorages(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StorageInfos(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StorageQuestion(_message.Message):
    __slots__ = ("topics", "known")
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    topics: _containers.RepeatedScalarFieldContainer[str]
    known: _containers.RepeatedCompositeFieldContainer[KnownStorage]
    def __init__(self, topics: _Optional[_Iterable[str]] = ..., known: _Optional[_Iterable[_Union[KnownStorage, _Mapping]]] = ...) -> None: ...

class KnownStorage(_message.Message):
    __slots__ = ("topic", "tag")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    topic: str
    tag: str
    def __init__(self, topic: _Optional[str] = ..., tag: _Optional[str] = ...) -> None: ...

class StorageAnswer(_message.Message):
    __slots__ = ("infos", "located", "errors", "left")
    INFOS_FIELD_NUMBER: _ClassVar[int]
    LOCATED_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    infos: _containers.RepeatedCompositeFieldContainer[StorageInfo]
    located: _containers.RepeatedCompositeFieldContainer[Located]
    errors: _containers.RepeatedCompositeFieldContainer[TopicError]
    left: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, infos: _Optional[_Iterable[_Union[StorageInfo, _Mapping]]] = ..., located: _Optional[_Iterable[_Union[Located, _Mapping]]] = ..., errors: _Optional[_Iterable[_Union[TopicError, _Mapping]]] = ..., left: _Optional[_Iterable[str]] = ...) -> None: ...

class TopicError(_message.Message):
    __slots__ = ("topic", "error")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    topic: str
    error: Error
    def __init__(self, topic: _Optional[str] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class SwapObjects(_message.Message):
    __slots__ = ("topic", "old", "descriptor")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    OLD_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    topic: str
    old: _containers.RepeatedScalarFieldContainer[str]
    descriptor: bytes
    def __init__(self, topic: _Optional[str] = ..., old: _Optional[_Iterable[str]] = ..., descriptor: _Optional[bytes] = ...) -> None: ...

class FlushLog(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: str
    def __init__(self, topic: _Optional[str] = ...) -> None: ...

class LogFlushed(_message.Message):
    __slots__ = ("head", "first_on_disk", "dead_letter_topics", "garbage_seconds", "set_aside")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    FIRST_ON_DISK_FIELD_NUMBER: _ClassVar[int]
    DEAD_LETTER_TOPICS_FIELD_NUMBER: _ClassVar[int]
    GARBAGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SET_ASIDE_FIELD_NUMBER: _ClassVar[int]
    head: int
    first_on_disk: int
    dead_letter_topics: _containers.RepeatedScalarFieldContainer[str]
    garbage_seconds: int
    set_aside: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, head: _Optional[int] = ..., first_on_disk: _Optional[int] = ..., dead_letter_topics: _Optional[_Iterable[str]] = ..., garbage_seconds: _Optional[int] = ..., set_aside: _Optional[_Iterable[str]] = ...) -> None: ...

class NoteOrder(_message.Message):
    __slots__ = ("order", "topic", "to_topic", "count")
    ORDER_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    TO_TOPIC_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    order: str
    topic: str
    to_topic: str
    count: int
    def __init__(self, order: _Optional[str] = ..., topic: _Optional[str] = ..., to_topic: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...
