"""docs/storage.md says what the code does: its columns are ours, its queries run, its commands exist."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import duckdb
import pyarrow.dataset as ds
import pytest
import typer.main

from pydanube.cli.main import build_app
from pydanube.core.places import Fate
from pydanube.log.batch import Envelope, encode, rows_of, stamp
from pydanube.log.parquet import COLUMNS, encode_object

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "storage.md").read_text()
TOPIC = "/default/orders"


def test_the_columns_are_those_of_an_object() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", PAGE, re.MULTILINE)
    named = [(name, kind) for name, kind in rows if name in COLUMNS.names]
    assert [name for name, _ in named] == COLUMNS.names
    for name, kind in named:
        written = str(COLUMNS.field(name).type).replace(" ('entries')", "")
        assert kind == written, name


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    """Two objects: offsets 0 to 999 and 1000 to 2999."""
    found = []
    for first, count in ((0, 1000), (1000, 2000)):
        messages = [Envelope(b"x" * 10, 1_700_000_000_000_000 + n, "eu" if n % 2 else "us", "p") for n in range(count)]
        batch = stamp(encode(rows_of(messages), topic=TOPIC), base_offset=first, epoch=1, append_time=1)
        path = tmp_path / f"data-{first}.parquet"
        path.write_bytes(encode_object(TOPIC, 1, [batch]).data)
        found.append(str(path))
    return found


def test_the_query_runs_and_means_what_it_says(paths: list[str]) -> None:
    [query] = re.findall(r'duckdb\.sql\("""(.*?)"""', PAGE, re.DOTALL)
    with duckdb.connect() as connection:
        [(_, count, size)] = connection.execute(query, [paths]).fetchall()
    assert (count, size) == (1500, 15_000)


def test_the_dataset_runs_and_means_what_it_says(paths: list[str]) -> None:
    [code] = re.findall(r"```python\nimport pyarrow\.dataset as ds\n\n(.*?)```", PAGE, re.DOTALL)
    names = {"ds": ds, "paths": paths}
    exec(code, names)  # the page's own words
    table = names["table"]
    assert table.num_rows == 1000 and table.column_names == ["offset", "payload"]  # type: ignore[attr-defined]


def test_every_command_on_the_page_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["danube", "log"])
    root = typer.main.get_command(build_app())
    lines = [line.partition("#")[0] for line in PAGE.splitlines() if line.startswith("    danube ")]
    assert len(lines) > 8
    for line in lines:
        command, words = root, shlex.split(line)[1:]
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]  # type: ignore[attr-defined]
        assert not hasattr(command, "commands"), line
        options = {name for parameter in command.params for name in parameter.opts}
        assert {word.strip("[]") for word in words if word.strip("[]").startswith("--")} <= options, line


def test_every_kind_of_problem_is_explained() -> None:
    source = (Path(__file__).resolve().parents[2] / "src/pydanube/log/tier_verify.py").read_text()
    kinds = set(re.findall(r'_problem\(\s*"(\w+)"', source)) | set(
        re.findall(r'_wrong\(described, key, "(\w+)"', source)
    )
    kinds |= {"size", "descriptor", Fate.NEWER.value}
    table = PAGE[PAGE.index("| problem |") :].partition("\n\n")[0]
    assert kinds == set(re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in table.splitlines()[2:])))
