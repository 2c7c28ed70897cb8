"""Sends this package to a cluster, so that its executors need only the packages that it is built on.

A zip of our own sources, as `spark-submit --py-files` would send; on executors it stands before anything installed, so
they run the driver's version. It has no part that is not Python.
"""

from __future__ import annotations

import atexit
import re
import shutil
import tempfile
from functools import cache
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

from pyspark.sql import SparkSession

import pydanube

PACKAGES = ("pydanube", "pyspark_danube")


def is_here(place: str) -> bool:
    """Whether a master, or a remote, is this machine with this Python: `local` and `local[4]`, but no local-cluster."""
    return re.fullmatch(r"local(\[.*\])?", place) is not None


def packed(directory: Path) -> Path | None:
    """The zip, made in `directory`; None where we are imported from one, which the driver sends to all."""
    root = Path(pydanube.__file__).parent.parent
    if not root.is_dir():
        return None
    made = directory / f"pydanube-{pydanube.__version__}.zip"
    with ZipFile(made, "w", ZIP_DEFLATED) as zipped:
        for package in PACKAGES:
            for file in sorted((root / package).rglob("*.py")):
                zipped.write(file, file.relative_to(root))
    return made


@cache
def _packed_once() -> Path | None:
    """One for all sessions of this process, and as long as it lives: executors that start late ask for it too."""
    directory = Path(tempfile.mkdtemp(prefix="danube-spark-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return packed(directory)


def ship(spark: SparkSession, *, is_remote: bool) -> None:
    """Before the source is registered: Spark notes then what its workers need."""
    made = _packed_once()
    if made is None:
        return
    if is_remote:
        spark.addArtifacts(str(made), pyfile=True)
    else:
        spark.sparkContext.addPyFile(str(made))
