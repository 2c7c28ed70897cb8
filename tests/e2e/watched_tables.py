"""A topic under load, and engines that read its table all the while: what they saw, against what was acknowledged.

with WatchedTable(cluster, "/default/orders") as table:
    cluster.admin("topics", "unload", table.topic, "--wait")      # whatever happens to it
    ...
table.judge()                                                      # both engines read exactly what was acknowledged

A message whose producer got no answer may be a row, once, or not: it is the only one that may.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from random import Random
from types import TracebackType
from typing import Any, Self

import duckdb
from pyiceberg.exceptions import RESTError, ServiceUnavailableError

import pydanube
from pydanube.errors import DanubeError
from tests.e2e.clusters import ClusterProcesses
from tests.e2e.processes import until
from tests.harness.engines import ask, digest, duckdb_at, pyiceberg_at, rows_of

Rows = dict[int, bytes]


class WatchedTable:
    def __init__(self, cluster: ClusterProcesses, topic: str, *, pause_seconds: float = 0.02, padding: int = 0) -> None:
        self.cluster = cluster
        self.topic = topic
        self.acked: Rows = {}
        self.unsure: set[bytes] = set()
        self.reads = {"DuckDB": 0, "PyIceberg": 0}
        self.forgotten = 0  # retention may forget what is below
        self._pause = pause_seconds
        self._padding = padding
        self._rng = Random(1)
        self._seen: Rows = {}
        self._ducks: dict[str, duckdb.DuckDBPyConnection] = {}
        self._problems: list[BaseException] = []
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._guarded, args=(each,), name=each.__name__)
            for each in (self._produce, self._read_with_duckdb, self._read_with_pyiceberg)
        ]

    def __enter__(self) -> Self:
        self._threads[0].start()
        until(lambda: len(self.acked) > 50 or self._problems, "it is under load")
        for thread in self._threads[1:]:
            thread.start()
        until(lambda: all(self.reads.values()) or self._problems, "both engines read")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(120)
        if kind is None:
            assert not self._problems, self._problems
            assert all(self.reads.values()), self.reads

    def catalogs(self) -> list[str]:
        return [f"http://127.0.0.1:{each.metrics_port}/iceberg" for each in self.cluster.living]

    # --- load ---------------------------------------------------------------------------------------------

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._problems.append(error)

    def _produce(self) -> None:
        asyncio.run(self._send())

    async def _send(self) -> None:
        number = 0
        async with (
            pydanube.connect(self.cluster.url, timeout=60) as client,
            client.producer(self.topic, reliable=True) as producer,
        ):

            async def send(payload: bytes) -> None:
                self.unsure.add(payload)
                try:
                    offset = (await producer.send(payload)).offset
                except DanubeError:
                    return  # it stays unsure
                self.acked[offset] = payload
                self.unsure.discard(payload)

            while not self._over.is_set():
                payloads = [f"{self.topic} {number + n}".encode() for n in range(10)]
                payloads = [each + b" " + self._rng.randbytes(self._padding) for each in payloads]
                number += len(payloads)
                await asyncio.gather(*map(send, payloads))
                await asyncio.sleep(self._pause)

    # --- engines ------------------------------------------------------------------------------------------

    def _read_with_duckdb(self) -> None:
        self._read("DuckDB", self._duckdb)

    def _read_with_pyiceberg(self) -> None:
        self._read("PyIceberg", self._pyiceberg)

    def _duckdb(self, catalog: str) -> list[tuple[int, bytes]]:
        connection = self._ducks.pop(catalog, None) or duckdb_at(catalog)
        rows = connection.execute(f'SELECT "offset", payload FROM danube.{self._name} ORDER BY 1').fetchall()
        self._ducks[catalog] = connection  # one that failed is not used again
        return rows

    def _pyiceberg(self, catalog: str) -> list[tuple[int, bytes]]:
        table = pyiceberg_at(catalog).load_table(self._name)
        return rows_of(table.scan(selected_fields=("offset", "payload")).to_arrow(), "offset", "payload")

    @property
    def _name(self) -> str:
        return self.topic[1:].replace("/", ".")

    def _read(self, engine: str, read: Callable[[str], list[tuple[int, bytes]]]) -> None:
        """One broker's catalog after the other's. A broker that is gone answers nothing; one that answers is right."""
        before: set[int] = set()
        for number in range(1_000_000):
            if self._over.is_set():
                return
            catalogs = self.catalogs()
            try:
                rows = read(catalogs[number % len(catalogs)])
            except (OSError, RESTError, ServiceUnavailableError, duckdb.Error) as error:
                if _is_away(error):
                    self._over.wait(0.1)
                    continue
                raise
            self.reads[engine] += 1
            offsets = {offset for offset, _ in rows}
            assert len(offsets) == len(rows), f"{engine} read an offset twice"
            lost = sorted(each for each in before - offsets if each >= self.forgotten)
            assert not lost, f"{engine} read offsets {lost[:10]} before, and not any more"
            before = offsets
            for offset, payload in rows:
                assert self._seen.setdefault(offset, payload) == payload, f"{engine}: offset {offset} has changed"
            self._over.wait(0.5)

    # --- judgement ----------------------------------------------------------------------------------------

    def judge(self, seconds: float = 90.0) -> None:
        """Waits until the table has everything, and compares it. Raises AssertionError."""
        wanted = {offset: payload for offset, payload in self.acked.items() if offset >= self.forgotten}
        found: dict[str, list[tuple[int, bytes]]] = {}

        def is_whole() -> bool:
            found["DuckDB"] = self._duckdb(self.catalogs()[-1])
            return wanted.items() <= dict(found["DuckDB"]).items()

        until(
            is_whole,
            "the table has all that was acknowledged",
            seconds=seconds,
            say=lambda: self._lacking(wanted, found),
        )
        for catalog in self.catalogs():
            rows = self._pyiceberg(catalog)
            assert digest(rows) == digest(found["DuckDB"]), f"{catalog}: the engines do not agree"
        extra = [(offset, payload) for offset, payload in found["DuckDB"] if offset not in self.acked]
        assert len({payload for _, payload in extra}) == len(extra)
        known = self.unsure | set(self.acked.values())  # one that was sent again to the next owner is on two disks
        assert {payload for _, payload in extra} <= known, extra[:5]
        rows_once = [row for row in found["DuckDB"] if row[0] in self.acked]
        assert digest(rows_once) == digest(sorted(wanted.items()))
        for offset, payload in self._seen.items():
            assert self.acked.get(offset, payload) == payload

    def _lacking(self, wanted: Rows, found: dict[str, Any]) -> str:
        lacking = sorted(set(wanted) - {offset for offset, _ in found.get("DuckDB", ())})
        code, body, _ = ask(f"{self.catalogs()[-1]}/v1/danube/namespaces/default/tables/{self.topic.split('/')[-1]}")
        properties = body["metadata"]["properties"] if code == 200 else body
        return f"{len(lacking)} of {len(wanted)} are not there: {lacking[:10]}…; {properties}"


def _is_away(error: BaseException) -> bool:
    """The catalog's broker is gone, or says that it has to wait."""
    words = ("Connection refused", "Could not connect", "Connection reset", "503", "ServiceUnavailable", "Max retries")
    return any(word in f"{error}" for word in (*words, "Could not establish connection", "aborted"))
