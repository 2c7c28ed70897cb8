"""Asks every broker for its metrics, every few seconds, and keeps what it needs in `Samples`.

In short steps: beside a broker, in its own event loop, a thousand topics must not delay a message. Most of the
time no page is open, and then it asks less often.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from pydanube.admin import values
from pydanube.admin.gateway import KnownBroker
from pydanube.admin.metrics_text import parse_in_steps
from pydanube.admin.samples import Samples
from pydanube.errors import DanubeError, Unreachable

log = logging.getLogger(__name__)

WATCHED_SECONDS: Final = 2.0
UNWATCHED_SECONDS: Final = 5.0
WATCHED_FOR_SECONDS: Final = 30.0  # after a page was asked for
SCRAPE_SECONDS: Final = 2.5  # all wait for the slowest, and a slot of the series has five
SIZE_MAX_BYTES: Final = 64 * 1024 * 1024


class Sampler:
    """`brokers` are asked for anew in every round.

    So is how a cluster is doing (`look`): the broker that is asked remembers since when another is silent, and while
    topics have no server the sums over all of them are not known.
    """

    def __init__(
        self,
        brokers: Callable[[], Awaitable[Sequence[KnownBroker]]],
        samples: Samples | None = None,
        look: Callable[[], Awaitable[values.ClusterStatus]] | None = None,
    ) -> None:
        self.samples = samples or Samples()
        self._look = look
        self._is_alone = False
        self.unreachable: str = ""  # why the brokers themselves are not known
        self._brokers = brokers
        self._watched_at = time.monotonic()
        self._wake = asyncio.Event()

    def watch(self) -> None:
        """A page is open: sample more often for a while."""
        was_watched = self._is_watched()
        self._watched_at = time.monotonic()
        if not was_watched:
            self._wake.set()

    def _is_watched(self) -> bool:
        return time.monotonic() - self._watched_at < WATCHED_FOR_SECONDS

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            started = time.monotonic()
            await self.round()
            self._wake.clear()
            every = WATCHED_SECONDS if self._is_watched() else UNWATCHED_SECONDS
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(every - (time.monotonic() - started), 0.1)):
                    await self._wake.wait()

    async def round(self) -> None:
        """Every broker once. One that does not answer is a failure in `samples`, never an exception."""
        try:
            brokers = await self._brokers()
        except DanubeError as error:
            self.unreachable = str(error)
            for broker in list(self.samples.brokers):
                self.samples.failed(broker, str(error))
            return
        self.unreachable = ""
        unserved, *_ = await asyncio.gather(self._unserved(), *(self._sample(broker) for broker in brokers))
        names = [each.broker_id for each in brokers]
        for _ in self.samples.end_round_in_steps(names, time.time(), is_complete=not unserved):
            await asyncio.sleep(0)

    async def _unserved(self) -> int:
        """Topics that no broker serves, as far as is known. A broker that is alone is asked once: it serves all."""
        if self._look is not None and not self._is_alone:
            with contextlib.suppress(DanubeError):  # the pages ask as well, and say why
                found = await self._look()
                self._is_alone = found.is_standalone
                return found.topics_unserved
        return 0

    async def _sample(self, broker: KnownBroker) -> None:
        try:
            text = await scrape(broker.metrics_addr)
        except DanubeError as error:
            self.samples.failed(broker.broker_id, str(error))
            return
        at = time.time()
        steps = parse_in_steps(text)
        while True:
            try:
                next(steps)
            except StopIteration as done:
                numbers = done.value
                break
            await asyncio.sleep(0)
        for _ in self.samples.add_in_steps(broker.broker_id, numbers, at):
            await asyncio.sleep(0)


async def scrape(metrics_addr: str) -> str:
    """What the broker prints at http://`metrics_addr`/metrics. Raises Unreachable."""
    who = f"the metrics of the broker at {metrics_addr}"
    host, _, port = metrics_addr.rpartition("://")[2].rpartition(":")
    if not host or not port.isdecimal():
        raise Unreachable(who, "that is no address")
    try:
        async with asyncio.timeout(SCRAPE_SECONDS):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=1 << 20)
            try:
                writer.write(f"GET /metrics HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
                head = await reader.readuntil(b"\r\n\r\n")
                if b" 200 " not in head.split(b"\r\n", 1)[0]:
                    raise Unreachable(who, "what answers there is no broker")
                chunks, size = [], 0
                while chunk := await reader.read(1 << 18):
                    size += len(chunk)
                    if size > SIZE_MAX_BYTES:
                        raise Unreachable(who, "it says more than can be read")
                    chunks.append(chunk)
            finally:
                writer.close()
    except TimeoutError:
        raise Unreachable(who, "it did not answer in time") from None
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        raise Unreachable(who, "nobody answers there") from None
    return b"".join(chunks).decode("utf-8", "replace")
