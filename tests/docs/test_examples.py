"""Every command and every snippet of README.md and docs/ is run by a test, or there is a reason why not.

Here is which test runs what; the tests themselves fail if there is more on their page than they know.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.pages import DOCS, REPOSITORY, blocks

PAGES = {str(page.relative_to(REPOSITORY)): page for page in (REPOSITORY / "README.md", *DOCS.rglob("*.md"))}
A_COMMAND = re.compile(r" {4,}\$? ?(danube|make|curl|pip|python3?|seq|docker|etcdctl|\.venv/\S+) ")

FOLLOWED_BY_ONE = "tests/e2e/test_pages.py::test_a_broker_runs_the_first_message_arrives_and_a_backup_is_whole"
FOLLOWED_BY_THREE = "tests/e2e/test_pages.py::test_a_cluster_runs_a_topic_moves_an_operator_works_and_nothing_stays"
AS_GETTING_STARTED = "tests/e2e/test_pages.py::test_the_first_commands_of_the_readme_are_those_of_getting_started"
LOOKED_UP = "tests/e2e/test_pages.py::test_the_examples_of_the_commands_run"
THREE_MACHINES = "tests/e2e/test_pages.py::test_the_example_of_a_cluster_is_a_cluster"
CLIENT = "tests/client/test_client_page.py::test_every_snippet_runs_and_prints_what_the_page_says"
STORAGE = "tests/docs/test_storage_page.py::test_the_commands_and_queries_run_one_after_the_other"
SPARK = "tests/spark/test_page.py::test_the_snippets_run_one_after_the_other"
PIPELINES = "tests/pipeline/test_page.py::test_the_commands_of_the_page_and_of_the_runbooks_run"
PROTOCOL = "tests/api/test_protocol_page.py"
RUNBOOKS = "tests/e2e/test_observed.py::test_every_command_in_the_runbooks_can_be_given"
CHAOS = "python -m tools.chaos"
HOURS = "it takes hours: its words are understood in tests/e2e/test_chaos.py, where a small round is run"

# How a command begins, or the language of a block that is none: the test that runs it. The longest beginning counts.
RUN_BY = {
    "README.md": {
        "make": AS_GETTING_STARTED,
        ".venv/bin/danube": AS_GETTING_STARTED,
        "```python": "tests/client/test_client_page.py::test_the_first_code_of_the_readme_runs",
    },
    "docs/chaos.md": {
        f".venv/bin/{CHAOS} --rounds 1 --only broker_kill --small": "tests/e2e/test_chaos.py::finished",
        "```python": "tests/e2e/test_chaos.py::test_the_page_judges_a_history",
    },
    "docs/cli.md": {
        "danube": LOOKED_UP,
        "seq": LOOKED_UP,
        "danube broker --mode cluster": THREE_MACHINES,
        "danube pipeline": SPARK,
    },
    "docs/client.md": {"```python": CLIENT, "```text": CLIENT},
    "docs/concepts.md": {"danube admin": LOOKED_UP},
    "docs/configuration.md": {"```yaml": "tests/docs/test_pages.py::test_the_example_file_on_the_page_is_accepted"},
    "docs/grpc.md": {
        "```yaml": "tests/docs/test_pages.py::test_the_files_on_the_page_of_the_grpc_port_are_accepted",
    },
    "docs/getting-started.md": {
        "make run": FOLLOWED_BY_ONE,
        "make": FOLLOWED_BY_THREE,
        "rm": FOLLOWED_BY_THREE,
        "seq": FOLLOWED_BY_ONE,
        ".venv/bin/danube": FOLLOWED_BY_ONE,
        ".venv/bin/danube admin": FOLLOWED_BY_THREE,
        ".venv/bin/python": FOLLOWED_BY_ONE,
        ".venv/bin/python moving.py": FOLLOWED_BY_THREE,
        ".venv/bin/python spark_read.py": "tests/spark/test_getting_started.py::test_the_moved_topic_is_a_table",
        "```python": FOLLOWED_BY_THREE,
        "```text": FOLLOWED_BY_THREE,
    },
    "docs/operations.md": {
        "danube admin": FOLLOWED_BY_THREE,
        "danube broker": FOLLOWED_BY_THREE,
        "danube log verify danube-backup": FOLLOWED_BY_ONE,
    },
    "docs/pipelines.md": {"danube pipeline": PIPELINES, "```yaml": PIPELINES},
    "docs/protocol.md": {
        "```hex hello": f"{PROTOCOL}::test_the_hello_is_what_a_client_sends",
        "```hex welcome": f"{PROTOCOL}::test_the_welcome_is_what_a_broker_answers",
        "```hex batch-header": f"{PROTOCOL}::test_the_batch_is_one_that_a_broker_stores",
        "```hex batch-body": f"{PROTOCOL}::test_the_batch_is_one_that_a_broker_stores",
        "```hex produce": f"{PROTOCOL}::test_the_produce_frame_is_the_prefix_and_the_batch",
    },
    "docs/schemas.md": {"danube admin": "tests/e2e/test_schemas.py::test_the_commands_of_the_page_run"},
    "docs/spark.md": {"danube pipeline": SPARK, "```python": SPARK, "```sql": SPARK, "```yaml": SPARK},
    "docs/storage.md": {
        "danube admin": STORAGE,
        "```python": STORAGE,
        "```sql": STORAGE,
        "```yaml": "tests/docs/test_storage_page.py::test_the_file_on_the_page_is_accepted",
    },
    "docs/web-admin.md": {
        "danube broker --mode standalone --data-dir ./danube-data": LOOKED_UP,
        "danube admin serve": "tests/e2e/test_web_admin.py::serve_as_the_page_says",
        "curl": "tests/web/test_page.py::test_the_requests_for_tools_are_answered",
    },
    "docs/runbooks": {
        "danube pipeline": PIPELINES,
        "danube admin": RUNBOOKS,
        "curl": RUNBOOKS,
        "promtool": RUNBOOKS,
        "df": RUNBOOKS,
        "danube log verify ./danube-data": FOLLOWED_BY_ONE,
    },
}

ARCHIVE = "the page says that it was not run: venv-pack is no package of ours"
ARCHIVED = (
    "python -m venv environment && environment/bin/pip install pydanube venv-pack",
    "environment/bin/venv-pack -p environment -o environment.tar.gz",
    "spark-submit --archives environment.tar.gz#environment "
    "--conf spark.pyspark.python=./environment/bin/python job.py",
)
NOT_RUN = {
    ("README.md", "make test"): "it is what runs this",
    ("README.md", "make demo"): "three minutes: tests/e2e/test_demo.py runs its program with less of everything",
    ("docs/chaos.md", "make chaos ROUNDS=20"): HOURS,
    ("docs/chaos.md", "make soak MINUTES=60"): HOURS,
    ("docs/chaos.md", f".venv/bin/{CHAOS} --rounds 1"): HOURS,
    ("docs/chaos.md", f".venv/bin/{CHAOS} --rounds 3 --only rolling_reboot --rejoin active"): HOURS,
    ("docs/chaos.md", f".venv/bin/{CHAOS} --rounds 5 --only disk_full --only cut_stores"): HOURS,
    ("docs/chaos.md", f".venv/bin/{CHAOS} --minutes 60 --seed 7"): HOURS,
    ("docs/spark.md", "make setup-spark"): "it is what these tests were set up with",
    **{("docs/spark.md", command): ARCHIVE for command in ARCHIVED},
    ("docs/web-admin.md", "```nginx"): "there is no nginx here: tests/e2e/test_web_admin.py sends what it would send",
}


def examples() -> Iterator[tuple[str, str]]:
    """Every command, and the first line of every other block, each with its page."""
    for name, page in PAGES.items():
        for block in blocks(page.read_text()):
            for each in block.commands if block.language == "sh" else [f"```{block.language} {block.name}".strip()]:
                yield name, each


def entry(name: str, example: str) -> tuple[str, str] | None:
    """Which line of RUN_BY speaks of it."""
    name = "docs/runbooks" if name.startswith("docs/runbooks/") else name
    fitting = [each for each in RUN_BY.get(name, ()) if example == each or example.startswith(f"{each} ")]
    return (name, max(fitting, key=len)) if fitting else None


def test_every_command_and_snippet_is_run_or_there_is_a_reason_why_not() -> None:
    assert [each for each in examples() if each not in NOT_RUN and entry(*each) is None] == []


def test_nothing_is_listed_that_is_on_no_page_any_more() -> None:
    found = set(examples())
    assert set(NOT_RUN) - found == set()
    listed = {(name, begins) for name, ways in RUN_BY.items() for begins in ways}
    assert listed - {entry(*each) for each in found - set(NOT_RUN)} == set()


@cache
def functions(file: Path) -> set[str]:
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("test", sorted({test for ways in RUN_BY.values() for test in ways.values()}))
def test_who_is_said_to_run_it_exists(test: str) -> None:
    file, _, name = test.partition("::")
    assert name in functions(REPOSITORY / file)


@pytest.mark.parametrize("name", PAGES)
def test_a_command_stands_in_a_block_that_says_what_it_is(name: str) -> None:
    text = PAGES[name].read_text()
    fences = re.findall(r"^ *```(.*)$", text, re.MULTILINE)
    assert len(fences) == 2 * len(blocks(text)), "every block has a language"
    outside = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert [line for line in outside.splitlines() if A_COMMAND.match(line)] == []
