"""What a job says: while it runs, and when it is done. A bar for people, a line of JSON for machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@dataclass(slots=True)
class JobReport:
    """The outcome of a job. `problems` make it fail, one line each."""

    job: str
    values: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        result = "ok" if self.is_good else "failed"
        return {
            "job": self.job,
            "result": result,
            "seconds": round(self.seconds, 3),
            **self.values,
            "problems": self.problems,
        }

    def lines(self) -> Sequence[str]:
        """For people."""
        found = [f"{self.job}: {'done' if self.is_good else 'FAILED'} in {self.seconds:.1f} s"]
        width = max((len(name) for name in self.values), default=0)
        found += [f"  {name:<{width}}  {_shown(value)}" for name, value in self.values.items()]
        found += [f"  problem: {problem}" for problem in self.problems]
        return found


def _shown(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)


class QueryWatch:
    """Progress of a job, on stderr. `as_json` or a pipe: one object a line, at most one a second."""

    def __init__(self, job: str, *, as_json: bool, stream: TextIO | None = None) -> None:
        self._job = job
        self._stream = stream or sys.stderr
        self._is_json = as_json or not self._stream.isatty()
        self._bar: Progress | None = None
        self._task: Any = None
        self._said_at = 0.0
        self.facts: Callable[[], Mapping[str, int]] = dict  # numbers about how far it is, for who reads the lines
        self._began = monotonic()

    def __enter__(self) -> Self:
        if not self._is_json:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=Console(file=self._stream), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self._job, total=None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def says(self, what: str, done: int = 0, total: int | None = None, **more: Any) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=f"{self._job}: {what}", completed=done, total=total)
            return
        now = monotonic()
        if now - self._said_at >= 1.0 or (total is not None and done >= total):
            self._said_at = now
            line = {"job": self._job, "progress": what, "done": done, "total": total, **self.facts(), **more}
            print(json.dumps(line), file=self._stream, flush=True)

    @property
    def seconds(self) -> float:
        return monotonic() - self._began
