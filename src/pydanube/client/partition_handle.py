"""What a producer and a consumer of one topic have in common: being open at whichever broker serves it.

    look up ─► open ─► use ─► ended ─► wait a little ─► look up ...
                                 └── for good: `failure` says why, and nothing is tried any more

Such a handle is called a lane: a partitioned topic has one per partition, and they come and go independently.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from pydanube.client.brokers import Brokers, RetryDelay
from pydanube.client.connection import BrokerConnection
from pydanube.errors import ClientClosed, DanubeError, DeadlineExceeded, LimitReached, NotServed, Unreachable

log = logging.getLogger(__name__)

OPEN_SECONDS: Final = 15.0  # for one attempt; a broker that does not answer by then is as good as away
ROUTES_MAX: Final = 4  # followed without a pause; two brokers that name each other are then given time
SETTLED_SECONDS: Final = 1.0  # a handle that was open for so long counts as settled


class PartitionHandle:
    """Subclasses say how to open, and what to do when it is open, lost or given up."""

    what: str = "lane"

    def __init__(self, brokers: Brokers, topic: str) -> None:
        self.topic = topic
        self.connection: BrokerConnection | None = None
        self.handle = 0
        self.failure: DanubeError | None = None
        self._brokers = brokers
        self._task: asyncio.Task[None] | None = None
        self._lost = asyncio.Event()
        self._first_open: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._backoff = RetryDelay(brokers.connector.rng)
        self._routes_followed = 0
        self._last_error: DanubeError | None = None

    async def open(self, seconds: float) -> None:
        """Returns when it is open. Raises why it cannot be, or DeadlineExceeded."""
        self._task = asyncio.create_task(self._keep_open(), name=f"{self.what} {self.topic}")
        try:
            async with asyncio.timeout(seconds):
                await asyncio.shield(self._first_open)
        except TimeoutError:
            await self.stop()
            raise DeadlineExceeded(f"opening {self.topic}", seconds, str(self._last_error or "")) from self._last_error
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Drops everything, without waiting."""
        if self.failure is None:
            self.failure = ClientClosed(f"the {self.what} of {self.topic}")
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._on_failed(self.failure)
        self._detach()
        if not self._first_open.done():
            self._first_open.cancel()

    # --- for connections ----------------------------------------------------------------------------------

    def ended(self, connection: BrokerConnection, error: DanubeError) -> None:
        if connection is not self.connection:
            return
        if connection.ended is None and not error.retryable:
            self._fail(error)  # the broker ended this handle alone, and says that trying again will not help
            return
        self._reopen(error)

    # --- for subclasses -----------------------------------------------------------------------------

    async def _open_at(self, connection: BrokerConnection) -> None:
        """Asks the broker; the answer is taken by `_attach`, synchronously."""
        raise NotImplementedError

    async def _find(self) -> BrokerConnection:
        return (await self._brokers.owner(self.topic))[0]

    def _on_lost(self, error: DanubeError) -> None:
        """The handle is gone; `connection` is still the old one."""

    def _on_failed(self, error: DanubeError) -> None:
        """It will never be open again. Called twice if it had failed before it was stopped."""

    def _forget_handle(self, connection: BrokerConnection) -> None:
        """Removes the handle from the connection."""
        raise NotImplementedError

    def _attach(self, connection: BrokerConnection, handle: int) -> None:
        self.connection = connection
        self.handle = handle
        self._lost.clear()

    def _detach(self) -> None:
        """Frames for the old handle are ignored from now on."""
        if self.connection is not None:
            self._forget_handle(self.connection)
        self.connection = None

    def _reopen(self, error: DanubeError) -> None:
        """The handle cannot be used any more: find the topic and open it again."""
        if self.connection is None:
            return
        log.info("lane lost", extra={"lane": self.what, "topic": self.topic, "why": str(error)})
        self._remember(error)
        self._on_lost(error)
        self._detach()
        self._lost.set()

    def _remember(self, error: DanubeError) -> None:
        self._last_error = error
        if isinstance(error, NotServed) and error.moved_to:
            self._brokers.moved(self.topic, error.moved_to)

    def _fail(self, error: DanubeError) -> None:
        if self.failure is None:
            self.failure = error
            self._on_failed(error)
        self._detach()
        self._lost.set()

    def _progressed(self) -> None:
        """The broker did something for this lane: the next failure begins a new backoff."""
        self._backoff.reset()
        self._routes_followed = 0

    # --- the loop -----------------------------------------------------------------------------------

    async def _keep_open(self) -> None:
        loop = asyncio.get_running_loop()
        while self.failure is None:
            try:
                await self._try_open()
            except DanubeError as error:
                self._remember(error)
                if not (error.retryable or self._passes(error)):
                    self._give_up(error)
                    return
            else:
                if not self._first_open.done():
                    self._first_open.set_result(None)
                opened_at = loop.time()
                await self._lost.wait()
                if loop.time() - opened_at > SETTLED_SECONDS:
                    self._routes_followed = 0
            if not self._follows_route() and self.failure is None:
                await self._backoff.sleep()

    def _passes(self, error: DanubeError) -> bool:
        """Whether a limit that this lane was within will pass: the broker may still count handles that are gone."""
        return isinstance(error, LimitReached) and self._first_open.done()

    def _follows_route(self) -> bool:
        """Whether a broker has named the owner, and it is worth connecting to it without a pause."""
        if not self._brokers.knows_route(self.topic):
            return False
        self._routes_followed += 1
        return self._routes_followed <= ROUTES_MAX

    async def _try_open(self) -> None:
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                connection = await self._find()
                try:
                    await self._open_at(connection)
                except NotServed:
                    self._brokers.bad_route(connection)
                    raise
        except TimeoutError:
            late = Unreachable(self.topic, f"its broker did not answer within {OPEN_SECONDS:g} s")
            self._reopen(late)  # the answer may have come at that very moment
            raise late from None

    def _give_up(self, error: DanubeError) -> None:
        if self._first_open.done():
            log.error("lane failed", extra={"lane": self.what, "topic": self.topic, "why": str(error)})
        else:
            self._first_open.set_exception(error)
        self._fail(error)
