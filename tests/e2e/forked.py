"""The product, in a process that was forked from one that has read its code: it starts in a fifth of the time.

Needs nothing of the tests and of pytest, so that the process has not read them either.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from pydanube.cli.log import writer
from pydanube.cli.main import main


def danube(arguments: Sequence[str], output: Path, environment: Mapping[str, str]) -> None:
    """`python -X faulthandler -m pydanube …`, with what it says at the end of the file."""
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for number in (sys.stdout.fileno(), sys.stderr.fileno()):
        os.dup2(file, number)
    os.close(file)
    faulthandler.enable()
    sys.argv = ["danube", *arguments]
    main()


def log_writer(output: Connection, directory: Path, epoch: int, topics: int) -> None:
    """`danube log writer`, with its lines in `output`."""
    os.dup2(output.fileno(), sys.stdout.fileno())
    output.close()
    writer(directory, epoch, topics)
