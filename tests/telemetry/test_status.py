"""What a client is told of an error."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from pydanube import errors
from pydanube.wire.status import ADMIN, RECEIVE, RETRIED, SEND, SENTENCE_SIZE_MAX_BYTES, Code, Status, code_of, status


def every_kind(root: type[errors.DanubeError] = errors.DanubeError) -> Iterator[type[errors.DanubeError]]:
    yield root
    for kind in root.__subclasses__():
        yield from every_kind(kind)


def test_codes_have_the_names_and_numbers_of_grpc() -> None:
    assert {code.name: code.value for code in Code} == {code.name: code.value[0] for code in grpc.StatusCode}


@pytest.mark.parametrize("kind", [*every_kind()])
def test_clients_retry_what_time_may_heal_and_nothing_else(kind: type[errors.DanubeError]) -> None:
    expected = kind.retryable or kind is errors.NamespaceUnknown  # as the reference answers a producer
    assert (code_of(kind) in RETRIED) == expected
    assert (code_of(kind, ADMIN) in RETRIED) == kind.retryable


@pytest.mark.parametrize("kind", [*every_kind(errors.Refused)])
def test_no_refusal_of_a_message_makes_a_client_send_it_for_ever(kind: type[errors.DanubeError]) -> None:
    recreate = kind is errors.TopicUnknown  # a new producer creates the topic again
    assert code_of(kind, SEND) is (Code.UNAVAILABLE if recreate else Code.INVALID_ARGUMENT)


@pytest.mark.parametrize("kind", [*every_kind(errors.Refused), *every_kind(errors.Unavailable)])
def test_a_stream_that_cannot_open_makes_every_client_subscribe_again(kind: type[errors.DanubeError]) -> None:
    assert code_of(kind, RECEIVE) is Code.UNAVAILABLE


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("producers", Code.RESOURCE_EXHAUSTED),
        ("subscriptions", Code.PERMISSION_DENIED),
        ("consumers of the topic", Code.RESOURCE_EXHAUSTED),
        ("consumers of the subscription", Code.PERMISSION_DENIED),
    ],
)
def test_a_limit_has_the_code_that_the_reference_gives_it(what: str, code: Code) -> None:
    assert status(errors.LimitReached(what, 3)) == Status(code, f"the policy allows at most 3 {what}")


def test_a_bad_topic_name_is_told_in_the_words_of_the_reference() -> None:
    code, sentence = status(errors.InvalidName("topic name", "a.b", "use letters"))
    assert code is Code.INVALID_ARGUMENT
    assert sentence.startswith("The topic: a.b has an invalid format, should be: /namespace_name/topic_name")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidName("namespace name", "x", "no"), Code.INVALID_ARGUMENT),
        (errors.TopicUnknown("/default/a"), Code.NOT_FOUND),
        (errors.TopicExists("/default/a", "taken"), Code.ALREADY_EXISTS),
        (errors.DeliveryMismatch("/default/a", "Reliable", "NonReliable"), Code.FAILED_PRECONDITION),
        (errors.SchemaMismatch("/default/a", "x", "y"), Code.FAILED_PRECONDITION),
        (errors.SubscriptionBusy("/default/a", "s", "c"), Code.PERMISSION_DENIED),
        (errors.MessageTooLarge(2, 1), Code.INVALID_ARGUMENT),
        (errors.RateLimited("/default/a", 1), Code.RESOURCE_EXHAUSTED),
        (errors.ConsumerUnknown(1), Code.UNAVAILABLE),
        (errors.InvalidBatch("too large"), Code.INVALID_ARGUMENT),
        (errors.ConfigError("key", 1, "2"), Code.INVALID_ARGUMENT),
        (errors.OffsetOutOfRange("/default/a", 1, 2, 3), Code.OUT_OF_RANGE),
        (errors.LogClosed("/default/a"), Code.UNAVAILABLE),
        (errors.DiskFull("wal"), Code.UNAVAILABLE),
        (errors.LogFull(1, 1, "away"), Code.UNAVAILABLE),
        (errors.LogDamaged("/default/a", "f", 0, 0, None, "crc"), Code.DATA_LOSS),
        (errors.LogStopped("disk"), Code.INTERNAL),
    ],
)
def test_the_sentence_is_the_errors_own(error: errors.DanubeError, code: Code) -> None:
    assert status(error) == Status(code, str(error))


def test_the_most_specific_entry_wins_and_a_kind_without_one_has_its_familys() -> None:
    class Odd(errors.OffsetOutOfRange):
        pass

    assert code_of(Odd) is Code.OUT_OF_RANGE
    assert code_of(errors.Conflict) is Code.UNAVAILABLE


def test_a_bug_tells_the_client_its_kind_and_nothing_of_the_inside() -> None:
    code, sentence = status(KeyError("/secret/path"))
    assert code is Code.INTERNAL
    assert "KeyError" in sentence and "secret" not in sentence


@pytest.mark.parametrize("letter", ["x", "é", "水", "🌊"])
def test_a_long_sentence_is_cut_between_letters(letter: str) -> None:
    _, sentence = status(errors.InvalidBatch(letter * 5000))
    assert len(sentence.encode()) <= SENTENCE_SIZE_MAX_BYTES
    assert sentence.endswith(f"{letter}...")


def test_a_sentence_is_always_utf_8() -> None:
    _, sentence = status(errors.InvalidBatch("a lone surrogate: \ud800"))
    assert sentence.encode()
