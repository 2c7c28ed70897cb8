"""Objects: what went in comes out, plain tools read it, and no flipped bit is taken for a message."""

from __future__ import annotations

import struct
import tarfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pydanube.errors import InvalidObject
from pydanube.formats import parquet_read, parquet_write
from pydanube.formats.batch import Batch, Envelope, encode, logical_crc, messages, rows_of, stamp
from pydanube.formats.parquet import COLUMNS, Encoded, encode_raw, footer_length, read_raw, summary
from pydanube.formats.parquet_read import (
    FOOTER_GUESS_BYTES,
    check_bytes,
    open_object,
    parse_footer,
    read_row_group,
    read_table,
    verify_object,
)
from pydanube.formats.parquet_write import ROW_GROUP_BYTES, encode_object, merge_objects, table_of_batches
from pydanube.ports import Buffer
from tests.harness.tiers import flipped

TOPIC = "/default/orders"
NOON = 1_704_110_400_000_000
KIB, MIB = 1024, 1 << 20


def batch(
    rows: Sequence[Envelope], base: int, *, epoch: int = 3, producer: int = 0, sequence: int = 0, codec: str = "none"
) -> Batch:
    made = encode(rows_of(rows), topic=TOPIC, producer_id=producer, session=9, first_sequence=sequence, codec=codec)
    return stamp(made, base_offset=base, epoch=epoch, append_time=NOON + base)


def text(count: int, first: int = 0) -> list[Envelope]:
    return [Envelope(f"message {n}".encode(), NOON + n, f"key {n % 5}") for n in range(first, first + count)]


def batches_of(*counts: int, epochs: Sequence[int] = ()) -> list[Batch]:
    made: list[Batch] = []
    base = 0
    for number, count in enumerate(counts):
        made.append(batch(text(count, base), base, epoch=epochs[number] if epochs else 3))
        base += count
    return made


def read(data: bytes, crc: int = 0) -> list[Batch]:
    """As a subscription reads it: the footer from the end, then one row group after the other."""
    tail = data[-max(FOOTER_GUESS_BYTES, footer_length(data)) :]
    footer = parse_footer(tail, len(data), crc)
    return [
        found
        for number, group in enumerate(footer.row_groups)
        for found in read_row_group(footer, number, data[group.position : group.position + group.length])
    ]


def rows(batches: Sequence[Batch]) -> list[tuple[int, Envelope]]:
    return [(each.header.base_offset + row, found) for each in batches for row, found in enumerate(messages(each))]


def bytes_of(encoded: Encoded) -> bytes:
    return bytes(encoded.data)


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups and batches that are small beside a test."""
    monkeypatch.setattr(parquet_write, "ROW_GROUP_BYTES", 4 * KIB)
    monkeypatch.setattr(parquet_read, "BATCH_BYTES", KIB)


# --- there and back ---------------------------------------------------------------------------------------


ODD = [
    Envelope(b""),
    Envelope(b"\0" * 10, NOON, "", "", {}, 0, 0, 0),
    Envelope("größe".encode(), NOON + 1, "ключ", "имя", {"a": "", "": "b", "ü": "ß" * 99}, 2**62, 2**31 - 1, 2**63 - 1),
    Envelope(b"early", -62_135_596_800_000_000, None, None, {"x": "y"}, None, None, -(2**63)),
    Envelope(b"late", 253_402_300_799_999_999, "k"),
]  # fmt: skip


def test_every_field_of_a_message_comes_back() -> None:
    written = [batch(ODD, 0), batch(ODD[::-1], len(ODD))]
    encoded = encode_object(TOPIC, 3, written)
    assert rows(read(bytes_of(encoded), encoded.footer_crc)) == rows(written)
    assert (encoded.min_publish_time, encoded.max_publish_time) == (ODD[3].publish_time, ODD[4].publish_time)


TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
ENVELOPES = st.builds(
    Envelope,
    payload=st.binary(max_size=200),
    publish_time=st.integers(-62_135_596_800_000_000, 253_402_300_799_999_999),
    routing_key=st.none() | TEXTS,
    producer_name=st.none() | TEXTS,
    attributes=st.dictionaries(TEXTS, TEXTS, max_size=3),
    schema_id=st.none() | st.integers(-(2**63), 2**63 - 1),
    schema_version=st.none() | st.integers(-(2**31), 2**31 - 1),
    request_id=st.integers(-(2**63), 2**63 - 1),
    event_time=st.none() | st.integers(-62_135_596_800_000_000, 253_402_300_799_999_999),
    deliver_at=st.none() | st.integers(-62_135_596_800_000_000, 253_402_300_799_999_999),
)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(ENVELOPES, min_size=1, max_size=8), min_size=1, max_size=5), st.integers(0, 2**40))
def test_whatever_a_message_is_it_comes_back_at_its_offset(groups: list[list[Envelope]], base: int) -> None:
    written = []
    for group in groups:
        written.append(batch(group, base))
        base += len(group)
    encoded = encode_object(TOPIC, 3, written)
    verify_object(bytes_of(encoded), [summary(each) for each in written])
    assert rows(read(bytes_of(encoded))) == rows(written)


@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
def test_a_compressed_batch_comes_back(codec: str) -> None:
    written = [batch([Envelope(b"x" * 5000, NOON)] * 10, 7, codec=codec)]
    assert rows(read(bytes_of(encode_object(TOPIC, 3, written)))) == rows(written)


@pytest.mark.parametrize("number", [1, 2**63 - 1, 2**63, 2**64 - 1])
def test_huge_producer_ids_and_sequences_are_kept_to_the_last_bit(number: int) -> None:
    first_sequence = min(number, 2**64 - 10)
    written = [batch(text(3), 2**40, producer=number, sequence=first_sequence)]
    encoded = encode_object(TOPIC, 3, written)
    (stored,) = open_object(bytes_of(encoded)).batches
    assert (stored.producer_id, stored.session, stored.first_sequence) == (number, 9, first_sequence)
    table = pq.read_table(pa.BufferReader(encoded.data))
    unsigned = [each % 2**64 for each in table.column("producer_id").to_pylist()]
    assert unsigned == [number] * 3
    sequences = [each % 2**64 for each in table.column("sequence").to_pylist()]
    assert sequences == [first_sequence, first_sequence + 1, first_sequence + 2]


def test_a_message_without_deduplication_has_no_sequence() -> None:
    table = table_of_batches([batch(text(2), 0), batch(text(2, 2), 2, producer=5, sequence=40)])
    assert table.column("sequence").to_pylist() == [None, None, 40, 41]
    assert table.column("producer_id").to_pylist() == [0, 0, 5, 5]


def test_rows_keep_the_epoch_and_the_offset_they_were_appended_with() -> None:
    written = batches_of(3, 2, 4, 1, epochs=(3, 3, 5, 8))
    encoded = encode_object(TOPIC, 9, written)
    found = read(bytes_of(encoded))
    assert [(each.header.base_offset, each.header.rows, each.header.epoch) for each in found] == [
        (0, 5, 3), (5, 4, 5), (9, 1, 8),
    ]  # fmt: skip
    assert [each.header.append_time for each in found] == [NOON + 3, NOON + 5, NOON + 9]


# --- sizes ------------------------------------------------------------------------------------------------


def test_a_batch_that_is_larger_than_a_row_group_is_taken_apart_and_comes_back() -> None:
    rng = Random(1)
    large = [Envelope(rng.randbytes(MIB), NOON + n) for n in range(20)]
    written = [batch(text(5), 0), batch(large, 5), batch(text(5, 25), 25)]
    encoded = encode_object(TOPIC, 3, written)
    data = bytes_of(encoded)
    footer = open_object(data, encoded.footer_crc)
    assert len(footer.row_groups) == 6
    assert all(group.length <= ROW_GROUP_BYTES + 64 * KIB for group in footer.row_groups)
    verify_object(data, encoded.batches)
    found = read(data)
    assert rows(found) == rows(written)
    assert max(each.header.size_bytes for each in found) < MIB + 64 * KIB


def test_one_message_that_is_larger_than_a_row_group_comes_back() -> None:
    written = [batch([Envelope(Random(2).randbytes(ROW_GROUP_BYTES + 1), NOON)], 0)]
    encoded = encode_object(TOPIC, 3, written)
    assert rows(read(bytes_of(encoded))) == rows(written)


def test_reading_a_row_group_takes_little_more_memory_than_what_comes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    payloads = [bytes([n % 251]) * KIB for n in range(5000)]
    data = bytes_of(encode_object(TOPIC, 3, [batch([Envelope(each, NOON) for each in payloads], 0)]))
    footer = open_object(data)
    group = footer.row_groups[0]
    before, taken = pa.total_allocated_bytes(), []

    def watched(*arguments: Any, **named: Any) -> Batch:
        taken.append(pa.total_allocated_bytes() - before)
        return encode(*arguments, **named)

    monkeypatch.setattr(parquet_read, "encode", watched)
    found = read_row_group(footer, 0, memoryview(data)[group.position : group.position + group.length])
    assert len(found) > 4
    made = 0
    for each, bytes_taken in zip(found, taken, strict=True):
        assert bytes_taken < made + 5_000_000, "what was made so far, and one batch in the making"
        made += each.header.size_bytes
    assert made > 5_000_000
    assert [each.payload for _, each in rows(found)] == payloads


def test_messages_of_very_different_sizes_come_back_in_batches_of_a_bounded_size() -> None:
    sizes = [10] * 3000 + [900 * KIB] * 3 + [0] * 500 + [300 * KIB] * 12
    sent = [Envelope(bytes([n % 251]) * size, NOON + n) for n, size in enumerate(sizes)]
    parts = [batch(sent[:1000], 0, epoch=3), batch(sent[1000:3002], 1000, epoch=3), batch(sent[3002:], 3002, epoch=4)]
    found = read(bytes_of(encode_object(TOPIC, 4, parts)))
    assert rows(found) == list(enumerate(sent))
    assert max(each.header.size_bytes for each in found) < parquet_read.BATCH_BYTES + 900 * KIB
    assert {each.header.epoch for each in found if each.header.end_offset <= 3002} == {3}
    assert {each.header.epoch for each in found if each.header.base_offset >= 3002} == {4}


def test_many_small_batches_share_row_groups_and_their_footer_stays_small_in_memory(small_groups: None) -> None:
    written = [batch(text(1, n), n) for n in range(300)]
    encoded = encode_object(TOPIC, 3, written)
    footer = open_object(bytes_of(encoded))
    assert 2 < len(footer.row_groups) < 100
    assert len(footer.runs) == 1 and len(footer.batches) == 300
    assert rows(read(bytes_of(encoded))) == rows(written)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 129])
def test_small_batches_are_put_together_some_at_a_time_and_none_is_lost(count: int) -> None:
    written = [batch(text(2, 2 * n), 2 * n) for n in range(count)]
    encoded = encode_object(TOPIC, 3, written)
    assert len(open_object(bytes_of(encoded)).row_groups) == 1
    assert rows(read(bytes_of(encoded))) == rows(written)


def test_batches_must_follow_each_other() -> None:
    for second in (4, 2):
        with pytest.raises(InvalidObject, match="offset"):
            encode_object(TOPIC, 3, [batch(text(3), 0), batch(text(3), second)])


# --- merging ------------------------------------------------------------------------------------------------


def test_merged_objects_hold_the_same_messages_and_say_less_about_batches(small_groups: None) -> None:
    written = batches_of(3, 50, 1, 30, 2, 7, epochs=(3, 3, 4, 4, 4, 6))
    parts = [
        encode_object(TOPIC, 6, written[:2]),
        encode_object(TOPIC, 6, written[2:3]),
        encode_object(TOPIC, 6, written[3:]),
    ]
    merged = merge_objects(TOPIC, 7, [(bytes_of(each), each.footer_crc) for each in parts])
    data = bytes_of(merged)
    verify_object(data, merged.batches)
    check_bytes(data, merged.footer_crc)
    assert rows(read(data)) == rows(written)
    assert (merged.start_offset, merged.end) == (0, 93)
    assert merged.max_append_time == NOON + 86
    assert len(merged.batches) == len(open_object(data).row_groups) + 2
    assert {each.epoch for each in merged.batches} == {3, 4, 6}
    before = pa.concat_tables([pq.read_table(pa.BufferReader(each.data)) for each in parts])
    assert pq.read_table(pa.BufferReader(data)).equals(before)


def test_who_sent_what_survives_merging_and_merging_again() -> None:
    """Else messages that a lost owner brings back would not be compared with those that were sent again."""
    written = [
        batch(text(2), 0, producer=7, sequence=10),
        batch(text(2, 2), 2),
        batch(text(2, 4), 4, producer=7, sequence=12),
        batch(text(1, 6), 6, producer=2**64 - 1, sequence=3),
        batch(text(1, 7), 7, producer=7, sequence=5, epoch=4),
    ]
    parts = [encode_object(TOPIC, 4, written[first:end]) for first, end in ((0, 2), (2, 4), (4, 5))]
    expected = {(7, 9, 3, 10), (2**64 - 1, 9, 3, 3), (7, 9, 4, 5)}
    once = merge_objects(TOPIC, 4, [(bytes_of(each), each.footer_crc) for each in parts[:2]])
    twice = merge_objects(TOPIC, 5, [(bytes_of(each), each.footer_crc) for each in (once, parts[2])])
    for data in (bytes_of(twice), bytes_of(encode_object(TOPIC, 4, written))):
        found = open_object(data).producers
        assert {(each.producer_id, each.session, each.epoch, each.first_sequence) for each in found} == expected
    assert open_object(bytes_of(encode_object(TOPIC, 3, written[1:2]))).producers == []


def test_objects_that_do_not_follow_each_other_or_are_damaged_are_not_merged() -> None:
    first, second, third = (encode_object(TOPIC, 3, [each]) for each in batches_of(5, 5, 5))
    with pytest.raises(InvalidObject, match="offset 10"):
        merge_objects(TOPIC, 3, [(bytes_of(first), 0), (bytes_of(third), 0)])
    data = bytes_of(second)
    for place in (20, len(data) - 100):
        with pytest.raises(InvalidObject, match="checksum"):
            merge_objects(TOPIC, 3, [(bytes_of(first), first.footer_crc), (flipped(data, place), second.footer_crc)])


# --- as a plain table -----------------------------------------------------------------------------------------


def test_the_columns_are_the_envelope_and_what_the_log_knows(small_groups: None) -> None:
    encoded = encode_object(TOPIC, 3, [*batches_of(40, 40), batch(ODD, 80, epoch=4, producer=6, sequence=1)])
    file = pq.ParquetFile(pa.BufferReader(encoded.data))
    assert file.schema_arrow.names == COLUMNS.names == [
        "offset", "publish_time", "payload", "routing_key", "producer_name", "attributes", "schema_id",
        "schema_version", "request_id", "producer_id", "sequence", "epoch", "append_time", "event_time", "deliver_at",
    ]  # fmt: skip
    table = file.read()
    assert table.column("offset").to_pylist() == list(range(85))
    assert table.column("epoch").to_pylist() == [3] * 80 + [4] * 5
    assert table.column("append_time")[84].as_py() == datetime(2024, 1, 1, 12, 0, 0, 80, tzinfo=UTC)
    assert dict(table.column("attributes")[82].as_py()) == ODD[2].attributes
    assert file.metadata.num_row_groups > 2


def field_ids(data: Buffer) -> dict[str, int]:
    """As Parquet's own schema has them; -1: none."""
    columns = pq.ParquetFile(pa.BufferReader(data)).metadata.schema.to_arrow_schema()
    attributes = columns.field("attributes").type
    parts = [*columns, attributes.key_field, attributes.item_field]
    return {part.name: int((part.metadata or {}).get(b"PARQUET:field_id", -1)) for part in parts}


EXPECTED_IDS = {name: number for number, name in enumerate(COLUMNS.names[:13], start=1)} | {
    "key": 15, "value": 16, "event_time": 18, "deliver_at": 19,
}  # fmt: skip


def older_object() -> bytes:
    """As an earlier version wrote it: 40 rows, no field ids."""
    name = "data/objects/default/orders/data-0-39-1.parquet"
    with tarfile.open(Path(__file__).parents[1] / "fixtures" / "data-directory-2.tar.xz") as archive:
        file = archive.extractfile(name)
        assert file is not None
        return file.read()


def test_columns_have_the_field_ids_that_tables_know_them_by(small_groups: None) -> None:
    assert field_ids(encode_object(TOPIC, 3, batches_of(40)).data) == EXPECTED_IDS
    assert EXPECTED_IDS["offset"] == 1 and EXPECTED_IDS["append_time"] == 13


def test_an_older_object_without_field_ids_is_read_and_merged_with_a_new_one() -> None:
    older = older_object()
    assert set(field_ids(older).values()) == {-1}
    footer = open_object(older)
    newer = encode_object(footer.topic, 3, [batch(text(10, 40), 40)])
    merged = merge_objects(footer.topic, 4, [(older, 0), (newer.data, newer.footer_crc)])
    assert field_ids(merged.data) == EXPECTED_IDS
    rows = pq.read_table(pa.BufferReader(merged.data))
    parts = [pq.read_table(pa.BufferReader(data)) for data in (older, newer.data)]
    assert rows.to_pylist() == pa.concat_tables(parts, promote_options="default").to_pylist()
    assert rows.column("offset").to_pylist() == list(range(50))
    assert [message.payload for each in read(older) for message in messages(each)] == [
        row["payload"] for row in parts[0].to_pylist()
    ]


def test_row_groups_have_statistics_bloom_filters_and_page_checksums(small_groups: None) -> None:
    encoded = encode_object(TOPIC, 3, batches_of(*[40] * 10))
    metadata = pq.ParquetFile(pa.BufferReader(encoded.data)).metadata
    names = [metadata.row_group(0).column(i).path_in_schema for i in range(metadata.num_columns)]
    for name in ("offset", "publish_time", "routing_key"):
        lows = [metadata.row_group(i).column(names.index(name)).statistics.min for i in range(metadata.num_row_groups)]
        assert None not in lows and lows == sorted(lows)
    payload = metadata.row_group(0).column(names.index("payload"))
    assert payload.statistics is None  # they would repeat messages in the footer
    assert {metadata.row_group(0).column(i).compression for i in range(metadata.num_columns)} == {"ZSTD"}
    assert metadata.row_group(0).sorting_columns[0].column_index == 0
    keys = metadata.row_group(0).column(names.index("routing_key"))
    assert keys.has_offset_index
    assert keys.bloom_filter_offset is not None and payload.bloom_filter_offset is None


def test_the_footer_names_topic_range_epoch_and_the_checksum_of_every_batch() -> None:
    written = batches_of(3, 4)
    metadata = pq.ParquetFile(pa.BufferReader(encode_object(TOPIC, 5, written).data)).metadata.metadata
    assert metadata[b"danube.topic"] == TOPIC.encode()
    assert (metadata[b"danube.first_offset"], metadata[b"danube.end_offset"]) == (b"0", b"7")
    assert (metadata[b"danube.rows"], metadata[b"danube.epoch"]) == (b"7", b"5")
    footer = open_object(bytes_of(encode_object(TOPIC, 5, written)))
    assert footer.batches == [summary(each) for each in written]
    assert [each.logical_crc for each in footer.batches] == [each.header.logical_crc for each in written]


def test_duckdb_reads_it_as_a_plain_table(tmp_path: Path, small_groups: None) -> None:
    duckdb = pytest.importorskip("duckdb")
    for number, part in enumerate((batches_of(50, 50)[:1], batches_of(50, 50)[1:])):
        (tmp_path / f"data-{number}.parquet").write_bytes(bytes_of(encode_object(TOPIC, 3, part)))
    table = f"'{tmp_path}/*.parquet'"
    assert duckdb.sql(f'SELECT count(*), max("offset"), min("offset") FROM {table}').fetchall() == [(100, 99, 0)]
    found = duckdb.sql(f"SELECT \"offset\", payload FROM {table} WHERE routing_key = 'key 3' ORDER BY 1").fetchall()
    assert found == [(n, f"message {n}".encode()) for n in range(3, 100, 5)]
    # The filter rules out what is not there without reading a row.
    assert duckdb.sql(f"SELECT count(*) FROM {table} WHERE routing_key = 'key 33'").fetchall() == [(0,)]
    (probed,) = duckdb.sql(
        f"SELECT count(*) FROM parquet_bloom_probe({table}, 'routing_key', 'key 33') WHERE bloom_filter_excludes"
    ).fetchall()
    assert probed[0] > 0


# --- damage ---------------------------------------------------------------------------------------------------


def places(length: int) -> Iterator[int]:
    """Every byte of the small parts of an object is too many for a test: a third of them, and all at both ends."""
    yield from range(0, 64)
    yield from range(64, length - 64, 3)
    yield from range(length - 64, length)


def test_no_flipped_bit_is_taken_for_a_message(small_groups: None) -> None:
    """Whatever a reader uses is covered: found before Arrow sees it, or not used at all (filters and indexes)."""
    written = [batch(text(60), 0, producer=4, sequence=1), batch(ODD, 60)]
    encoded = encode_object(TOPIC, 3, written)
    data = bytes_of(encoded)
    expected = rows(written)
    used = [(group.position, group.position + group.length) for group in open_object(data).row_groups]
    used.append((len(data) - footer_length(data), len(data)))
    found = harmless = 0
    for place in places(len(data)):
        broken = flipped(data, place, place % 8)
        if any(first <= place < end for first, end in used):
            with pytest.raises(InvalidObject):
                check_bytes(broken, encoded.footer_crc)
            found += 1
        else:
            check_bytes(broken, encoded.footer_crc)
            harmless += 1
    assert found > 1000 and harmless > 10
    for place in range(0, len(data) - 8, 97):
        broken = flipped(data, place)
        if any(first <= place < end for first, end in used):
            with pytest.raises(InvalidObject, match="checksum is"):
                read(broken, encoded.footer_crc)
        else:
            assert rows(read(broken, encoded.footer_crc)) == expected


def test_an_object_that_is_cut_short_or_something_else_is_refused() -> None:
    encoded = encode_object(TOPIC, 3, batches_of(5))
    data = bytes_of(encoded)
    for broken in (b"", b"PAR1", data[:-1], data[:100], b"x" * 500, data[: len(data) // 2] + data[-8:]):
        with pytest.raises(InvalidObject):
            open_object(broken)
    with pytest.raises(InvalidObject):
        open_object(struct.pack("<I", 2**31) + b"PAR1")
    plain = pa.BufferOutputStream()
    pq.write_table(pa.table({"a": [1]}), plain)
    with pytest.raises(InvalidObject, match="footer"):
        open_object(plain.getvalue())


def test_read_back_notices_other_batches_other_payloads_and_other_offsets() -> None:
    first, second = batches_of(5, 5)
    encoded = encode_object(TOPIC, 3, [first, second])
    data = bytes_of(encoded)
    verify_object(data, encoded.batches)
    with pytest.raises(InvalidObject, match="other batches"):
        verify_object(data, encoded.batches[:1])
    # An encoder that mixed up two payloads of one length: all checksums of the file are right, and it is wrong.
    swapped = batch([*text(5)[1::-1], *text(5)[2:]], 0)
    assert swapped.header.logical_crc != first.header.logical_crc
    lying = first.header._replace(body_crc=swapped.header.body_crc, body_length=swapped.header.body_length)
    wrong = encode_object(TOPIC, 3, [Batch(lying, first.header_bytes, swapped.body), second])
    with pytest.raises(InvalidObject, match="logical checksum"):
        verify_object(bytes_of(wrong), wrong.batches)


def test_a_row_group_of_another_place_is_noticed(small_groups: None) -> None:
    encoded = encode_object(TOPIC, 3, batches_of(*[40] * 6))
    data = bytes_of(encoded)
    footer = open_object(data)
    first, second = footer.row_groups[:2]
    with pytest.raises(InvalidObject, match="offsets"):
        read_table(footer, 0, data[second.position : second.position + first.length], ["payload"])


# --- raw objects ----------------------------------------------------------------------------------------------


def test_a_raw_object_is_the_log_byte_for_byte() -> None:
    written = batches_of(3, 4)
    encoded = encode_raw(written)
    assert bytes(encoded.data) == b"".join(each.to_bytes() for each in written)
    assert read_raw(encoded.data) == written or rows(read_raw(encoded.data)) == rows(written)
    assert (encoded.start_offset, encoded.end) == (0, 7)
    for place in range(0, len(memoryview(encoded.data)), 11):
        with pytest.raises(InvalidObject):
            read_raw(flipped(bytes(encoded.data), place))


def test_logical_checksums_do_not_depend_on_how_arrow_lays_payloads_out() -> None:
    payload = pa.array([b"a", b"", b"ccc"], pa.binary())
    assert logical_crc(payload) == logical_crc(pc.take(pa.array([b"ccc", b"a", b""], pa.binary()), pa.array([1, 2, 0])))
    assert logical_crc(payload.slice(1)) == logical_crc(pa.array([b"", b"ccc"], pa.binary()))
    assert logical_crc(pa.array([b"ab", b"c"], pa.binary())) != logical_crc(pa.array([b"a", b"bc"], pa.binary()))
