"""Members of an etcd come and go while brokers run: its clients learn their addresses from it.

A broker that was started with three addresses must go on when the members behind all of them have been replaced, one
after the other. So the members are asked for their list now and then, long before the last known one can be gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final, NoReturn, Protocol

from pydanube.errors import DanubeError
from pydanube.stores.metadata.etcd.cluster import EtcdCluster, Member
from pydanube.stores.metadata.etcd.endpoint import target

log = logging.getLogger(__name__)

FOLLOW_SECONDS: Final = 10.0


class Asks(Protocol):
    async def use_endpoints(self, endpoints: Sequence[str]) -> None:
        """These are the members from now on, the first is preferred."""
        ...


async def follow(
    cluster: EtcdCluster, known: Sequence[str], asking: Sequence[Asks], seconds: float = FOLLOW_SECONDS
) -> NoReturn:
    """Tells `asking` whenever the members are others, until it is cancelled.

    `known` are the addresses that were given: they stay first, for members may name themselves by addresses that are
    not reached from here.
    """
    used = list(known)
    while True:
        await asyncio.sleep(seconds)
        try:
            found = addresses(known, await cluster.members())
        except DanubeError as error:  # no member answers: calls to the store log that
            log.debug("members of the metadata store not told", extra={"why": str(error)})
            continue
        if found != used:
            log.info("members of the metadata store changed", extra={"endpoints": ", ".join(found)})
            for each in (*asking, cluster):
                await each.use_endpoints(found)
            used = found


def addresses(known: Sequence[str], members: Sequence[Member]) -> list[str]:
    """Of all that may be asked: those given, and voters that have started. A learner answers nothing."""
    told = [target(url) for member in members if not member.is_learner for url in member.client_urls]
    return list(dict.fromkeys([*map(target, known), *told]))
