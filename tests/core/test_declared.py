"""Errors that declare their fields: how they are made, what they say, and that they travel."""

from __future__ import annotations

import copy
import pickle

import pytest

from pydanube import errors
from pydanube.core.declared import fields_of, have_same_fields


def test_fields_come_in_order_or_by_name() -> None:
    in_order, by_name = (
        errors.TopicExists("/default/a", "it is there"),
        errors.TopicExists(why="it is there", topic="/default/a"),
    )
    for error in (in_order, by_name):
        assert (error.topic, error.why) == error.args == ("/default/a", "it is there")
        assert str(error) == "topic /default/a cannot be created: it is there"


def test_a_field_with_a_default_may_be_left_out_and_is_in_args_all_the_same() -> None:
    assert errors.NotServed("/default/a", "it moves").args == ("/default/a", "it moves", "")
    assert errors.NotServed("/default/a", "it moves", moved_to="danube://b:6651").moved_to == "danube://b:6651"


@pytest.mark.parametrize(
    ("given", "named"),
    [((), {}), (("a", "b"), {}), (("a",), {"topic": "b"}), ((), {"name": "a"})],
    ids=["too few", "too many", "twice", "unknown"],
)
def test_fields_that_do_not_fit_are_refused(given: tuple[str, ...], named: dict[str, str]) -> None:
    with pytest.raises(TypeError, match="TopicUnknown takes topic"):
        errors.TopicUnknown(*given, **named)


def test_what_a_field_holds_is_never_taken_for_a_placeholder() -> None:
    assert str(errors.InvalidBatch("{topic} and {0}")) == "not a valid batch: {topic} and {0}"


def test_fields_of_a_base_come_first() -> None:
    error = errors.ResourcesShort("data", "Too many open files")
    assert fields_of(errors.ResourcesShort) == ("path", "why") and isinstance(error, errors.DiskFull)
    assert str(error).startswith("data could not be used: too many open files; ")


@pytest.mark.parametrize("made", [pickle.loads, copy.copy], ids=["pickled", "copied"])
def test_an_error_keeps_its_fields_when_it_travels(made: object) -> None:
    error = errors.LogDamaged("/default/a", "file", 96, 3, None, "checksum")
    again = pickle.loads(pickle.dumps(error)) if made is pickle.loads else copy.copy(error)
    assert type(again) is errors.LogDamaged and again.args == error.args and str(again) == str(error)


def test_classes_with_the_same_fields_and_another_sentence_do_not_say_the_same() -> None:
    assert not have_same_fields(errors.ClientClosed, errors.NeverOpened)
    assert have_same_fields(errors.Unreachable, errors.StoreRefused)
