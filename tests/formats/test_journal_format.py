"""The commit journal as bytes: what it holds, what is torn, what is damaged."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from pydanube.formats.journal import (
    JOURNAL_HEADER_SIZE,
    RECORD_HEADER_SIZE,
    JournalEntry,
    JournalHeader,
    Redo,
    decode_journal_header,
    encode_journal_header,
    encode_record,
    read_journal,
)

ID = 0x0102030405060708
CAPACITY = 4096
HEADER = JournalHeader(ID, 3, 77, 2048, CAPACITY)

u64 = st.integers(0, 2**64 - 1)


def entry(path: str, position: int, *data: bytes, segment_id: int = 9) -> JournalEntry:
    return JournalEntry(path, segment_id, position, data, sum(map(len, data)))


ONE = [entry("wal/a", 96, b"first")]
TWO = [entry("wal/a", 160, b"sec", b"ond"), entry("wal/b", 96, b"other")]
THREE = [entry("wal/ü/c", 2**40, b"x" * 50)]


def journal(*records: Sequence[JournalEntry], journal_id: int = ID) -> tuple[bytearray, list[int]]:
    """A journal file, zeros to its capacity, and the position of every record and of the end."""
    data = bytearray(encode_journal_header(HEADER._replace(journal_id=journal_id)))
    positions = [len(data)]
    for number, entries in enumerate(records, 1):
        buffers, length = encode_record(entries, journal_id=journal_id, number=number, position=len(data))
        joined = b"".join(buffers)
        assert len(joined) == length
        data += joined
        positions.append(len(data))
    data += bytes(CAPACITY - len(data))
    return data, positions


def read(data: bytes | bytearray, end: int | None = None) -> Redo:
    redo = read_journal(bytes(data), end=end)
    assert redo is not None
    return redo


def flat(entries: Sequence[JournalEntry]) -> list[tuple[str, int, int, bytes]]:
    """Entries as values: buffers may be cut differently."""
    return [(e.path, e.segment_id, e.position, b"".join(e.data)) for e in entries]


def torn(data: bytearray, first: int, end: int) -> bytearray:
    """As if the bytes [first, end) had never been written."""
    return data[:first] + bytes(end - first) + data[end:]


# --- the header -------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.builds(JournalHeader, u64, u64, u64, u64, u64))
def test_a_journal_header_comes_back_as_written(written: JournalHeader) -> None:
    data = encode_journal_header(written)
    assert len(data) == JOURNAL_HEADER_SIZE
    assert decode_journal_header(data) == written


def test_any_changed_byte_of_a_journal_header_is_noticed() -> None:
    data, _ = journal(ONE)
    for place in range(JOURNAL_HEADER_SIZE - 12):  # 12 bytes at its end are not used
        for bit in range(8):
            wrong = data.copy()
            wrong[place] ^= 1 << bit
            assert read_journal(bytes(wrong), end=None) is None, f"byte {place}, bit {bit}"


def test_what_is_shorter_than_a_header_or_zeros_is_no_journal() -> None:
    data, _ = journal()
    for end in range(JOURNAL_HEADER_SIZE):
        assert read_journal(bytes(data[:end]), end=None) is None
    assert read_journal(bytes(CAPACITY), end=None) is None


# --- what it holds ----------------------------------------------------------------------------------


def test_a_journal_without_records_is_empty_and_neither_torn_nor_damaged() -> None:
    data, _ = journal()
    assert read(data) == Redo(HEADER, [], JOURNAL_HEADER_SIZE, None, [])


def test_entries_come_back_in_the_order_of_their_writing() -> None:
    data, positions = journal(ONE, TWO, THREE)
    redo = read(data)
    assert flat(redo.entries) == flat([*ONE, *TWO, *THREE])
    assert (redo.end, redo.torn_at, redo.damaged_at) == (positions[-1], None, [])
    assert all(e.length == sum(map(len, e.data)) for e in redo.entries)


paths = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
entries = st.builds(
    lambda path, segment_id, position, data: entry(path, position, *data, segment_id=segment_id),
    paths,
    u64,
    u64,
    st.lists(st.binary(max_size=30), max_size=3),
)


@settings(deadline=None)
@given(st.lists(st.lists(entries, max_size=3), max_size=4))
def test_any_records_come_back_as_written(records: list[list[JournalEntry]]) -> None:
    data, positions = journal(*records)
    redo = read(data)
    assert flat(redo.entries) == flat([e for record in records for e in record])
    assert (redo.end, redo.torn_at, redo.damaged_at) == (positions[-1], None, [])


def test_a_journal_that_is_full_to_the_last_byte_is_read_to_its_end() -> None:
    data, positions = journal(ONE, TWO)
    assert read(data[: positions[-1]]).end == positions[-1]


def test_redoing_twice_changes_nothing_because_later_entries_win_both_times() -> None:
    """A position may be journaled again after a refused group; the bytes written last are the ones that count."""
    data, _ = journal([entry("a", 0, b"xxxx")], [entry("a", 2, b"yyyy")], [entry("a", 0, b"zz")])
    once, twice = bytearray(8), bytearray(8)
    for file, times in ((once, 1), (twice, 2)):
        for _ in range(times):
            for e in read(data).entries:
                file[e.position : e.position + e.length] = b"".join(e.data)
    assert once == twice == b"zzyyyy\0\0"


# --- torn -------------------------------------------------------------------------------------------


def test_a_last_record_with_a_changed_byte_is_torn_and_the_ones_before_it_are_kept() -> None:
    data, positions = journal(ONE, TWO, THREE)
    for place in range(positions[2], positions[3]):
        wrong = data.copy()
        wrong[place] ^= 1
        redo = read(wrong)
        assert flat(redo.entries) == flat([*ONE, *TWO]), f"byte {place}"
        assert (redo.end, redo.torn_at, redo.damaged_at) == (positions[2], positions[2], [])


@settings(deadline=None)
@given(st.data())
def test_a_last_record_of_which_any_part_is_missing_is_torn_or_absent(choice: st.DataObject) -> None:
    data, positions = journal(ONE, THREE)
    first = choice.draw(st.integers(positions[1], positions[2] - 1))
    end = choice.draw(st.integers(first + 1, positions[2]))
    wrong = torn(data, first, end)
    redo = read(wrong)
    if wrong == data:  # these bytes were zeros anyway
        assert flat(redo.entries) == flat([*ONE, *THREE])
        return
    assert flat(redo.entries) == flat(ONE)
    assert redo.end == positions[1] and redo.damaged_at == []


def test_a_record_that_was_never_written_is_not_torn() -> None:
    data, positions = journal(ONE, TWO)
    redo = read(torn(data, positions[1], positions[2]))
    assert (redo.end, redo.torn_at) == (positions[1], None)


def test_a_file_shorter_than_its_capacity_is_damage_because_its_length_was_safe_before_its_first_record() -> None:
    data, positions = journal(ONE, TWO)
    for end in range(positions[1] + 1, positions[2]):
        redo = read(data[:end])
        assert flat(redo.entries) == flat(ONE)
        assert (redo.end, redo.damaged_at) == (positions[1], [end])


# --- damaged ----------------------------------------------------------------------------------------


def test_a_bad_record_with_a_good_one_behind_it_is_damage_and_the_good_one_is_kept() -> None:
    data, positions = journal(ONE, TWO, THREE)
    for place in range(positions[1], positions[2]):
        wrong = data.copy()
        wrong[place] ^= 1
        redo = read(wrong)
        assert flat(redo.entries) == flat([*ONE, *THREE]), f"byte {place}"
        assert (redo.end, redo.torn_at, redo.damaged_at) == (positions[3], None, [positions[1]])


def test_a_bad_first_record_is_damage() -> None:
    data, positions = journal(ONE, TWO)
    redo = read(torn(data, positions[0], positions[1]))
    assert flat(redo.entries) == flat(TWO)
    assert redo.damaged_at == [positions[0]]


def test_damage_in_the_middle_and_a_torn_end_are_both_told() -> None:
    data, positions = journal(ONE, TWO, THREE, ONE)
    data[positions[1] + 70] ^= 1
    data[positions[3] + 70] ^= 1
    redo = read(data)
    assert flat(redo.entries) == flat([*ONE, *THREE])
    assert (redo.end, redo.torn_at, redo.damaged_at) == (positions[3], positions[3], [positions[1]])


def test_a_torn_header_behind_damage_does_not_hide_the_damage() -> None:
    """The header of record 3 proves that record 2 was synced, even if record 3's own body is torn."""
    data, positions = journal(ONE, TWO, THREE)
    data[positions[1] + 70] ^= 1
    data[positions[3] - 1] ^= 1
    redo = read(data)
    assert flat(redo.entries) == flat(ONE)
    assert (redo.torn_at, redo.damaged_at) == (positions[2], [positions[1]])


# --- other bytes ------------------------------------------------------------------------------------


def test_records_of_another_journal_are_not_records() -> None:
    stale, positions = journal(ONE, TWO, journal_id=ID + 1)
    data = encode_journal_header(HEADER) + stale[JOURNAL_HEADER_SIZE:]
    redo = read(data)
    assert redo.entries == [] and redo.torn_at == positions[0] and redo.damaged_at == []


def test_a_record_at_another_position_is_not_a_record() -> None:
    data, positions = journal(ONE, TWO)
    moved = data[: positions[1]] + bytes(8) + data[positions[1] : -8]
    redo = read(moved)
    assert flat(redo.entries) == flat(ONE) and redo.damaged_at == []


def test_a_record_inside_the_data_of_another_is_not_a_record() -> None:
    inner, _ = encode_record(ONE, journal_id=ID, number=9, position=64)
    data, positions = journal([entry("a", 0, b"".join(inner))])
    data[70] ^= 1  # the outer one is torn
    redo = read(data)
    assert (redo.entries, redo.torn_at, redo.damaged_at) == ([], positions[0], [])


@settings(deadline=None)
@given(st.binary(max_size=300), st.none() | st.integers(0, 400))
def test_any_bytes_behind_the_header_hold_no_entries(data: bytes, end: int | None) -> None:
    redo = read(encode_journal_header(HEADER) + data, end)
    assert redo.entries == []


@pytest.mark.parametrize("place", [40, 44, 56])
def test_a_record_with_an_impossible_length_is_torn(place: int) -> None:
    """With a right header checksum: entries, table length or data length of a record that nobody wrote whole."""
    data, positions = journal(ONE)
    start = positions[0]
    data[start + place - 4 : start + place] = b"\xff\xff\xff\x7f"
    body = bytes(data[start + 8 : start + RECORD_HEADER_SIZE])
    data[start + 4 : start + 8] = crc32c(body).to_bytes(4, "little")
    redo = read(data)
    assert redo.entries == [] and redo.torn_at == start


# --- the link from the next journal -----------------------------------------------------------------


def test_what_stands_beyond_the_link_does_not_exist() -> None:
    data, positions = journal(ONE, TWO, THREE)
    redo = read(data, end=positions[2])
    assert flat(redo.entries) == flat([*ONE, *TWO])
    assert (redo.end, redo.torn_at, redo.damaged_at) == (positions[2], None, [])


def test_a_bad_last_record_below_the_link_is_damage_not_torn() -> None:
    data, positions = journal(ONE, TWO)
    data[positions[2] - 1] ^= 1
    redo = read(data, end=positions[2])
    assert flat(redo.entries) == flat(ONE)
    assert (redo.end, redo.torn_at, redo.damaged_at) == (positions[1], None, [positions[1]])


def test_a_missing_last_record_below_the_link_is_damage() -> None:
    data, positions = journal(ONE, TWO)
    redo = read(torn(data, positions[1], positions[2]), end=positions[2])
    assert redo.damaged_at == [positions[1]]


def test_a_good_record_beyond_the_link_does_not_excuse_a_bad_one_below_it() -> None:
    data, positions = journal(ONE, TWO, THREE)
    data[positions[1] + 70] ^= 1
    redo = read(data, end=positions[2])
    assert flat(redo.entries) == flat(ONE)
    assert redo.damaged_at == [positions[1]]


def test_a_link_to_the_header_bounds_an_empty_journal() -> None:
    data, _ = journal(ONE)
    assert read(data, end=JOURNAL_HEADER_SIZE) == Redo(HEADER, [], JOURNAL_HEADER_SIZE, None, [])


def test_a_file_that_ends_between_records_before_its_link_is_damage() -> None:
    data, positions = journal(ONE, TWO)
    redo = read(data[: positions[1]], end=positions[2])
    assert flat(redo.entries) == flat(ONE)
    assert redo.damaged_at == [positions[1]]
