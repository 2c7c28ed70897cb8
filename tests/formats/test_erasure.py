"""Objects without the messages of some keys: what goes, what stays, and what the comparison of both refuses."""

from __future__ import annotations

import pytest

from pydanube.errors import InvalidObject
from pydanube.formats.batch import Batch, Envelope, encode_messages, messages, stamp
from pydanube.formats.erasure import (
    ERASED,
    check_erasure,
    check_raw_erasure,
    erase_object,
    erase_raw,
    rows_with_keys,
)
from pydanube.formats.parquet import encode_raw, read_raw
from pydanube.formats.parquet_read import open_object, read_row_group, verify_object
from pydanube.formats.parquet_write import encode_object, merge_objects

TOPIC = "/default/people"
WHEN = "2026-11-18T08:00:00+00:00"
T = 1_700_000_000_000_000


def batch(first: int, keys: list[str | None], *, epoch: int = 1) -> Batch:
    sent = [
        Envelope(f"secret of {key} {first + row}".encode(), T + row, key, "p", {"mail": f"{key}@x"}, 7, 1, row)
        for row, key in enumerate(keys)
    ]
    return stamp(encode_messages(sent, topic=TOPIC), base_offset=first, epoch=epoch, append_time=T)


def batches() -> list[Batch]:
    return [batch(0, ["ann", "bob", None]), batch(3, ["bob"] * 40), batch(43, ["ann", "eve"], epoch=2)]


def stored(data: object) -> list[tuple[int, Envelope]]:
    footer = open_object(data)  # type: ignore[arg-type]
    found = []
    for number, group in enumerate(footer.row_groups):
        part = memoryview(data)[group.position : group.position + group.length]  # type: ignore[call-overload]
        for each in read_row_group(footer, number, part):
            found += list(enumerate(messages(each), each.header.base_offset))
    return found


@pytest.mark.parametrize("merged", [False, True])
def test_erased_rows_keep_their_offsets_and_times_and_lose_everything_that_was_said(merged: bool) -> None:
    whole = encode_object(TOPIC, 2, batches())
    if merged:
        parts = [encode_object(TOPIC, 2, batches()[:2]), encode_object(TOPIC, 2, batches()[2:])]
        whole = merge_objects(TOPIC, 2, [(part.data, part.footer_crc) for part in parts])
    assert rows_with_keys(whole.data, whole.footer_crc, ["ann"]) == 2
    erased = erase_object(whole.data, whole.footer_crc, ["ann"], WHEN)
    assert erased.rows == 2
    assert b"ann" not in bytes(erased.encoded.data)
    verify_object(erased.encoded.data, erased.encoded.batches)
    before, after = stored(whole.data), stored(erased.encoded.data)
    assert [offset for offset, _ in after] == list(range(45))
    for (offset, was), (_, now) in zip(before, after, strict=True):
        if was.routing_key == "ann":
            assert (now.payload, now.routing_key, dict(now.attributes)) == (b"", None, {ERASED: WHEN}), offset
            assert now._replace(payload=b"", routing_key=None, attributes={}) == was._replace(
                payload=b"", routing_key=None, attributes={}
            )
        else:
            assert now == was
    footers = open_object(whole.data), open_object(erased.encoded.data)
    assert sorted(footers[0].producers) == sorted(footers[1].producers)
    assert check_erasure(whole.data, whole.footer_crc, erased.encoded.data, erased.encoded.footer_crc) == 2
    assert rows_with_keys(erased.encoded.data, erased.encoded.footer_crc, ["ann"]) == 0


def test_the_comparison_refuses_an_object_that_differs_in_anything_else() -> None:
    whole = encode_object(TOPIC, 2, batches())
    others = [
        [batch(0, ["ann", "bob", "eve"]), *batches()[1:]],  # a key where there was none
        [*batches()[:2], batch(43, ["ann", "eva"], epoch=2)],  # another payload, key and attributes
        [*batches()[:2], batch(43, ["ann", "eve"], epoch=3)],  # another epoch
        [batch(0, ["ann", "bob", None, "bob"]), batch(4, ["bob"] * 39), batches()[2]],
        batches()[:2],  # fewer rows
    ]
    for other in others:
        made = encode_object(TOPIC, 2, other)
        with pytest.raises(InvalidObject):
            check_erasure(whole.data, whole.footer_crc, made.data, made.footer_crc)


def test_an_erased_row_must_say_so_and_nothing_else() -> None:
    silent = [Envelope(b"", T, None, "p", {}, 7, 1, 0), *(messages(batch(0, ["ann", "bob", None]))[1:])]
    made = encode_object(
        TOPIC,
        2,
        [stamp(encode_messages(silent, topic=TOPIC), base_offset=0, epoch=1, append_time=T), *batches()[1:]],
    )
    whole = encode_object(TOPIC, 2, batches())
    with pytest.raises(InvalidObject, match=r"danube\.erased"):
        check_erasure(whole.data, whole.footer_crc, made.data, made.footer_crc)


def test_a_raw_object_is_erased_and_an_unreadable_one_is_named() -> None:
    raw = encode_raw(batches())
    erased, unreadable = erase_raw(raw.data, ["ann", "eve"], WHEN)
    assert (erased.rows, unreadable) == (3, [])
    assert b"ann" not in bytes(erased.encoded.data)
    assert check_raw_erasure(raw.data, erased.encoded.data) == 3
    before, after = read_raw(raw.data), read_raw(erased.encoded.data)
    assert [each.header.base_offset for each in after] == [0, 3, 43]
    assert after[1].header == before[1].header
    assert [each.payload for each in messages(after[2])] == [b"", b""]
    with pytest.raises(InvalidObject):
        check_raw_erasure(raw.data, encode_raw([*batches()[:2], batch(43, ["ann", "eva"], epoch=2)]).data)
    # A body that Arrow does not understand, under checksums that are right: what raw objects are for.
    from crc32c import crc32c

    from pydanube.formats.batch_header import finish

    odd = batches()[1]
    body = b"\1" * len(odd.body)
    broken = finish(odd.header._replace(body_crc=crc32c(body), codec=0, uncompressed_length=len(body)), body)
    raw = encode_raw([batches()[0], broken, batches()[2]])
    erased, unreadable = erase_raw(raw.data, ["ann"], WHEN)
    assert erased.rows == 2
    assert [(each.first, each.end) for each in unreadable] == [(3, 43)]
    assert check_raw_erasure(raw.data, erased.encoded.data) == 2
