"""A metadata store on etcd, for clusters.

    get, list, empty transactions    linearizable: a majority confirms that what is read is the newest
    transactions                     sent once; Unreachable: not known whether it was made
    list                             pages, all read at the revision of the first
    watch                            one stream, which ends with its connection; then the caller lists again
    lease                            whole seconds, at least one and a half of etcd's election timeouts (2 s)

Everything is kept below `root`, which callers never see, so several clusters can share an etcd.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from typing import Final, TypeAlias

import grpc

from pydanube.errors import LeaseLost, MessageTooLarge, Unreachable
from pydanube.ports import COMPARES_MAX, OPERATIONS_MAX, Compare, Delete, Event, Item, LeaseId, Put, Revision, Usage
from pydanube.stores.metadata.etcd import endpoint as etcd
from pydanube.stores.metadata.etcd.calls import ATTEMPT_SECONDS, CONFIRM, TIMEOUT_SECONDS, Calls, Refusal
from pydanube.stores.metadata.etcd.endpoint import CallFailed, Closed, Stream, Tls
from pydanube.stores.metadata.etcd.quota import QUOTA_BYTES, quota_in_metrics
from pydanube.stores.metadata.etcd.renewals import Renewals
from pydanube.wire._pb.pydanube import etcd_pb2 as pb

# etcd's own limit is 1.5 MiB for what it writes to its log, which is the request and a little more.
REQUEST_BYTES_MAX: Final = 1536 * 1024 - 512
PAGE_ITEMS: Final = 500  # of the first page; the next ones are as long as makes PAGE_BYTES
PAGE_ITEMS_MAX: Final = 10_000
PAGE_BYTES: Final = 1024 * 1024
LIST_ATTEMPTS: Final = 3

Items: TypeAlias = list[Item]
WatchStream: TypeAlias = Stream[pb.WatchRequest, pb.WatchResponse]


class EtcdMetadataStore:
    """`endpoints` are host:port of members' client ports; the first is preferred, the others are asked when it fails.

    Every call ends within `timeout_seconds` (a list: every page). `attempt_seconds` is how long a read or a renewal
    waits for one member before it asks the next; to survive a member that hangs, a third of the shortest lease is a
    good value. Belongs to the event loop that first uses it.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        root: str = "",
        tls: Tls | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        attempt_seconds: float = ATTEMPT_SECONDS,
    ) -> None:
        self._root = root.encode()
        self._calls = Calls(endpoints, tls=tls, timeout_seconds=timeout_seconds, attempt_seconds=attempt_seconds)
        self._renewals = Renewals(
            endpoints,
            self._calls.credentials,
            lambda: self._calls.cluster_id,
            attempt_seconds=attempt_seconds,
            timeout_seconds=timeout_seconds,
        )

    @property
    def peers(self) -> str:
        """Whom it asks, for people."""
        return self._calls.peer

    async def use_endpoints(self, endpoints: Sequence[str]) -> None:
        """Members came or went. Calls and watches on a member that is not named any more end."""
        self._renewals.use(endpoints)
        for endpoint in self._calls.use(endpoints):
            await endpoint.close()

    async def close(self) -> None:
        """Ends every call and every watch with Unreachable."""
        self._renewals.close()
        await self._calls.close()

    # --- keys ---

    async def get(self, key: str) -> Item | None:
        answer = await self._read(pb.RangeRequest(key=self._key(key)))
        return self._item(answer.kvs[0]) if answer.kvs else None

    async def list(self, prefix: str) -> Items:
        for _ in range(LIST_ATTEMPTS):
            items = await self._list(prefix)
            if items is not None:
                return items
        raise Unreachable(self._calls.peer, "its history is compacted faster than it can be listed")

    async def _list(self, prefix: str) -> Items | None:
        """None if the revision of the first page was compacted before the last page was read."""
        first, end = self._range(prefix)
        items: Items = []
        revision: Revision = 0
        limit, size_bytes = PAGE_ITEMS, 0
        while True:
            request = pb.RangeRequest(key=first, range_end=end, limit=limit, revision=revision)
            try:
                page = await self._calls.repeatable(etcd.RANGE, request)
            except Refusal as refusal:
                if revision and refusal.code is grpc.StatusCode.OUT_OF_RANGE:
                    return None
                raise _unreachable(refusal) from None
            items += map(self._item, page.kvs)
            if not page.more:
                return items
            revision = revision or page.header.revision
            first = page.kvs[-1].key + b"\0"
            size_bytes += page.ByteSize()
            limit = max(1, min(PAGE_ITEMS_MAX, PAGE_BYTES * len(items) // size_bytes))

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> Revision | None:
        assert len(compares) <= COMPARES_MAX and len(operations) <= OPERATIONS_MAX
        keys = {operation.key for operation in operations}
        assert len(keys) == len(operations), "two operations on one key"
        request = pb.TxnRequest(
            compare=[
                pb.Compare(
                    target=pb.Compare.MOD,
                    result=pb.Compare.EQUAL,
                    key=self._key(compare.key),
                    mod_revision=compare.revision,
                )
                for compare in compares
            ],
            success=[self._operation(operation) for operation in operations],
        )
        if request.ByteSize() > REQUEST_BYTES_MAX:
            raise MessageTooLarge(request.ByteSize(), REQUEST_BYTES_MAX)
        try:
            if operations:
                answer = await self._calls.once(etcd.TXN, request)
            else:
                # A member answers a transaction without operations by itself, maybe with the past. Not so with a read.
                request.success.add(range=CONFIRM)
                answer = await self._calls.repeatable(etcd.TXN, request)
        except Refusal as refusal:
            if _lease_not_found(refusal):
                raise LeaseLost(await self._lost_lease(operations)) from None
            raise _unreachable(refusal) from None
        revision: Revision = answer.header.revision
        return revision if answer.succeeded else None

    def _operation(self, operation: Put | Delete) -> pb.RequestOp:
        key = self._key(operation.key)
        if isinstance(operation, Put):
            return pb.RequestOp(put=pb.PutRequest(key=key, value=operation.value, lease=operation.lease))
        return pb.RequestOp(delete_range=pb.DeleteRangeRequest(key=key))

    async def _read(self, request: pb.RangeRequest) -> pb.RangeResponse:
        try:
            return await self._calls.repeatable(etcd.RANGE, request)
        except Refusal as refusal:
            raise _unreachable(refusal) from None

    # --- watches ---

    def watch(self, prefix: str, after: Revision) -> AsyncIterator[Sequence[Event]]:
        return _Watch(self, prefix, after)

    async def _open_watch(self, prefix: str, after: Revision) -> tuple[WatchStream, pb.WatchResponse]:
        first, end = self._range(prefix)
        create = pb.WatchCreateRequest(key=first, range_end=end, start_revision=after + 1)
        try:
            return await self._calls.stream(etcd.WATCH, pb.WatchRequest(create=create))
        except Refusal as refusal:
            raise _unreachable(refusal) from None

    def _event(self, event: pb.Event) -> Event:
        deleted = event.type == pb.Event.DELETE
        return Event(self._text(event.kv.key), None if deleted else event.kv.value, event.kv.mod_revision)

    # --- space ---

    async def compact(self, revision: Revision) -> None:
        """etcd reuses the space for new changes; to give it back to the disk is `etcdctl defrag`."""
        try:
            await self._calls.repeatable(etcd.COMPACT, pb.CompactionRequest(revision=revision))
        except Refusal as refusal:
            if refusal.code is not grpc.StatusCode.OUT_OF_RANGE:  # another client compacted further
                raise _unreachable(refusal) from None

    async def usage(self) -> Usage:
        """Of the member that is asked first: the others have the same changes, in files of about the same size."""
        try:
            said = await self._calls.repeatable(etcd.STATUS, pb.StatusRequest())
        except Refusal as refusal:
            raise _unreachable(refusal) from None
        quota_bytes = said.db_size_quota
        if not quota_bytes and self._calls.credentials is None:
            quota_bytes = await quota_in_metrics(self._calls.current)
        return Usage(said.header.revision, said.db_size, quota_bytes or QUOTA_BYTES)

    # --- leases ---

    async def grant(self, ttl_seconds: float) -> LeaseId:
        """etcd counts whole seconds: a fraction is rounded up. If the answer is lost, so is the lease: it runs out."""
        assert ttl_seconds > 0
        try:
            answer = await self._calls.once(etcd.LEASE_GRANT, pb.LeaseGrantRequest(ttl=math.ceil(ttl_seconds)))
        except Refusal as refusal:
            raise _unreachable(refusal) from None
        lease: LeaseId = answer.id
        return lease

    async def renew(self, lease: LeaseId) -> None:
        """By a thread, so that a busy loop does not cost the lease (renewals.py)."""
        await self._renewals.renew(lease)

    async def revoke(self, lease: LeaseId) -> None:
        try:
            await self._calls.repeatable(etcd.LEASE_REVOKE, pb.LeaseRevokeRequest(id=lease))
        except Refusal as refusal:
            if not _lease_not_found(refusal):
                raise _unreachable(refusal) from None

    async def _lost_lease(self, operations: Sequence[Put | Delete]) -> LeaseId:
        """etcd does not say which one it did not find."""
        leases = list(dict.fromkeys(each.lease for each in operations if isinstance(each, Put) and each.lease))
        for lease in leases[:-1]:
            try:
                answer = await self._calls.repeatable(etcd.LEASE_TIME_TO_LIVE, pb.LeaseTimeToLiveRequest(id=lease))
            except Refusal:
                return lease
            if answer.ttl < 0:
                return lease
        return leases[-1]

    # --- keys as etcd has them ---

    def _key(self, key: str) -> bytes:
        # The slash keeps the root /a apart from the root /ab.
        assert key.startswith("/"), key
        return self._root + key.encode(errors="surrogateescape")

    def _range(self, prefix: str) -> tuple[bytes, bytes]:
        """The first key with this prefix, and the first key after all of them."""
        first = self._root + (prefix or "/").encode(errors="surrogateescape")
        assert first[-1] < 0xFF, "no text ends with this byte"
        return first, first[:-1] + bytes([first[-1] + 1])

    def _text(self, key: bytes) -> str:
        # Other writers below our root may use any bytes; they come back as they were.
        return key[len(self._root) :].decode(errors="surrogateescape")

    def _item(self, kv: pb.KeyValue) -> Item:
        return Item(self._text(kv.key), kv.value, kv.mod_revision)


class _Watch:
    """A place in etcd's history, and the stream that reads on from there.

    A wait that is cancelled takes its stream with it; the next one opens another at the same place. Dropping a watch
    ends its stream.
    """

    def __init__(self, store: EtcdMetadataStore, prefix: str, after: Revision) -> None:
        self._store = store
        self._prefix = prefix
        self._after = after
        self._stream: WatchStream | None = None
        self._ended: str | None = None

    def __aiter__(self) -> _Watch:
        return self

    async def __anext__(self) -> Sequence[Event]:
        while self._ended is None:
            try:
                answer = await self._next()
            except asyncio.CancelledError:
                self._stream = None
                raise
            except Unreachable as error:
                self._ended = error.why
                raise
            except CallFailed as failure:
                self._ended = failure.details or failure.code.name
                break
            except Closed:
                self._ended = "the store was closed"
                break
            if answer.canceled:
                self._ended = answer.cancel_reason or "the watch was ended"
                if answer.compact_revision:
                    self._ended = f"changes before revision {answer.compact_revision} are no longer kept"
                break
            if answer.events:
                self._after = answer.events[-1].kv.mod_revision
                return [self._store._event(event) for event in answer.events]
        self._stream = None
        raise Unreachable(self._store._calls.peer, self._ended)

    async def _next(self) -> pb.WatchResponse:
        if self._stream is None:
            self._stream, answer = await self._store._open_watch(self._prefix, self._after)
            return answer
        return await self._stream.read()


def _lease_not_found(refusal: Refusal) -> bool:
    return refusal.code is grpc.StatusCode.NOT_FOUND and "lease not found" in refusal.details


def _unreachable(refusal: Refusal) -> Unreachable:
    """A refusal that no caller can do anything about: rights, quota, a damaged etcd."""
    why = refusal.details or refusal.code.name
    if "database space exceeded" in refusal.details:
        why = (
            "its database is full: compact and defragment it and disarm the alarm (etcdctl compact, defrag, alarm "
            "disarm), or start it with a larger --quota-backend-bytes"
        )
    return Unreachable(refusal.peer, why)
