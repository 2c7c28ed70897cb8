"""What a cluster is sent: our package and nothing else, in a file that Python can import from."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from zipfile import ZipFile

import pytest

from pydanube.spark.ship import is_here, packed
from tests.spark.places import without_us


def test_a_worker_without_our_package_reads_and_writes_with_what_it_was_sent(tmp_path: Path) -> None:
    made = packed(tmp_path)
    assert made is not None
    ask = "import pyspark_danube, pydanube.spark.sink, pydanube.pipeline.lake; print(pydanube.__file__)"
    done = subprocess.run(
        [without_us(tmp_path), "-c", ask], env={**os.environ, "PYTHONPATH": str(made)}, capture_output=True, text=True
    )
    assert done.stdout.startswith(str(made)), done.stderr


def test_nothing_but_our_sources_is_sent(tmp_path: Path) -> None:
    made = packed(tmp_path)
    assert made is not None
    with ZipFile(made) as zipped:
        names = zipped.namelist()
    assert {name.partition("/")[0] for name in names} == {"pydanube", "pyspark_danube"}
    assert all(name.endswith(".py") for name in names)


@pytest.mark.parametrize(
    ("place", "answer"),
    [
        *[(place, True) for place in ("local", "local[*]", "local[2,4]")],
        *[(place, False) for place in ("local-cluster[2,1,1024]", "spark://host:7077", "yarn", "sc://host:15002")],
    ],
)
def test_only_this_machine_with_this_python_needs_nothing(place: str, answer: bool) -> None:
    assert is_here(place) is answer
