"""Lives many histories of the log, one per seed, on all cores.

    python -m pydanube.testing.sim --seed 42 --count 10000
    python -m pydanube.testing.sim --seed 42 --count 1 --verbose     one history, event by event

The last line has the totals. A history that breaks a promise is printed with its seed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from pydanube.stores.system import SystemClock, SystemWork
from pydanube.testing.log_history import Outcome, run_history

COUNT: Final = 10_000
FAILURES_SHOWN_MAX: Final = 10
# A history in which nothing was acknowledged proves nothing. A few are unavoidable.
IDLE_SHARE_MAX: Final = 0.15
_CRASHES: Final = ("power cuts", "kills")


@dataclass(slots=True)
class Totals:
    """What many histories did together."""

    histories: int = 0
    idle: int = 0
    acknowledged: int = 0
    checked: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.histories += 1
        self.idle += outcome.acknowledged == 0
        self.acknowledged += outcome.acknowledged
        self.checked += outcome.checked
        self.counts.update(outcome.counts)
        if outcome.failure is not None:
            self.failures.append(outcome)

    @property
    def too_idle(self) -> bool:
        return self.idle > max(5, IDLE_SHARE_MAX * self.histories)

    @property
    def passed(self) -> bool:
        return not self.failures and not self.too_idle

    def __str__(self) -> str:
        crashes = sum(self.counts[kind] for kind in _CRASHES)
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items()) if count)
        return (
            f"{self.histories} histories, {len(self.failures)} failed, {self.idle} idle, {crashes} crashes, "
            f"{self.acknowledged} batches acknowledged, {self.checked} compared ({kinds})"
        )


def outcomes(seeds: Sequence[int], *, processes: int) -> Iterator[Outcome]:
    """Lives the seeds' histories, in any order."""
    if processes == 1:
        yield from _live(seeds)
        return
    # Fresh interpreters: nothing of this one, whatever it has loaded or changed, can have a part in a history.
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, initializer=_prepare) as pool:
        yield from pool.imap_unordered(run_history, seeds, chunksize=8)


def _prepare() -> None:
    logging.disable(logging.CRITICAL)
    gc.collect()
    gc.freeze()


def _live(seeds: Iterable[int]) -> Iterator[Outcome]:
    for seed in seeds:
        yield run_history(seed)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pydanube.testing.sim", description=__doc__)
    parser.add_argument("--seed", type=int, help="the first seed (default: a random one)")
    parser.add_argument("--count", type=int, default=COUNT, help="how many seeds (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--verbose", action="store_true", help="print every event of every history")
    options = parser.parse_args(arguments)
    seed = options.seed if options.seed is not None else SystemWork(threads_max=1).random_u64() >> 32
    if options.verbose:
        return _verbose(range(seed, seed + options.count))
    return _run(seed, options.count, options.processes)


def _run(seed: int, count: int, processes: int) -> int:
    clock = SystemClock()
    started = clock.elapsed()
    totals = Totals()
    on_terminal = sys.stderr.isatty()
    print(f"seeds {seed} to {seed + count - 1} on {processes} processes", flush=True)
    shown_at = 0.0
    for outcome in outcomes(range(seed, seed + count), processes=processes):
        totals.add(outcome)
        if outcome.failure is not None and len(totals.failures) <= FAILURES_SHOWN_MAX:
            _show_failure(outcome)
        if on_terminal and clock.elapsed() > shown_at + 0.2:
            shown_at = clock.elapsed()
            done = f"{totals.histories}/{count} histories, {len(totals.failures)} failed"
            rate = totals.histories / (shown_at - started)
            print(f"\r{done}, {rate:.0f}/s ", end="", file=sys.stderr, flush=True)
    if on_terminal:
        print("\r" + " " * 78 + "\r", end="", file=sys.stderr)
    if totals.too_idle:
        print(f"in {totals.idle} of {totals.histories} histories nothing was acknowledged: they prove nothing")
    rate = totals.histories / max(1e-9, clock.elapsed() - started)
    print(f"seed {seed}: {totals}, {rate:.0f} seeds/s")
    return 0 if totals.passed else 1


def _show_failure(outcome: Outcome) -> None:
    print(f"\nseed {outcome.seed} failed: {outcome.failure}")
    print(f"  again: make sim SEED={outcome.seed} COUNT=1", flush=True)
    print(f"  every event: python -m pydanube.testing.sim --seed {outcome.seed} --count 1 --verbose", flush=True)


def _verbose(seeds: Iterable[int]) -> int:
    totals = Totals()
    for seed in seeds:
        outcome = run_history(seed, keep_events=True)
        totals.add(outcome)
        print("\n".join(outcome.events))
        print(f"seed {seed} digest {outcome.digest}: {outcome.failure or 'every promise held'}")
    print(totals)
    return 1 if totals.failures else 0


if __name__ == "__main__":
    sys.exit(main())
