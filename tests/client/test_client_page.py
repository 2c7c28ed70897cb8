"""docs/client.md says what the client does: its snippets run, in order, on one broker, and print what it says."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import re
from typing import Any

import pytest

import pydanube
import pydanube.testing
from pydanube.client.client import Client, connect
from tests.pages import DOCS, REPOSITORY, Block, blocks

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

PAGE = (DOCS / "client.md").read_text()
URL = "danube://127.0.0.1:6651"


async def run(block: Block, url: str, names: dict[str, Any]) -> str:
    """What a snippet prints."""
    said = io.StringIO()
    code = compile(block.text.replace(URL, url), f"client.md, {block.heading}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    with contextlib.redirect_stdout(said):
        result = eval(code, names)
        if inspect.iscoroutine(result):
            await result
    return said.getvalue()


async def run_all(found: list[Block], url: str) -> list[str]:
    """What is not as the page says."""
    wrong = []
    async with pydanube.connect(url) as client:
        for block, following in zip(found, [*found[1:], None], strict=True):
            if block.language != "python":
                continue
            said = await run(block, url, {"pydanube": pydanube, "asyncio": asyncio, "client": client})
            if following is not None and following.language == "text" and said != following.text:
                wrong.append(f"{block.heading}: said {said!r}, not {following.text!r}")
    return wrong


def test_every_snippet_runs_and_prints_what_the_page_says() -> None:
    with pydanube.testing.broker() as broker:
        assert asyncio.run(run_all(blocks(PAGE), broker.url)) == []


def test_the_first_code_of_the_readme_runs() -> None:
    [first] = [block for block in blocks((REPOSITORY / "README.md").read_text()) if block.language == "python"]
    program = first.text.replace("asyncio.run(main())", "await main()")
    with pydanube.testing.broker(memory=True) as broker:
        said = asyncio.run(run(first._replace(text=program), broker.url, {}))
    assert said == "on disk at offset 0\n0 user-7 b'two of them'\n"


@pytest.mark.parametrize(
    ("made_by", "heading"),
    [(connect, "argument"), (Client.producer, "argument of `producer`"), (Client.consumer, "argument of `consumer`")],
    ids=["connect", "producer", "consumer"],
)
def test_every_argument_is_in_the_table_with_its_default(made_by: Any, heading: str) -> None:
    table = PAGE.partition(f"| {heading} | default |")[2].partition("\n\n")[0].splitlines()[2:]
    rows: dict[str, str] = {}
    for row in table:
        named, values, *_ = (cell.strip().replace("`", "") for cell in row.strip("|").split("|"))
        rows |= dict(zip(named.split(", "), values.split(", "), strict=True))
    parameters = {
        name: parameter.default
        for name, parameter in inspect.signature(made_by).parameters.items()
        if name not in ("self", "topic")
    }
    assert set(rows) == set(parameters)
    for name, value in parameters.items():
        if value not in (None, (), "", inspect.Parameter.empty):
            assert rows[name] == str(value), name


def test_every_family_of_errors_is_as_the_table_says() -> None:
    for family, retryable, examples in re.findall(
        r"^\| `(\w+)` \| [^|]* \| (True|False) \| (.*) \|$", PAGE, re.MULTILINE
    ):
        kind = getattr(pydanube.errors, family)
        assert str(kind.retryable) == retryable
        for name in re.findall(r"`(\w+)`", examples):
            assert issubclass(getattr(pydanube.errors, name), kind)


def test_what_the_blocking_client_lacks_is_said() -> None:
    from pydanube import blocking

    public = {name for name in vars(Client) if not name.startswith("_")}
    lacking = public - {name for name in vars(blocking.Client) if not name.startswith("_")}
    assert lacking == {
        "describe_storage",
        "describe_storages",
        "flush_log",
        "note_order",
        "publisher",
        "requests",
        "swap_objects",
    }  # requests are for programs with async; all others but the first two are our own tools'
    assert "Not there: `requests`" in PAGE
