"""Our errors as gRPC status: a code and a sentence. The most specific entry of the table wins.

Official clients read only the code, and from it only whether to try again: UNAVAILABLE, DEADLINE_EXCEEDED and
RESOURCE_EXHAUSTED are retried (for ever, by a sending producer), all others reach the application. Two traps:

- PERMISSION_DENIED, NOT_FOUND, ABORTED, FAILED_PRECONDITION on a send make the Java client open a new producer
  and send again at once, without end. What is wrong with a message itself is INVALID_ARGUMENT.
- RESOURCE_EXHAUSTED is retried too, so it is never the answer to a message that is too large.

The codes are ours by name and number, so that this room needs no gRPC; `grpc.StatusCode[code.name]` is gRPC's.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final, NamedTuple

from pydanube.errors import (
    DanubeError,
    DataDamaged,
    LogDamaged,
    OffsetOutOfRange,
    OffsetTaken,
    OutOfSequence,
    ProducerFenced,
    Refused,
    SessionUnknown,
    TailUnproven,
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

STATUS: Final[Mapping[type[DanubeError], Code]] = {
    DanubeError: Code.INTERNAL,
    # the caller acts
    Refused: Code.INVALID_ARGUMENT,
    OffsetOutOfRange: Code.OUT_OF_RANGE,
    OffsetTaken: Code.FAILED_PRECONDITION,
    OutOfSequence: Code.FAILED_PRECONDITION,
    ProducerFenced: Code.FAILED_PRECONDITION,
    SessionUnknown: Code.NOT_FOUND,
    # time acts
    Unavailable: Code.UNAVAILABLE,
    # an operator acts
    DataDamaged: Code.INTERNAL,
    LogDamaged: Code.DATA_LOSS,
    TailUnproven: Code.DATA_LOSS,
}


class Status(NamedTuple):
    code: Code
    sentence: str


def status(error: BaseException) -> Status:
    """What a client is told. Of an error that is none of ours it learns the kind and nothing else."""
    if not isinstance(error, DanubeError):
        return Status(Code.INTERNAL, f"the broker failed ({type(error).__name__}); its log says where")
    return Status(code_of(type(error)), _cut(str(error)))


def code_of(kind: type[DanubeError]) -> Code:
    return next(STATUS[base] for base in kind.__mro__ if base in STATUS)


def _cut(sentence: str) -> str:
    """The sentence, short enough for a header; text that is no UTF-8 has question marks instead."""
    encoded = sentence.encode("utf-8", "replace")
    if len(encoded) <= SENTENCE_SIZE_MAX_BYTES:
        return encoded.decode()
    return encoded[: SENTENCE_SIZE_MAX_BYTES - 3].decode("utf-8", "ignore") + "..."
