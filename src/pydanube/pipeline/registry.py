"""What declared pipelines may be: the jobs there are, and whether a declaration's settings are ones of its job.

A reference to a file or a variable stands for some text: what it refers to is read when a run starts, on the
supervisor's machine (`resolved`), and is in no declaration, no command line and no log.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from pydanube.core.pipelines.declaration import FOLLOW_SETTING, FROM_FILE, Declaration, reference_of
from pydanube.errors import ConfigError
from pydanube.pipeline.run import JOBS, SparkMissing, check_values

STANDS_FOR_TEXT: Final = "x"
REFERENCE_MAX_BYTES: Final = 64 * 1024


def check(declaration: Declaration) -> None:
    """As the job does before it starts Spark. Raises ConfigError, and SparkMissing where no job can be asked."""
    job = declaration.job
    if job not in JOBS:
        meant = get_close_matches(job, JOBS, 1)
        raise ConfigError("job", job, f"did you mean {meant[0]}?" if meant else f"one of {', '.join(JOBS)}")
    if declaration.follows and not can_follow(job):
        raise ConfigError("follow", declaration.when, f"{job} has an end: say when it is to run, every or cron")
    check_values(job, with_text(declaration.job_settings))


def can_follow(job: str) -> bool:
    """Raises SparkMissing."""
    try:
        return FOLLOW_SETTING in import_module(f"pydanube.pipeline.{job}").KNOWN
    except ImportError:
        raise SparkMissing from None


def with_text(value: Any) -> Any:
    """References replaced by some text, to be checked with."""
    if reference_of(value) is not None:
        return STANDS_FOR_TEXT
    if isinstance(value, Mapping):
        return {name: with_text(each) for name, each in value.items()}
    return [with_text(each) for each in value] if isinstance(value, list) else value


def resolved(value: Any, path: str = "settings") -> Any:
    """With what files and variables say. Raises ConfigError, which names the place and never what is there."""
    reference = reference_of(value)
    if reference is not None:
        how, where = reference
        found = _from_file(path, where) if how == FROM_FILE else os.environ.get(where)
        if not found:
            raise ConfigError(path, dict(value), "set and not empty where the supervisor runs")
        return found
    if isinstance(value, Mapping):
        return {name: resolved(each, f"{path}.{name}" if path != "settings" else name) for name, each in value.items()}
    return [resolved(each, path) for each in value] if isinstance(value, list) else value


def _from_file(path: str, where: str) -> str:
    try:
        with Path(where).open("rb") as file:
            found = file.read(REFERENCE_MAX_BYTES + 1)
        if len(found) > REFERENCE_MAX_BYTES:
            raise ConfigError(path, {FROM_FILE: where}, f"a file of {REFERENCE_MAX_BYTES:,} bytes at most")
        return found.decode().strip()
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ConfigError(path, {FROM_FILE: where}, f"a file that the supervisor can read: {why}") from None
    except UnicodeDecodeError:
        raise ConfigError(path, {FROM_FILE: where}, "a file of text") from None
