"""Schemas are parsed in processes of their own kind: JSON in, JSON out, an empty environment, limits, a deadline.

    broker ── question ──► pydanube.schema.child, one for definitions and one for payloads ── answer ──► broker

Questions of one process are answered in order. One that takes too long, or too much, ends the process; the next one
starts another. Nothing is ever parsed in the broker instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydanube.core.schemas.refusals import SchemaTooCostly
from pydanube.errors import Unreachable
from pydanube.ports import Buffer, SchemaAnswer, SchemaLane

FRAME: Final = struct.Struct("<II")
SECONDS_MAX: Final = 10.0  # of wall time; its CPU time is bounded more tightly, by itself
WAITING_MAX: Final = 1_000  # questions to one process
ANSWER_MAX: Final = 4 * 1024 * 1024
# A limit of its own ends it: CPU time, or memory where a library does not survive that there is none.
COSTLY: Final = frozenset({-signal.SIGXCPU, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGKILL})
STARTED: Final = (
    "import sys; sys.path.insert(0, sys.argv.pop()); "
    "import runpy; runpy.run_module('pydanube.schema.child', run_name='__main__')"
)


class SchemaProcesses:
    """The port `SchemaParsers`, on real processes, which are started when they are first asked."""

    def __init__(self, seconds_max: float = SECONDS_MAX) -> None:
        self._lanes = {lane: _Lane(seconds_max) for lane in SchemaLane}

    async def ask(self, lane: SchemaLane, question: Mapping[str, Any], payloads: Sequence[Buffer] = ()) -> SchemaAnswer:
        return await self._lanes[lane].ask(question, payloads)

    async def close(self) -> None:
        for each in self._lanes.values():
            await each.close()


class _Lane:
    def __init__(self, seconds_max: float) -> None:
        self._seconds_max = seconds_max
        self._process: asyncio.subprocess.Process | None = None
        self._asking = asyncio.Lock()  # fair: answers come in the order of the questions
        self._waiting = 0
        self._is_closed = False

    async def ask(self, question: Mapping[str, Any], payloads: Sequence[Buffer]) -> SchemaAnswer:
        if self._waiting >= WAITING_MAX:
            raise Unreachable("the process for schemas", f"{WAITING_MAX} questions wait for it; try again in a moment")
        self._waiting += 1
        try:
            async with self._asking:
                return await self._ask(question, payloads)
        finally:
            self._waiting -= 1

    async def _ask(self, question: Mapping[str, Any], payloads: Sequence[Buffer]) -> SchemaAnswer:
        if self._is_closed:
            raise Unreachable("the process for schemas", "the broker is shutting down")
        process = await self._started()
        try:
            async with asyncio.timeout(self._seconds_max):
                return await _talk(process, question, payloads)
        except TimeoutError:
            await self._kill()
            raise SchemaTooCostly(f"it was not understood within {self._seconds_max:g} s") from None
        except (OSError, EOFError, ValueError) as error:
            code = await self._code(process)
            if code in COSTLY:
                raise SchemaTooCostly("understanding it takes more CPU time or memory than may be used") from error
            raise Unreachable("the process for schemas", f"it ended (code {code}): try again") from error
        except BaseException:
            await self._kill()  # what is left in the pipes answers no later question
            raise

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        ours = str(Path(__file__).parents[3])  # where the package is
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-B", "-c", STARTED, ours,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
                env={}, cwd=os.sep, limit=ANSWER_MAX,
            )  # fmt: skip
        except OSError as error:
            raise Unreachable("the process for schemas", f"it cannot be started: {error.strerror or error}") from error
        return self._process

    async def _code(self, process: asyncio.subprocess.Process) -> int:
        """How it ended; 0 if it did not, and was ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                return await process.wait()
        await self._kill()
        return 0

    async def close(self) -> None:
        self._is_closed = True
        await self._kill()

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _talk(
    process: asyncio.subprocess.Process, question: Mapping[str, Any], payloads: Sequence[Buffer]
) -> SchemaAnswer:
    assert process.stdin is not None and process.stdout is not None
    text = json.dumps(question).encode()
    size = sum(len(each) for each in payloads)
    process.stdin.writelines([FRAME.pack(len(text), size), text, *payloads])
    await process.stdin.drain()
    length, _ = FRAME.unpack(await process.stdout.readexactly(FRAME.size))
    if length > ANSWER_MAX:
        raise ValueError(f"an answer of {length} bytes")
    found: SchemaAnswer = json.loads(await process.stdout.readexactly(length))
    return found
