"""Version 2 of the envelope: times of events and of deliveries, in batches and objects beside those of before."""

from __future__ import annotations

import pyarrow as pa
import pytest

from pydanube.errors import InvalidBatch
from pydanube.formats.batch import (
    Batch,
    Envelope,
    cut,
    decode,
    delivery_times,
    encode,
    encode_columns,
    encode_messages,
    in_version_1,
    load,
    messages,
    parse,
    rows_of,
    stamp,
    with_attribute,
)
from pydanube.formats.envelope import ENVELOPE, ENVELOPE_1
from pydanube.formats.parquet import COLUMNS
from pydanube.formats.parquet_read import open_object, read_row_group, read_table
from pydanube.formats.parquet_write import encode_object, merge_objects

TOPIC = "/default/orders"
PLAIN = Envelope(b"plain", 5, "key", "name", {"a": "b"})
LATER = Envelope(b"later", 6, "key", deliver_at=1_700_000_000_000_000)
EVENT = Envelope(b"event", 7, event_time=-3)
ALL = [PLAIN, LATER, EVENT]


def stored(sent: list[Envelope], base: int) -> Batch:
    return stamp(encode(rows_of(sent), topic=TOPIC), base_offset=base, epoch=3, append_time=9)


def test_a_batch_without_these_times_is_the_one_of_before_byte_for_byte() -> None:
    wide = decode(encode(rows_of([PLAIN] * 3), topic=TOPIC))
    assert wide.schema == ENVELOPE
    again = encode(wide, topic=TOPIC)
    assert again.header.envelope == 1
    assert again.to_bytes() == encode(wide.select(ENVELOPE_1.names), topic=TOPIC).to_bytes()
    assert delivery_times(again) is None


@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
def test_these_times_come_back_as_they_were_sent(codec: str) -> None:
    sent = [each._replace(payload=each.payload * 2_000) for each in ALL]
    batch = parse(encode(rows_of(sent), topic=TOPIC, codec=codec).to_bytes())
    assert batch.header.envelope == 2
    assert messages(batch) == messages(encode_messages(sent, topic=TOPIC)) == sent
    assert delivery_times(batch) == [None, 1_700_000_000_000_000, None]
    columns = encode_columns([b"a", b"b"], bytes(16), topic=TOPIC, event_times=[1, None], deliver_at=None)
    assert [each.event_time for each in messages(parse(columns.to_bytes()))] == [1, None]


def test_parts_of_a_batch_have_the_lowest_version_that_says_all_of_them() -> None:
    batch = stored(ALL, 10)
    assert cut(batch, 10, 11).header.envelope == 1
    part = load(cut(batch, 11, 13).to_bytes())
    assert part.header.envelope == 2 and messages(part) == ALL[1:] and part.header.base_offset == 11
    assert messages(with_attribute(part, "x", "y"))[0].deliver_at == LATER.deliver_at


def test_a_peer_that_knows_version_1_gets_it_with_the_same_checksum_of_the_payloads() -> None:
    batch = stored(ALL, 10)
    older = parse(in_version_1(encode(rows_of(ALL), topic=TOPIC)).to_bytes())
    assert messages(older)[1] == LATER._replace(deliver_at=None)
    older = in_version_1(batch)
    assert older.header.envelope == 1
    assert older.header.logical_crc == batch.header.logical_crc and older.header.base_offset == 10
    assert [each.payload for each in messages(older)] == [b"plain", b"later", b"event"]
    assert delivery_times(older) is None
    same = stored([PLAIN], 0)
    assert in_version_1(same) is same


@pytest.mark.parametrize("column", ["event_time", "deliver_at"])
@pytest.mark.parametrize("time", [-62_135_596_800_000_001, 253_402_300_800_000_000])
def test_a_time_that_is_no_date_is_refused_by_name(column: str, time: int) -> None:
    with pytest.raises(InvalidBatch, match=f"{column} {time} is not in the years"):
        encode(rows_of([PLAIN, PLAIN._replace(**{column: time})]), topic=TOPIC)


def test_a_body_of_one_version_is_refused_under_the_number_of_the_other() -> None:
    one, two = encode(rows_of([PLAIN]), topic=TOPIC), encode(rows_of([LATER]), topic=TOPIC)
    from pydanube.formats.batch_header import finish

    for batch, version in ((one, 2), (two, 1)):
        with pytest.raises(InvalidBatch, match="its columns are not the envelope's"):
            parse(finish(batch.header._replace(envelope=version), batch.body).to_bytes())


def test_objects_have_these_columns_and_those_of_before_are_read_with_nulls() -> None:
    encoded = encode_object(TOPIC, 3, [stored([PLAIN] * 2, 0), stored(ALL, 2)])
    footer = open_object(encoded.data)
    group = footer.row_groups[0]
    data = memoryview(encoded.data)[group.position : group.position + group.length]
    assert [each for batch in read_row_group(footer, 0, data) for each in messages(batch)] == [PLAIN, PLAIN, *ALL]
    assert read_table(footer, 0, data, ["deliver_at"]).column(0).null_count == 4
    merged = merge_objects(TOPIC, 4, [(encoded.data, encoded.footer_crc)])
    again = open_object(merged.data)
    group = again.row_groups[0]
    table = read_table(again, 0, memoryview(merged.data)[group.position : group.position + group.length], COLUMNS.names)
    assert table.column("event_time").cast(pa.int64()).to_pylist() == [None] * 4 + [-3]
