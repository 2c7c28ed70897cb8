"""Objects that a job wrote for the owner: neighbours put together, or one object with rows erased. The owner checks
the new object and swaps the descriptors.

    put by a job ─► the owner reads it, every byte against its checksums ─► one transaction ─► the old ones are garbage
                    one for one: and every row against the old object, equal or erased (formats/erasure.py)
                    a row group at a time: an object may be larger than what the owner can spare

A job that dies before leaves an object without a descriptor; the sweep removes it. Readers that are at an old object
have until the next sweep but one, and find the new one if they come later.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Final

from pydanube.core.history.tiers import PARQUET, Descriptor, epoch_of_name
from pydanube.errors import Conflict, InvalidObject
from pydanube.formats.erasure import check_footers, check_group, check_raw_erasure
from pydanube.formats.parquet import Footer, read_raw
from pydanube.formats.parquet_read import check_group_bytes
from pydanube.history.change import HistoryChange
from pydanube.history.manifest import store_manifest
from pydanube.history.stored_object import StoredObject
from pydanube.history.tier import TopicTier
from pydanube.ports import Buffer

log = logging.getLogger(__name__)

SWAPPED_MAX: Final = 100  # one transaction has 128 operations


async def swap(tier: TopicTier, old: Sequence[str], new: Descriptor) -> None:
    """Describes `new` instead of the `old` ones. Raises Conflict if they are not what the tier has now.

    Raises InvalidObject if the new one is not what its descriptor says, or, if it replaces a single object, if a row of
    it differs from that one and is not an erased one. The caller holds the topic: no other step runs on the tier.
    """
    await tier.refresh_if_stale()
    if len(old) == 1:
        await tier.load_manifest()
    run = _run(tier, old, new)
    key = tier.key(new.object_id)
    epoch = epoch_of_name(new.object_id)
    if epoch is None or epoch > tier.epoch:
        raise InvalidObject(key, f"its name must carry an epoch up to {tier.epoch}")
    if len(run) > 1:
        await _check(tier, await _opened(tier, new), new)
        await tier.apply(HistoryChange(added=[new], replaced=run))
        return
    old_one = run[0]
    same = replace(
        new,
        object_id=old_one.object_id,
        size=old_one.size,
        etag=old_one.etag,
        created_at=old_one.created_at,
        footer_crc=old_one.footer_crc,
    )
    if same != old_one:
        raise InvalidObject(new.object_id, "its descriptor differs from the old one in more than the object")
    erased = await (_check_erased if new.format == PARQUET else _check_raw_erased)(tier, old_one, new)
    if run[0] in tier.objects.listed:
        listed = [new if each == run[0] else each for each in tier.objects.listed]
        await tier.apply(HistoryChange(replaced=run, relisted=[new], manifest=await store_manifest(tier, listed)))
    else:
        await tier.apply(HistoryChange(added=[new], replaced=run))
    log.info("messages erased", extra={"topic": tier.topic, "object": new.object_id, "messages": erased})


def _run(tier: TopicTier, old: Sequence[str], new: Descriptor) -> list[Descriptor]:
    known = {each.object_id: each for each in (tier.objects.keyed if len(old) > 1 else tier.objects)}
    run = [known[name] for name in old if name in known]
    fits = (
        1 <= len(run) == len(old) <= SWAPPED_MAX
        and all(earlier.end == later.start_offset for earlier, later in pairwise(run))
        and (run[0].start_offset, run[-1].end) == (new.start_offset, new.end)
        and new.object_id not in known
        and new.format == (PARQUET if len(run) > 1 else run[0].format)
    )
    if not fits:
        raise Conflict(tier.key(new.object_id))
    return run


async def _opened(tier: TopicTier, new: Descriptor) -> StoredObject:
    key = tier.key(new.object_id)
    if not new.footer_crc:
        raise InvalidObject(key, "its descriptor has no checksum of its footer")
    try:
        return await StoredObject.open(tier.store, tier.work, key, new.size, new.footer_crc)
    except FileNotFoundError:
        raise InvalidObject(key, "it is not in the store") from None


async def _check(tier: TopicTier, stored: StoredObject, new: Descriptor) -> None:
    """Every byte of its row groups has the checksum that its footer says, and they hold what the descriptor says."""
    footer = stored.footer
    _check_described(tier.topic, footer, new)
    for number in range(len(footer.row_groups)):
        data = await _group(stored, number, new.object_id)
        await tier.work.run(partial(check_group_bytes, footer, number, data))


def _check_described(topic: str, footer: Footer, new: Descriptor) -> None:
    if (footer.topic, footer.start_offset, footer.end) != (topic, new.start_offset, new.end):
        raise InvalidObject(new.object_id, "it holds something else than its descriptor says")
    at = new.start_offset
    for group in footer.row_groups:
        if group.first_offset != at:
            raise InvalidObject(new.object_id, f"offset {at} is not in it")
        at = group.end_offset
    if at != new.end:
        raise InvalidObject(new.object_id, f"it ends at offset {at}")


async def _check_erased(tier: TopicTier, old: Descriptor, new: Descriptor) -> int:
    after = await _opened(tier, new)
    _check_described(tier.topic, after.footer, new)
    try:
        before = await StoredObject.open(tier.store, tier.work, tier.key(old.object_id), old.size, old.footer_crc)
    except FileNotFoundError:
        raise tier.damaged(old, "it is missing") from None
    check_footers(before.footer, after.footer)
    erased = 0
    for number in range(len(before.footer.row_groups)):
        was, now = await _group(before, number, old.object_id), await _group(after, number, new.object_id)
        erased += await tier.work.run(partial(check_group, before.footer, after.footer, number, was, now))
    return erased


async def _check_raw_erased(tier: TopicTier, old: Descriptor, new: Descriptor) -> int:
    """Whole: what Arrow refused to read is rare, and its batches have no index."""
    try:
        data = await tier.store.get(tier.key(new.object_id))
    except FileNotFoundError:
        raise InvalidObject(new.object_id, "it is not in the store") from None
    try:
        before = await tier.store.get(tier.key(old.object_id))
    except FileNotFoundError:
        raise tier.damaged(old, "it is missing") from None
    return await tier.work.run(partial(_compare_raw, before, data, new))


def _compare_raw(before: Buffer, data: Buffer, new: Descriptor) -> int:
    offsets = [(each.header.base_offset, each.header.end_offset) for each in read_raw(data)]
    if not offsets or (offsets[0][0], offsets[-1][1], len(memoryview(data))) != (new.start_offset, new.end, new.size):
        raise InvalidObject(new.object_id, "it holds something else than its descriptor says")
    return check_raw_erasure(before, data)


async def _group(stored: StoredObject, number: int, name: str) -> Buffer:
    try:
        return await stored.group(number)
    except FileNotFoundError:
        raise InvalidObject(name, "it was removed while it was read") from None
