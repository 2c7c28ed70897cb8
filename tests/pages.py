"""Pages of docs/ as tests read them: blocks of commands, programs and what they print.

```sh               commands, one a line
```python first.py  a program that the page tells to save under this name
```python           a snippet
```text             what was printed; … stands for anything, lines that are left out too

tests/docs/test_examples.py knows for every kind of block on every page the test that runs it.
"""

from __future__ import annotations

import re
import textwrap
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main

from pydanube.cli.main import build_app

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = REPOSITORY / "docs"

_FENCE = re.compile(r"^( *)```(\w+)(?: (\S+))?\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)  # in lists they are indented


class Block(NamedTuple):
    """`before` is the prose in front of it, `heading` the nearest heading above."""

    language: str
    name: str
    text: str
    before: str
    heading: str

    @property
    def commands(self) -> list[str]:
        """Lines of a shell block, without comments; one that ends in a backslash goes on in the next."""
        joined = self.text.replace("\\\n", " ")
        lines = (each.partition("  #")[0].strip() for each in joined.splitlines())
        return [" ".join(line.split()) for line in lines if line and not line.startswith("#")]


def blocks(page: str) -> list[Block]:
    found, end, heading = [], 0, ""
    for match in _FENCE.finditer(page):
        before = page[end : match.start()]
        heading = ([heading, *re.findall(r"^#+ (.*)$", before, re.MULTILINE)])[-1]
        found.append(Block(match[2], match[3] or "", textwrap.dedent(match[4]), before, heading))
        end = match.end()
    return found


def missing(expected: str, said: str) -> str | None:
    """The first line of `expected` that `said` does not have behind the ones before; None if it has all."""
    lines = [" ".join(line.split()) for line in said.splitlines()]
    at = 0
    for line in filter(None, (" ".join(each.split()) for each in expected.splitlines())):
        pattern = re.compile(".*".join(re.escape(part.strip()) for part in line.split("…")))
        while at < len(lines) and not pattern.fullmatch(lines[at]):
            at += 1
        if at == len(lines):
            return line
        at += 1
    return None


@cache
def _danube() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["danube", "log"])  # which is left out otherwise
        return typer.main.get_command(build_app())


def command_named(words: list[str]) -> tuple[Any, list[str]]:
    """The danube command that these words (without `danube`) name, and the words that are left for it."""
    command = _danube()
    words = list(words)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
        if getattr(command, "commands", None):
            while words and words[0].startswith("--") and len(words) > 1:
                words = words[2:]  # options of a group, as `admin --endpoint URL`
    return command, words
