"""What a client is told of an error."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from pydanube import errors
from pydanube.wire.status import RETRIED, SENTENCE_SIZE_MAX_BYTES, Code, Status, code_of, status


def every_kind(root: type[errors.DanubeError] = errors.DanubeError) -> Iterator[type[errors.DanubeError]]:
    yield root
    for kind in root.__subclasses__():
        yield from every_kind(kind)


def test_codes_have_the_names_and_numbers_of_grpc() -> None:
    assert {code.name: code.value for code in Code} == {code.name: code.value[0] for code in grpc.StatusCode}


@pytest.mark.parametrize("kind", [*every_kind()])
def test_clients_retry_what_time_may_heal_and_nothing_else(kind: type[errors.DanubeError]) -> None:
    assert (code_of(kind) in RETRIED) == kind.retryable


@pytest.mark.parametrize("kind", [*every_kind(errors.Refused)])
def test_no_refusal_makes_a_client_try_for_ever(kind: type[errors.DanubeError]) -> None:
    assert code_of(kind) not in {Code.PERMISSION_DENIED, Code.ABORTED, Code.RESOURCE_EXHAUSTED}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidName("topic name", "x", "no"), Code.INVALID_ARGUMENT),
        (errors.InvalidBatch("too large"), Code.INVALID_ARGUMENT),
        (errors.ConfigError("key", 1, "2"), Code.INVALID_ARGUMENT),
        (errors.OffsetOutOfRange("/default/a", 1, 2, 3), Code.OUT_OF_RANGE),
        (errors.LogClosed("/default/a"), Code.UNAVAILABLE),
        (errors.DiskFull("wal"), Code.UNAVAILABLE),
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
