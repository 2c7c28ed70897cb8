"""Values through a pipe between two processes: pickled, and what is large behind the pickle, uncopied.

magic ─ count ─ sizes ─ pickle ─ bytes ─ bytes …
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
from array import array
from collections import deque
from collections.abc import Sequence
from io import BytesIO
from itertools import islice
from typing import IO, Any, Final

from pydanube.ports import Buffer

PIPE_BYTES: Final = 1024 * 1024
MAPPED_FROM_BYTES: Final = 256 * 1024
VIEWS_MAX: Final = 1024  # IOV_MAX
_MAGIC: Final = 0x7472617061  # "apart"
_SIZE: Final = "Q"
_SIZE_BYTES: Final = array(_SIZE).itemsize
_SET_PIPE_SIZE: Final = 1031  # F_SETPIPE_SZ of Linux: 64 KiB at a time would be 16 times as many turns


def widen(pipe: int) -> None:
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        fcntl.fcntl(pipe, _SET_PIPE_SIZE, PIPE_BYTES)


class _Pickler(pickle.Pickler):
    """Keeps views of the memory itself. A view of a PickleBuffer, or of a BytesIO, that becomes part of a cycle (an
    error and its frames) kills the interpreter when it is collected, before Python 3.13.
    """

    def __init__(self, file: BytesIO, views: list[memoryview]) -> None:
        super().__init__(file, protocol=5, buffer_callback=lambda _: None)
        self._views = views

    def reducer_override(self, value: object) -> Any:
        if not isinstance(value, memoryview):
            return NotImplemented
        self._views.append(value.cast("B"))
        return memoryview, (pickle.PickleBuffer(value),)


def dumped(value: object) -> list[memoryview]:
    """What is sent: the pickle, and every memoryview that is in the value, which is not copied."""
    pickled, views = BytesIO(), list[memoryview]()
    _Pickler(pickled, views).dump(value)
    return [memoryview(pickled.getvalue()), *views]


def loaded(views: Sequence[Buffer]) -> Any:
    return pickle.loads(views[0], buffers=views[1:])


def send(pipe: int, value: object) -> None:
    left = deque(dumped(value))
    try:
        sizes = array(_SIZE, [_MAGIC, len(left), *(view.nbytes for view in left)])
        left.appendleft(memoryview(sizes).cast("B"))
        while left:
            # The lock is not held while it is written, whatever time that takes.
            written = os.writev(pipe, list(islice(left, VIEWS_MAX)))
            while left and written >= left[0].nbytes:
                written -= left.popleft().nbytes
            if written:
                left[0] = left[0][written:]
    finally:
        left.clear()  # an error may be kept, with this frame


def receive(pipe: IO[bytes]) -> Any:
    magic, count = _read(pipe, 2 * _SIZE_BYTES).cast(_SIZE)
    if magic != _MAGIC:
        raise pickle.UnpicklingError("something else was written into the pipe")
    return loaded([_read(pipe, size) for size in _read(pipe, count * _SIZE_BYTES).cast(_SIZE)])


def _read(pipe: IO[bytes], size: int) -> memoryview:
    """Raises EOFError if it ends before that."""
    left = data = memoryview(bytearray(size) if size < MAPPED_FROM_BYTES else _untouched(size))
    while left.nbytes:
        count = pipe.readinto(left)  # type: ignore[attr-defined]
        if not count:
            raise EOFError("it has ended")
        left = left[count:]
    return data


def _untouched(size: int) -> mmap.mmap:
    """A bytearray is filled with zeros first, with the lock held: 64 MiB of it stop all threads for 20 ms."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)  # unmapping it takes 5 ms without
    return memory
