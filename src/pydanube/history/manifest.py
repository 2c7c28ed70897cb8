"""Puts the object that lists descriptors without keys of their own, and reads it back before anything names it."""

from __future__ import annotations

from collections.abc import Sequence

from crc32c import crc32c

from pydanube.core.history.tiers import Descriptor, manifest_name, manifest_to_bytes
from pydanube.errors import InvalidObject
from pydanube.history.change import StoredManifest
from pydanube.history.tier import TopicTier


async def store_manifest(tier: TopicTier, listed: Sequence[Descriptor]) -> StoredManifest:
    """A new manifest with these descriptors, in order of offset. It is garbage until a change of the history names it.

    Raises InvalidObject if the store has something else than it was given.
    """
    listed = sorted(listed, key=lambda each: each.start_offset)
    name = manifest_name(tier.epoch, tier.next_manifest())
    key, data = tier.key(name), manifest_to_bytes(listed)
    tier.garbage.add(name)
    await tier.store.put(key, [data], create=True)
    try:
        stored = await tier.store.get(key)
    except FileNotFoundError:
        raise InvalidObject(key, "the store took it and does not have it") from None
    if stored != data:
        raise InvalidObject(key, "what the store has is not what it was given")
    return StoredManifest(name, listed[-1].end, crc32c(data))
