"""Schemas are parsed where they are asked for, or not at all: for tests, simulations, and brokers without processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydanube.ports import Buffer, SchemaAnswer, SchemaLane


class NoSchemaParsers:
    """Says of every definition that nothing here parses it."""

    async def ask(self, lane: SchemaLane, question: Mapping[str, Any], payloads: Sequence[Buffer] = ()) -> SchemaAnswer:
        return {"missing": question["type"]}

    async def close(self) -> None:
        pass


class MemorySchemaParsers:
    """Answers in this process, without limits: for schemas that the caller trusts. `answer` is that of `Answering`."""

    def __init__(self, answer: Callable[[Mapping[str, Any], bytes], SchemaAnswer]) -> None:
        self._answer = answer
        self.asked: list[Mapping[str, Any]] = []

    async def ask(self, lane: SchemaLane, question: Mapping[str, Any], payloads: Sequence[Buffer] = ()) -> SchemaAnswer:
        self.asked.append(question)
        return self._answer(question, b"".join(payloads))

    async def close(self) -> None:
        pass
