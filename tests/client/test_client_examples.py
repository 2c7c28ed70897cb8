"""The examples in the client's docstrings run, and print what they say they print.

They are doctests whose lines may `await`. Each docstring gets a fresh broker, `url`, an open `client`, and two topics:
/default/greetings (hello, goodbye) and /default/numbers (1, 2, 3 in one batch).
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import doctest
import importlib
import inspect
import io
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest

import pydanube
import pydanube.client
import pydanube.testing
from pydanube.testing import brokers

pytestmark = [pytest.mark.timeout(60), pytest.mark.slow]

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def modules() -> Iterator[Any]:
    for found in pkgutil.iter_modules(pydanube.client.__path__, "pydanube.client."):
        yield importlib.import_module(found.name)
    yield brokers


def examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    tests = [test for module in modules() for test in finder.find(module, module.__name__) if test.examples]
    return [test for test in tests if not inspect.ismodule(test.globs.get(test.name))]


async def prepare(client: pydanube.Client) -> None:
    async with client.producer("/default/greetings") as greetings:
        await greetings.send(b"hello", key="me", attributes={"lang": "en"})
        await greetings.send(b"goodbye")
    async with client.producer("/default/numbers") as numbers:
        await asyncio.gather(*(numbers.send(b"%d" % number) for number in (1, 2, 3)))


async def execute(test: doctest.DocTest, url: str) -> list[str]:
    """What differs from what the docstring says."""
    wrong = []
    checker = doctest.OutputChecker()
    async with pydanube.connect(url) as client:
        await prepare(client)
        names: dict[str, Any] = {"pydanube": pydanube, "asyncio": asyncio, "client": client, "url": url}
        for example in test.examples:
            said = io.StringIO()
            code = compile(example.source, test.name, "single", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            with contextlib.redirect_stdout(said):
                result = eval(code, names)
                if inspect.iscoroutine(result):
                    await result
            if not checker.check_output(example.want, said.getvalue(), FLAGS):
                wrong.append(f"{example.source}said {said.getvalue()!r}, not {example.want!r}")
    return wrong


@pytest.mark.parametrize("test", examples(), ids=lambda test: test.name)
def test_the_example_runs_as_it_says(test: doctest.DocTest) -> None:
    with pydanube.testing.broker() as broker:
        assert asyncio.run(execute(test, broker.url)) == []


def test_what_applications_use_first_has_an_example() -> None:
    names = {test.name.removeprefix("pydanube.client.") for test in examples()}
    assert {"client.connect", "producer.Producer", "consumer.Consumer", "blocking.connect"} <= names
    assert {"consumer.Consumer.batches", "client.Client.fetch", "producer.Producer.send_nowait"} <= names
