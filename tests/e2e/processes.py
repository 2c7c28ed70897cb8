"""Real processes for tests: a broker that can be stopped, killed and started again, and programs that talk to it.

Everything runs on free ports of 127.0.0.1 in a directory of the test's, writes what it says to files there (a failing
test shows them), and is gone when its `with` block is left, however that happens.

A broker is forked from a process that has read the product's code, one for each process of tests: a new interpreter
needs a second of a core for that. Whatever else is started here is started as users do it.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing.connection
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import pytest

from pydanube.cli.main import main
from pydanube.testing.ports import free_ports
from tests.e2e import forked

T = TypeVar("T")

DICE = random.SystemRandom()  # nobody sets it to where others stand

CLIENTS = Path(__file__).parent / "clients"
START_SECONDS = 60.0
STOP_SECONDS = 60.0  # a sync may take long on a busy disk
WAIT_SECONDS = 60.0
READY = "is ready."
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["tests.e2e.preloaded"])
DANUBE = [sys.executable, "-X", "faulthandler", "-m", "pydanube"]
LOG_LINE = re.compile(r"\d{4}-\d\d-\d\dT")


def until(condition: Callable[[], T], what: str, *, seconds: float = WAIT_SECONDS, say: Callable[[], str] = str) -> T:
    """The first true value of `condition`, asked often. `say` is what helps to understand a failure.

    A question that is dear is asked less often: else whoever waits would keep busy whom it waits for.
    """
    deadline = time.monotonic() + seconds
    while True:
        asked = time.monotonic()
        value = condition()
        if value:
            return value
        now = time.monotonic()
        if now > deadline:
            raise AssertionError(f"{what}: not within {seconds:.0f} s\n{say()}")
        time.sleep(min(max(0.01, 4 * (now - asked)), 0.3))


class Process:
    """A child with its output in a file. Leaving the `with` block kills it if it still runs."""

    def __init__(self, command: Sequence[str], output: Path, **options: Any) -> None:
        self.command = list(command)
        self.output = output
        self._child: subprocess.Popen[bytes] | _Fork
        with output.open("ab") as file:
            self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=file, stderr=file, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def exit_code(self) -> int | None:
        return self._child.poll()

    def send_signal(self, number: signal.Signals) -> None:
        self._child.send_signal(number)

    def write(self, text: str) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(text.encode())
        self._child.stdin.flush()

    def wait(self, seconds: float = WAIT_SECONDS) -> int:
        try:
            return self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.command} still runs after {seconds:.0f} s\n{self.text()}") from None

    def stop(self, seconds: float = STOP_SECONDS) -> int:
        """As an operator does. Returns the exit code."""
        self._child.send_signal(signal.SIGTERM)
        code = self.wait(seconds)
        self._close()
        return code

    def kill(self) -> None:
        """As a power failure does."""
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait()
        self._close()

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def _close(self) -> None:
        if self._child.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._child.stdin.close()


class ForkedProcess(Process):
    """A `danube` command that is forked, not started anew. It cannot be written to."""

    def __init__(self, arguments: Sequence[str], output: Path) -> None:
        self.command = [*DANUBE, *arguments]
        self.output = output
        output.touch()
        self._child = _Fork(arguments, output)


class _Fork:
    """What Process needs of a child, as subprocess.Popen has it."""

    _using = threading.Lock()  # a start looks after all others, and an exit code can be read once
    stdin = None

    def __init__(self, arguments: Sequence[str], output: Path) -> None:
        self._process = FORKED.Process(
            target=forked.danube, args=(list(arguments), output, dict(os.environ)), daemon=True
        )
        with self._using:
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        with self._using:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + timeout if timeout is not None else None
        while (code := self.poll()) is None:
            left = max(0.0, deadline - time.monotonic()) if deadline is not None else None
            if not multiprocessing.connection.wait([self._process.sentinel], left):
                assert timeout is not None
                raise subprocess.TimeoutExpired("danube", timeout)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Program(Process):
    """One of the scripts in clients/: it prints an object per line, and goes on when it is told to."""

    def __init__(self, directory: Path, script: str, *arguments: object) -> None:
        number = len(list(directory.glob(f"{script}-*.out")))
        output = directory / f"{script}-{number}.out"
        output.touch()
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        command = [sys.executable, str(CLIENTS / f"{script}.py"), *map(str, arguments)]
        self._read_bytes = 0
        self._lines: list[dict[str, Any]] = []
        super().__init__(command, output, env=environment)

    def go(self) -> None:
        self.write("go\n")

    def lines(self) -> list[dict[str, Any]]:
        with self.output.open("rb") as file:
            file.seek(self._read_bytes)
            whole = file.read().rpartition(b"\n")[0]
        if whole:
            self._read_bytes += len(whole) + 1
            self._lines += [json.loads(line) for line in whole.split(b"\n") if line.startswith(b"{")]
        return list(self._lines)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in self.lines() if line["event"] == name]

    def until(self, name: str, count: int = 1, *, seconds: float = WAIT_SECONDS) -> list[dict[str, Any]]:
        """At least `count` events of this name."""

        def enough() -> list[dict[str, Any]] | None:
            found = self.events(name)
            if len(found) < count and self.exit_code not in (None, 0):
                raise AssertionError(f"{self.command} ended with {self.exit_code}\n{self.text()}")
            return found if len(found) >= count else None

        what = f"{count} × {name} of {self.command[1:]}"
        return until(enough, what, seconds=seconds, say=lambda: self.text()[-4000:]) or []


class BrokerProcess:
    """A broker with its ports and its data, which outlive the process."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self.directory = directory
        self.data_dir = directory / "data"
        self.client_port, self.admin_port, self.metrics_port, self.stream_port = free_ports(4)
        self.url = f"http://127.0.0.1:{self.client_port}"
        self.endpoint = f"http://127.0.0.1:{self.admin_port}"
        self._flags = flags
        self._starts = 0
        self.process: Process | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:  # it may run all the same, only too slowly
            if self.process is not None:
                self.process.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process is not None:
            self.process.kill()

    @property
    def command(self) -> list[str]:
        return [
            *(*DANUBE, "broker", "--mode", "standalone", "--data-dir", str(self.data_dir)),
            *("--broker-addr", f"127.0.0.1:{self.client_port}", "--admin-addr", f"127.0.0.1:{self.admin_port}"),
            *("--prom-exporter", f"127.0.0.1:{self.metrics_port}", "--stream-addr", f"127.0.0.1:{self.stream_port}"),
            *("--web-addr", "off"),
            *self._flags,
        ]

    @property
    def output(self) -> Path:
        return self.directory / f"broker-{self._starts}.log"

    def start(self) -> None:
        """Returns when clients can connect."""
        assert self.process is None or self.process.exit_code is not None, "it runs already"
        self._starts += 1
        command = self.command
        as_it_is = command[: len(DANUBE)] == DANUBE
        process = ForkedProcess(command[len(DANUBE) :], self.output) if as_it_is else Process(command, self.output)
        self.process = process

        def is_ready() -> bool:
            if process.exit_code is not None:
                raise AssertionError(f"the broker ended with {process.exit_code}\n{process.text()}")
            return READY in process.text()

        until(is_ready, "the broker is ready", seconds=START_SECONDS, say=process.text)

    def stop(self) -> int:
        assert self.process is not None
        return self.process.stop()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()

    def run(self, script: str, *arguments: object) -> Program:
        return Program(self.directory, script, self.url, *arguments)

    def admin(self, *arguments: object) -> str:
        """What `danube admin` prints. It must succeed."""
        done = danube_here("admin", "--endpoint", self.endpoint, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def errors(self) -> list[str]:
        """What a healthy broker does not write: lines at level ERROR and tracebacks, each with what belongs to it."""
        found: list[str] = []
        for log in sorted(self.directory.glob("broker-*.log")):
            inside = False
            for line in log.read_text(errors="replace").splitlines():
                begins = " ERROR " in line or line.startswith("Traceback") or "never retrieved" in line
                if inside and (begins or not LOG_LINE.match(line)):
                    found[-1] += f"\n{line}"
                elif begins:
                    found.append(line)
                    inside = True
                else:
                    inside = False
        return found


def danube(*arguments: object, text: str = "", seconds: float = 100.0) -> subprocess.CompletedProcess[str]:
    """The command, to its end."""
    command = [sys.executable, "-m", "pydanube", *map(str, arguments)]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=seconds)


def danube_here(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The same in this process: for commands that neither read nor wait, and spare the half second of a start."""
    words = ["danube", *map(str, arguments)]
    output, errors = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        patch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as left:
            main()
    code = left.value.code or 0
    assert isinstance(code, int)
    return subprocess.CompletedProcess(words, code, output.getvalue(), errors.getvalue())


@contextlib.contextmanager
def broker_in(directory: Path, *flags: str) -> Iterator[BrokerProcess]:
    """A broker that must not have complained by the end."""
    directory.mkdir(parents=True, exist_ok=True)
    with BrokerProcess(directory, *flags) as broker:
        yield broker
        assert broker.process is not None and broker.process.exit_code is None, broker.output.read_text()
        assert broker.errors() == []
