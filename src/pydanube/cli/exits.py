"""Exit codes by kind of failure, so that a script knows what to do without reading the sentence.

    0    done
    1    done, and the answer is not good: fewer messages than asked for, problems found, something is damaged
    2    a mistake in what was asked: options, arguments, settings, names
    3    not reachable, or not now: the same command may work later
    4    not there: topic, subscription, namespace, broker, context
    5    refused: it is there already, somebody uses it, a rule or a limit forbids it
    70   a bug of ours
    130  Ctrl-C

docs/cli.md has this table; `exit_code` is the only place that decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pydanube.errors import DanubeError

NOT_GOOD: Final = 1
USAGE: Final = 2
NOT_REACHABLE: Final = 3
NOT_FOUND: Final = 4
REFUSED: Final = 5
BUG: Final = 70  # EX_SOFTWARE: ours to fix, not the user's
INTERRUPTED: Final = 130  # 128 + SIGINT, as shells report it

# What a broker answered, by gRPC's name of it. Others, such as INTERNAL and DATA_LOSS, are NOT_GOOD.
CODES: Final[Mapping[str, int]] = {
    "INVALID_ARGUMENT": USAGE,
    "OUT_OF_RANGE": USAGE,
    "UNAVAILABLE": NOT_REACHABLE,
    "DEADLINE_EXCEEDED": NOT_REACHABLE,
    "RESOURCE_EXHAUSTED": NOT_REACHABLE,
    "NOT_FOUND": NOT_FOUND,
    "ALREADY_EXISTS": REFUSED,
    "FAILED_PRECONDITION": REFUSED,
    "PERMISSION_DENIED": REFUSED,
    "UNAUTHENTICATED": REFUSED,
    "ABORTED": REFUSED,
    "UNIMPLEMENTED": REFUSED,
}


def exit_code(error: DanubeError) -> int:
    """The most specific kind wins."""
    from pydanube import errors

    code = getattr(error, "code", None)
    if isinstance(code, str):  # the broker refused
        return CODES.get(code, NOT_GOOD)
    kinds: Mapping[type[DanubeError], int] = {
        errors.ConfigError: USAGE,
        errors.InvalidName: USAGE,
        errors.OffsetOutOfRange: USAGE,
        errors.TopicUnknown: NOT_FOUND,
        errors.NamespaceUnknown: NOT_FOUND,
        errors.SubscriptionUnknown: NOT_FOUND,
        errors.BrokerUnknown: NOT_FOUND,
        errors.Unavailable: NOT_REACHABLE,
        errors.DirectoryInUse: REFUSED,
        errors.Refused: REFUSED,
    }
    return next((kinds[kind] for kind in type(error).__mro__ if kind in kinds), NOT_GOOD)
