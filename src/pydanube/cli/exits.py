"""How a command ends, for scripts: one number for each kind of failure.

    raise UsageError("say where: TO, --earliest, --latest, --offset or --time")      2, and the sentence
    code_of(error)                                                              the number for any error

docs/cli.md has the same table, made from `MEANINGS`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from pydanube.errors import (
    BrokerUnknown,
    ConfigError,
    DanubeError,
    DirectoryInUse,
    InvalidName,
    NamespaceUnknown,
    OffsetOutOfRange,
    Refused,
    SubscriptionUnknown,
    TopicUnknown,
    Unavailable,
)


class Exit(IntEnum):
    DONE = 0
    NOT_GOOD = 1
    USAGE = 2  # also that of the library which reads the command line
    NOT_REACHABLE = 3
    NOT_FOUND = 4
    REFUSED = 5
    CRITICAL = 9  # of `danube admin status` alone
    BUG = 70  # EX_SOFTWARE: ours to fix, not the user's
    INTERRUPTED = 130  # 128 + SIGINT, as shells report it


MEANINGS: Final = {
    Exit.DONE: "done",
    Exit.NOT_GOOD: "only a part was done, or the answer is not good: some messages were refused, fewer came than "
    "`--count`, some topics did not move, something is damaged",
    Exit.USAGE: "a mistake on the command line or in a configuration: an unknown option, a value that cannot be, "
    "the wrong port",
    Exit.NOT_REACHABLE: "nobody answers, or not now: the same command may succeed later",
    Exit.NOT_FOUND: "no such topic, subscription, namespace, broker or context",
    Exit.REFUSED: "refused: it is there already, somebody uses it, a rule or a limit forbids it",
    Exit.CRITICAL: "`danube admin status`: something is critical",
    Exit.BUG: "an error that nobody foresaw",
    Exit.INTERRUPTED: "Ctrl-C",
}

# What a broker's gRPC code means. Others, such as INTERNAL and DATA_LOSS, are no good answer.
_OF_CODE: Final = {
    "INVALID_ARGUMENT": Exit.USAGE,
    "OUT_OF_RANGE": Exit.USAGE,
    "NOT_FOUND": Exit.NOT_FOUND,
    "UNAVAILABLE": Exit.NOT_REACHABLE,
    "RESOURCE_EXHAUSTED": Exit.NOT_REACHABLE,
    "DEADLINE_EXCEEDED": Exit.NOT_REACHABLE,
    "ALREADY_EXISTS": Exit.REFUSED,
    "FAILED_PRECONDITION": Exit.REFUSED,
    "PERMISSION_DENIED": Exit.REFUSED,
    "UNAUTHENTICATED": Exit.REFUSED,
    "ABORTED": Exit.REFUSED,
    "UNIMPLEMENTED": Exit.REFUSED,
}
_OF_KIND: Final[dict[type[DanubeError], Exit]] = {
    ConfigError: Exit.USAGE,
    InvalidName: Exit.USAGE,
    OffsetOutOfRange: Exit.USAGE,
    TopicUnknown: Exit.NOT_FOUND,
    SubscriptionUnknown: Exit.NOT_FOUND,
    NamespaceUnknown: Exit.NOT_FOUND,
    BrokerUnknown: Exit.NOT_FOUND,
    Unavailable: Exit.NOT_REACHABLE,
    DirectoryInUse: Exit.REFUSED,
    Refused: Exit.REFUSED,
}


class UsageError(DanubeError):
    """A mistake on the command line, in one sentence that says what to type instead."""


class NotThere(DanubeError):
    """What was named does not exist; the sentence says what to do about it."""


_OF_KIND.update({UsageError: Exit.USAGE, NotThere: Exit.NOT_FOUND})


def code_of(error: BaseException) -> Exit:
    """The number for an error that we know, or that the system reports."""
    code = getattr(error, "code", None)  # of a `BrokerRefused`
    if isinstance(error, DanubeError) and isinstance(code, str):
        return _OF_CODE.get(code, Exit.NOT_GOOD)
    for kind in type(error).__mro__:
        if kind in _OF_KIND:
            return _OF_KIND[kind]
    return Exit.NOT_GOOD if isinstance(error, DanubeError | OSError) else Exit.BUG
