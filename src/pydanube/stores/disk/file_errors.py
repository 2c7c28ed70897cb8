"""What the kernel refuses, in our words."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from pydanube.errors import DiskFailed, DiskFull, ResourcesShort
from pydanube.stores.disk.descriptors import SHORT


def not_opened(error: OSError, path: str, operation: str) -> DiskFull | DiskFailed:
    """What kept `operation` from being begun; a sync that was not begun has lost nothing."""
    return failure_of(error, path, "open" if error.errno in SHORT else operation)


def failure_of(error: OSError, path: str, operation: str) -> DiskFull | DiskFailed:
    # A sync that finds the disk full has lost bytes that were accepted before: that is not "try again later".
    if error.errno in (errno.ENOSPC, errno.EDQUOT) and operation != "sync":
        return DiskFull(path)
    if error.errno in SHORT and operation != "sync":
        return ResourcesShort(path, error.strerror or str(error))
    return DiskFailed(path, operation, error.strerror or str(error))


@contextmanager
def our_errors(path: str, operation: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, FileExistsError) as error:
        raise type(error)(error.errno, error.strerror, path) from None
    except OSError as error:
        raise failure_of(error, path, operation) from error
