"""Our errors as `Error` commands of the native protocol, and the very same errors on the other side.

    OffsetOutOfRange("/default/a", 3, 10, 90)
      ⇅  code 105 · retryable false · "offset 3 of /default/a is not kept: …" · fields topic, offset, first, end

A code stands for one class; its number never changes and its hundred is its family. A broker may be newer than the
client: of a code, or of fields, that the client does not know, it keeps the family and the sentence, so it still knows
who must act. A class without a code travels as its nearest ancestor that has one and says the same of itself, or as its
family with the sentence. The sentence and every field that is text are cut to 1 KiB each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

from pydanube import errors
from pydanube.core.declared import fields_of, have_same_fields
from pydanube.core.schemas import refusals
from pydanube.errors import DanubeError, DataDamaged, Refused, Unavailable
from pydanube.wire._pb.pydanube import stream_pb2 as pb
from pydanube.wire.status import cut

Scalar: TypeAlias = str | int | float | bool | None

CODES: Final[Mapping[type[DanubeError], pb.Code]] = {
    DanubeError: pb.INTERNAL,
    # the caller acts
    Refused: pb.REFUSED,
    errors.ProtocolViolation: pb.PROTOCOL_VIOLATION,
    errors.InvalidName: pb.INVALID_NAME,
    errors.InvalidBatch: pb.INVALID_BATCH,
    errors.ConfigError: pb.CONFIG_ERROR,
    errors.OffsetOutOfRange: pb.OFFSET_OUT_OF_RANGE,
    errors.OffsetTaken: pb.OFFSET_TAKEN,
    errors.OutOfSequence: pb.OUT_OF_SEQUENCE,
    errors.ProducerFenced: pb.PRODUCER_FENCED,
    errors.SessionUnknown: pb.SESSION_UNKNOWN,
    errors.TopicUnknown: pb.TOPIC_UNKNOWN,
    errors.TopicExists: pb.TOPIC_EXISTS,
    errors.NamespaceUnknown: pb.NAMESPACE_UNKNOWN,
    errors.NamespaceExists: pb.NAMESPACE_EXISTS,
    errors.NamespaceNotEmpty: pb.NAMESPACE_NOT_EMPTY,
    errors.DeliveryMismatch: pb.DELIVERY_MISMATCH,
    errors.SchemaMismatch: pb.SCHEMA_MISMATCH,
    errors.SubscriptionUnknown: pb.SUBSCRIPTION_UNKNOWN,
    errors.SubscriptionBusy: pb.SUBSCRIPTION_BUSY,
    errors.AckOutdated: pb.ACK_OUTDATED,
    errors.NotATable: pb.NOT_A_TABLE,
    errors.ProducerExists: pb.PRODUCER_EXISTS,
    errors.LimitReached: pb.LIMIT_REACHED,
    errors.MessageTooLarge: pb.MESSAGE_TOO_LARGE,
    errors.BrokerUnknown: pb.BROKER_UNKNOWN,
    errors.MoveRefused: pb.MOVE_REFUSED,
    refusals.SchemaUnknown: pb.SCHEMA_UNKNOWN,
    refusals.SubjectMissing: pb.SUBJECT_MISSING,
    refusals.SchemaInvalid: pb.SCHEMA_INVALID,
    refusals.SchemaIncompatible: pb.SCHEMA_INCOMPATIBLE,
    refusals.ParserMissing: pb.PARSER_MISSING,
    refusals.SchemaRefused: pb.SCHEMA_REFUSED,
    # time acts
    Unavailable: pb.UNAVAILABLE,
    errors.DiskFull: pb.DISK_FULL,
    errors.LogFull: pb.LOG_FULL,
    errors.LogBusy: pb.LOG_BUSY,
    errors.LogClosed: pb.LOG_CLOSED,
    errors.LeaseLost: pb.LEASE_LOST,
    errors.Conflict: pb.CONFLICT,
    errors.Unreachable: pb.UNREACHABLE,
    errors.NotServed: pb.NOT_SERVED,
    errors.OwnershipLost: pb.OWNERSHIP_LOST,
    errors.ProducerUnknown: pb.PRODUCER_UNKNOWN,
    errors.ConsumerUnknown: pb.CONSUMER_UNKNOWN,
    errors.RateLimited: pb.RATE_LIMITED,
    # an operator acts
    DataDamaged: pb.DATA_DAMAGED,
    errors.DiskFailed: pb.DISK_FAILED,
    errors.LogStopped: pb.LOG_STOPPED,
    errors.LogDamaged: pb.LOG_DAMAGED,
    errors.InvalidObject: pb.INVALID_OBJECT,
    errors.ObjectDamaged: pb.OBJECT_DAMAGED,
    errors.TailUnproven: pb.TAIL_UNPROVEN,
    errors.DirectoryInUse: pb.DIRECTORY_IN_USE,
    errors.FormatTooNew: pb.FORMAT_TOO_NEW,
    errors.NodeIdInUse: pb.NODE_ID_IN_USE,
    errors.MoveFailed: pb.MOVE_FAILED,
}
ERROR_OF_CODE: Final[Mapping[int, type[DanubeError]]] = {int(code): kind for kind, code in CODES.items()}
FAMILIES: Final[Mapping[int, type[DanubeError]]] = {1: Refused, 2: Unavailable, 3: DataDamaged}


# The fields of an error, in order. Families have none, only a sentence.
FIELDS: Final[Mapping[type[DanubeError], tuple[str, ...]]] = {kind: fields_of(kind) for kind in CODES}


def to_wire(error: BaseException, *, producer: int = 0, consumer: int = 0) -> pb.Error:
    """What the peer gets. Of an error that is none of ours it learns the kind and nothing else.

    `producer` or `consumer` is the handle that has ended with an error that answers no request.
    """
    if not isinstance(error, DanubeError):
        sentence = f"the broker failed ({type(error).__name__}); its log says where"
        return pb.Error(code=pb.INTERNAL, sentence=sentence, producer=producer, consumer=consumer)
    kind = next(base for base in type(error).__mro__ if base in CODES and _speaks_for(base, type(error)))
    message = pb.Error(
        code=CODES[kind],
        retryable=error.retryable,
        sentence=cut(str(error)),
        producer=producer,
        consumer=consumer,
    )
    for name in FIELDS[kind]:
        message.fields[name].CopyFrom(_value(getattr(error, name, None)))
    return message


def _speaks_for(kind: type[DanubeError], error: type[DanubeError]) -> bool:
    """Whether the other side makes the right sentence of the fields of `kind`; a family has none, and is sent it."""
    return not FIELDS[kind] or have_same_fields(kind, error)


def from_wire(message: pb.Error) -> DanubeError:
    """The error that was raised on the other side, as far as this side knows its class; never raises."""
    kind = ERROR_OF_CODE.get(message.code)
    if kind is not None:
        names = FIELDS[kind]
        fields = {name: _scalar(message.fields[name]) for name in names if name in message.fields}
        if names and len(fields) == len(names):
            try:
                rebuilt = kind(**fields)
                str(rebuilt)  # a field of another type than we expect shows here, not in the caller's log line
            except (TypeError, ValueError, AttributeError):
                pass
            else:
                return rebuilt
    family = kind if kind is not None and not FIELDS[kind] else FAMILIES.get(message.code // 100, DanubeError)
    return family(message.sentence)


def _value(value: object) -> pb.Value:
    match value:
        case None:
            return pb.Value()
        case bool():
            return pb.Value(flag=value)
        case int() if -(1 << 63) <= value < 1 << 63:
            return pb.Value(integer=value)
        case int() if 0 < value < 1 << 64:
            return pb.Value(natural=value)
        case float():
            return pb.Value(real=value)
        case str():
            return pb.Value(text=cut(value))
        case _:  # a list in a setting: its looks are enough to correct it
            return pb.Value(text=cut(repr(value)))


def _scalar(value: pb.Value) -> Scalar:
    kind = value.WhichOneof("kind")
    if kind is None:
        return None
    found: Scalar = getattr(value, kind)
    return found
