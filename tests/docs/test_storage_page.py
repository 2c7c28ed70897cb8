"""docs/storage.md says what the code does: its columns are ours, its file is accepted, its commands and queries run."""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pydanube
from pydanube.broker.stores import readers_keys
from pydanube.config import Flags, StorageConfig, load
from pydanube.core.history.coverage import Fate
from pydanube.core.history.tiers import TierConfig
from pydanube.formats.parquet import COLUMNS
from pydanube.testing.brokers import TestBroker
from tests.e2e.processes import danube_here
from tests.harness.engines import duckdb_alone
from tests.pages import DOCS, blocks

PAGE = (DOCS / "storage.md").read_text()
TOPIC = "/default/orders"


def test_the_columns_are_those_of_an_object() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", PAGE, re.MULTILINE)
    named = [(name, kind) for name, kind in rows if name in COLUMNS.names]
    assert [name for name, _ in named] == COLUMNS.names
    for name, kind in named:
        written = str(COLUMNS.field(name).type).replace(" ('entries')", "")
        assert kind == written, name


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[TestBroker]:
    """Offsets 0 to 2999 are in objects; every second message is European."""
    storage = StorageConfig(tier=TierConfig(upload_seconds=0.05))
    with TestBroker(tmp_path, storage=storage) as running:
        asyncio.run(fill(running.url))
        yield running


async def fill(url: str) -> None:
    async with pydanube.connect(url) as client, asyncio.timeout(30):
        for numbers in (range(1000), range(1000, 3000)):
            async with client.producer(TOPIC) as orders:
                for number in numbers:
                    orders.send_nowait(b"x" * 10, key="eu" if number % 2 else "us")
            while not await is_uploaded(client, numbers.stop):  # noqa: ASYNC110  # brokers tell nobody
                await asyncio.sleep(0.01)


async def is_uploaded(client: pydanube.Client, end: int) -> bool:
    return any(each.end == end for each in (await client.describe_storage(TOPIC)).objects)


@pytest.mark.slow
def test_the_commands_and_queries_run_one_after_the_other(
    broker: TestBroker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DANUBE_ADMIN_ENDPOINT", broker.admin_url)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    assert broker._servers is not None
    metrics_addr = broker._servers.metrics_addr
    names: dict[str, Any] = {}
    said = ""
    for block in blocks(PAGE):
        match block.language:
            case "sh":
                for command in block.commands:
                    done = danube_here(*shlex.split(command)[1:])
                    assert done.returncode == 0, f"{command}\n{done.stderr}"
                    said += done.stdout
            case "python":
                exec(block.text.replace("127.0.0.1:9040", metrics_addr), names)  # the page's own words
            case "sql":
                rows = duckdb_alone().execute(block.text.replace("127.0.0.1:9040", metrics_addr)).fetchall()
                assert sorted(row[:2] for row in rows) == [("eu", 1000), ("us", 1000)]
    assert "10080" in said and "everything verifies" in said
    assert {"1500", "15000"} <= set(re.findall(r"\d+", capsys.readouterr().out))
    assert names["rows"].num_rows == 2000
    assert names["table"].num_rows == 1000 and names["table"].column_names == ["offset", "payload"]


def test_the_file_on_the_page_is_accepted(tmp_path: Path) -> None:
    [example, readers] = [block for block in blocks(PAGE) if block.language == "yaml"]
    (tmp_path / "danube.yml").write_text(example.text)
    loaded = load(Flags(mode="standalone", config_file=tmp_path / "danube.yml"))
    assert loaded.storage.url == "s3://events/danube" and loaded.warnings == ()
    (tmp_path / "danube.yml").write_text(readers.text)
    loaded = load(Flags(mode="standalone", config_file=tmp_path / "danube.yml"))
    assert readers_keys(loaded)["s3.access-key-id"] == "READER" and loaded.warnings == ()


def test_every_kind_of_problem_is_explained() -> None:
    source = (Path(__file__).resolve().parents[2] / "src/pydanube/history/verify.py").read_text()
    kinds = set(re.findall(r'_problem\(\s*"(\w+)"', source)) | set(
        re.findall(r'_wrong\(described, key, "(\w+)"', source)
    )
    kinds |= {"size", "descriptor", Fate.NEWER.value}
    table = PAGE[PAGE.index("| problem |") :].partition("\n\n")[0]
    assert kinds == set(re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in table.splitlines()[2:])))
