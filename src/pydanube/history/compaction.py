"""Objects that a job wrote for the owner: neighbours put together, or one object with rows erased. The owner checks
the new object and swaps the descriptors.

    put by a job ─► the owner reads it, every byte against its checksums ─► one transaction ─► the old ones are garbage
                    one for one: and every row against the old object, equal or erased (formats/erasure.py)

A job that dies before leaves an object without a descriptor; the sweep removes it. Readers that are at an old object
have until the next sweep but one, and find the new one if they come later.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

from pydanube.core.history.tiers import PARQUET, Descriptor, epoch_of_name
from pydanube.errors import Conflict, InvalidObject
from pydanube.formats.erasure import check_erasure, check_raw_erasure
from pydanube.formats.parquet import read_raw
from pydanube.formats.parquet_read import check_bytes, open_object
from pydanube.history.change import HistoryChange
from pydanube.history.manifest import store_manifest
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
    try:
        data = await tier.store.get(key)
    except FileNotFoundError:
        raise InvalidObject(key, "it is not in the store") from None
    if len(run) > 1:
        await tier.work.run(lambda: _check(tier.topic, data, new))
        await tier.apply(HistoryChange(added=[new], replaced=run))
        return
    try:
        before = await tier.store.get(tier.key(run[0].object_id))
    except FileNotFoundError:
        raise tier.damaged(run[0], "it is missing") from None
    erased = await tier.work.run(lambda: _check_erased(tier.topic, before, run[0], data, new))
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


def _check_erased(topic: str, before: Buffer, old: Descriptor, data: Buffer, new: Descriptor) -> int:
    same = replace(
        new, object_id=old.object_id, size=old.size, etag=old.etag, created_at=old.created_at, footer_crc=old.footer_crc
    )
    if same != old:
        raise InvalidObject(new.object_id, "its descriptor differs from the old one in more than the object")
    if new.format == PARQUET:
        _check(topic, data, new)
        return check_erasure(before, old.footer_crc, data, new.footer_crc)
    offsets = [(each.header.base_offset, each.header.end_offset) for each in read_raw(data)]
    if not offsets or (offsets[0][0], offsets[-1][1], len(memoryview(data))) != (new.start_offset, new.end, new.size):
        raise InvalidObject(new.object_id, "it holds something else than its descriptor says")
    return check_raw_erasure(before, data)


def _check(topic: str, data: Buffer, new: Descriptor) -> None:
    check_bytes(data, new.footer_crc)
    footer = open_object(data, new.footer_crc)
    found = (footer.topic, footer.start_offset, footer.end, len(memoryview(data)))
    if found != (topic, new.start_offset, new.end, new.size) or not new.footer_crc:
        raise InvalidObject(new.object_id, "it holds something else than its descriptor says")
    at = new.start_offset
    for group in footer.row_groups:
        if group.first_offset != at:
            raise InvalidObject(new.object_id, f"offset {at} is not in it")
        at = group.end_offset
    if at != new.end:
        raise InvalidObject(new.object_id, f"it ends at offset {at}")
