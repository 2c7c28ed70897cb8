"""One etcd process of ours: started so that it ends with us, stopped, found again, and its log kept short.

    {directory}/
      etcd.log  etcd.log.1   what etcd says, the newest LOG_BYTES_MAX, and what it said before
      etcd.pid               the last process that was started
      data/                  etcd's own

etcd writes to its log by itself: nothing between us can fill up and stop it, even while this process is paused.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pydanube.stores.environment import ETCD, child_environment

STOP_SECONDS: Final = 3.0  # then it is killed: etcd waits long for clients and loses nothing when it does not
POLL_SECONDS: Final = 0.05
LOG_CHECK_SECONDS: Final = 5.0
LOG_BYTES_MAX: Final = 8 * 1024 * 1024
TAIL_BYTES: Final = 64 * 1024
GUARD: Final = Path(__file__).with_name("guard.py")


def log_path(directory: Path) -> Path:
    return directory / "etcd.log"


def pid_path(directory: Path) -> Path:
    return directory / "etcd.pid"


class MemberProcess:
    """A running etcd. `command` is the program's path and its arguments.

    Made on the thread that lives as long as etcd is to live: the kernel watches the thread. Not by the event loop:
    uvloop forks where the standard library does not, and gRPC complains of every fork.
    """

    def __init__(self, directory: Path, command: Sequence[str]) -> None:
        self._directory = directory
        with log_path(directory).open("ab") as log:
            self._log_position = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(GUARD), str(os.getpid()), str(pid_path(directory)), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=child_environment(ETCD),  # it takes every flag from the environment as well: none of them
                start_new_session=True,  # Ctrl-C is for the broker, which needs etcd to the last
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ended(self) -> int:
        """Its exit code, once it has ended. Keeps the log short while it runs."""
        while True:
            with contextlib.suppress(TimeoutError):
                return await self._wait(LOG_CHECK_SECONDS)
            if await asyncio.to_thread(shorten_log, self._directory):
                self._log_position = 0

    async def stop(self) -> None:
        """Returns when it has ended."""
        self._signal(signal.SIGTERM)
        try:
            await self._wait(STOP_SECONDS)
        except TimeoutError:
            self._signal(signal.SIGKILL)
            await self._wait(None)

    async def _wait(self, seconds: float | None) -> int:
        async with asyncio.timeout(seconds):
            while (code := self._process.poll()) is None:  # noqa: ASYNC110
                await asyncio.sleep(POLL_SECONDS)
            return code

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
            self._process.send_signal(signal.SIGCONT)  # a paused process hears nothing else

    def said(self) -> str:
        """The end of what this process wrote to the log."""
        with contextlib.suppress(OSError), log_path(self._directory).open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_position, size - TAIL_BYTES))
            return log.read().decode(errors="replace")
        return ""


def last_complaint(said: str) -> str:
    """The reason in the last line of the log that has one."""
    for line in reversed(said.splitlines()):
        try:
            fields = json.loads(line)
        except ValueError:
            continue
        if isinstance(fields, dict) and fields.get("level") in ("error", "fatal", "panic"):
            return str(fields.get("error") or fields.get("msg"))
    lines = said.splitlines()
    return lines[-1] if lines else "it said nothing"


def shorten_log(directory: Path) -> bool:
    """Moves a log that is too long out of the way. etcd has it open and goes on at its new end."""
    log = log_path(directory)
    if not log.exists() or log.stat().st_size <= LOG_BYTES_MAX:
        return False
    shutil.copyfile(log, log.with_name("etcd.log.1"))
    os.truncate(log, 0)
    return True


def take_over(directory: Path, marker: str) -> int | None:
    """Ends an etcd that an earlier process of ours left behind, and returns its pid; None if there is none.

    Blocks. `marker` is the argument by which our own is known: a pid is soon used again.
    """
    try:
        pid = int(pid_path(directory).read_text())
        handle = os.pidfd_open(pid)
    except (OSError, ValueError, AttributeError):  # no file, no such process, no Linux
        return None
    ending = select.poll()  # not select: the handle's number may be beyond what that can take
    ending.register(handle, select.POLLIN)
    try:
        if marker.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            return None
        for number, seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, STOP_SECONDS)):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
                signal.pidfd_send_signal(handle, signal.SIGCONT)
            if ending.poll(seconds * 1000):
                break
    except OSError:  # it went by itself
        return None
    finally:
        os.close(handle)
    return pid
