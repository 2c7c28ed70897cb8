"""What reads without a subscription, for programs without an event loop: see `pydanube.blocking`."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from pydanube.client import admin, tail
from pydanube.client.tail import TailedMessage
from pydanube.client.thread import LoopThread


class Fetch:
    """See `pydanube.Client.fetch`."""

    def __init__(self, thread: LoopThread, inner: admin.Fetch) -> None:
        self._thread = thread
        self._fetch = inner

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        batches = self._fetch.__aiter__()
        while (batch := self._thread.call(_next(batches))) is not None:
            yield batch

    def table(self) -> pa.Table:
        return self._thread.call(self._fetch.table())


async def _next(found: Any) -> Any:
    return await anext(found, None)


class Tail:
    """See `pydanube.Client.tail`."""

    def __init__(self, thread: LoopThread, inner: tail.Tail) -> None:
        self._thread = thread
        self._tail = inner

    def open(self) -> Self:
        self._thread.call(self._tail.open())
        return self

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def offsets(self) -> dict[str, int]:
        return self._tail.offsets

    def __iter__(self) -> Iterator[TailedMessage]:
        found = self._tail.__aiter__()
        while (message := self._thread.call(_next(found))) is not None:
            yield message

    def receive(self, *, timeout: float | None = None) -> TailedMessage:
        return self._thread.call(self._tail.receive(timeout=timeout))

    def close(self) -> None:
        self._thread.call(self._tail.close())
