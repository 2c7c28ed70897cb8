"""Segment files as bytes: headers and groups come back as written, and nothing else passes for one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pydanube.errors import InvalidBatch
from pydanube.formats.batch import Batch, Envelope, encode, rows_of, session_record, stamp
from pydanube.formats.segment import (
    GROUP_HEADER_SIZE,
    SEGMENT_HEADER_SIZE,
    SNAPSHOT_LENGTH_MAX,
    UNSYNCED,
    GroupHeader,
    SegmentGroup,
    SegmentHeader,
    batch_headers_of,
    batches_of,
    body_is_whole,
    decode_group_header,
    decode_segment_header,
    encode_group,
    encode_group_header,
    encode_segment_header,
    file_name,
    find_group_header,
    pad,
    segment_header_length,
)

ID = 0x1122334455667788
OTHER_ID = 0x1122334455667789
TOPIC = "/default/orders"

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
i64 = st.integers(-(2**63), 2**63 - 1)
segment_headers = st.builds(SegmentHeader, u64, u64, u64, u64, i64, u64, u64, i64, i64, u32, st.binary(max_size=200))
group_headers = st.builds(GroupHeader, u64, u32, u32, u64, u64, u32, u32, i64, u32, u32)


def header(snapshot: bytes = b"producers") -> SegmentHeader:
    return SegmentHeader(ID, 5, 3, 100, 1_700, 77, 4096, 1_600, 1_500, UNSYNCED, snapshot)


def batch(payload: bytes, base_offset: int) -> Batch:
    made = encode(rows_of([Envelope(payload, publish_time=base_offset)]), topic=TOPIC)
    return stamp(made, base_offset=base_offset, epoch=3, append_time=7)


def group(
    *payloads: bytes, number: int = 1, position: int = 96, first: int = 100, segment_id: int = ID
) -> SegmentGroup:
    return encode_group(
        [batch(payload, first + i) for i, payload in enumerate(payloads)],
        segment_id=segment_id,
        number=number,
        position=position,
        durable_before=position,
        first_offset=first,
    )


def bytes_of(written: SegmentGroup) -> bytes:
    return b"".join(written.buffers)


# --- segment headers --------------------------------------------------------------------------------


@settings(deadline=None)
@given(segment_headers)
def test_a_segment_header_comes_back_as_written(written: SegmentHeader) -> None:
    data = encode_segment_header(written)
    assert len(data) % 8 == 0
    assert segment_header_length(data) == len(data)
    assert segment_header_length(data[:SEGMENT_HEADER_SIZE]) == len(data)
    assert decode_segment_header(data) == written


def test_any_changed_byte_of_a_segment_header_or_its_snapshot_is_noticed() -> None:
    data = encode_segment_header(header())
    for place in range(SEGMENT_HEADER_SIZE + len(header().snapshot)):
        for bit in range(8):
            wrong = bytearray(data)
            wrong[place] ^= 1 << bit
            assert decode_segment_header(bytes(wrong)) is None, f"byte {place}, bit {bit}"


def test_a_segment_header_that_is_cut_or_longer_is_none() -> None:
    data = encode_segment_header(header())
    for end in range(len(data)):
        assert decode_segment_header(data[:end]) is None
    assert decode_segment_header(data + bytes(8)) is None
    assert segment_header_length(data[: SEGMENT_HEADER_SIZE - 1]) is None


def test_zeros_are_no_segment_header() -> None:
    assert segment_header_length(bytes(4096)) is None
    assert decode_segment_header(bytes(SEGMENT_HEADER_SIZE)) is None


@pytest.mark.parametrize("length", [SNAPSHOT_LENGTH_MAX + 1, 2**32 - 1])
def test_a_snapshot_of_impossible_length_is_not_believed(length: int) -> None:
    data = bytearray(encode_segment_header(header(b"")))
    data[12:16] = length.to_bytes(4, "little")
    data[8:12] = ((SEGMENT_HEADER_SIZE + length + pad(length)) % 2**32).to_bytes(4, "little")
    assert segment_header_length(bytes(data)) is None


def test_lengths_that_contradict_each_other_are_not_believed() -> None:
    data = bytearray(encode_segment_header(header()))
    data[8] += 8
    assert segment_header_length(bytes(data)) is None


def test_file_names_sort_by_offset() -> None:
    names = [file_name(offset, ID) for offset in (0, 9, 10, 2**63)]
    assert names == sorted(names)
    assert names[2] == "00000000000000000010-1122334455667788.wal"
    assert len(file_name(0, 1)) == len(file_name(2**64 - 1, 2**64 - 1))


# --- groups -----------------------------------------------------------------------------------------


@settings(deadline=None)
@given(group_headers, st.binary(max_size=50))
def test_a_group_header_comes_back_as_written(written: GroupHeader, before: bytes) -> None:
    data = before + encode_group_header(written)
    found = decode_group_header(data, len(before), written.position, written.segment_id)
    assert found == written
    assert len(data) - len(before) == GROUP_HEADER_SIZE


@settings(deadline=None)
@given(st.lists(st.binary(max_size=60), min_size=1, max_size=5))
def test_the_batches_of_a_group_come_back_as_written(payloads: list[bytes]) -> None:
    written = group(*payloads)
    data = bytes_of(written)
    assert len(data) == written.length and len(data) % 8 == 0
    found = decode_group_header(data, 0, 96, ID)
    assert found == written.header
    body = data[GROUP_HEADER_SIZE:]
    assert body_is_whole(found, body)
    expected = [batch(payload, 100 + i).to_bytes() for i, payload in enumerate(payloads)]
    assert [one.to_bytes() for one in batches_of(body)] == expected
    assert [one.base_offset for one in batch_headers_of(body)] == [100 + i for i in range(len(payloads))]
    assert (found.first_offset, found.end_offset, found.batches) == (100, 100 + len(payloads), len(payloads))
    assert found.max_publish_time == 99 + len(payloads)


def test_every_batch_of_a_group_begins_aligned() -> None:
    record = session_record(topic=TOPIC, producer_id=1, session=2)
    batches = [batch(b"x" * n, 100 + n) for n in range(5)]
    written = encode_group([record, *batches], segment_id=ID, number=1, position=96, durable_before=0, first_offset=100)
    place = 0
    for one in batches_of(bytes_of(written)[GROUP_HEADER_SIZE:]):
        assert place % 8 == 0
        place += one.header.size_bytes + pad(one.header.size_bytes)
    assert written.header.rows == 5 and written.header.batches == 6


def test_a_group_of_session_records_takes_no_offsets() -> None:
    record = session_record(topic=TOPIC, producer_id=1, session=2)
    written = encode_group([record], segment_id=ID, number=1, position=96, durable_before=0, first_offset=100)
    assert written.header.end_offset == 100
    assert decode_group_header(bytes_of(written), 0, 96, ID) == written.header
    assert [one.to_bytes() for one in batches_of(bytes_of(written)[64:])] == [record.to_bytes()]


def test_any_changed_byte_of_a_group_header_is_noticed() -> None:
    data = bytes_of(group(b"x"))
    for place in range(GROUP_HEADER_SIZE):
        for bit in range(8):
            wrong = bytearray(data)
            wrong[place] ^= 1 << bit
            assert decode_group_header(bytes(wrong), 0, 96, ID) is None, f"byte {place}, bit {bit}"


def test_any_changed_byte_of_a_group_body_is_noticed() -> None:
    written = group(b"abc", b"defgh")
    body = bytes_of(written)[GROUP_HEADER_SIZE:]
    for place in range(len(body)):
        wrong = bytearray(body)
        wrong[place] ^= 0x40
        assert not body_is_whole(written.header, bytes(wrong)), f"byte {place}"


def test_a_group_body_of_another_length_is_not_whole() -> None:
    written = group(b"abc")
    body = bytes_of(written)[GROUP_HEADER_SIZE:]
    assert not body_is_whole(written.header, body[:-8])
    assert not body_is_whole(written.header, body + bytes(8))


def test_a_group_header_at_another_position_is_not_a_group() -> None:
    data = bytes_of(group(b"x", position=96))
    assert decode_group_header(data, 0, 104, ID) is None
    assert decode_group_header(data, 0, 0, ID) is None


def test_a_group_header_of_another_segment_is_not_a_group() -> None:
    assert decode_group_header(bytes_of(group(b"x")), 0, 96, OTHER_ID) is None


def test_a_group_header_that_is_cut_is_not_a_group() -> None:
    data = bytes_of(group(b"x"))
    for end in range(GROUP_HEADER_SIZE):
        assert decode_group_header(data[:end], 0, 96, ID) is None
    assert decode_group_header(data, len(data) - 10, 96, ID) is None


def test_zeros_are_not_a_group() -> None:
    for segment_id in (0, ID):
        assert decode_group_header(bytes(4096), 0, 0, segment_id) is None
        assert find_group_header(bytes(4096), 0, 0, segment_id) is None


def test_stale_bytes_of_an_older_segment_are_not_groups() -> None:
    """A file system may hand out blocks that held another segment at the very same positions."""
    stale = bytes_of(group(b"old", b"older", segment_id=OTHER_ID))
    fresh = bytes_of(group(b"new"))
    file = fresh + stale[len(fresh) :]
    assert len(stale) > len(fresh)
    assert find_group_header(file, 1, 97, ID) is None
    assert find_group_header(stale, 0, 96, ID) is None


def test_a_group_copied_into_a_payload_is_not_a_group() -> None:
    inner = bytes_of(group(b"x"))
    outer = bytes_of(group(inner, number=2, position=4096))
    assert inner in outer
    assert find_group_header(outer, 0, 4096, ID) == (0, group(inner, number=2, position=4096).header)
    assert find_group_header(outer, 1, 4097, ID) is None


# --- find_group_header ------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.binary(max_size=100), st.binary(max_size=20), st.integers(0, 100))
def test_a_group_is_found_behind_whatever_stands_before_it(before: bytes, after: bytes, start: int) -> None:
    start = min(start, len(before))
    file_position = 1000  # of the buffer's first byte
    written = group(b"x", position=file_position + len(before))
    buffer = before + bytes_of(written) + after
    assert find_group_header(buffer, start, file_position + start, ID) == (len(before), written.header)


def test_the_first_of_several_groups_is_found() -> None:
    first = group(b"x", position=96)
    second = group(b"y", number=2, position=96 + first.length)
    buffer = bytes_of(first) + bytes_of(second)
    assert find_group_header(buffer, 0, 96, ID) == (0, first.header)
    assert find_group_header(buffer, 1, 97, ID) == (first.length, second.header)
    assert find_group_header(buffer, first.length, 96 + first.length, ID) == (first.length, second.header)
    assert find_group_header(buffer, first.length + 1, 97 + first.length, ID) is None


def test_a_damaged_group_is_passed_over() -> None:
    first = group(b"x", position=96)
    second = group(b"y", number=2, position=96 + first.length)
    buffer = bytearray(bytes_of(first) + bytes_of(second))
    buffer[20] ^= 1
    assert find_group_header(bytes(buffer), 0, 96, ID) == (first.length, second.header)


def test_the_segment_id_alone_is_passed_over() -> None:
    needle = ID.to_bytes(8, "little")
    before = needle * 9 + needle[:3]
    written = group(b"x", position=96 + len(before))
    buffer = before + bytes_of(written) + needle
    assert find_group_header(buffer, 0, 96, ID) == (len(before), written.header)


# --- the batches of a body --------------------------------------------------------------------------


def test_a_damaged_batch_in_a_body_raises_after_the_good_ones() -> None:
    body = bytearray(bytes_of(group(b"abc", b"def"))[GROUP_HEADER_SIZE:])
    body[-40] ^= 1
    found = batches_of(bytes(body))
    assert next(found).header.base_offset == 100
    with pytest.raises(InvalidBatch, match="body checksum"):
        next(found)


def test_a_batch_that_ends_outside_its_body_raises() -> None:
    body = bytes_of(group(b"abc", b"def"))[GROUP_HEADER_SIZE:]
    with pytest.raises(InvalidBatch, match=r"body of \d+ bytes ends after \d+"):
        list(batches_of(body[:-16]))
    with pytest.raises(InvalidBatch, match="the last batch of a group ends outside it"):
        list(batch_headers_of(body[:-16]))


def test_padding_alone_is_not_a_batch() -> None:
    with pytest.raises(InvalidBatch, match="8 bytes are less than a header's 96"):
        list(batches_of(bytes(8)))
    with pytest.raises(InvalidBatch, match="8 bytes are less than a header's 96"):
        list(batch_headers_of(bytes(8)))
    with pytest.raises(InvalidBatch, match="it begins with"):
        list(batches_of(bytes(104)))


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_as_a_body_raise_invalid_batch_or_are_empty(body: bytes) -> None:
    for read in (batches_of, batch_headers_of):
        if not body:
            assert list(read(body)) == []  # type: ignore[operator]
            continue
        with pytest.raises(InvalidBatch):
            list(read(body))  # type: ignore[operator]
