"""Batches of few rows: written as Arrow writes them, and believed only where Arrow would believe them."""

from __future__ import annotations

from array import array
from collections import Counter
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pydanube.errors import InvalidBatch
from pydanube.formats import batch as batches
from pydanube.formats.batch import (
    Envelope,
    columns_of,
    decode,
    encode,
    encode_columns,
    encode_messages,
    logical_crc,
    messages,
    parse,
    payloads_of,
    routing,
    rows_of,
    schema_pairs,
)
from pydanube.formats.envelope import ENVELOPE_1, validated
from pydanube.formats.small_batch import BODY_SIZE_MAX, ROWS_MAX, Sizes, SmallBatchLayout

TIMES = st.integers(-(2**55), 2**57)
TEXTS = st.text(max_size=12)
ROWS = st.lists(
    st.tuples(st.binary(max_size=40), TIMES, st.none() | TEXTS, st.none() | st.dictionaries(TEXTS, TEXTS, max_size=3)),
    min_size=1,
    max_size=ROWS_MAX,
)


def few() -> SmallBatchLayout:
    layout = batches._FEW
    assert layout is not None, "this Arrow lays batches out in another way: everything is slower than it was"
    return layout


def body_of(payloads: list[bytes], **columns: Any) -> bytes:
    times = array("q", range(len(payloads)))
    return few().write(payloads, memoryview(times).cast("B"), **columns)


def by_arrow(body: bytes) -> pa.RecordBatch | None:
    try:
        return validated(pa.py_buffer(body))
    except InvalidBatch:
        return None


# --- writing ----------------------------------------------------------------------------------------


SCHEMAS = st.none() | st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1))


@given(ROWS, st.none() | TEXTS, st.booleans(), st.booleans(), SCHEMAS)
def test_a_body_is_byte_for_byte_the_one_that_arrow_writes(
    rows: list[tuple[bytes, int, str | None, dict[str, str] | None]],
    name: str | None,
    keyed: bool,
    attributed: bool,
    schema: tuple[int, int] | None,
) -> None:
    payloads = [row[0] for row in rows]
    times = memoryview(array("q", [row[1] for row in rows])).cast("B")
    columns: dict[str, Any] = {
        "keys": [row[2] for row in rows] if keyed else None,
        "attributes": [row[3] for row in rows] if attributed else None,
        "producer_name": name,
        "schema": schema,
    }
    theirs = columns_of(payloads, times, **columns)
    ours = few().write(payloads, times, **columns)
    assert ours == theirs.serialize().to_pybytes()
    facts = few().check(ours, len(rows))
    assert facts is not None
    assert facts.logical_crc == logical_crc(theirs.column(1))
    assert facts.schema == (schema or (None, None))
    assert (facts.publish_time_min, facts.publish_time_max) == (min(row[1] for row in rows), max(r[1] for r in rows))


@pytest.mark.parametrize("count", [1, 2, ROWS_MAX, ROWS_MAX + 1])
@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
def test_a_batch_of_columns_is_the_same_with_few_rows_and_with_many(count: int, codec: str) -> None:
    payloads = [b"%d" % number * 300 for number in range(count)]
    times = memoryview(array("q", range(5, 5 + count))).cast("B")
    identity: dict[str, Any] = {
        "topic": "/default/a",
        "producer_id": 7,
        "session": 1,
        "first_sequence": 9,
        "codec": codec,
    }
    ours = encode_columns(payloads, times, producer_name="p", **identity)
    assert ours.to_bytes() == encode(columns_of(payloads, times, producer_name="p"), **identity).to_bytes()
    assert parse(ours.to_bytes()).header == ours.header


@pytest.mark.parametrize(
    "columns",
    [{"keys": ["\ud800"]}, {"producer_name": "\ud800"}, {"attributes": [{"a": "\ud800"}]}, {"attributes": [{"a": 1}]}],
)
def test_a_message_that_does_not_fit_the_envelope_is_refused(columns: dict[str, Any]) -> None:
    with pytest.raises(InvalidBatch, match="does not fit the envelope"):
        encode_columns([b"x"], bytes(8), topic="/default/a", **columns)


def test_a_publish_time_that_is_no_date_is_refused() -> None:
    with pytest.raises(InvalidBatch, match="years 1 to 9999"):
        encode_columns([b"x"], memoryview(array("q", [2**62])).cast("B"), topic="/default/a")


ENVELOPES = st.lists(
    st.builds(
        Envelope,
        payload=st.binary(max_size=40),
        publish_time=TIMES,
        routing_key=st.none() | TEXTS,
        producer_name=st.none() | TEXTS,
        attributes=st.dictionaries(TEXTS, TEXTS, max_size=3),
        schema_id=st.sampled_from((None, None, None, 7, 7, 7, 8)),
        schema_version=st.sampled_from((None, 1, 1, 2)),
        request_id=st.just(0) | st.integers(-(2**63), 2**63 - 1),
        event_time=st.sampled_from((None, None, None, None, None, 7)),
        deliver_at=st.none(),
    ),
    min_size=1,
    max_size=5,
)


@given(ENVELOPES)
def test_the_schemas_of_a_batch_are_told_apart(sent: list[Envelope]) -> None:
    batch = encode_messages(sent, topic="/default/a")
    pairs = Counter((each.schema_id, each.schema_version) for each in sent)
    assert schema_pairs(batch) == pairs
    assert schema_pairs(parse(batch.to_bytes())) == pairs, "of a batch that was just parsed"
    assert [each[4:7] for each in messages(batch)] == [each[4:7] for each in sent]
    for pair in pairs:
        rows = [(row, each.payload) for row, each in enumerate(sent) if (each.schema_id, each.schema_version) == pair]
        assert payloads_of(batch, pair) == rows


@given(ENVELOPES)
def test_messages_become_the_very_batch_that_arrow_makes_of_them(sent: list[Envelope]) -> None:
    ours = encode_messages(sent, topic="/default/a")
    assert ours.to_bytes() == encode(rows_of(sent), topic="/default/a").to_bytes()


@pytest.mark.parametrize(
    "envelope",
    [
        Envelope(None),  # type: ignore[arg-type]
        Envelope(b"x", publish_time=2**62),
        Envelope(b"x", publish_time=2**70),
        Envelope(b"x", routing_key="\ud800"),
        Envelope(b"x", attributes={"a": 1}),  # type: ignore[dict-item]
        Envelope(b"x", request_id=2**63),
    ],
)
def test_a_message_is_refused_in_the_words_in_which_arrow_refuses_it(envelope: Envelope) -> None:
    with pytest.raises(InvalidBatch) as theirs:
        encode(rows_of([envelope]), topic="/default/a")
    with pytest.raises(InvalidBatch) as ours:
        encode_messages([envelope], topic="/default/a")
    assert str(ours.value) == str(theirs.value)


# --- reading ----------------------------------------------------------------------------------------


@given(ENVELOPES)
def test_what_is_read_is_what_arrow_reads(sent: list[Envelope]) -> None:
    batch = encode_messages(sent, topic="/default/a")
    known = [each.schema_id is not None for each in sent]
    plain = all(known) or not any(known)  # all of them have a schema, or none has
    plain = plain and known == [each.schema_version is not None for each in sent]
    plain = plain and all(each.event_time is None for each in sent)
    assert (few().read(batch.body, len(sent)) is not None) == plain
    assert messages(batch) == sent
    assert messages(batch) == messages(batch), "what is remembered stays as it is"
    rows = decode(batch)
    assert [list(each) for each in routing(batch)] == [rows.column(2).to_pylist(), rows.column(3).to_pylist()]


# --- checking ---------------------------------------------------------------------------------------

SHAPES = {
    "one": body_of([b"payload"], producer_name="p"),
    "everything": body_of(
        [b"", b"abc", b"\xff" * 9],
        keys=["k", None, "ü"],
        producer_name="prödücer",
        attributes=[{"a": "b", "c": "ü"}, None, {"": ""}],
    ),
    "schema": body_of([b"abc", b"", b"d"], producer_name="p", schema=(7, 2)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_believed_of_a_body_with_one_other_byte_arrow_believes_too(name: str) -> None:
    body, rows = SHAPES[name], {"one": 1}.get(name, 3)
    random = Random(name)
    believed = 0
    for place in range(len(body)):
        for value in {0, 1, 0x7F, 0x80, 0xFF, body[place] ^ 1 << random.randrange(8)} - {body[place]}:
            changed = body[:place] + bytes([value]) + body[place + 1 :]
            facts = few().check(changed, rows)
            if facts is not None:
                believed += 1
                read = by_arrow(changed)
                assert read is not None, f"byte {place} may not be {value}"
                assert read.num_rows == rows and facts.logical_crc == logical_crc(read.column(1))
                read.drop_columns(["publish_time"]).to_pylist()  # times are for `parse` to judge
    assert believed, "other payloads and times are as good"


@given(st.binary(max_size=64), st.integers(1, ROWS_MAX), st.integers(0, 900))
def test_bytes_that_are_no_body_are_left_to_arrow(noise: bytes, rows: int, place: int) -> None:
    assert few().check(noise, rows) is None
    body = SHAPES["everything"]
    cut = body[:place] + noise
    if few().check(cut, rows) is not None:
        assert by_arrow(cut) is not None


@pytest.mark.parametrize("rows", [0, 2, ROWS_MAX, ROWS_MAX + 1, -1, 2**31])
def test_another_number_of_rows_is_not_believed(rows: int) -> None:
    assert few().check(SHAPES["one"], rows) is None


def test_a_body_is_remembered_only_with_its_own_claims() -> None:
    """The same columns behind the payloads, and metadata that says something else of them."""
    honest = body_of([b"x"], keys=["k"], producer_name="p")
    assert few().check(honest, 1) is not None
    liar = bytearray(honest)
    liar[few()._claims_at + 40] = 1  # a null in routing_key
    assert few().check(bytes(liar), 1) is None and few().check(honest, 1) is not None


@pytest.mark.parametrize(
    "envelope",
    [
        Envelope(b"x", schema_id=7, schema_version=1),
        Envelope(b"x" * (BODY_SIZE_MAX + 1)),
        Envelope(b"x", request_id=-5, producer_name=None),
    ],
)
def test_what_is_not_believed_here_is_still_a_batch(envelope: Envelope) -> None:
    batch = encode(rows_of([envelope]), topic="/default/a")
    assert messages(parse(batch.to_bytes()))[0].payload == envelope.payload


def test_checking_and_arrow_read_the_same_values() -> None:
    body = SHAPES["everything"]
    batch = encode(pa.ipc.read_record_batch(pa.py_buffer(body), ENVELOPE_1), topic="/default/a")
    assert decode(parse(batch.to_bytes())).column("routing_key").to_pylist() == ["k", None, "ü"]


# --- the example it is made from --------------------------------------------------------------------


def test_an_example_that_is_not_what_it_is_said_to_be_makes_no_layout() -> None:
    example = columns_of([bytes(70_001)], bytes(8)).serialize().to_pybytes()
    SmallBatchLayout(example, 70_001, Sizes(1, 1, 0, 1, 0))
    for payload, sizes in (
        (70_002, Sizes(1, 1, 0, 1, 0)),
        (70_001, Sizes(2, 1, 0, 1, 0)),
        (70_001, Sizes(1, 0, 0, 1, 0)),
    ):
        with pytest.raises(ValueError, match="metadata"):
            SmallBatchLayout(example, payload, sizes)
