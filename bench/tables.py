"""What a topic costs as an Iceberg table: a load of one with 10,000 objects, and a query through the catalog.

    python bench/tables.py [--objects 10000] [--rows 1000000] [--runs 9]

Load: state in SQLite, as a standalone broker has it (250 descriptors with a key, the others in the manifest), objects
in a directory; CPU time of everything from the request to its JSON, when nothing has changed since the last load and
after each of some uploads. Query: a broker of its own, DuckDB with one thread, through the catalog and over the same
files by their names, in turn; both read every payload.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
from processes import broker

import pydanube
from pydanube.core import keys
from pydanube.core.history.ownership import Owner
from pydanube.core.history.tiers import Descriptor, TopicHistory, manifest_to_bytes
from pydanube.core.names import TopicName
from pydanube.history.tables import Tables
from pydanube.ports import Put
from pydanube.stores.metadata.sqlite import SqliteMetadataStore
from pydanube.stores.objects.urls import open_object_store
from pydanube.stores.work.system import SystemClock, SystemWork

TOPIC = TopicName("/default/orders")
KEYED = 250
ROWS = 1000  # of an object
UNCHANGED_MS, CHANGED_MS, LEAST_SHARE = 20.0, 50.0, 0.90
PUTS_AT_ONCE = 100
SCRATCH = Path(__file__).resolve().parents[1] / "build"
EXTENSIONS = ("avro", "httpfs", "iceberg")


# --- loads ------------------------------------------------------------------------------------------------


def described(number: int) -> Descriptor:
    start, end, now = number * ROWS, (number + 1) * ROWS, 1_700_000_000_000_000 + number * 1_000_000
    return Descriptor(
        start_offset=start,
        end_offset=end - 1,
        object_id=f"data-{start}-{end - 1}-1.parquet",
        size=1_000_000 + number,
        etag=f"{number:032x}",
        min_publish_time=now,
        max_publish_time=now + 999_999,
        epoch=1,
        created_at=now // 1_000_000,
        max_append_time=now + 999_999,
    )


async def loads(scratch: Path, objects: int, runs: int) -> dict[str, float]:
    clock, work = SystemClock(), SystemWork()
    metadata = SqliteMetadataStore(scratch / "metadata.sqlite", clock)
    store = await open_object_store((scratch / "objects").as_uri(), {})
    prefix = TOPIC[1:] + "/"
    listed = [described(number) for number in range(objects - KEYED)]
    await store.put(f"{prefix}_manifest-1-1.json", [manifest_to_bytes(listed)])
    history = TopicHistory(
        manifest="_manifest-1-1.json", manifest_end=listed[-1].end, epoch=1, change=1, changed_at=clock.time_us()
    )
    owner = Owner(epoch=1, session=1, broker_id=1, start_offset=0, created=1)
    puts = [Put(keys.owner(TOPIC), owner.to_bytes()), Put(keys.history(TOPIC), history.to_bytes())]
    for number in range(objects - KEYED, objects):
        puts.append(Put(keys.storage_object(TOPIC, number * ROWS), described(number).to_bytes()))
    for first in range(0, len(puts), PUTS_AT_ONCE):
        await metadata.transact([], puts[first : first + PUTS_AT_ONCE])
    root = scratch / "objects"
    tables = Tables(metadata, store, clock, work, lambda key: f"{root}/{key}", 600.0, 30.0)

    async def measured() -> float:
        before = time.process_time()
        loaded = await tables.load(TOPIC)
        json.dumps({"metadata-location": loaded.location, "metadata": loaded.metadata, "config": {}}).encode()
        return (time.process_time() - before) * 1000

    found = {"first load, ms": await measured()}
    found["nothing changed, ms"] = statistics.median([await measured() for _ in range(runs)])
    changed: list[float] = []
    for number in range(objects, objects + runs):
        history = history.changed(1, history.change + 1, clock.time_us())
        await metadata.transact(
            [],
            [
                Put(keys.history(TOPIC), history.to_bytes()),
                Put(keys.storage_object(TOPIC, number * ROWS), described(number).to_bytes()),
            ],
        )
        changed.append(await measured())
    found["after an upload, ms"] = statistics.median(changed)
    rows = int((await tables.load(TOPIC)).metadata["snapshots"][-1]["summary"]["total-records"])
    assert rows == (objects + runs) * ROWS, rows
    await store.close()
    metadata.close()
    return found


# --- queries ----------------------------------------------------------------------------------------------


async def publish(url: str, rows: int) -> None:
    rng = Random(1)
    async with pydanube.connect(url) as client, client.producer(TOPIC, reliable=True) as producer:
        for first in range(0, rows, 20_000):
            count = min(20_000, rows - first)
            keys_ = [("eu", "us", "asia")[n % 3] for n in range(count)]
            payloads = [rng.randbytes(800) for _ in range(count)]
            await producer.send_many(pa.table({"payload": payloads, "routing_key": keys_}))


def duck(catalog: str) -> Any:
    import duckdb

    connection = duckdb.connect(config={"threads": 1})
    for name in EXTENSIONS:
        module = __import__(f"duckdb_extension_{name}")
        [file] = Path(module.__path__[0]).rglob(f"{name}.duckdb_extension")
        connection.execute(f"LOAD '{file}'")
    connection.execute(f"ATTACH 'danube' AS danube (TYPE iceberg, ENDPOINT '{catalog}', AUTHORIZATION_TYPE 'none')")
    return connection


def queries(scratch: Path, rows: int, runs: int) -> dict[str, float]:
    with broker(scratch, "--upload-interval", "5", "--web-addr", "off") as server:
        asyncio.run(publish(f"danube://127.0.0.1:{server.stream}", rows))
        connection = duck(f"http://127.0.0.1:{server.metrics}/iceberg")
        what = "routing_key, count(*), sum(octet_length(payload)) FROM {} GROUP BY 1 ORDER BY 1"
        deadline = time.monotonic() + 300
        while connection.execute("SELECT count(*) FROM danube.default.orders").fetchall() != [(rows,)]:
            if time.monotonic() > deadline:
                raise SystemExit("the table did not get all rows in five minutes")
            time.sleep(0.5)
        command = [sys.executable, "-m", "pydanube", "admin", "--endpoint", f"http://127.0.0.1:{server.admin}"]
        listing = [*command, "storage", "list", TOPIC, "--output", "paths"]
        paths = subprocess.run(listing, check=True, capture_output=True, text=True).stdout.splitlines()

        def timed(query: str) -> tuple[float, float]:
            before, began = time.process_time(), time.perf_counter()
            connection.execute(f"SELECT {query}").fetchall()
            return time.process_time() - before, time.perf_counter() - began

        through, over = what.format("danube.default.orders"), what.format(f"read_parquet({paths})")
        assert connection.execute(f"SELECT {through}").fetchall() == connection.execute(f"SELECT {over}").fetchall()
        pairs = [(timed(through), timed(over)) for _ in range(runs)]
        found = {"objects": float(len(paths))}
        for place, clock in enumerate(("CPU", "wall")):
            found[f"{clock} ms, through the catalog"] = statistics.median(a[place] for a, _ in pairs) * 1000
            found[f"{clock} ms, over the files"] = statistics.median(b[place] for _, b in pairs) * 1000
        found["share of plain files, CPU"] = statistics.median(b[0] / a[0] for a, b in pairs)
        return found


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--objects", type=int, default=10_000)
    options.add_argument("--rows", type=int, default=1_000_000)
    options.add_argument("--runs", type=int, default=9)
    given = options.parse_args()
    SCRATCH.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=SCRATCH) as scratch:
        print(f"load of a table with {given.objects:,} objects, median of {given.runs}", flush=True)
        loaded = asyncio.run(loads(Path(scratch), given.objects, given.runs))
        show(loaded)
        print(f"DuckDB over {given.rows:,} rows of 800 B, one thread, median of {given.runs}", flush=True)
        asked = queries(Path(scratch), given.rows, given.runs)
        show(asked)
    bounds: list[tuple[str, float, Callable[[float], bool]]] = [
        (
            f"nothing changed: at most {UNCHANGED_MS:.0f} ms",
            loaded["nothing changed, ms"],
            lambda ms: ms <= UNCHANGED_MS,
        ),
        (f"after an upload: at most {CHANGED_MS:.0f} ms", loaded["after an upload, ms"], lambda ms: ms <= CHANGED_MS),
        (
            f"at least {LEAST_SHARE:.0%} of plain files",
            asked["share of plain files, CPU"],
            lambda share: share >= LEAST_SHARE,
        ),
    ]
    for name, value, holds in bounds:
        print(f"{'ok  ' if holds(value) else 'NOT '} {name} ({value:.2f})")
    return 0 if all(holds(value) for _, value, holds in bounds) else 1


def show(found: dict[str, float]) -> None:
    for name, value in found.items():
        print(f"  {name:<32} {value:>10.2f}")


if __name__ == "__main__":
    sys.exit(main())
