"""What the demo shows: steps and numbers while it goes, one table at the end. In a pipe, a line per step."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

REFRESH_PER_SECOND = 4
LINE_SECONDS = 5.0  # in a pipe


class Step:
    def __init__(self, what: str) -> None:
        self.what = what
        self.detail = ""
        self.state = "running"
        self.began = time.monotonic()
        self.seconds = 0.0

    def say(self, detail: str) -> None:
        self.detail = detail

    def end(self, state: str) -> None:
        self.state = state
        self.seconds = time.monotonic() - self.began


class Screen:
    """Steps are entered one after the other; numbers are asked for when they are drawn."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.numbers: Callable[[], Mapping[str, str]] = dict
        self.facts: dict[str, str] = {}
        self._steps: list[Step] = []
        self._spinner = Spinner("dots")

    @asynccontextmanager
    async def shown(self) -> AsyncIterator[None]:
        """While the demo goes."""
        if self.console.is_terminal:
            with Live(get_renderable=self._draw, console=self.console, refresh_per_second=REFRESH_PER_SECOND):
                yield
            return
        ticking = asyncio.create_task(self._print_numbers())
        try:
            yield
        finally:
            ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ticking

    @contextmanager
    def step(self, what: str) -> Iterator[Step]:
        step = Step(what)
        self._steps.append(step)
        try:
            yield step
        except BaseException:
            step.end("failed")
            self._line(step)
            raise
        step.end("done")
        self._line(step)

    @property
    def last_step(self) -> str:
        return self._steps[-1].what if self._steps else "begin"

    def fact(self, name: str, text: str) -> None:
        self.facts[name] = text
        if not self.console.is_terminal:
            self.console.print(f"{name}: {text}", highlight=False, soft_wrap=True)

    def _line(self, step: Step) -> None:
        if not self.console.is_terminal:
            detail = f": {step.detail}" if step.detail else ""
            mark = "ok    " if step.state == "done" else "FAILED"
            self.console.print(f"{mark} {step.what}{detail} ({step.seconds:.1f} s)", highlight=False, soft_wrap=True)

    async def _print_numbers(self) -> None:
        while True:
            await asyncio.sleep(LINE_SECONDS)
            if found := self.numbers():
                text = ", ".join(f"{name} {value}" for name, value in found.items())
                self.console.print(f"       {text}", highlight=False, soft_wrap=True)

    def _draw(self) -> RenderableType:
        facts = Table.grid(padding=(0, 2))
        for name, text in self.facts.items():
            facts.add_row(Text(name, style="dim"), Text(text))
        steps = Table.grid(padding=(0, 1))
        for step in self._steps:
            mark: RenderableType = self._spinner
            if step.state != "running":
                mark = Text("✓", style="green") if step.state == "done" else Text("✗", style="red")
            seconds = step.seconds if step.state != "running" else time.monotonic() - step.began
            steps.add_row(mark, Text(step.what), Text(step.detail, style="dim"), Text(f"{seconds:.1f} s", style="dim"))
        numbers = Table.grid(padding=(0, 3))
        found = self.numbers()
        if found:
            numbers.add_row(*(Text(name, style="dim") for name in found))
            numbers.add_row(*(Text(value, style="bold") for value in found.values()))
        return Group(Text("PyDanube demo", style="bold"), facts, Text(), steps, Text(), numbers)
