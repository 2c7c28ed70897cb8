"""Renewals of leases, from a thread of their own with connections of their own.

What etcd answers in a millisecond takes an asynchronous call ten turns of the event loop. A broker whose loop is busy,
and takes a tenth of a second for each, would lose its lease though it serves. Here the loop is needed twice: to begin,
and to hear of the end. A loop that does not turn at all begins nothing, so a broker that is stuck loses its lease.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc

from pydanube.errors import LeaseLost, Unreachable
from pydanube.ports import LeaseId
from pydanube.stores.metadata.etcd.calls import CONFIRM, PAUSE_SECONDS, PAUSE_SECONDS_MAX
from pydanube.stores.metadata.etcd.endpoint import LEASE_KEEP_ALIVE, OPTIONS, RANGE, REQUIRE_LEADER, Method, target
from pydanube.stores.work.threads import Threads
from pydanube.wire._pb.pydanube import etcd_pb2 as pb

TERMS_MAX: Final = 4


class Renewals:
    """`cluster_id` says which etcd is ours, 0 if that is not known yet: another one does not know the lease."""

    def __init__(
        self,
        endpoints: Sequence[str],
        credentials: Any | None,
        cluster_id: Callable[[], int],
        *,
        attempt_seconds: float,
        timeout_seconds: float,
    ) -> None:
        self._addresses = [target(url) for url in endpoints]  # replaced, never changed
        self._credentials = credentials
        self._cluster_id = cluster_id
        self._attempt_seconds = attempt_seconds
        self._timeout_seconds = timeout_seconds
        self._threads = Threads("renew-lease", 1)
        self._closed = False
        # Of the thread alone.
        self._current = 0
        self._channels: dict[str, Any] = {}

    def use(self, endpoints: Sequence[str]) -> None:
        self._addresses = [target(url) for url in endpoints]

    async def renew(self, lease: LeaseId) -> None:
        """Raises LeaseLost if there is none, Unreachable if no member answers."""
        if self._closed:
            raise Unreachable("metadata", "the store was closed")
        await self._threads.call(lambda: self._renew(lease))

    def close(self) -> None:
        """A renewal that is under way ends."""
        self._closed = True
        for channel in list(self._channels.values()):
            channel.close()
        self._threads.close()

    # --- in the thread ---

    def _renew(self, lease: LeaseId) -> None:
        deadline = time.monotonic() + self._timeout_seconds
        attempt_seconds, pause = self._attempt_seconds, PAUSE_SECONDS
        while True:
            addresses = self._addresses
            address = addresses[self._current % len(addresses)]
            try:
                return self._renew_at(address, lease, min(attempt_seconds, max(deadline - time.monotonic(), pause)))
            except grpc.RpcError as error:
                why = error.details() or error.code().name
                if error.code() is grpc.StatusCode.NOT_FOUND and "lease not found" in why:
                    raise LeaseLost(lease) from None
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    why = f"{address} did not answer in time"
                attempt_seconds *= 2
            except _Doubt as doubt:
                why = str(doubt)
            except ValueError:  # gRPC's word for a channel that was closed
                why = "the store was closed"
            self._current += 1
            if self._closed or time.monotonic() + pause >= deadline:
                raise Unreachable("etcd at " + ", ".join(addresses), why)
            time.sleep(pause)
            pause = min(2 * pause, PAUSE_SECONDS_MAX)

    def _renew_at(self, address: str, lease: LeaseId, seconds: float) -> None:
        """Renewals do not go through etcd's log: a leader that was replaced, and has not noticed, renews what runs out
        elsewhere, or denies what is there. So a majority confirms afterwards that the term is still the same.
        """
        denials = 0
        for _ in range(TERMS_MAX):
            kept = self._ask(address, LEASE_KEEP_ALIVE, pb.LeaseKeepAliveRequest(id=lease), seconds)
            confirmed = self._ask(address, RANGE, CONFIRM, seconds)
            if self._cluster_id() not in (0, kept.header.cluster_id):
                raise _Doubt(f"{address} belongs to another etcd cluster")
            if kept.header.raft_term != confirmed.header.raft_term:
                continue
            if kept.ttl > 0:
                return
            # A leader may be asked before it has carried out what it took over. The second time it has.
            denials += 1
            if denials == 2:
                raise LeaseLost(lease)
        raise _Doubt("its leader changes all the time")

    def _ask(self, address: str, method: Method[Any, Any], request: Any, seconds: float) -> Any:
        channel = self._channels.get(address)
        if channel is None:
            if self._credentials is None:
                channel = grpc.insecure_channel(address, options=OPTIONS)
            else:
                channel = grpc.secure_channel(address, self._credentials, options=OPTIONS)
            self._channels[address] = channel
        make = channel.stream_stream if method.streams else channel.unary_unary
        stub = make(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.answer.FromString,
        )
        if not method.streams:
            return stub(request, timeout=seconds, metadata=REQUIRE_LEADER)
        call = stub(iter([request]), timeout=seconds, metadata=REQUIRE_LEADER)
        try:
            return next(call)
        except StopIteration:
            raise _Doubt("the stream was ended") from None
        finally:
            call.cancel()


class _Doubt(Exception):
    """This member cannot tell; another may."""
