"""Columns in SQL's words, looked at without Spark: what is wrong for certain is said, and nothing else."""

from __future__ import annotations

import pytest

from pydanube.pipeline.ddl import Unreadable, column_names


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("id string not null, amount double, at timestamp", ["id", "amount", "at"]),
        ("`a``b c` INT, d decimal(10, 2) COMMENT 'x, y'", ["a`b c", "d"]),
        ("a: int, b array<map<string, struct<c: int, d: array<date>>>>", ["a", "b"]),
        ("t timestamp_ntz, i interval day to second, v varchar(10), s string collate UTF8_LCASE", ["t", "i", "v", "s"]),
    ],
)
def test_columns_are_known_by_their_names(text: str, names: list[str]) -> None:
    assert column_names(text) == names


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("id strng", "id is of no type that there is: strng; string is one"),
        ("id", "`id` is no column"),
        ("id string,, n int", "a column is empty"),
        ("id string not, n int", "`not` is not understood"),
        ("id array<strng>", "id is of no type that there is: strng"),
        ("id array", "array needs 1 types"),
        ("id map<string>", "map needs 2 types"),
        ("id array<string", "does not close"),
        ("id string>", "a bracket closes that none opened"),
        ("s struct<a: strng>", "a is of no type"),
        ("id string, ID int", "the column ID is there twice"),
        ("id string<int>", "has nothing in angle brackets"),
    ],
)
def test_what_no_sql_means_is_said(text: str, why: str) -> None:
    with pytest.raises(Unreadable) as caught:
        column_names(text)
    assert why in str(caught.value)
