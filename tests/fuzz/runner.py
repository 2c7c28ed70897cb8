"""Runs a fuzzer's inputs in child processes, and its command line.

Inputs run a chunk at a time. A child notes the number of each input before it tries it; so the parent knows which one a
child died of or hangs on, and goes on behind it. Input i of a seed is always the same, so a failure can be repeated.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import mmap
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

REPOSITORY: Final = Path(__file__).resolve().parents[2]
FAILURES_MAX: Final = 20


class Failure(NamedTuple):
    index: int  # type: ignore[assignment]
    what: str


class Outcome(NamedTuple):
    tried: int
    outcomes: Counter[str]
    failures: list[Failure]


@dataclass(frozen=True, kw_only=True)
class Fuzzer:
    """`attempt(seed, index)` tries one input: it returns what came of it, or raises if that must not be.

    `accepted` is what it returns for an input in which nothing was wrong.
    """

    module: str  # what `python -m` runs, which calls `main`
    description: str
    attempt: Callable[[int, int], str]
    accepted: str
    accepted_plural: str
    count: int
    chunk: int = 5_000
    hang_seconds: float = 20.0
    child: tuple[str, ...] | None = None  # what runs instead of the module, in tests

    def run(self, seed: int, first: int, count: int, jobs: int) -> Outcome:
        end = first + count
        chunks = [(start, min(start + self.chunk, end)) for start in range(first, end, self.chunk)]
        with ThreadPoolExecutor(jobs) as pool:
            results = list(pool.map(lambda chunk: self.run_chunk(seed, *chunk), chunks))
        outcomes: Counter[str] = Counter()
        for result in results:
            outcomes.update(result.outcomes)
        failures = [failure for result in results for failure in result.failures]
        return Outcome(sum(result.tried for result in results), outcomes, failures)

    def run_chunk(self, seed: int, first: int, end: int) -> Outcome:
        """Tries inputs [first, end) in child processes, as many as are needed."""
        outcomes: Counter[str] = Counter()
        failures: list[Failure] = []
        command = self.child or (sys.executable, "-m", self.module)
        start = first
        with tempfile.TemporaryDirectory() as directory:
            progress = Path(directory) / "progress"
            while start < end and len(failures) < FAILURES_MAX:
                progress.write_bytes(start.to_bytes(8, "little"))
                arguments = ["--child", str(progress), "--seed", str(seed), "--first", str(start)]
                process = subprocess.Popen(
                    [*command, *arguments, "--count", str(end - start)],
                    cwd=REPOSITORY,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                output, errors, hung = wait(process, progress, self.hang_seconds)
                if process.returncode == 0 and not hung:
                    result = json.loads(output)
                    outcomes.update(result["outcomes"])
                    failures += [Failure(*failure) for failure in result["failures"]]
                    break
                stopped_at = int.from_bytes(progress.read_bytes(), "little")
                how = f"it hangs for {self.hang_seconds} s" if hung else f"the child ended with {process.returncode}"
                failures.append(Failure(stopped_at, f"{how}\n{errors[-2000:]}"))
                # What the dead child had counted is lost; so only the inputs before the bad one run again.
                if stopped_at > start:
                    before = self.run_chunk(seed, start, stopped_at)
                    outcomes.update(before.outcomes)
                    failures += before.failures
                start = stopped_at + 1
        return Outcome(sum(outcomes.values()) + len(failures), outcomes, failures)

    def run_child(self, seed: int, first: int, end: int, progress: Path) -> None:
        """Tries inputs [first, end) and prints what came of them; `progress` always holds the one being tried."""
        faulthandler.enable()
        outcomes: Counter[str] = Counter()
        failures: list[Failure] = []
        with progress.open("r+b") as file, mmap.mmap(file.fileno(), 8) as place:
            for index in range(first, end):
                place[:] = index.to_bytes(8, "little")
                try:
                    sentence = self.attempt(seed, index)
                except Exception:
                    failures.append(Failure(index, traceback.format_exc()))
                else:
                    outcomes[kind_of(sentence)] += 1
        json.dump({"outcomes": outcomes, "failures": failures}, sys.stdout)

    def main(self, arguments: Sequence[str] | None = None) -> int:
        parser = argparse.ArgumentParser(prog=f"python -m {self.module}", description=self.description)
        parser.add_argument("--seed", type=int, default=1)
        parser.add_argument("--first", type=int, default=0, help="number of the first input")
        parser.add_argument("--count", type=int, default=self.count)
        parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
        parser.add_argument("--verbose", action="store_true", help="print how often each refusal was given")
        parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
        options = parser.parse_args(arguments)
        if options.child:
            self.run_child(options.seed, options.first, options.first + options.count, options.child)
            return 0
        started = time.monotonic()
        tried, outcomes, failures = self.run(options.seed, options.first, options.count, options.jobs)
        seconds = time.monotonic() - started
        if options.verbose:
            for kind, times in outcomes.most_common():
                print(f"{times:8}  {kind}")
        for failure in failures:
            print(f"seed {options.seed} input {failure.index}: {failure.what}")
            print(f"again with: python -m {self.module} --seed {options.seed} --first {failure.index} --count 1\n")
        accepted = outcomes[self.accepted]
        refusals = sum(outcomes.values()) - accepted
        print(
            f"seed {options.seed}: {tried} inputs in {seconds:.1f} s ({tried / seconds:.0f}/s), "
            f"{accepted} {self.accepted_plural}, {refusals} refused in {max(len(outcomes) - 1, 0)} ways, "
            f"{len(failures)} failures"
        )
        return 1 if failures or tried < options.count else 0


def kind_of(sentence: str) -> str:
    """The sentence without its numbers, so that equal complaints are counted together."""
    return re.sub(r"0x[0-9a-f]+|-?\d+|b'.*?'|b\".*?\"", "#", sentence)[:90]


def wait(process: subprocess.Popen[str], progress: Path, hang_seconds: float) -> tuple[str, str, bool]:
    """What the child printed, and whether it had to be killed because it stood still."""
    seen, since = progress.read_bytes(), time.monotonic()
    while True:
        try:
            output, errors = process.communicate(timeout=min(1.0, hang_seconds / 4))
            return output, errors, False
        except subprocess.TimeoutExpired:
            now = progress.read_bytes()
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > hang_seconds:
                process.kill()
                output, errors = process.communicate()
                return output, errors, True
