"""Objects that a job wrote for the owner: neighbours, merged. The owner checks them, and swaps the descriptors.

    put by a job ─► the owner reads it, every byte against its checksums ─► one transaction ─► the old ones are garbage

A job that dies before leaves an object without a descriptor; the sweep removes it. Readers that are at an old object
have until the next sweep but one, and find the new one if they come later.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from pydanube.core.history.tiers import PARQUET, Descriptor, epoch_of_name
from pydanube.errors import Conflict, InvalidObject
from pydanube.formats.parquet_read import check_bytes, open_object
from pydanube.history.change import HistoryChange
from pydanube.history.tier import TopicTier
from pydanube.ports import Buffer

SWAPPED_MAX: Final = 100  # one transaction has 128 operations


async def swap(tier: TopicTier, old: Sequence[str], new: Descriptor) -> None:
    """Describes `new` instead of the `old` ones. Raises Conflict if they are not what the tier has now.

    Raises InvalidObject if the new one is not what its descriptor says. The caller has the tier to itself.
    """
    await tier.refresh_if_stale()
    run = _run(tier, old, new)
    key = tier.key(new.object_id)
    epoch = epoch_of_name(new.object_id)
    if epoch is None or epoch > tier.epoch:
        raise InvalidObject(key, f"its name must carry an epoch up to {tier.epoch}")
    try:
        data = await tier.store.get(key)
    except FileNotFoundError:
        raise InvalidObject(key, "it is not in the store") from None
    await tier.work.run(lambda: _check(tier.topic, data, new))
    await tier.apply(HistoryChange(added=[new], replaced=run))


def _run(tier: TopicTier, old: Sequence[str], new: Descriptor) -> list[Descriptor]:
    keyed = {each.object_id: each for each in tier.objects.keyed}
    run = [keyed[name] for name in old if name in keyed]
    fits = (
        2 <= len(run) == len(old) <= SWAPPED_MAX
        and all(earlier.end == later.start_offset for earlier, later in pairwise(run))
        and (run[0].start_offset, run[-1].end) == (new.start_offset, new.end)
        and new.object_id not in keyed
        and new.format == PARQUET
    )
    if not fits:
        raise Conflict(tier.key(new.object_id))
    return run


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
