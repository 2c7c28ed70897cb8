"""Some thousand damaged connections in every test run, and proof that the fuzzer would notice."""

from random import Random

import pytest

from pydanube.wire.grpc.calls import Held
from pydanube.wire.http2.connection import Http2Connection
from tests.fuzz import http2 as fuzz


def test_damage_inside_a_connection_raises_nothing_and_every_account_is_right() -> None:
    outcomes: dict[str, int] = {}
    for index in range(1_500):
        outcome = fuzz.attempt(1, index)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    # Most of it must stay inside, or the fuzzer tests the first check and nothing else.
    assert outcomes["goes on"] > 500
    assert outcomes["PROTOCOL_ERROR"] > 50
    assert len(outcomes) >= 6


def _search(defect: str) -> bool:
    for index in range(1_500):
        try:
            fuzz.Fuzzed(Random(f"planted {index}")).run()
        except Exception:
            return True
    raise AssertionError(f"{defect} was not found")


def test_a_window_that_is_not_given_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    give_back = Http2Connection.give_back
    monkeypatch.setattr(
        Http2Connection, "give_back", lambda self, size, stream=None: give_back(self, size - (size > 200), stream)
    )
    assert _search("a lost byte of window")


def test_a_call_that_keeps_what_it_held_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Held, "release", lambda self, call: None)
    assert _search("bytes that stay held")
