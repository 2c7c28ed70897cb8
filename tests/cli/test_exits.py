"""Exit codes: every error that a command may end with has one, and every one has a meaning."""

from __future__ import annotations

import pytest

from pydanube import errors
from pydanube.cli.exits import MEANINGS, Exit, NotThere, UsageError, code_of
from pydanube.client.grpc.connection import BrokerRefused, WrongPort


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("say where"), Exit.USAGE),
        (WrongPort("--endpoint", "127.0.0.1:6650", "that is the client port"), Exit.USAGE),
        (errors.ConfigError("--count", 0, "at least 1"), Exit.USAGE),
        (errors.InvalidName("topic name", "x", "/a/b"), Exit.USAGE),
        (BrokerRefused("INVALID_ARGUMENT", "no such heartbeat"), Exit.USAGE),
        (errors.Unreachable("the broker", "nobody answers"), Exit.NOT_REACHABLE),
        (errors.DeadlineExceeded("connecting", 3), Exit.NOT_REACHABLE),
        (errors.DiskFull("data"), Exit.NOT_REACHABLE),
        (BrokerRefused("UNAVAILABLE", "between brokers"), Exit.NOT_REACHABLE),
        (NotThere("there is no context a"), Exit.NOT_FOUND),
        (errors.TopicUnknown("/default/a"), Exit.NOT_FOUND),
        (errors.SubscriptionUnknown("/default/a", "s"), Exit.NOT_FOUND),
        (errors.NamespaceUnknown("a"), Exit.NOT_FOUND),
        (BrokerRefused("NOT_FOUND", "unable to find the topic"), Exit.NOT_FOUND),
        (errors.TopicExists("/default/a", "it is there"), Exit.REFUSED),
        (errors.DirectoryInUse("data", 1), Exit.REFUSED),
        (BrokerRefused("FAILED_PRECONDITION", "drained"), Exit.REFUSED),
        (BrokerRefused("DATA_LOSS", "damaged"), Exit.NOT_GOOD),
        (errors.LogDamaged("/default/a", "file", 0, 0, 1, "checksum"), Exit.NOT_GOOD),
        (PermissionError(13, "Permission denied"), Exit.NOT_GOOD),
        (ZeroDivisionError(), Exit.BUG),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.name,
)
def test_the_kind_of_an_error_is_its_exit_code(error: Exception, code: Exit) -> None:
    assert code_of(error) is code


def test_every_exit_code_has_a_meaning_and_a_number_of_its_own() -> None:
    assert set(MEANINGS) == set(Exit) and len({*map(int, Exit)}) == len(Exit)
