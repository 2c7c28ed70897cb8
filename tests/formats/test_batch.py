"""Batches: what goes in comes out, and nothing else gets in.

The attacks at the end have right checksums: whoever can compute a crc can send them. Each is a way in which Arrow
bytes from a client have killed, fooled or filled a reader; `tests/fuzz/batch.py` looks for the ones not thought of.
"""

from __future__ import annotations

import io
import re
import struct
import tracemalloc
from collections.abc import Callable

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from pydanube.errors import InvalidBatch
from pydanube.formats import batch as batches
from pydanube.formats.batch import (
    CODECS,
    ENVELOPE,
    HEADER_SIZE,
    PUBLISH_TIME_MAX,
    PUBLISH_TIME_MIN,
    UNCOMPRESSED_LENGTH_MAX,
    Batch,
    Envelope,
    Header,
    cut,
    decode,
    encode,
    load,
    logical_crc,
    messages,
    parse,
    parse_header,
    rows_of,
    session_record,
    stamp,
    topic_hash,
)
from pydanube.formats.envelope import ENVELOPE_1
from tests.fuzz.batch import sealed

TOPIC = "/default/orders"
FULL = Envelope(b"payload", 1_700_000_000_000_000, "key", "producer", {"a": "b", "ü": "é"}, 7, 2, 9)
BARE = Envelope(b"")
BOTH = [FULL, BARE, Envelope(b"\x00\xff" * 40, -5, "", "", {"": ""}, -1, -1, -1)]

text = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
envelopes = st.builds(
    Envelope,
    payload=st.binary(max_size=64) | st.binary(min_size=2000, max_size=3000),
    publish_time=st.integers(PUBLISH_TIME_MIN, PUBLISH_TIME_MAX),
    event_time=st.none() | st.integers(PUBLISH_TIME_MIN, PUBLISH_TIME_MAX),
    deliver_at=st.none() | st.integers(PUBLISH_TIME_MIN, PUBLISH_TIME_MAX),
    routing_key=st.none() | text,
    producer_name=st.none() | text,
    attributes=st.dictionaries(text, text, max_size=3),
    schema_id=st.none() | st.integers(-(2**63), 2**63 - 1),
    schema_version=st.none() | st.integers(-(2**31), 2**31 - 1),
    request_id=st.integers(-(2**63), 2**63 - 1),
)
some_envelopes = st.lists(envelopes, min_size=1, max_size=12)
codecs = st.sampled_from(sorted(CODECS))


def made(sent: list[Envelope], codec: str = "none", **fields: int) -> Batch:
    return encode(rows_of(sent), topic=TOPIC, codec=codec, **fields)


def stored(sent: list[Envelope], base_offset: int = 100, codec: str = "none") -> Batch:
    """As the log has it."""
    return stamp(made(sent, codec), base_offset=base_offset, epoch=3, append_time=77)


def refusal(data: bytes) -> str:
    """The sentence with which `parse` refuses."""
    with pytest.raises(InvalidBatch) as error:
        parse(data)
    assert str(error.value) == f"not a valid batch: {error.value.what}"
    return error.value.what


def changed(batch: Batch, **fields: object) -> bytes:
    """The batch with other header fields and right checksums. Lengths stay as given."""
    header = batch.header._replace(**fields)  # type: ignore[arg-type]
    packed = struct.pack("<4sBBBBQIIIQQQQQqqII", *header[:-1])
    return packed + struct.pack("<I", crc32c(packed)) + bytes(batch.body)


# --- what goes in comes out -------------------------------------------------------------------------


@settings(deadline=None)
@given(some_envelopes, codecs)
def test_messages_come_back_as_they_were_sent(sent: list[Envelope], codec: str) -> None:
    batch = made(sent, codec)
    received = parse(batch.to_bytes())
    assert messages(received) == sent
    assert received.header == batch.header
    assert received.to_bytes() == batch.to_bytes()


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_every_codec_keeps_every_column(codec: str) -> None:
    sent = BOTH * 50
    batch = made(sent, codec)
    assert batch.header.codec == CODECS[codec]
    assert messages(parse(batch.to_bytes())) == sent


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_codec_is_left_out_where_it_would_save_nothing(codec: str) -> None:
    assert made([FULL], codec).header.codec == 0
    large = made([Envelope(b"x" * 8000)], codec)
    assert large.header.codec == CODECS[codec]
    assert large.header.body_length < large.header.uncompressed_length


@pytest.mark.parametrize("column", ["routing_key", "producer_name", "schema_id", "schema_version"])
@pytest.mark.parametrize("nulls", [(True, True), (True, False), (False, True)])
def test_a_nullable_column_keeps_its_nulls(column: str, nulls: tuple[bool, bool]) -> None:
    sent = [FULL._replace(**{column: None}) if null else FULL for null in nulls]
    assert messages(parse(made(sent).to_bytes())) == sent


def test_a_batch_says_what_the_producer_knows_about_it() -> None:
    header = made(BOTH, producer_id=5, session=6, first_sequence=7).header
    assert (header.producer_id, header.session, header.first_sequence) == (5, 6, 7)
    assert header.rows == 3
    assert header.topic_hash == topic_hash(TOPIC) != topic_hash(TOPIC + "x")
    assert header.max_publish_time == FULL.publish_time
    assert (header.base_offset, header.epoch, header.append_time) == (0, 0, 0)


def test_the_header_stands_where_the_drawing_says() -> None:
    data = stamp(
        made([FULL], producer_id=5, session=6, first_sequence=7), base_offset=8, epoch=9, append_time=10
    ).to_bytes()
    assert data[:8] == b"DNB1\x01\x01\x00\x00"
    assert struct.unpack_from("<QIII", data, 8) == (8, 1, len(data) - 96, len(data) - 96)
    assert struct.unpack_from("<QQQQQqq", data, 28) == (9, topic_hash(TOPIC), 5, 6, 7, 10, FULL.publish_time)
    logical = crc32c(struct.pack("<i", 7) + b"payload")
    assert struct.unpack_from("<III", data, 84) == (logical, crc32c(data[96:]), crc32c(data[:92]))


def test_stamping_writes_the_logs_fields_and_shares_the_body() -> None:
    sent = made(BOTH, producer_id=5, session=6, first_sequence=7)
    stamped = stamp(sent, base_offset=100, epoch=3, append_time=77)
    assert stamped.body is sent.body
    logs = ("base_offset", "epoch", "append_time", "header_crc")
    for name in Header._fields:
        if name not in logs:
            assert getattr(stamped.header, name) == getattr(sent.header, name), name
    assert (stamped.header.base_offset, stamped.header.end_offset) == (100, 103)
    assert (stamped.header.epoch, stamped.header.append_time) == (3, 77)
    assert load(stamped.to_bytes()).header == stamped.header


def test_decoding_an_uncompressed_body_copies_nothing() -> None:
    data = made([Envelope(b"x" * 10_000)]).to_bytes()
    body = pa.py_buffer(data)
    payload = decode(load(data)).column(1).buffers()[2]
    assert body.address <= payload.address < body.address + body.size


def test_a_batch_can_be_loaded_from_the_start_of_a_longer_buffer() -> None:
    data = stored(BOTH).to_bytes()
    assert messages(load(data + b"more")) == BOTH


def test_a_session_record_has_no_rows_and_no_body() -> None:
    record = session_record(topic=TOPIC, producer_id=5, session=6)
    found = load(record.to_bytes())
    assert found == record
    assert (found.header.flags, found.header.rows, found.header.size_bytes) == (1, 0, HEADER_SIZE)
    assert (found.header.producer_id, found.header.session) == (5, 6)
    assert decode(found).num_rows == 0 and decode(found).schema == ENVELOPE
    assert messages(found) == []


# --- cutting ----------------------------------------------------------------------------------------


@settings(deadline=None)
@given(some_envelopes, codecs, st.data())
def test_cut_gives_the_rows_of_these_offsets(sent: list[Envelope], codec: str, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(sent) - 1))
    end = data.draw(st.integers(first + 1, len(sent)))
    whole = stamp(made(sent, codec, first_sequence=50), base_offset=1000, epoch=3, append_time=77)
    part = cut(whole, 1000 + first, 1000 + end)
    assert messages(part) == sent[first:end]
    assert parse(part.to_bytes()).header == part.header
    assert part.header.logical_crc == made(sent[first:end]).header.logical_crc
    assert (part.header.base_offset, part.header.end_offset) == (1000 + first, 1000 + end)
    assert part.header.first_sequence == 50 + first
    assert part.header.max_publish_time == max(m.publish_time for m in sent[first:end])
    assert (part.header.epoch, part.header.append_time) == (3, 77)


def test_cutting_everything_is_the_batch_itself() -> None:
    batch = stored(BOTH)
    assert cut(batch, 100, 103) is batch


@pytest.mark.parametrize(("first", "end"), [(99, 101), (101, 104), (101, 101), (102, 101)])
def test_cutting_what_is_not_inside_is_a_mistake_of_the_caller(first: int, end: int) -> None:
    with pytest.raises(ValueError, match=r"is not inside \[100, 103\)"):
        cut(stored(BOTH), first, end)


# --- the logical checksum ---------------------------------------------------------------------------


def through_parquet(rows: pa.RecordBatch, **options: object) -> pa.Array:
    """The payload column, written to a Parquet file and read back."""
    file = io.BytesIO()
    pq.write_table(pa.Table.from_batches([rows]), file, **options)
    return pq.read_table(file).column("payload").combine_chunks()


@settings(deadline=None)
@given(some_envelopes, st.sampled_from(["none", "snappy", "zstd"]), st.booleans())
def test_the_logical_checksum_is_the_same_in_parquet(sent: list[Envelope], compression: str, dictionary: bool) -> None:
    rows = rows_of(sent)
    back = through_parquet(rows, compression=compression, use_dictionary=dictionary)
    assert logical_crc(back) == made(sent).header.logical_crc


@settings(deadline=None)
@given(some_envelopes, st.data())
def test_the_logical_checksum_of_a_slice_is_the_same_in_arrow_and_parquet(
    sent: list[Envelope], data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, len(sent) - 1))
    length = data.draw(st.integers(1, len(sent) - first))
    rows = rows_of(sent)
    expected = logical_crc(rows_of(sent[first : first + length]).column(1))
    assert logical_crc(rows.slice(first, length).column(1)) == expected
    assert logical_crc(through_parquet(rows).slice(first, length)) == expected
    assert logical_crc(through_parquet(rows.slice(first, length))) == expected


@settings(deadline=None)
@given(st.lists(st.binary(max_size=20), min_size=1, max_size=10))
def test_the_logical_checksum_is_of_the_lengths_and_then_of_the_bytes(payloads: list[bytes]) -> None:
    lengths = b"".join(struct.pack("<i", len(payload)) for payload in payloads)
    assert logical_crc(pa.array(payloads, pa.binary())) == crc32c(lengths + b"".join(payloads))


def test_moving_a_byte_from_one_payload_to_the_next_changes_the_logical_checksum() -> None:
    assert logical_crc(pa.array([b"ab", b"c"])) != logical_crc(pa.array([b"a", b"bc"]))


# --- making what cannot be --------------------------------------------------------------------------


def test_a_batch_needs_a_row() -> None:
    with pytest.raises(InvalidBatch, match="it has no rows"):
        rows_of([])
    with pytest.raises(InvalidBatch, match="it has no rows"):
        encode(rows_of([FULL]).slice(0, 0), topic=TOPIC)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"payload": None}, "column payload has a null"),
        ({"publish_time": None}, "column publish_time has a null"),
        ({"request_id": None}, "column request_id has a null"),
        ({"attributes": {"a": None}}, "column attributes has a null inside"),
        ({"attributes": {None: "a"}}, "a message does not fit the envelope: "),
        ({"attributes": 7}, "a message does not fit the envelope: "),
        ({"payload": 7}, "a message does not fit the envelope: "),
        ({"routing_key": "\ud800"}, "a message does not fit the envelope: "),
        ({"schema_version": 2**31}, "a message does not fit the envelope: "),
        ({"request_id": 2**63}, "a message does not fit the envelope: "),
        ({"publish_time": PUBLISH_TIME_MAX + 1}, "publish time 253402300800000000 is not in the years 1 to 9999"),
        ({"publish_time": PUBLISH_TIME_MIN - 1}, "publish time -62135596800000001 is not in the years 1 to 9999"),
    ],
)
def test_a_message_that_does_not_fit_is_refused_before_it_is_sent(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(InvalidBatch) as error:
        made([FULL, FULL._replace(**fields)])  # type: ignore[arg-type]
    assert error.value.what.startswith(sentence)


def test_other_columns_are_refused_before_they_are_sent() -> None:
    rows = pa.RecordBatch.from_pydict({"payload": [b"x"]})
    with pytest.raises(InvalidBatch, match=r"its columns are \['payload'\], not the envelope's \['publish_time', "):
        encode(rows, topic=TOPIC)


def test_a_body_over_the_limit_is_refused_before_it_is_sent() -> None:
    rows = rows_of([Envelope(b"x" * 1024 * 1024)])
    large = pa.Table.from_batches([rows] * 64).combine_chunks().to_batches()[0]
    with pytest.raises(InvalidBatch, match=rf"uncompressed length \d+ is over {UNCOMPRESSED_LENGTH_MAX}"):
        encode(large, topic=TOPIC)


# --- checksums, lengths, counts ---------------------------------------------------------------------


@pytest.mark.parametrize("batch", [stored(BOTH), stored([Envelope(b"x" * 9000)], codec="zstd")], ids=["none", "zstd"])
def test_any_changed_header_byte_is_noticed(batch: Batch) -> None:
    data = batch.to_bytes()
    for place in range(HEADER_SIZE):
        for bit in range(8):
            wrong = bytearray(data)
            wrong[place] ^= 1 << bit
            for read in (parse, load, parse_header):
                with pytest.raises(InvalidBatch) as error:
                    read(bytes(wrong))
                expected = "it begins with" if place < 4 else "header checksum is"
                assert error.value.what.startswith(expected)


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_any_changed_body_byte_is_noticed(codec: str) -> None:
    data = stored([Envelope(b"x" * 5000)], codec=codec).to_bytes()
    for place in range(HEADER_SIZE, len(data), 1 + len(data) // 300):
        wrong = bytearray(data)
        wrong[place] ^= 0x10
        for read in (parse, load):
            with pytest.raises(InvalidBatch, match=r"body checksum is 0x[0-9a-f]{8}, the header says 0x[0-9a-f]{8}"):
                read(bytes(wrong))


def test_a_batch_that_ends_anywhere_before_its_end_is_refused() -> None:
    data = stored(BOTH).to_bytes()
    for end in range(len(data)):
        sentence = refusal(data[:end])
        if end < HEADER_SIZE:
            assert sentence == f"{end} bytes are less than a header's 96"
        else:
            assert sentence == f"body of {len(data) - 96} bytes ends after {end - 96}"


def test_bytes_behind_the_batch_are_refused() -> None:
    assert refusal(made(BOTH).to_bytes() + b"x") == "1 bytes follow its end"


PLAIN = made(BOTH)
LENGTH = PLAIN.header.body_length


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"magic": b"DNB2"}, "it begins with b'DNB2', not b'DNB1'"),
        ({"version": 2}, "header version 2 is not known here (1 is)"),
        ({"version": 0}, "header version 0 is not known here (1 is)"),
        ({"envelope": 3}, "envelope version 3 is not known here (1 to 2 are)"),
        ({"envelope": 0}, "envelope version 0 is not known here (1 to 2 are)"),
        ({"envelope": 2}, "its columns are not the envelope's: it has 11 arrays and 26 buffers, not 13 and 30"),
        ({"codec": 3}, "codec 3 is not known here ({'none': 0, 'lz4': 1, 'zstd': 2} are)"),
        ({"flags": 2}, "flags 0x02 are not known here"),
        ({"flags": 0x81}, "flags 0x81 are not known here"),
        ({"flags": 1}, "it says it has 3 rows"),
        ({"rows": 0}, "it says it has 0 rows"),
        ({"rows": 0, "flags": 1}, "it has a body but no rows"),
        ({"rows": 4}, "it says 4 rows and has 3"),
        ({"rows": 2**32 - 1}, "it says 4294967295 rows and has 3"),
        ({"body_length": 2**32 - 1}, "body length 4294967295 is over 67108864"),
        ({"uncompressed_length": 2**32 - 1}, "uncompressed length 4294967295 is over 67108864"),
        ({"uncompressed_length": LENGTH + 1}, f"body length {LENGTH} differs from uncompressed length {LENGTH + 1}"),
        (
            {"body_length": LENGTH + 1, "uncompressed_length": LENGTH + 1},
            f"body of {LENGTH + 1} bytes ends after {LENGTH}",
        ),
        ({"body_length": LENGTH - 8, "uncompressed_length": LENGTH - 8}, "body checksum is "),
        ({"first_sequence": 2**64 - 3}, "3 rows from sequence 18446744073709551613 on are more than can be numbered"),
        ({"session": 2**63}, "session 9223372036854775808 is none that an owner issues"),
        ({"logical_crc": 1}, f"logical checksum is {PLAIN.header.logical_crc:#010x}, the header says 0x00000001"),
        ({"body_crc": 1}, f"body checksum is {PLAIN.header.body_crc:#010x}, the header says 0x00000001"),
        ({"max_publish_time": 5}, "latest publish time is 1700000000000000, the header says 5"),
        (
            {"max_publish_time": -(2**63)},
            "latest publish time is 1700000000000000, the header says -9223372036854775808",
        ),
    ],
)
def test_a_header_with_a_right_checksum_and_a_wrong_claim_is_refused(fields: dict[str, object], sentence: str) -> None:
    assert refusal(changed(PLAIN, **fields)).startswith(sentence)


def test_the_session_flag_is_not_the_clients_to_set() -> None:
    record = session_record(topic=TOPIC, producer_id=5, session=6).to_bytes()
    assert refusal(record) == "flags 0x01 are the log's to set"


@pytest.mark.parametrize("field", ["body_length", "uncompressed_length", "rows"])
@pytest.mark.parametrize("codec", [0, 1, 2])
def test_a_claim_of_4_gib_allocates_nothing(field: str, codec: int) -> None:
    data = changed(PLAIN, **{field: 2**32 - 1}, codec=codec)
    pool = pa.default_memory_pool()
    before = pool.total_bytes_allocated()
    tracemalloc.start()
    try:
        refusal(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1024 * 1024
    assert pool.total_bytes_allocated() - before < 1024 * 1024


@settings(deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_are_refused(data: bytes) -> None:
    refusal(data)


@settings(deadline=None)
@given(st.binary(max_size=400), codecs)
def test_any_body_with_right_checksums_is_refused(body: bytes, codec: str) -> None:
    header = PLAIN.header._replace(codec=CODECS[codec])
    refusal(sealed(header, bytes(64), stored=body) if codec != "none" else sealed(header, body))


# --- attacks with right checksums -------------------------------------------------------------------


class Message:
    """An Arrow record batch message whose numbers can be changed; finds its way by the flatbuffer's own tables."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)
        self.metadata_end = 8 + self.number("<i", 4)
        self.message = 8 + self.number("<I", 8)
        header = self.field(self.message, 2)
        self.record_batch = header + self.number("<I", header)

    def number(self, form: str, place: int) -> int:
        return int(struct.unpack_from(form, self.data, place)[0])

    def slot(self, table: int, field: int) -> int:
        """Where the table's vtable says where `field` is."""
        return table - self.number("<i", table) + 4 + 2 * field

    def field(self, table: int, field: int) -> int:
        return table + self.number("<H", self.slot(table, field))

    def element(self, field: int, index: int) -> int:
        """Of the record batch: field 1 is the arrays {length, nulls}, 2 the buffers {offset, length}."""
        vector = self.field(self.record_batch, field)
        return vector + self.number("<I", vector) + 4 + 16 * index

    def set_array(self, index: int, length: int, nulls: int) -> Message:
        struct.pack_into("<qq", self.data, self.element(1, index), length, nulls)
        return self

    def set_buffer(self, index: int, offset: int, length: int) -> Message:
        struct.pack_into("<qq", self.data, self.element(2, index), offset, length)
        return self

    def buffer(self, index: int) -> tuple[int, int]:
        """Offset and length."""
        offset, length = struct.unpack_from("<qq", self.data, self.element(2, index))
        return offset, length

    def write(self, index: int, place: int, value: bytes) -> Message:
        """Puts bytes into the buffer itself."""
        start = self.metadata_end + self.buffer(index)[0] + place
        self.data[start : start + len(value)] = value
        return self

    def set_length(self, length: int) -> Message:
        struct.pack_into("<q", self.data, self.field(self.record_batch, 0), length)
        return self


# Places in the envelope's message: the buffers of each column, in order.
PAYLOAD_OFFSETS, PAYLOAD_BYTES = 3, 4
KEY_NULLS, KEY_OFFSETS, KEY_BYTES = 5, 6, 7
MAP_OFFSETS, MAP_KEY_OFFSETS, MAP_KEY_BYTES, MAP_VALUE_NULLS = 12, 15, 16, 17
REQUEST_ID = 25
PAYLOAD_ARRAY, KEY_ARRAY, MAP_ARRAY, MAP_PAIRS_ARRAY, MAP_KEYS_ARRAY, MAP_VALUES_ARRAY = 1, 2, 4, 5, 6, 7


def message() -> Message:
    return Message(bytes(PLAIN.body))


def i32(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}i", *numbers)


def test_the_message_helper_finds_what_it_looks_for() -> None:
    found = message()
    assert found.buffer(PAYLOAD_OFFSETS)[1] == 16 and found.buffer(REQUEST_ID)[1] == 24
    offset, length = found.buffer(MAP_KEY_BYTES)
    assert bytes(found.data[found.metadata_end + offset :][:length]) == b"a\xc3\xbc"


def arrow_refusal(attack: Message | bytes, **fields: object) -> str:
    plain = bytes(attack.data) if isinstance(attack, Message) else attack
    return refusal(sealed(PLAIN.header._replace(**fields), plain))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("attack", "sentence"),
    [
        (lambda m: m.write(PAYLOAD_OFFSETS, 4, i32(2**31 - 1)), "Offset invariant failure"),
        (lambda m: m.write(PAYLOAD_OFFSETS, 4, i32(-1)), "Offset invariant failure"),
        (lambda m: m.write(PAYLOAD_OFFSETS, 0, i32(-8)), "negative offset -8"),
        (lambda m: m.write(PAYLOAD_OFFSETS, 12, i32(2**30)), "offset for slot 3 out of bounds: 1073741824"),
        (lambda m: m.write(PAYLOAD_OFFSETS, 4, i32(9, 3)), "Offset invariant failure"),
        (lambda m: m.write(KEY_OFFSETS, 4, i32(2**31 - 1)), "Offset invariant failure"),
        (lambda m: m.write(KEY_OFFSETS, 12, i32(2**30)), "offset for slot 3 out of bounds: 1073741824"),
        (lambda m: m.write(MAP_OFFSETS, 12, i32(2**30)), "offset for slot 3 out of bounds: 1073741824"),
        (lambda m: m.write(MAP_OFFSETS, 4, i32(3, 1)), "Offset invariant failure"),
        (lambda m: m.write(MAP_KEY_OFFSETS, 4, i32(2**31 - 1)), "Offset invariant failure"),
        (lambda m: m.write(KEY_BYTES, 0, b"\xff\xfe"), "Invalid UTF8"),
        (lambda m: m.write(MAP_KEY_BYTES, 1, b"\xff"), "Invalid UTF8"),
        (lambda m: m.set_buffer(PAYLOAD_BYTES, 0, 2**40), "Read out of bounds|exceeds|File too short"),
        (lambda m: m.set_buffer(PAYLOAD_BYTES, 2**62, 8), "Read out of bounds|exceeds|File too short"),
        (lambda m: m.set_buffer(PAYLOAD_BYTES, -8, 8), "Negative offset"),
        (lambda m: m.set_buffer(PAYLOAD_BYTES, 0, -8), "Negative length"),
        (lambda m: m.set_buffer(PAYLOAD_BYTES, 4, 8), "8-byte aligned"),
        (lambda m: m.set_buffer(PAYLOAD_OFFSETS, 0, 8), "Buffer #1 too small|Offsets buffer size"),
        (lambda m: m.set_buffer(REQUEST_ID, 0, 16), "Buffer #1 too small"),
        (lambda m: m.set_array(PAYLOAD_ARRAY, 4, 0), "did not match record batch length"),
        (lambda m: m.set_array(PAYLOAD_ARRAY, -1, 0), "did not match record batch length|[Nn]egative"),
        (lambda m: m.set_length(2**40), "did not match record batch length"),
        (lambda m: m.set_length(-1), "did not match record batch length|[Nn]egative"),
        (lambda m: m.set_array(MAP_PAIRS_ARRAY, 2**40, 0), "List child array invalid|did not match"),
        (lambda m: m.set_array(KEY_ARRAY, 3, 4), "Null count exceeds"),
        (lambda m: m.set_array(KEY_ARRAY, 3, 2), r"null_count value \(2\) doesn't match"),
        (lambda m: m.set_array(MAP_KEYS_ARRAY, 3, 1), "keys array should have no nulls"),
        (lambda m: m.set_array(MAP_PAIRS_ARRAY, 3, 1), "child array should have no nulls"),
    ],
)  # fmt: skip
def test_an_arrow_body_that_would_mislead_a_reader_is_refused(
    attack: Callable[[Message], Message], sentence: str
) -> None:
    what = arrow_refusal(attack(message()))
    assert what.startswith("its body is not a record batch of the envelope: ")
    assert re.search(sentence, what), what


def test_an_offsets_buffer_that_is_longer_than_needed_by_an_odd_byte_is_read_all_the_same() -> None:
    odd = message()
    offset, length = odd.buffer(PAYLOAD_OFFSETS)
    odd.set_buffer(PAYLOAD_OFFSETS, offset, length + 1)
    assert messages(parse(sealed(PLAIN.header, bytes(odd.data)))) == BOTH


def nulled(column: str) -> bytes:
    """BOTH with a null in a column, as bytes that no encoder of ours would write."""
    rows = rows_of(BOTH)
    index = ENVELOPE.get_field_index(column)
    values = rows.column(index).to_pylist()
    values[1] = None
    return bytes(
        rows.set_column(index, ENVELOPE.field(index), pa.array(values, ENVELOPE.field(index).type)).serialize()
    )


@pytest.mark.parametrize("column", ["publish_time", "payload", "attributes", "request_id"])
def test_a_null_in_a_required_column_is_refused(column: str) -> None:
    assert arrow_refusal(nulled(column)) == f"column {column} has a null"


def test_a_null_in_an_attributes_value_is_refused() -> None:
    column = pa.array([[("a", None)], [], []], ENVELOPE.field("attributes").type)
    rows = rows_of(BOTH).set_column(4, ENVELOPE.field("attributes"), column)
    assert arrow_refusal(bytes(rows.serialize())) == "column attributes has a null inside"


@pytest.mark.parametrize(
    ("times", "sentence"),
    [
        ([2**62, 0, 0], f"publish time {2**62} is not in the years 1 to 9999"),
        ([-(2**63), 0, 0], f"publish time {-(2**63)} is not in the years 1 to 9999"),
    ],
)
def test_a_publish_time_that_is_no_date_is_refused(times: list[int], sentence: str) -> None:
    column = pa.array(times, ENVELOPE.field(0).type)
    rows = rows_of(BOTH).set_column(0, ENVELOPE.field(0), column)
    assert arrow_refusal(bytes(rows.serialize()), max_publish_time=max(times)) == sentence


def test_fewer_rows_in_the_body_than_in_the_header_are_refused() -> None:
    assert arrow_refusal(bytes(rows_of(BOTH[:2]).serialize())) == "it says 3 rows and has 2"


def in_stream(
    rows: pa.RecordBatch, *, metadata: dict[str, str] | None = None, message: int = 1, **options: object
) -> bytes:
    """Message `message` of an Arrow stream (0 is its schema), as a client could write it."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_batch(rows, custom_metadata=metadata)
    reader = pa.BufferReader(sink.getvalue())
    start = 0
    for _ in range(message + 1):
        start = reader.tell()
        pa.ipc.read_message(reader)
    return bytes(sink.getvalue())[start : reader.tell()]


ONE_BY_ONE = "its Arrow buffers are compressed one by one; compress the whole body instead"


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_buffers_compressed_one_by_one_are_refused(codec: str) -> None:
    assert arrow_refusal(in_stream(rows_of(BOTH), compression=codec)) == ONE_BY_ONE


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_buffers_compressed_one_by_one_in_the_way_of_arrow_0_17_are_refused(codec: str) -> None:
    """Before V5 the codec could stand in the message's metadata instead of the record batch's own field. Arrow still
    obeys it, and allocates what each buffer claims."""
    old = Message(
        in_stream(
            rows_of(BOTH),
            metadata={"ARROW:experimental_compression": codec},
            compression=codec,
            metadata_version=pa.ipc.MetadataVersion.V4,
        )
    )
    struct.pack_into("<H", old.data, old.slot(old.record_batch, 3), 0)  # forget the record batch's field
    assert pa.ipc.read_record_batch(pa.py_buffer(bytes(old.data)), ENVELOPE_1) == rows_of(BOTH)
    assert arrow_refusal(old) == "its Arrow message is not of metadata version 5"


def test_metadata_of_another_version_is_refused() -> None:
    old = in_stream(rows_of(BOTH), metadata_version=pa.ipc.MetadataVersion.V4)
    assert arrow_refusal(old) == "its Arrow message is not of metadata version 5"


def test_an_arrow_schema_is_not_a_body() -> None:
    assert arrow_refusal(bytes(ENVELOPE.serialize())) == "its body is an Arrow schema, not a record batch"


def test_an_arrow_dictionary_is_not_a_body() -> None:
    rows = rows_of(BOTH)
    key = rows.column(2).dictionary_encode()
    encoded = rows.set_column(2, pa.field("routing_key", key.type), key)
    assert arrow_refusal(in_stream(encoded)) == "its body is an Arrow dictionary, not a record batch"
    # The record batch behind it has numbers where the envelope has text.
    assert "envelope" in arrow_refusal(in_stream(encoded, message=2))


def test_columns_of_another_schema_are_refused() -> None:
    rows = rows_of(BOTH)
    fewer = rows.remove_column(7)
    more = rows.append_column("extra", pa.array([1, 2, 3]))
    none = rows.select([])
    sentence = "its columns are not the envelope's: it has {} arrays and {} buffers, not 11 and 26"
    assert arrow_refusal(bytes(fewer.serialize())) == sentence.format(10, 24)
    assert arrow_refusal(bytes(more.serialize())) == sentence.format(12, 28)
    assert arrow_refusal(bytes(none.serialize())) == sentence.format(0, 0)


def test_columns_in_another_order_are_refused() -> None:
    rows = rows_of(BOTH)
    swapped = rows.select([1, 0, 2, 3, 4, 5, 6, 7])
    assert arrow_refusal(bytes(swapped.serialize())).startswith("its body is not a record batch of the envelope: ")


def test_an_arrow_body_that_ends_anywhere_before_its_end_is_refused() -> None:
    plain = bytes(PLAIN.body)
    for end in range(0, len(plain), 7):
        assert arrow_refusal(plain[:end]).startswith("its body is not a record batch of the envelope: ")


@pytest.mark.parametrize("codec", [0, 1, 2])
def test_bytes_behind_the_arrow_message_are_refused(codec: int) -> None:
    sentence = "8 bytes follow the Arrow message in its body"
    assert arrow_refusal(bytes(PLAIN.body) + bytes(8), codec=codec) == sentence


@pytest.mark.parametrize("length", [0, -1, 1, 8, 2**31 - 1, -(2**31), 2**24])
def test_an_absurd_metadata_length_is_refused(length: int) -> None:
    plain = bytearray(PLAIN.body)
    struct.pack_into("<i", plain, 4, length)
    assert arrow_refusal(bytes(plain)).startswith(("its body is not a record batch", f"{len(plain) - 8} bytes follow"))


@pytest.mark.parametrize("length", [-1, 0, 8, 2**40, 2**63 - 1])
def test_an_absurd_arrow_body_length_is_refused(length: int) -> None:
    attack = message()
    struct.pack_into("<q", attack.data, attack.field(attack.message, 3), length)
    what = arrow_refusal(attack)
    assert what.startswith("its body is not a record batch") or what.endswith("follow the Arrow message in its body")


def test_an_empty_body_is_refused() -> None:
    assert arrow_refusal(b"") == "its body is not a record batch of the envelope: End of Arrow stream"


# --- attacks on the codecs --------------------------------------------------------------------------

BIG = made([Envelope(b"x" * 50_000)])


def compressed(codec: str) -> bytes:
    name = {"lz4": "lz4_raw", "zstd": "zstd"}[codec]
    return bytes(pa.Codec(name).compress(bytes(BIG.body), asbytes=True))


def claiming(codec: str, length: int, body: bytes) -> bytes:
    return sealed(BIG.header._replace(codec=CODECS[codec]), bytes(length), stored=body)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_bomb_is_refused_without_room_for_more_than_it_claims(codec: str) -> None:
    name = {"lz4": "lz4_raw", "zstd": "zstd"}[codec]
    bomb = pa.Codec(name).compress(bytes(32 * 1024 * 1024), asbytes=True)
    before = pa.total_allocated_bytes()
    assert refusal(claiming(codec, 1000, bomb)).startswith("its body does not decompress: ")
    assert pa.total_allocated_bytes() - before < 1024 * 1024


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
@pytest.mark.parametrize("missing", [1, 8, 1000])
def test_a_body_longer_than_it_claims_is_refused(codec: str, missing: int) -> None:
    what = refusal(claiming(codec, BIG.header.uncompressed_length - missing, compressed(codec)))
    assert what.startswith("its body does not decompress: ")


@pytest.mark.parametrize("more", [1, 8, 1000])
def test_a_body_shorter_than_it_claims_is_refused(more: int) -> None:
    """Raw lz4 would leave the rest of the buffer as the memory was: another content for every reader."""
    length = BIG.header.uncompressed_length + more
    assert refusal(claiming("lz4", length, compressed("lz4"))) == (
        f"its body has less than the {length} bytes that the header says"
    )
    assert refusal(claiming("zstd", length, compressed("zstd"))).startswith("its body does not decompress: ")


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_rows_that_would_stand_in_memory_nobody_wrote_are_refused(codec: str) -> None:
    name = {"lz4": "lz4_raw", "zstd": "zstd"}[codec]
    shortened = pa.Codec(name).compress(bytes(BIG.body)[:-4096], asbytes=True)
    refusal(claiming(codec, BIG.header.uncompressed_length, shortened))


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
@pytest.mark.parametrize("body", [b"", b"\x00", b"junk" * 40, bytes(100), b"\xff" * 100])
def test_bytes_that_are_not_of_the_codec_are_refused(codec: str, body: bytes) -> None:
    assert refusal(claiming(codec, 1000, body)).startswith(
        ("its body does not decompress: ", "its body has less than the 1000 bytes")
    )


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_nothing_compressed_is_refused(codec: str) -> None:
    name = {"lz4": "lz4_raw", "zstd": "zstd"}[codec]
    refusal(claiming(codec, 0, pa.Codec(name).compress(b"", asbytes=True)))


def test_reading_a_stored_batch_again_gives_the_same_rows() -> None:
    batch = stored(BOTH * 40, codec="lz4")
    assert decode(batch) == decode(batch) == decode(batches.load(batch.to_bytes()))
