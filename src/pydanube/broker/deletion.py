"""Deletes a topic that this broker owns, with everything it had."""

from __future__ import annotations

import logging

from pydanube.broker.ownership import Ownership
from pydanube.broker.registrations import (
    remove_below,
)
from pydanube.broker.take_over import BrokerContext
from pydanube.core import keys
from pydanube.core.history.ownership import Owner
from pydanube.core.names import TopicName
from pydanube.errors import (
    DanubeError,
)
from pydanube.history.leftovers import remove_files
from pydanube.history.tier import delete_objects
from pydanube.ports import Delete, Put

log = logging.getLogger("pydanube.broker.topics")


async def erase(context: BrokerContext, ownership: Ownership, session: int) -> None:
    """With the topic's lock. Interrupted at any point, it is finished by the next broker that opens the topic.

    How it delivers goes first: a topic without that is one that is being deleted, whatever else is left of it. That
    it exists goes last, so that no new one of its name finds what the old one had.
    """
    name = ownership.topic
    tombstone = Owner(
        epoch=ownership.epoch,
        session=session,
        broker_id=context.broker_id,
        start_offset=0,
        released=True,
        deleted=True,
    )
    await ownership.write([Delete(keys.delivery(name))])
    await remove_below(
        context.metadata,
        ownership,
        [keys.below_topic(name), keys.below_storage(name)],
        [
            Delete(keys.topic(name)),
            Delete(keys.namespace_topic(name)),
            Delete(keys.assignment(context.broker_id, name)),
            Put(keys.owner(name), tombstone.to_bytes()),  # epochs go on if the name is used again
        ],
    )
    await remove_files(context.disk, name)
    await _remove_objects(context, name, ownership.epoch)
    log.info("topic deleted", extra={"topic": name})


async def _remove_objects(context: BrokerContext, name: TopicName, epoch: int) -> None:
    """What stays because the store is unreachable is garbage without a descriptor: `storage verify` lists it."""
    if context.cloud is None:
        return
    try:
        await delete_objects(context.cloud.store, name, epoch)
    except DanubeError as error:
        log.warning("objects of a deleted topic are left", extra={"topic": name, "why": str(error)})
