"""Calls to an etcd of several members: who is asked, for how long, and what a failure means.

    not sent, or refused before it began    the next member is asked, whatever the call is
    sent, and no answer                     a call that may be repeated goes to the next member; whether a change
                                            was made is not known, so it is never sent again: Unreachable
    answered with an error                  Refusal; the caller knows what it means

A change is waited for as long as its answer can still come; when the leader was replaced since it cannot.

A call stays with the member that answered last. A member that was silent for a while may have been stopped or cut off
without our knowing, so before a change goes there it has to answer a read, which costs nothing to repeat elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

import grpc

from pydanube.errors import ConfigError, Unreachable
from pydanube.stores.metadata.etcd.endpoint import (
    RANGE,
    Answer,
    CallFailed,
    Closed,
    Endpoint,
    Method,
    Request,
    Stream,
    Tls,
    target,
)
from pydanube.wire._pb.pydanube import etcd_pb2 as pb

log = logging.getLogger(__name__)

T = TypeVar("T")

TIMEOUT_SECONDS: Final = 5.0
ATTEMPT_SECONDS: Final = 1.0
SILENCE_SECONDS: Final = 1.0  # after which a member has to answer a read before it gets a change
SHUN_SECONDS: Final = 1.0  # how long a member that failed is not asked, if there is another
PAUSE_SECONDS: Final = 0.02  # after a failure; doubled up to the next
PAUSE_SECONDS_MAX: Final = 0.25
CONNECT_POLL_SECONDS: Final = 0.01

# A read that a majority has to confirm, of as little as possible.
CONFIRM: Final = pb.RangeRequest(key=b"\0", count_only=True)

# No answer, or one that leaves open whether the request was carried out.
SILENT: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.ABORTED,
    }
)
# etcd says these before it does anything, so any request may be sent elsewhere.
NOT_BEGUN: Final = frozenset(
    {
        "etcdserver: no leader",
        "etcdserver: rpc not supported for learner",
        "etcdserver: too many requests",
    }
)
# An answer, though its code is that of silence.
ANSWERED: Final = frozenset({"etcdserver: unhealthy cluster"})


class Refusal(Exception):
    """etcd answered, and the answer is no. `details` is etcd's sentence."""

    def __init__(self, peer: str, code: grpc.StatusCode, details: str) -> None:
        super().__init__(peer, code, details)
        self.peer = peer
        self.code = code
        self.details = details


class Calls:
    """`timeout_seconds` bounds every call. `attempt_seconds` is how long a call that may be repeated waits for one
    member before it asks another; it doubles with every attempt, so that a slow etcd is not taken for a dead one.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        tls: Tls | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        attempt_seconds: float = ATTEMPT_SECONDS,
    ) -> None:
        assert attempt_seconds > 0 and timeout_seconds > 0
        self.credentials: Any | None = None if tls is None else tls.credentials()
        self._timeout_seconds = timeout_seconds
        self._attempt_seconds = attempt_seconds
        self._endpoints: list[Endpoint] = []
        self._current = 0
        self.cluster_id = 0  # of the first etcd that we heard of; 0: of none yet
        self._strangers: set[str] = set()
        self._closed = False
        self.use(endpoints)

    @property
    def peer(self) -> str:
        """For errors."""
        return "etcd at " + ", ".join(endpoint.address for endpoint in self._endpoints)

    @property
    def current(self) -> str:
        """The address of the member that is asked first."""
        return self._endpoints[self._current].address

    def use(self, endpoints: Sequence[str]) -> list[Endpoint]:
        """Asks these members from now on, the first of them first. Returns those that are to be closed.

        The member in use stays in use if it is among them.
        """
        addresses = list(dict.fromkeys(target(url) for url in endpoints))
        if not addresses:
            raise ConfigError("etcd endpoints", "", "at least one host:port")
        known = {endpoint.address: endpoint for endpoint in self._endpoints}
        current = self._endpoints[self._current] if self._endpoints else None
        added = {each: Endpoint(each, self.credentials) for each in addresses if each not in known}
        self._endpoints = [added[each] if each in added else known.pop(each) for each in addresses]
        self._current = self._endpoints.index(current) if current in self._endpoints else 0
        return list(known.values())

    async def repeatable(
        self, method: Method[Request, Answer], request: Request, *, require_leader: bool = True
    ) -> Answer:
        """For reads, and for what has the same effect when it is done twice."""

        def ask(endpoint: Endpoint, seconds: float) -> Awaitable[Answer]:
            return endpoint.ask(method, request, seconds, require_leader=require_leader)

        return await self._call(ask, once=False)

    async def once(self, method: Method[Request, Answer], request: Request) -> Answer:
        """For changes. Raises Unreachable if it is unknown whether the change was made."""
        return await self._call(lambda endpoint, seconds: endpoint.ask(method, request, seconds), once=True)

    async def stream(self, method: Method[Request, Answer], request: Request) -> tuple[Stream[Request, Answer], Answer]:
        """A stream that has had its first answer."""
        opened: list[Stream[Request, Answer]] = []

        async def first(endpoint: Endpoint, seconds: float) -> Answer:
            stream = endpoint.stream(method, None)
            try:
                async with asyncio.timeout(seconds):
                    await stream.write(request)
                    answer = await stream.read()
            except TimeoutError:
                raise CallFailed(grpc.StatusCode.DEADLINE_EXCEEDED, "") from None
            opened.append(stream)
            return answer

        answer = await self._call(first, once=False)
        return opened[-1], answer

    async def close(self) -> None:
        """Ends every call and every stream."""
        self._closed = True
        for endpoint in self._endpoints:
            await endpoint.close()

    # --- one call, several attempts ---

    async def _call(self, ask: Callable[[Endpoint, float], Awaitable[Answer]], *, once: bool) -> Answer:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_seconds
        attempt_seconds = self._attempt_seconds
        pause = PAUSE_SECONDS
        why = "no connection"
        while True:
            endpoint = await self._connected(deadline, why)
            sent = False
            try:
                if once and loop.time() - endpoint.heard_at > SILENCE_SECONDS:
                    seconds = min(attempt_seconds, deadline - loop.time())
                    self._heard(endpoint, await endpoint.ask(RANGE, CONFIRM, seconds))
                sent = True
                seconds = deadline - loop.time()
                if once:
                    answer = await self._ask_while_hopeful(endpoint, ask, seconds)
                else:
                    answer = await ask(endpoint, min(attempt_seconds, seconds))
                self._heard(endpoint, answer)
                return answer
            except CallFailed as failure:
                not_begun = failure.details in NOT_BEGUN
                if failure.details in ANSWERED or (failure.code not in SILENT and not not_begun):
                    endpoint.heard_at = loop.time()
                    raise Refusal(f"etcd at {endpoint.address}", failure.code, failure.details) from None
                why = failure.details
                if failure.code is grpc.StatusCode.DEADLINE_EXCEEDED:
                    why = f"{endpoint.address} did not answer in time"
                self._shun(endpoint)
                if sent and once and not not_begun:
                    raise Unreachable(f"etcd at {endpoint.address}", why) from None
            except Closed:
                self._check_open()
                why = "its connection was closed"  # the endpoint is not used any more
                if sent and once:
                    raise Unreachable(f"etcd at {endpoint.address}", why) from None
            attempt_seconds *= 2
            if loop.time() + pause >= deadline:
                raise Unreachable(self.peer, why)
            await asyncio.sleep(pause)
            pause = min(2 * pause, PAUSE_SECONDS_MAX)

    async def _ask_while_hopeful(
        self, endpoint: Endpoint, ask: Callable[[Endpoint, float], Awaitable[Answer]], seconds: float
    ) -> Answer:
        """Asks, and after a while looks whether an answer can still come.

        What a member passed on to a leader that is gone is never answered, and the member does not notice.
        """
        loop = asyncio.get_running_loop()
        watching: list[asyncio.Task[None]] = []
        try:
            async with asyncio.timeout(seconds) as scope:

                def watch() -> None:
                    watching.append(loop.create_task(self._expire_when_hopeless(endpoint, endpoint.raft_term, scope)))

                timer = loop.call_later(self._attempt_seconds, watch)
                try:
                    return await ask(endpoint, seconds)
                finally:
                    timer.cancel()
                    for task in watching:
                        task.cancel()
        except TimeoutError:
            raise CallFailed(grpc.StatusCode.DEADLINE_EXCEEDED, "") from None

    async def _expire_when_hopeless(self, asked: Endpoint, term: int, scope: asyncio.Timeout) -> None:
        """Ends the scope when a newer leader is in office, or when others answer and the one that was asked does not.

        While no member answers, there is no better one to ask.
        """

        def expire() -> None:
            if not scope.expired():
                scope.reschedule(asyncio.get_running_loop().time())

        async def look(endpoint: Endpoint) -> int | None:
            found = await self._term(endpoint)
            if found is not None and found > term:
                expire()
            return found

        while True:
            endpoints = [each for each in self._endpoints if each.connected()]
            terms = dict(zip(endpoints, await asyncio.gather(*map(look, endpoints)), strict=True))
            if terms.get(asked) is None and any(terms.values()):
                expire()
            await asyncio.sleep(self._attempt_seconds / 4)

    async def _term(self, endpoint: Endpoint) -> int | None:
        """The term that a majority confirms, as this member sees it; None without an answer."""
        try:
            answer = await endpoint.ask(RANGE, CONFIRM, self._attempt_seconds)
        except (CallFailed, Closed):
            return None
        term: int = answer.header.raft_term
        return term

    async def _connected(self, deadline: float, why: str) -> Endpoint:
        """The member in use if it is connected and has not just failed, else the next that is."""
        loop = asyncio.get_running_loop()
        while True:
            self._check_open()
            ring = [*self._endpoints[self._current :], *self._endpoints[: self._current]]
            now = loop.time()
            # Asking begins to connect, so all of those who may be chosen are asked.
            ready = [each for each in ring if each.shunned_until <= now and each.connected()]
            if not ready and all(each.shunned_until > now for each in ring):
                ready = [each for each in ring if each.connected()]
            if ready:
                self._current = self._endpoints.index(ready[0])
                return ready[0]
            if now >= deadline:
                raise Unreachable(self.peer, why)
            # Polled: waiting for a change of state cannot be taken back, so waits for a dead member would pile up.
            await asyncio.sleep(CONNECT_POLL_SECONDS)

    def _heard(self, endpoint: Endpoint, answer: Any) -> None:
        """Notes that the member is alive. Raises CallFailed if its cluster is not the first that we heard of."""
        cluster_id: int = answer.header.cluster_id
        if self.cluster_id not in (0, cluster_id):
            if endpoint.address not in self._strangers:
                self._strangers.add(endpoint.address)
                log.error("etcd endpoint belongs to another cluster", extra={"endpoint": endpoint.address})
            raise CallFailed(grpc.StatusCode.UNAVAILABLE, f"{endpoint.address} belongs to another etcd cluster")
        self.cluster_id = cluster_id
        endpoint.heard_at = asyncio.get_running_loop().time()
        endpoint.raft_term = answer.header.raft_term
        endpoint.shunned_until = float("-inf")

    def _shun(self, endpoint: Endpoint) -> None:
        now = asyncio.get_running_loop().time()
        endpoint.heard_at = float("-inf")
        endpoint.shunned_until = now + SHUN_SECONDS
        if len(self._endpoints) > 1 and self._endpoints[self._current] is endpoint:
            self._current = (self._current + 1) % len(self._endpoints)

    def _check_open(self) -> None:
        if self._closed:
            raise Unreachable("metadata", "the store was closed")
