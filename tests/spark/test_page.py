"""docs/spark.md says what the code does: its options and settings are ours, and its snippets run."""

from __future__ import annotations

import re
import shlex
import sys
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from pyspark.sql import DataFrame, SparkSession

from pydanube.cli.main import build_app
from pydanube.pipeline import audit, compact, lake, maintain, replay, stats
from pydanube.pipeline.run import JOBS
from pydanube.pipeline.settings import CONNECTION, TOPICS
from pydanube.spark.options import COLUMNS, EXTRA_COLUMNS, SINK_OPTIONS, SOURCE_OPTIONS
from tests.e2e.processes import danube_here
from tests.pages import DOCS, blocks
from tests.spark.places import Place

PAGE = (DOCS / "spark.md").read_text()
URL, TOPIC = "danube://127.0.0.1:6651", "/default/orders"


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def names_in(table: str) -> set[str]:
    """What is code in the first column."""
    rows = [line.replace("\\|", " ").split("|")[1] for line in table.splitlines() if line.startswith("|")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_every_option_is_on_the_page_and_no_other() -> None:
    assert names_in(section("Reading").partition("| option |")[2]) == set(SOURCE_OPTIONS)
    writing = names_in(section("Writing").partition("| option |")[2])
    assert writing | {"storage.url", "storage.options"} == set(SINK_OPTIONS)


def test_the_columns_are_those_of_the_source() -> None:
    table = section("Reading").partition("| column |")[2].partition("\n\n")[0]
    first = ",".join(line.split("|")[1] for line in table.splitlines()[2:]).replace("with `columns` only:", "")
    assert tuple(name.strip() for name in first.split(",")) == (*COLUMNS, *EXTRA_COLUMNS)


def test_every_setting_of_a_job_is_on_the_page_and_no_other() -> None:
    jobs = section("Jobs")
    common = {*CONNECTION, *TOPICS}
    assert all(f"`{name}`" in jobs for name in common)
    for name, module in {"compact": compact, "audit": audit, "replay": replay, "stats": stats}.items():
        [row] = [line for line in jobs.splitlines() if line.startswith(f"| {name} |")]
        told = re.findall(r"`(\w+)`", row.replace("\\|", " ").split("|")[2])
        assert set(told) == set(module.KNOWN) - common, name
    lake_file, maintain_file = (block.text for block in blocks(PAGE) if block.language == "yaml")
    assert set(maintain.KNOWN) - set(lake.KNOWN) - {"tables"} <= {
        *yaml.safe_load(maintain_file),
        *re.findall(r"\b(\w+_\w+)\b", maintain_file),
    }
    [also] = re.findall(r"Also: (.*?)\n\n", jobs, re.DOTALL)
    file = set(yaml.safe_load(lake_file)) - {"service"}
    told_of_lake: set[str] = file | set(re.findall(r"`(\w+)`", also)) | {"catalog"}
    for table in ("| for the typed table |", "| setting | meaning |"):
        told_of_lake |= names_in(jobs.partition(table)[2].partition("\n\n")[0])
    assert told_of_lake == (set(lake.KNOWN) - common) | {"topic"}


def test_the_commands_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["danube", "pipeline"])
    command: Any = typer.main.get_command(build_app())
    pipeline = command.commands["pipeline"].commands
    lines = [command.split() for block in blocks(PAGE) if block.language == "sh" for command in block.commands]
    assert {words[2] for words in lines if words[0] == "danube"} == {"run", "jobs"} < set(pipeline)  # see pipelines.md
    [synopsis] = re.findall(r"^`danube pipeline run (.*)`$", PAGE, re.MULTILINE)
    told = set(re.findall(r"--\w+", synopsis))
    assert told == {name for each in pipeline["run"].params for name in each.opts if name.startswith("--")}
    assert set(JOBS) == {"lake", *re.findall(r"^\| (compact|audit|erase|maintain|replay|stats) \|", PAGE, re.MULTILINE)}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_snippets_run_one_after_the_other(
    borrowed: SparkSession, place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    topic = place.new_topic("page")
    payloads = [b'{"id": "%d", "amount": %d.5, "at": "2026-11-15T10:00:00Z"}' % (n, n) for n in range(20)]
    place.send(topic, payloads, keys=["a", "b"])
    place.upload(topic)
    totals, copied = place.new_topic("totals"), place.new_topic("copied")

    def here(text: str) -> str:
        text = text.replace(URL, place.url).replace(TOPIC, topic)
        return text.replace("/default/totals", totals).replace("/default/copied", copied)

    tables: list[DataFrame] = []
    names: dict[str, Any] = {"checkpoint": str(tmp_path / "checkpoint")}
    looked_up = [
        block for block in blocks((DOCS / "cli.md").read_text()) if block.heading.startswith("danube pipeline")
    ]
    with chdir(tmp_path):
        for block in (*blocks(PAGE), *looked_up):
            match block.language:
                case "python":
                    exec(here(block.text), names)  # the page's own words
                case "sql":
                    for statement in here(block.text).split(";"):
                        if statement.strip():
                            tables.append(borrowed.sql(statement))
                case "yaml":
                    name = re.findall(r"`(\w+\.yaml)`", block.before)[-1]
                    # Only Iceberg tables are maintained; those of lake.yaml are Parquet.
                    text = block.text.replace("./lake ", "./iceberg ") if name == "maintain.yaml" else block.text
                    Path(name).write_text(here(text))
                case "sh":
                    for command in block.commands:
                        if command.startswith("danube pipeline run maintain "):
                            other = "--set format=iceberg --set target=./iceberg --set follow_seconds=null"
                            done = danube_here(*shlex.split(f"pipeline run lake --conf lake.yaml {other}"))
                            assert done.returncode == 0, f"{done.stdout}{done.stderr}"
                        if command.startswith("danube "):  # tests/docs/test_examples.py says why not others
                            done = danube_here(*shlex.split(here(command))[1:])
                            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    assert looked_up and "audit" in done.stdout
    assert {row["routing_key"]: row["count(1)"] for row in tables[-1].collect()} == {"a": 10, "b": 10}
    borrowed.sql("DROP TABLE orders")
    assert "|          a|   10|" in capsys.readouterr().out
    assert names["history"].count() == 20
    assert sorted(place.payloads(totals)) == [b'{"count":10}', b'{"count":10}']
    assert sorted(place.payloads(copied)) == sorted(payloads)
    assert names["found"] == (20, sum(n + 0.5 for n in range(20)))
