"""Paths of the Disk port: relative to its root, with forward slashes, never leaving it."""

from __future__ import annotations

from typing import Final

_NO_NAMES: Final = frozenset(("", ".", ".."))


def assert_inside(path: str) -> str:
    """Returns `path`. One that could leave the root, or that names one file in two ways, is our own bug."""
    parts = path.split("/")
    # "" is the root; everywhere else an empty part is a leading, trailing or doubled slash.
    assert path == "" or _NO_NAMES.isdisjoint(parts), f"not a path of a Disk: {path!r}"
    assert "\0" not in path and "\\" not in path, f"not a path of a Disk: {path!r}"
    return path


def parent(path: str) -> str:
    return path.rpartition("/")[0]
