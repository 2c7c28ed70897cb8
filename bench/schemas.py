"""What a schema costs a message: `make bench-schemas`. CPU time, in alternating rounds, medians of their ratios.

batch      encoded by a producer, parsed and looked at by the broker under `warn`: without a schema, and with one
payloads   checked in the process for schemas: CPU of both processes, per message
"""

from __future__ import annotations

import asyncio
import io
import json
import statistics
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastavro
from google.protobuf.wrappers_pb2 import StringValue

from pydanube.broker.schema_enforcer import SchemaEnforcer
from pydanube.broker.schemas import SchemaRegistry
from pydanube.core.names import TopicName
from pydanube.core.schemas.enforcing import TopicSchema
from pydanube.core.schemas.kinds import SchemaType
from pydanube.core.schemas.subjects import SubjectRecord, VersionMark
from pydanube.formats.batch import encode_columns, parse
from pydanube.ports import SchemaLane
from pydanube.stores.metadata.memory import MemoryMetadataStore
from pydanube.stores.schemas.memory import NoSchemaParsers
from pydanube.stores.schemas.process import SchemaProcesses
from pydanube.stores.work.system import SystemClock
from pydanube.telemetry import TopicMetrics

TOPIC = TopicName("/default/orders")
ROUNDS = 21
ROWS = (1, 10, 100)
PAYLOAD = json.dumps({"id": 7, "name": "coffee", "price": 2.5, "tags": ["a", "b"]}).encode()
CHECKED = 200  # messages of a batch


def enforcer(config: TopicSchema) -> SchemaEnforcer:
    clock = SystemClock()
    registry = SchemaRegistry(MemoryMetadataStore(clock), clock, NoSchemaParsers())
    registry._learn(SubjectRecord(1, "orders", SchemaType.JSON_SCHEMA, versions=(VersionMark(1, "f"),)), 1)
    return SchemaEnforcer(TOPIC, config, registry, clock, TopicMetrics())


def path_of(rows: int, schema: tuple[int, int] | None) -> Callable[[], None]:
    """One batch, from the producer's columns to the broker's decision."""
    payloads, times = [PAYLOAD] * rows, memoryview(array("q", range(rows))).cast("B")
    topic = enforcer(TopicSchema("orders") if schema else TopicSchema())

    def once() -> None:
        batch = encode_columns(payloads, times, producer_name="p", schema=schema, topic=TOPIC)
        assert topic.lets_batch(parse(batch.to_bytes()))

    return once


def cpu_us(once: Callable[[], None], times: int) -> float:
    before = time.process_time()
    for _ in range(times):
        once()
    return (time.process_time() - before) / times * 1e6


def batches() -> None:
    print("rows   without, µs a message   with   ratio")
    for rows in ROWS:
        bare, typed = path_of(rows, None), path_of(rows, (1, 1))
        times = max(20, 3000 // rows)
        cpu_us(bare, times), cpu_us(typed, times)
        pairs = [(cpu_us(bare, times) / rows, cpu_us(typed, times) / rows) for _ in range(ROUNDS)]
        ratio = statistics.median(other / one for one, other in pairs)
        without, with_ = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"{rows:4d} {without:15.2f} {with_:15.2f} {ratio:8.2f}")


def child_cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


async def payloads() -> None:
    avro = {
        "type": "record",
        "name": "O",
        "fields": [{"name": "id", "type": "long"}, {"name": "name", "type": "string"}],
    }
    datum = io.BytesIO()
    fastavro.schemaless_writer(datum, avro, {"id": 7, "name": "coffee"})
    json_schema = {"properties": {"id": {"type": "integer"}, "name": {"type": "string"}}, "required": ["id"]}
    cases: dict[str, tuple[str, bytes]] = {
        "json_schema": (json.dumps(json_schema), PAYLOAD),
        "avro": (json.dumps(avro), datum.getvalue()),
        "protobuf": (
            'syntax = "proto3"; message O { string name = 1; }',
            StringValue(value="coffee").SerializeToString(),
        ),
    }
    parsers = SchemaProcesses()
    print(f"payloads, {CHECKED} a batch    CPU µs a message: broker   process")
    for kind, (definition, payload) in cases.items():
        together = [payload] * CHECKED
        question: dict[str, Any] = {
            "do": "check", "key": kind, "type": kind, "definition": definition, "message": "",
            "sizes": [len(payload)] * CHECKED,
        }  # fmt: skip
        assert await parsers.ask(SchemaLane.PAYLOADS, question, together) == {"bad": None}
        process = parsers._lanes[SchemaLane.PAYLOADS]._process
        assert process is not None
        times = 1000
        own, theirs = time.process_time(), child_cpu(process.pid)
        for _ in range(times):
            await parsers.ask(SchemaLane.PAYLOADS, question, together)
        count = times * CHECKED / 1e6
        print(
            f"{kind:12} {(time.process_time() - own) / count:24.2f} {(child_cpu(process.pid) - theirs) / count:12.2f}"
        )
    await parsers.close()


if __name__ == "__main__":
    batches()
    asyncio.run(payloads())
