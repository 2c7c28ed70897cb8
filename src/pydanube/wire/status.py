"""Our errors as gRPC status: a code and a sentence. The most specific entry of the table wins.

Official clients read only the code, and from it only whether to try again: UNAVAILABLE, DEADLINE_EXCEEDED and
RESOURCE_EXHAUSTED are retried (without end, by a sending producer), all others reach the application. Two traps:

- PERMISSION_DENIED, NOT_FOUND, ABORTED, FAILED_PRECONDITION on a send make the Java client open a new producer
  and send again immediately, without end. What is wrong with a message itself is INVALID_ARGUMENT.
- RESOURCE_EXHAUSTED is retried too, so it is never the answer to a message that is too large.

So the same error may have another code in another service: a table per service, each complete.

    STATUS   the reference's table: creating producers, subscribing, looking up
    SEND     a message: what is wrong with it is final, anything that a new producer would cure is UNAVAILABLE
    RECEIVE  opening a stream: only UNAVAILABLE makes every client look the topic up and subscribe again
    ADMIN    administration, where clients do not retry and codes mean what they say

The codes are ours by name and number, so that this layer needs no gRPC; `grpc.StatusCode[code.name]` is gRPC's.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final, NamedTuple, TypeAlias

from pydanube.core.schemas.refusals import ParserMissing, SchemaIncompatible, SchemaUnknown, SubjectMissing
from pydanube.errors import (
    AckOutdated,
    BrokerUnknown,
    DanubeError,
    DataDamaged,
    DeliveryMismatch,
    InvalidName,
    InvalidObject,
    LimitReached,
    LogBusy,
    LogDamaged,
    MoveRefused,
    NamespaceExists,
    NamespaceNotEmpty,
    NamespaceUnknown,
    ObjectDamaged,
    OffsetOutOfRange,
    OffsetTaken,
    OutOfSequence,
    ProducerExists,
    ProducerFenced,
    RateLimited,
    Refused,
    SchemaMismatch,
    SessionUnknown,
    SubscriptionBusy,
    SubscriptionUnknown,
    TailUnproven,
    TopicExists,
    TopicUnknown,
    Unavailable,
)

# A sentence travels in a header, where every byte beyond ASCII takes three and 8 KiB are the limit.
SENTENCE_SIZE_MAX_BYTES: Final = 1024


class Code(enum.IntEnum):
    """gRPC's status codes."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


RETRIED: Final = frozenset({Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.RESOURCE_EXHAUSTED})

Table: TypeAlias = Mapping[type[DanubeError], Code]

STATUS: Final[Table] = {
    DanubeError: Code.INTERNAL,
    # the caller acts
    Refused: Code.INVALID_ARGUMENT,
    TopicUnknown: Code.NOT_FOUND,
    TopicExists: Code.ALREADY_EXISTS,
    # By a producer that would create a topic: a retry may find the namespace.
    NamespaceUnknown: Code.UNAVAILABLE,
    NamespaceExists: Code.ALREADY_EXISTS,
    NamespaceNotEmpty: Code.FAILED_PRECONDITION,
    DeliveryMismatch: Code.FAILED_PRECONDITION,
    SchemaMismatch: Code.FAILED_PRECONDITION,
    SubjectMissing: Code.FAILED_PRECONDITION,
    SchemaIncompatible: Code.FAILED_PRECONDITION,
    ParserMissing: Code.FAILED_PRECONDITION,
    SchemaUnknown: Code.NOT_FOUND,
    SubscriptionUnknown: Code.NOT_FOUND,
    SubscriptionBusy: Code.PERMISSION_DENIED,
    AckOutdated: Code.FAILED_PRECONDITION,
    ProducerExists: Code.PERMISSION_DENIED,
    LimitReached: Code.PERMISSION_DENIED,  # of subscriptions; see LIMITS for the others
    OffsetOutOfRange: Code.OUT_OF_RANGE,
    OffsetTaken: Code.FAILED_PRECONDITION,
    OutOfSequence: Code.FAILED_PRECONDITION,
    ProducerFenced: Code.FAILED_PRECONDITION,
    SessionUnknown: Code.NOT_FOUND,
    BrokerUnknown: Code.NOT_FOUND,
    MoveRefused: Code.FAILED_PRECONDITION,
    # time acts
    Unavailable: Code.UNAVAILABLE,
    RateLimited: Code.RESOURCE_EXHAUSTED,
    LogBusy: Code.RESOURCE_EXHAUSTED,
    # an operator acts
    DataDamaged: Code.INTERNAL,
    LogDamaged: Code.DATA_LOSS,
    InvalidObject: Code.DATA_LOSS,
    ObjectDamaged: Code.DATA_LOSS,
    TailUnproven: Code.DATA_LOSS,
}
LIMITS: Final = {
    "producers": Code.RESOURCE_EXHAUSTED,
    "consumers of the topic": Code.RESOURCE_EXHAUSTED,
}

SEND: Final[Table] = {
    DanubeError: Code.INTERNAL,
    Refused: Code.INVALID_ARGUMENT,
    TopicUnknown: Code.UNAVAILABLE,
    Unavailable: Code.UNAVAILABLE,
    RateLimited: Code.RESOURCE_EXHAUSTED,
    LogBusy: Code.RESOURCE_EXHAUSTED,
    DataDamaged: Code.INTERNAL,
}

RECEIVE: Final[Table] = {
    DanubeError: Code.INTERNAL,
    Refused: Code.UNAVAILABLE,
    Unavailable: Code.UNAVAILABLE,
}

ADMIN: Final[Table] = {
    **STATUS,
    NamespaceUnknown: Code.NOT_FOUND,
    SubscriptionBusy: Code.FAILED_PRECONDITION,
}


class Status(NamedTuple):
    code: Code
    sentence: str


def status(error: BaseException, table: Table = STATUS) -> Status:
    """What a client gets. Of an error that is none of ours it learns the kind and nothing else."""
    if not isinstance(error, DanubeError):
        return Status(Code.INTERNAL, f"the broker failed ({type(error).__name__}); its log says where")
    code = code_of(type(error), table)
    if isinstance(error, LimitReached):
        code = LIMITS.get(error.what, code)
    return Status(code, cut(_sentence(error)))


def code_of(kind: type[DanubeError], table: Table = STATUS) -> Code:
    return next(table[base] for base in kind.__mro__ if base in table)


def _sentence(error: DanubeError) -> str:
    if isinstance(error, InvalidName) and error.kind == "topic name":
        # The reference's own words, which its tests look for, before ours.
        start = f"The topic: {error.name[:200]} has an invalid format, should be: /namespace_name/topic_name"
        return f"{start} ({error.rule.rpartition('/namespace_name/topic_name, ')[2]})"
    return str(error)


def cut(sentence: str) -> str:
    """The sentence, short enough for a header; text that is no UTF-8 has question marks instead."""
    encoded = sentence.encode("utf-8", "replace")
    if len(encoded) <= SENTENCE_SIZE_MAX_BYTES:
        return encoded.decode()
    return encoded[: SENTENCE_SIZE_MAX_BYTES - 3].decode("utf-8", "ignore") + "..."


def camel(code: Code) -> str:
    """InvalidArgument, as the reference labels its metrics."""
    return code.name.title().replace("_", "")
