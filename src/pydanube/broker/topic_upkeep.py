"""What is done now and then for every topic that is open here, until cancelled."""

from __future__ import annotations

import logging
from typing import Final, NoReturn

from pydanube.broker.topic_table import TopicTable
from pydanube.core.names import TopicName
from pydanube.errors import (
    DanubeError,
)

log = logging.getLogger("pydanube.broker.topics")

REAP_SECONDS: Final = 300.0
REST_SECONDS: Final = 10.0


async def reap_consumers(topics: TopicTable) -> NoReturn:
    """Forgets registrations of consumers that are gone, every few minutes, until cancelled."""
    clock = topics.context.services.clock
    while True:
        await clock.sleep(REAP_SECONDS)
        for topic in topics.loaded:
            try:
                await topic.reap(clock.elapsed())
            except DanubeError as error:
                log.warning("consumers not reaped", extra={"topic": topic.name, "why": str(error)})


async def rest_idle_topics(topics: TopicTable) -> NoReturn:
    """Topics where nothing happens give their reservation back, so that a crash leaves nothing in doubt."""
    clock = topics.context.services.clock
    heads: dict[TopicName, int] = {}
    while True:
        await clock.sleep(REST_SECONDS)
        before, heads = heads, {}
        for topic in topics.loaded:
            if topic.reliable and topic.has_doubt:
                heads[topic.name] = topic.head
                if before.get(topic.name) == topic.head and topic.name not in topics.leaving:
                    try:
                        await topic.release_reservation()
                    except DanubeError as error:
                        log.warning("reservation not shrunk", extra={"topic": topic.name, "why": str(error)})
