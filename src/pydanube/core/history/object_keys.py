"""Keys of objects: names that every object store takes as they are.

    default/orders/data-0-4999-3.parquet

S3, GCS, Azure and a directory differ in what they escape, forbid or read as something else. What is allowed here means
the same to all of them, so a key is never translated on its way, and one that could leave a directory does not exist.
Only a directory needs a little help (`path_of`): it cannot hold a file and a directory of one name.
"""

from __future__ import annotations

import re
from typing import Final

from pydanube.errors import InvalidName

PART_BYTES_MAX: Final = 240  # a file name holds 255; an adapter may need some of them
KEY_BYTES_MAX: Final = 800  # S3 takes 1,024, and the prefix of the store's URL is part of them

NO_DOT: Final = ".%"  # behind a file's name that would have no dot

_PART: Final = re.compile(r"[\w.=-]+")
_RULE: Final = (
    "parts of letters, digits, '_', '-', '.' and '=' joined by '/', none of them empty, '.' or '..', "
    f"at most {PART_BYTES_MAX} bytes each and {KEY_BYTES_MAX} together"
)


def check_key(key: str) -> str:
    """Returns `key`, or raises InvalidName."""
    if not is_key(key):
        raise InvalidName("key of an object", key, f"use {_RULE}")
    return key


def is_key(text: str) -> bool:
    return len(text) <= KEY_BYTES_MAX and len(text.encode()) <= KEY_BYTES_MAX and all(map(is_part, text.split("/")))


def is_part(text: str) -> bool:
    return _PART.fullmatch(text) is not None and text not in (".", "..") and len(text.encode()) <= PART_BYTES_MAX


def path_of(key: str) -> str:
    """Where a store in a directory has the object, relative to its root. Raises InvalidName.

    A file's name has a dot, a directory's has none: `a/b` is `a/b.%`, and `v1.2/a.b` is `v1%2/a.b`. No key has a `%`.
    """
    *directories, last = check_key(key).split("/")
    return "/".join([*(part.replace(".", "%") for part in directories), last if "." in last else last + NO_DOT])
