"""Standard output and standard error of a command whose reader may leave early, as `head` does.

    with guarded():         a write that meets a closed pipe is dropped, and so is everything after it
        ends_with_reader()  said by a command that prints without end or very much: it ends there instead (`ReaderLeft`)

A command that orders something carries it out, and its exit code is what it would be with a reader.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, cast


class ReaderLeft(Exception):
    """Standard output has no reader any more. No OSError: libraries on the way have their own answer to those."""


class Guarded:
    """A text stream that survives its reader. Everything but writing is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_left = False
        self.ends = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if not self._is_left:
            try:
                return self._stream.write(text)
            except BrokenPipeError:
                self._leave()
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        if not self._is_left:
            try:
                self._stream.flush()
            except BrokenPipeError:
                self._leave()

    def _leave(self) -> None:
        """Discards what is still in buffers, or the interpreter's last flush would fail."""
        self._is_left = True
        with contextlib.suppress(OSError, ValueError):  # one in memory has no descriptor
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        if self.ends:
            raise ReaderLeft()


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    output, errors = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = cast(TextIO, Guarded(output)), cast(TextIO, Guarded(errors))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = output, errors


def ends_with_reader() -> None:
    if isinstance(stream := cast(object, sys.stdout), Guarded):
        stream.ends = True
