"""A real directory whose every write, sync and name is written down, and what power cuts might have left of it.

`Recorder` stands for `os` in the modules that touch files. It does what they ask for, except that it saves the time of
real syncs, and keeps a list of steps. `Replay` puts steps into a FaultyDisk, whose power cut chooses among everything
that a disk may do with what was not synced, and writes the result to a fresh directory. So the adapter is judged by
what it asked of the operating system, not by what it says that it did.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pydanube.stores.disk import descriptors, file_names, file_writer, files
from pydanube.stores.disk.paths import parent
from pydanube.testing.disk_image import DiskFile, NameChange, WriteChange, last_part
from pydanube.testing.faulty_disk import FaultyDisk

Step = tuple[Any, ...]
LOCK = "LOCK"  # belongs to the process, not to what is kept


class Recorder:
    """Writes steps down. `say` adds what the program was told or promised, in between."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._lock = threading.RLock()
        self._paths: dict[str, int] = {}  # path -> number of its file
        self._open: dict[int, int | str] = {}  # descriptor -> number of its file, or path of a directory
        self._numbers = 0
        self._syncs = 0
        self.fail_sync = 0  # the so-manieth sync of a file from now on fails
        self.failed_syncs = 0
        self.steps: list[Step] = []

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for module in (files, file_names, file_writer, descriptors):
            patch.setattr(module, "os", self)
        try:
            from pydanube.stores.disk import directories
        except ImportError:
            return
        patch.setattr(directories, "os", self)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def say(self, *step: Any) -> None:
        with self._lock:
            self.steps.append(step)

    def _inside(self, full: str) -> str | None:
        if full == self._root:
            return ""
        return full[len(self._root) + 1 :] if full.startswith(self._root + "/") else None

    # --- what the adapters call ---

    def open(self, full: str, flags: int, mode: int = 0o777) -> int:
        with self._lock:
            path = self._inside(full)
            existed = os.path.lexists(full)
            fd = os.open(full, flags, mode)
            if path is None or path == LOCK:
                return fd
            if os.path.isdir(full):
                self._open[fd] = path
                return fd
            if not existed:
                self._numbers += 1
                self._paths[path] = self._numbers
                self.steps.append(("create", path, self._numbers))
            elif path not in self._paths:
                self._numbers += 1
                self._paths[path] = self._numbers
                self.steps.append(("known", path, self._numbers))
            self._open[fd] = self._paths[path]
            return fd

    def close(self, fd: int) -> None:
        with self._lock:
            self._open.pop(fd, None)
            os.close(fd)

    def pwritev(self, fd: int, buffers: Sequence[Any], position: int) -> int:
        with self._lock:
            written = os.pwritev(fd, buffers, position)
            if fd in self._open:
                data = b"".join(bytes(buffer) for buffer in buffers)[:written]
                self.steps.append(("write", self._open[fd], position, data))
            return written

    def ftruncate(self, fd: int, length: int) -> None:
        with self._lock:
            os.ftruncate(fd, length)
            if fd in self._open:
                self.steps.append(("truncate", self._open[fd], length))

    def fdatasync(self, fd: int) -> None:
        with self._lock:
            self._syncs += 1
            token, file = self._syncs, self._open.get(fd)
            self.steps.append(("sync begins", token))
            self.fail_sync -= 1
            if self.fail_sync == 0:
                self.failed_syncs += 1
                self.steps.append(("sync fails", token, file))
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            self.steps.append(("synced", token, file))

    def fsync(self, fd: int) -> None:
        with self._lock:
            self._syncs += 1
            self.steps += [("sync begins", self._syncs), ("names synced", self._syncs, self._open.get(fd))]

    def mkdir(self, full: str, mode: int = 0o777) -> None:
        with self._lock:
            os.mkdir(full, mode)
            self.steps.append(("mkdir", self._inside(full)))

    def replace(self, source: str, target: str) -> None:
        with self._lock:
            os.replace(source, target)
            old, new = self._inside(source), self._inside(target)
            assert old is not None and new is not None
            if old in self._paths:
                self._paths[new] = self._paths.pop(old)
            else:
                self._paths.pop(new, None)
            self.steps.append(("rename", old, new))

    def unlink(self, full: str) -> None:
        with self._lock:
            os.unlink(full)
            path = self._inside(full)
            assert path is not None
            self._paths.pop(path, None)
            self.steps.append(("remove", path))

    def rmdir(self, full: str) -> None:
        with self._lock:
            os.rmdir(full)
            self.steps.append(("remove", self._inside(full)))


class Replay:
    """Steps, in a FaultyDisk."""

    def __init__(self, rng: Random) -> None:
        self.disk = FaultyDisk(rng)
        self._rng = rng
        self._process = self.disk.process()
        self._files: dict[int, DiskFile] = {}
        self._begun: dict[int, int] = {}

    def take(self, steps: Sequence[Step]) -> None:
        disk = self.disk
        for kind, *rest in steps:
            if kind == "create":
                path, number = rest
                self._files[number] = file = DiskFile()
                self._name(path, file=file)
            elif kind == "known":
                path, number = rest
                self._files[number] = disk._find(path)
            elif kind == "mkdir":
                self._name(rest[0])
            elif kind == "write":
                number, position, data = rest
                file = self._files[number]
                file.content.extend(bytes(max(0, position + len(data) - len(file.content))))
                file.content[position : position + len(data)] = data
                disk._number += 1
                file.unsynced.append(WriteChange(disk._number, position, data, len(file.content)))
            elif kind == "truncate":
                disk._truncate(self._files[rest[0]], rest[1])
            elif kind == "sync begins":
                self._begun[rest[0]] = disk._number
            elif kind == "synced":
                disk._sync(self._files[rest[1]], self._begun[rest[0]])
            elif kind == "sync fails":
                disk._fail_sync(self._files[rest[1]], self._begun[rest[0]])
            elif kind == "names synced":
                disk._sync_directory(rest[1], self._begun[rest[0]])
            elif kind == "rename":
                self._process._rename(rest[0], rest[1])
            elif kind == "remove":
                self._name(rest[0], gone=True)

    def _name(self, path: str, *, file: DiskFile | None = None, gone: bool = False) -> None:
        self.disk._number += 1
        change = NameChange(self.disk._number, parent(path), last_part(path), file, gone)
        self.disk._change_name(change)

    def cut(self) -> None:
        """The power goes."""
        self.disk.crash(self._rng)
        self.kill()

    def kill(self) -> None:
        """The process goes. What it wrote is still there."""
        self._process = self.disk.process()
        self._files.clear()
        self._begun.clear()

    def write_to(self, root: Path) -> None:
        """What is left, as a directory."""
        for directory in sorted(self.disk._current):
            (root / directory).mkdir(parents=True, exist_ok=True)
        for path in self.disk.paths():
            (root / path).write_bytes(self.disk.content(path))
