"""One run of a declared pipeline: `python -m pydanube.pipeline.child`, started by a supervisor alone.

    stdin    {"job", "settings", "master", "remote", "until"}, then {"until"} again and again, until the supervisor ends
    stdout   {"progress", "fresh_us", …} as it runs, and last {"report": {…}} or {"error": …, "refused": true | false}

`until` is on the clock that all processes of the machine share. A child that does not hear of a later moment before it
comes, or whose supervisor has ended, kills itself and all it has started: from then on another supervisor may run the
pipeline. SIGTERM is what Ctrl-C is to `danube pipeline run`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
from types import FrameType
from typing import Any

from pydanube.errors import DanubeError, Refused
from pydanube.pipeline.registry import resolved
from pydanube.pipeline.run import run_values
from pydanube.stores.work.system import SystemClock

POLL_SECONDS = 0.5


def main() -> int:
    """The exit code: 0 good, 1 not good or failed, 2 refused."""
    signal.signal(signal.SIGTERM, _interrupt)
    first, rest = _first_line()
    if not first:
        return 1  # the supervisor has ended
    order = json.loads(first)
    guard = LeaseGuard(float(order["until"]), rest)
    threading.Thread(target=guard.run, name="guard", daemon=True).start()
    try:
        report = run_values(
            order["job"],
            resolved(order["settings"]),
            master=order.get("master"),
            remote=order.get("remote"),
            as_json=True,
            progress=sys.stdout,
        )
    except KeyboardInterrupt:
        _say({"error": "it was interrupted", "refused": False})
        return 1
    except DanubeError as error:
        is_refused = isinstance(error, Refused)
        _say({"error": " ".join(str(error).split()), "refused": is_refused})
        return 2 if is_refused else 1
    except Exception as error:
        _say({"error": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}", "refused": False})
        return 1
    _say({"report": report.to_json()})
    return 0 if report.is_good else 1


class LeaseGuard:
    """Ends this process, and all of its group, when the supervisor's lease is no longer known to last."""

    def __init__(self, until: float, read: bytes) -> None:
        self._until = until
        self._clock = SystemClock()
        self._read = read  # what has come and is no whole line yet

    def run(self) -> None:
        try:
            self._understand(b"")
            while (left := self._until - self._clock.elapsed()) > 0 and self._hear(min(left, POLL_SECONDS)):
                pass
        finally:  # also if what came cannot be read: a run without its guard would not end with the lease
            os.killpg(0, signal.SIGKILL)

    def _hear(self, seconds: float) -> bool:
        """False: the supervisor has ended."""
        ready, _, _ = select.select([0], [], [], seconds)
        if not ready:
            return True
        found = os.read(0, 65536)
        self._understand(found)
        return bool(found)

    def _understand(self, found: bytes) -> None:
        *lines, self._read = (self._read + found).split(b"\n")
        for line in lines:
            self._until = max(self._until, float(json.loads(line)["until"]))


def _first_line() -> tuple[bytes, bytes]:
    """And what has come behind it. By hand: a buffered reader would keep that to itself."""
    read = b""
    while b"\n" not in read:
        found = os.read(0, 65536)
        if not found:
            return b"", b""
        read += found
    line, _, rest = read.partition(b"\n")
    return line, rest


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what, ensure_ascii=False, default=str), flush=True)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.exit(code)
