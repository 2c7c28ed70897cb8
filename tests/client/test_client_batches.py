"""Batches as a producer makes them: from columns, and under other numbers; and the broker that tests may use."""

from __future__ import annotations

import asyncio
from array import array
from pathlib import Path

import pytest

import pydanube
import pydanube.testing
from pydanube.errors import InvalidBatch
from pydanube.formats.batch import Envelope, columns_of, encode, messages, parse, renumber, rows_of
from tests.support import run

TOPIC = "/default/orders"
TIMES = memoryview(array("q", [5, 6, 7])).cast("B")
PAYLOADS = [b"a", b"", b"ccc"]


def test_columns_and_rows_make_the_same_batch() -> None:
    keys = ["k", None, "ü"]
    attributes = [{"a": "b", "c": ""}, None, {}]
    rows = rows_of(
        [
            Envelope(payload, time, key, "p", attribute or {})
            for payload, time, key, attribute in zip(PAYLOADS, (5, 6, 7), keys, attributes, strict=True)
        ]
    )
    columns = columns_of(PAYLOADS, TIMES, keys=keys, producer_name="p", attributes=attributes)
    assert columns.equals(rows)
    assert (
        parse(encode(columns, topic=TOPIC).to_bytes()).header.logical_crc
        == encode(rows, topic=TOPIC).header.logical_crc
    )


def test_columns_that_all_messages_lack_are_null_or_empty() -> None:
    batch = parse(encode(columns_of(PAYLOADS, TIMES), topic=TOPIC).to_bytes())
    assert messages(batch) == [Envelope(payload, time) for payload, time in zip(PAYLOADS, (5, 6, 7), strict=True)]


@pytest.mark.parametrize(
    ("payloads", "times", "keys"),
    [([], b"", None), ([b"a"], TIMES, None), ([b"a", b"b", b"c"], TIMES, ["k"]), (["a", "b", 3], TIMES, None)],
)
def test_columns_that_do_not_fit_are_refused(payloads: list[bytes], times: bytes, keys: list[str | None]) -> None:
    with pytest.raises(InvalidBatch):
        encode(columns_of(payloads, times, keys=keys), topic=TOPIC)


def test_a_renumbered_batch_is_the_same_but_for_its_numbers() -> None:
    batch = encode(columns_of(PAYLOADS, TIMES), topic=TOPIC, producer_id=1, session=2, first_sequence=3)
    again = parse(renumber(batch, producer_id=4, session=5, first_sequence=6).to_bytes())
    assert (again.header.producer_id, again.header.session, again.header.first_sequence) == (4, 5, 6)
    assert bytes(again.body) == bytes(batch.body) and messages(again) == messages(batch)


@pytest.mark.slow
def test_a_test_broker_keeps_what_it_is_given_where_it_is_told(tmp_path: Path) -> None:
    async def inside() -> None:
        for number in range(2):
            async with (
                pydanube.testing.broker(tmp_path) as broker,
                pydanube.connect(broker.url) as client,
                client.producer(TOPIC) as producer,
            ):
                assert (await producer.send(b"x")).offset == number

    run(inside())


@pytest.mark.slow
def test_a_test_broker_needs_no_event_loop_and_leaves_nothing_behind() -> None:
    with pydanube.testing.broker() as broker:
        assert broker.data_dir is not None
        directory = broker.data_dir

        async def inside() -> list[str]:
            async with pydanube.connect(broker.url) as client:
                await client.create_topic(TOPIC)
                return await client.list_topics()

        assert asyncio.run(inside()) == [TOPIC]
    assert not directory.exists()
