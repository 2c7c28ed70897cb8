"""The process that test_kill_writer kills. It needs nothing of the test and of pytest, so it starts at once."""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from pydanube.cli.log import writer


def write(output: Connection, directory: Path, epoch: int, topics: int) -> None:
    """`danube log writer`, with its lines in `output`."""
    os.dup2(output.fileno(), sys.stdout.fileno())
    output.close()
    writer(directory, epoch, topics)
