"""What a message does to a row: sets it, deletes it, or neither, with a reason."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import DoubleType, LongType, StringType, StructType

from pydanube.formats.erasure import ERASED
from pydanube.pipeline import changes, steps
from tests.spark.test_steps import message, messages

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCHEMA = StructType().add("id", LongType()).add("amount", DoubleType(), False).add("state", StringType())
LATER = datetime(2026, 11, 15, 13, tzinfo=UTC)


def effects(rows: DataFrame, **how: Any) -> list[tuple[Any, ...]]:
    """Of each message: whether it deletes, the row, or else the reason."""
    decoded = changes.decoded(steps.raw(rows), SCHEMA, key=["id"], **how).orderBy("offset")
    return [
        (row["reason"],) if row["reason"] else (row["__deleted"], *row["__value"][:3])
        for row in decoded.select("reason", "__deleted", "__value").collect()
    ]


def envelope(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def test_rows_are_set_and_deleted_by_an_empty_payload_or_by_a_column(spark: SparkSession) -> None:
    rows = messages(
        spark,
        message(0, b'{"id": 1, "amount": 2.5, "state": "open"}'),
        message(1, b"", routing_key="1"),
        message(2, b"", routing_key='{"id": 7}'),
        message(3, b"", routing_key='{"schema": {}, "payload": {"id": 8}}'),
        message(4, b'{"id": 1, "state": "gone"}'),  # a deletion need not have the rest
        message(5, b"", routing_key="seven"),
        message(6, b""),
        message(7, b"", attributes={ERASED: "2026-11-18"}),
        message(8, b'{"id": 1, "state": "open"}'),
        message(9, b'{"id": null, "amount": 1.0}'),
        message(10, b'{"id": 1, "amount": 1.0} more'),
        message(11, b"\xff"),
        message(12, b"[]"),
    )
    assert effects(rows, deletes={"state": "gone"}) == [
        (False, 1, 2.5, "open"),
        (True, 1, None, None),
        (True, 7, None, None),
        (True, 8, None, None),
        (True, 1, None, "gone"),
        ("the tombstone has no id: it is not in the routing key",),
        ("the tombstone has no id: it is not in the routing key",),
        ("the message was erased",),
        ("amount is missing",),
        ("id is missing",),
        ("the payload goes on behind its JSON",),
        ("the payload is not UTF-8",),
        ("a value does not have the type that the schema says",),
    ]


def test_debezium_envelopes_are_read_wrapped_or_not(spark: SparkSession) -> None:
    one = {"id": 1, "amount": 2.5, "state": "open"}
    rows = messages(
        spark,
        message(0, envelope(op="c", before=None, after=one, source={"db": "x"}, ts_ms=1)),
        message(1, envelope(schema={"type": "struct"}, payload={"op": "u", "before": one, "after": {**one, "id": 2}})),
        message(2, envelope(op="r", after=one)),
        message(3, envelope(op="d", before=one, after=None)),
        message(4, envelope(op="d", before=None), routing_key='{"id": 5}'),  # the database tells no more
        message(5, b"", routing_key='{"id": 5}'),  # what follows a deletion, for compaction
        message(6, envelope(op="t")),
        message(7, envelope(id=1, amount=2.5)),  # no envelope
        message(8, envelope(op="c", after=None)),
        message(9, envelope(op="c", after={**one, "amount": "many"})),
        message(10, envelope(op="d", before=None)),
    )
    assert effects(rows, envelope="debezium") == [
        (False, 1, 2.5, "open"),
        (False, 2, 2.5, "open"),
        (False, 1, 2.5, "open"),
        (True, 1, 2.5, "open"),
        (True, 5, None, None),
        (True, 5, None, None),
        ("the operation is not one of c, r, u and d: t",),
        ("the operation is not one of c, r, u and d: none",),
        ("after is missing",),
        ("a value does not have the type that the schema says",),
        ("id is missing",),
    ]


def test_the_last_of_a_key_is_that_of_the_greatest_version_and_then_the_last_appended(spark: SparkSession) -> None:
    rows = messages(
        spark,
        message(0, b'{"id": 1, "amount": 3.0}'),
        message(1, b'{"id": 1, "amount": 2.0}'),
        message(2, b'{"id": 2, "amount": 9.0}', topic="/default/b", append_time=LATER),
        message(9, b'{"id": 2, "amount": 8.0}'),  # a larger offset of another topic, and an earlier moment
        message(10, b'{"id": 3, "amount": 1.0}'),
        message(11, b'{"id": 3, "amount": 1.0}'),
    )
    decoded = changes.decoded(steps.raw(rows), SCHEMA, key=["id"])
    every = changes.changes(decoded, SCHEMA)

    def last(version: str | None) -> list[tuple[Any, ...]]:
        found = changes.last_by_key(every, ["id"], version).orderBy("id")
        return [tuple(row) for row in found.select("id", "amount", "_offset").collect()]

    assert last(None) == [(1, 2.0, 1), (2, 9.0, 2), (3, 1.0, 11)]
    assert last("amount") == [(1, 3.0, 0), (2, 9.0, 2), (3, 1.0, 11)]
