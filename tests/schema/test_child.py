"""The process that parses schemas: real ones, hostile questions, and a loop that goes on meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from pydanube.core.schemas.refusals import SchemaTooCostly
from pydanube.errors import Unreachable
from pydanube.ports import SchemaAnswer, SchemaLane
from pydanube.stores.schemas.process import SchemaProcesses
from tests.support import run

STEP_SECONDS_MAX = 0.05  # of the loop's CPU time
BOMB = {"allOf": [{"anyOf": [{"required": [f"a{n}"]}, {"required": [f"b{n}"]}]} for n in range(20)]}
STRICT = "backward:strict"
WRONG = {"type": "record", "name": "A", "fields": [{"name": "a", "type": "int", "default": "x"}]}
OTHER = {"allOf": [{"anyOf": [{"required": [f"a{n}"]}, {"required": [f"c{n}"]}]} for n in range(20)]}


def judging(kind: str, definition: str, *history: str, asked: str = "backward") -> dict[str, Any]:
    old = [[number, kind, text, ""] for number, text in enumerate(history, start=1)]
    return {"do": "judge", "type": kind, "definition": definition, "message": "", "asked": asked, "history": old}


def checking(kind: str, definition: str | None, *payloads: bytes) -> dict[str, Any]:
    sizes = [len(each) for each in payloads]
    return {"do": "check", "key": "1.1", "type": kind, "definition": definition, "message": "", "sizes": sizes}


def text_of(path: str) -> str:
    return Path(path).read_text()


async def longest_step(stop: asyncio.Event) -> float:
    """CPU seconds of this thread between two turns of the loop: what a foreign schema may not cost."""
    longest = 0.0
    while not stop.is_set():
        before = time.thread_time()
        await asyncio.sleep(0)
        longest = max(longest, time.thread_time() - before)
        await asyncio.sleep(0.001)
    return longest


HOSTILE: list[tuple[str, dict[str, Any], str]] = [
    ("a bomb of alternatives", judging("json_schema", json.dumps(BOMB), json.dumps(OTHER), asked=STRICT), "cost"),
    ("the same, leniently", judging("json_schema", json.dumps({**BOMB, "required": ["z"]}), json.dumps(OTHER)), "any"),
    ("ten thousand levels", judging("json_schema", "[" * 10_000), "deeper than 64"),
    ("levels of Avro", judging("avro", '{"type": "array", "items": ' * 2000 + '"int"' + "}" * 2000), "deeper than 64"),
    ("a million names", judging("json_schema", json.dumps({f"k{n}": 1 for n in range(15_000)})), "10000 keys"),
    ("a circle", judging("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}', "{}"), "any"),
    ("an address", judging("json_schema", '{"$ref": "http://127.0.0.1:9/x"}'), "does not lead"),
    ("a file", judging("json_schema", '{"$ref": "file:///etc/passwd"}'), "does not lead"),
    ("an id elsewhere", judging("json_schema", '{"$id": "http://127.0.0.1:9/", "$ref": "x"}'), "does not lead"),
    ("a draft that is unknown", judging("json_schema", '{"$schema": "http://127.0.0.1:9/draft"}'), "no draft"),
    ("items of nothing", judging("avro", '{"type": "array", "items": "null"}'), "take no byte"),
    ("a wrong default", judging("avro", json.dumps(WRONG)), "efault"),
    ("an import", judging("protobuf", 'syntax = "proto3"; import "../../etc/passwd"; message A {}'), "schema.proto"),
    ("an import of our own", judging("protobuf", 'syntax = "proto3"; import "schema.proto"; message A {}'), "itself"),
    ("a number like 1e400", judging("json_schema", '{"minimum": 1e400}', "{}"), "any"),
]  # fmt: skip


def test_hostile_schemas_are_refused_with_a_reason_and_cost_the_loop_nothing() -> None:
    async def story() -> None:
        parsers, stop = SchemaProcesses(), asyncio.Event()
        watching = asyncio.create_task(longest_step(stop))
        try:
            for name, question, word in HOSTILE:
                try:
                    answer: SchemaAnswer = await parsers.ask(SchemaLane.DEFINITIONS, question)
                except SchemaTooCostly as error:
                    answer = {"invalid": f"cost: {error}"}
                if word != "any":
                    assert word in answer["invalid"], (name, answer)
                good = await parsers.ask(SchemaLane.DEFINITIONS, judging("json_schema", "{}"))
                assert good["fingerprint"], f"after {name} it goes on"
        finally:
            stop.set()
            await parsers.close()
        assert await watching < STEP_SECONDS_MAX

    run(story())


def test_a_process_has_no_environment_no_file_no_socket_and_bounds() -> None:
    async def story() -> None:
        parsers = SchemaProcesses()
        os.environ["A_SECRET"] = "secret"
        try:
            await parsers.ask(SchemaLane.DEFINITIONS, judging("json_schema", "{}"))
            process = parsers._lanes[SchemaLane.DEFINITIONS]._process
            assert process is not None
            here = f"/proc/{process.pid}"
            assert "SECRET" not in text_of(f"{here}/environ")
            lines = text_of(f"{here}/limits").splitlines()
            limits = {line[:25].strip(): line[25:].split() for line in lines}
            descriptors = len(os.listdir(f"{here}/fd"))
            assert int(limits["Max open files"][0]) <= descriptors, "not one can be opened"
            assert int(limits["Max address space"][0]) < 2**30
            assert int(limits["Max cpu time"][0]) < 60
            opened = [os.readlink(f"{here}/fd/{each}") for each in os.listdir(f"{here}/fd")]
            assert not [each for each in opened if each.startswith("socket")], opened
        finally:
            del os.environ["A_SECRET"]
            await parsers.close()

    run(story())


def test_payloads_are_checked_against_the_version_that_is_named_and_row_and_path_are_told() -> None:
    async def story() -> None:
        parsers = SchemaProcesses()
        try:
            ask = parsers.ask
            avro = (
                '{"type": "record", "name": "A", "fields": [{"name": "a", "type": {"type": "array", "items": "int"}}]}'
            )
            for kind, definition, good, bad in (
                ("json_schema", '{"properties": {"a": {"type": "string"}}}', b'{"a": "x"}', b'{"a": 1}'),
                ("avro", avro, b"\x02\x06\x00", b"\x02\x06\x00\x00"),
                ("protobuf", 'syntax = "proto3"; message A { string a = 1; }', b"\n\x01x", b"\n\xff"),
            ):
                key = {"key": kind}
                first = {**checking(kind, None, good), **key}
                assert await ask(SchemaLane.PAYLOADS, first, [good]) == {"unknown": True}
                told = {**checking(kind, definition, good, good, bad), **key}
                row, path, why = (await ask(SchemaLane.PAYLOADS, told, [good, good, bad]))["bad"]
                assert (row, path) == (2, "/a" if kind == "json_schema" else "") and why
                assert await ask(SchemaLane.PAYLOADS, first, [good]) == {"bad": None}
        finally:
            await parsers.close()

    run(story())


def test_a_process_that_is_killed_is_followed_by_another() -> None:
    async def story() -> None:
        parsers = SchemaProcesses()
        try:
            await parsers.ask(SchemaLane.DEFINITIONS, judging("json_schema", "{}"))
            lane = parsers._lanes[SchemaLane.DEFINITIONS]
            assert lane._process is not None
            lane._process.send_signal(signal.SIGBUS)
            with pytest.raises(Unreachable, match="try again"):
                for _ in range(100):  # until the signal has arrived
                    await parsers.ask(SchemaLane.DEFINITIONS, judging("json_schema", "{}"))
            assert "fingerprint" in await parsers.ask(SchemaLane.DEFINITIONS, judging("json_schema", "{}"))
        finally:
            await parsers.close()
        with pytest.raises(Unreachable, match="shutting down"):
            await parsers.ask(SchemaLane.DEFINITIONS, judging("json_schema", "{}"))

    run(story())


def test_a_question_that_is_not_answered_in_time_ends_its_process_and_no_other() -> None:
    async def story() -> None:
        parsers = SchemaProcesses(seconds_max=5.0)
        try:
            await parsers.ask(SchemaLane.PAYLOADS, checking("avro", '"int"'))
            lane = parsers._lanes[SchemaLane.DEFINITIONS]
            await parsers.ask(SchemaLane.DEFINITIONS, judging("json_schema", "{}"))
            assert lane._process is not None
            lane._process.send_signal(signal.SIGSTOP)
            lane._seconds_max = 0.05
            with pytest.raises(SchemaTooCostly, match="within"):
                await parsers.ask(SchemaLane.DEFINITIONS, judging("json_schema", "{}"))
            assert await parsers.ask(SchemaLane.PAYLOADS, checking("avro", None)) == {"bad": None}
        finally:
            await parsers.close()

    run(story())
