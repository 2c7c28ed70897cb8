"""A history in a file: it comes back as it was, and a file that is cut, damaged or foreign is refused with the line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pydanube.testing.history import (
    EVENT_TYPES,
    Acked,
    Fault,
    Got,
    History,
    InvalidHistory,
    Kept,
    Quiet,
    Released,
    Serving,
    life,
)

EVENTS = [
    Fault("power_cut", 2, 0.125),
    Acked("/default/orders", "order 1, with ünïcode and\nlines", 12, 3, 1, 4.25),
    Got("/default/orders", "sub", "c0", "order 1", 12, "key", 2, 3, True, 5.0),
    Released("/default/orders", 3, 13, True, 6.0),
    Serving("/default/orders", [1, 2], 7.0),
    Quiet(6.0, 8.0),
    Kept("/default/orders", 10, 13, {12: "order 1", 11: "x"}, [(10, 11)], [], 9.0),
]


def refused(text: str) -> InvalidHistory:
    with pytest.raises(InvalidHistory) as caught:
        History.parse(text, "run.jsonl")
    return caught.value


def text() -> str:
    return "".join(line + "\n" for line in History(EVENTS).lines())


def test_a_history_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    History(EVENTS).write(path)
    assert History.read(path).events == EVENTS
    assert path.read_text(encoding="utf-8").splitlines()[0] == '{"format": "pydanube history", "version": 1}'


def test_every_kind_of_event_can_be_written_and_read() -> None:
    samples = {"int": 3, "str": "s", "bool": True, "float": 1.5}
    for kind in EVENT_TYPES.values():
        fields = {name: samples.get(str(annotation), [(1, 2)]) for name, annotation in kind.__annotations__.items()}
        if kind is Kept:
            fields |= {"messages": {1: "a"}, "voids": [(1, 2)], "orphans": []}
        event = kind(**fields)
        again = History.parse("\n".join(History([event]).lines())).events
        assert json.dumps(again[0]._asdict()) == json.dumps(event._asdict())


@pytest.mark.parametrize("line", range(1, 9))
def test_a_file_that_ends_too_early_is_refused_with_the_line(line: int) -> None:
    whole = text().splitlines(keepends=True)
    error = refused("".join(whole[:line]))
    assert error.line == line + 1 and "cut" in error.why
    assert str(error) == f"run.jsonl, line {line + 1}: {error.why}"


def test_a_file_that_ends_inside_a_line_is_refused_with_the_line() -> None:
    error = refused(text()[:200])
    assert error.line == text()[:200].count("\n") + 1 and "middle of a line" in error.why


def test_a_missing_line_is_found_by_the_last_one() -> None:
    whole = text().splitlines(keepends=True)
    error = refused("".join(whole[:3] + whole[4:]))
    assert error.line == len(whole) - 1 and error.why == "7 events were written and 6 are here"


def test_lines_behind_the_end_are_refused() -> None:
    assert refused(text() + '{"event": "quiet"}\n').why == "there is more behind its end"


def test_another_version_and_another_format_are_refused() -> None:
    assert refused(text().replace('"version": 1', '"version": 2')).why == "it has version 2; this program reads 1"
    assert "it is no history" in refused('{"format": "something else"}\n').why
    assert refused("").line == 1
    assert refused("hello\n").line == 1
    assert refused("[1, 2]\n").why == "it is no JSON object"


def test_an_event_of_another_version_is_refused_with_the_line() -> None:
    lines = text().splitlines(keepends=True)
    lines[2] = '{"event": "teleported", "topic": "/default/orders"}\n'
    assert (refused("".join(lines)).line, refused("".join(lines)).why) == (3, "it has no event of this version")
    lines[2] = '{"event": "acked", "topic": "/default/orders", "mood": "good"}\n'
    assert refused("".join(lines)).line == 3 and "mood" in refused("".join(lines)).why


def test_a_topic_that_was_made_again_is_another_one() -> None:
    assert life("/default/orders", 1) == "/default/orders"
    assert life("/default/orders", 7) == "/default/orders@7"
