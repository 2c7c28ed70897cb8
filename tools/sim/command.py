"""Lives many histories of the log, and of whole clusters, one each per seed, on all cores.

    python -m tools.sim --seed 42 --count 10000
    python -m tools.sim --only cluster --seed 42 --count 1 --verbose        one history, event by event
    python -m tools.sim --only log --seed 0 --count 200 --digests           a line per seed, to be compared

The last line has the totals. What breaks a promise is printed with its seed, and the exit code is 1; of a cluster also
the schedule of faults, made as short as it can be, and what happened to the messages in question. The command that
repeats it has the digest of what happened: if the code has changed since, and the seed is another history now, it says
so.
"""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

from pydanube.stores.work.system import SystemClock, SystemWork
from tools.sim.cluster_report import ClusterTotals, report, shrink
from tools.sim.cluster_sim import ANY_LENGTH_FROM, run_seed
from tools.sim.cluster_sim import Outcome as ClusterOutcome
from tools.sim.coverage import unmet
from tools.sim.log_history import OPERATIONS, Outcome, run_history

COUNT: Final = 10_000
FAILURES_SHOWN_MAX: Final = 10
SHRUNK_MAX: Final = 3  # failing clusters are made smaller, which takes a while
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
    seeds_with: Counter[str] = field(default_factory=Counter)  # in how many histories each kind occurred
    met: Counter[str] = field(default_factory=Counter)  # public operations of the log, and how often they were called
    failures: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.histories += 1
        self.idle += outcome.acknowledged == 0
        self.acknowledged += outcome.acknowledged
        self.checked += outcome.checked
        self.counts.update(outcome.counts)
        self.seeds_with.update(kind for kind, count in outcome.counts.items() if count)
        self.met.update(outcome.met)
        if outcome.failure is not None:
            self.failures.append(outcome)

    @property
    def too_idle(self) -> bool:
        return self.idle > max(5, IDLE_SHARE_MAX * self.histories)

    @property
    def passed(self) -> bool:
        return not self.failures and not self.too_idle

    @property
    def done(self) -> tuple[int, int]:
        return self.histories, len(self.failures)

    def __str__(self) -> str:
        crashes = sum(self.counts[kind] for kind in _CRASHES)
        return (
            f"{self.histories} histories, {len(self.failures)} failed, {self.idle} idle, {crashes} crashes, "
            f"{self.acknowledged} batches acknowledged, {self.checked} compared"
        )

    @property
    def kinds(self) -> str:
        """What happened how often."""
        return ", ".join(f"{kind} {count}" for kind, count in sorted(self.counts.items()) if count)

    @property
    def operations(self) -> str:
        """Which public operations were met."""
        never = unmet(self.met, *OPERATIONS)
        return f"{len(self.met)} public operations met" + (f", never: {', '.join(never)}" if never else "")


def outcomes(seeds: Sequence[int], *, processes: int) -> Iterator[Outcome]:
    """Lives the seeds' histories, in any order."""
    if processes == 1:
        yield from map(run_history, seeds)
        return
    # Fresh interpreters: nothing of this one, whatever it has loaded or changed, can have a part in a history.
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, initializer=_prepare) as pool:
        yield from pool.imap_unordered(run_history, seeds, chunksize=8)


def _prepare() -> None:
    logging.disable(logging.CRITICAL)
    gc.collect()
    gc.freeze()
    gc.set_threshold(300_000, 10, 10)  # a history is short, and nearly all of it lives to its end


def cluster_outcomes(seeds: Sequence[int], *, processes: int) -> Iterator[ClusterOutcome]:
    """Runs the seeds' clusters, in any order."""
    if processes == 1:
        yield from map(run_seed, seeds)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, initializer=_prepare) as pool:
        yield from pool.imap_unordered(run_seed, seeds, chunksize=1)


def _fresh_seed() -> int:
    return ANY_LENGTH_FROM + (SystemWork(threads_max=1).random_u64() >> 32)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.sim", description=__doc__)
    parser.add_argument("--seed", type=_at_least(0), help="the first seed (default: a random one)")
    parser.add_argument("--count", type=_at_least(1), default=COUNT, help="how many seeds (default: %(default)s)")
    parser.add_argument("--processes", type=_at_least(1), default=os.cpu_count() or 1)
    parser.add_argument("--only", choices=("log", "cluster"), help="one of the two simulators (default: both)")
    parser.add_argument("--digest", default="", help="of what the first seed did then; says so if it does not any more")
    parser.add_argument("--verbose", action="store_true", help="print every event of every history")
    parser.add_argument("--digests", action="store_true", help="print only each seed's digest, in the order of seeds")
    options = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    seed = options.seed if options.seed is not None else _fresh_seed()
    seeds = range(seed, seed + options.count)
    kinds = [options.only] if options.only else ["log", "cluster"]
    if options.digests:
        return max([_digests(kind, seeds, options.processes) for kind in kinds])
    if options.verbose:
        return max([_verbose(seeds) if kind == "log" else _verbose_cluster(seeds) for kind in kinds])
    places = "1 process" if options.processes == 1 else f"{options.processes} processes"
    print(f"seeds {seed} to {seed + options.count - 1} on {places}", flush=True)
    clock = SystemClock()
    started = clock.elapsed()
    told: list[str] = []
    passed = True
    if options.digest:
        _compare(kinds, seed, options.digest)
    for kind in kinds:
        began = clock.elapsed()
        run: Callable[[Sequence[int], int], tuple[bool, Totals | ClusterTotals]]
        run = _run_log if kind == "log" else _run_clusters
        passed_here, totals = run(seeds, options.processes)
        passed &= passed_here
        print(f"{kind}: {totals.kinds}")
        told.append(f"{totals}, {options.count / max(1e-9, clock.elapsed() - began):.1f} seeds/s")
    print(f"seed {seed}: {'; '.join(told)}; {_duration(clock.elapsed() - started)}")
    return 0 if passed else 1


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        found = int(text)
        if found < least:
            raise argparse.ArgumentTypeError(f"it must be {least} at least, not {found}")
        return found

    number.__name__ = "whole number"  # as argparse calls what it is not: "invalid whole number value: 'x'"
    return number


def _compare(kinds: Sequence[str], seed: int, digest: str) -> None:
    """Says whether the seed still does what it did when its digest was recorded."""
    found = [run_history(seed).digest if kind == "log" else run_seed(seed, keep_history=True).digest for kind in kinds]
    if digest in found:
        print(f"seed {seed} is the history that it was")
    else:
        print(f"seed {seed} is not the history that it was ({digest}, now {', '.join(found)}): the code has changed")


def _digests(kind: str, seeds: Sequence[int], processes: int) -> int:
    """Prints what every seed does as one line, so that two versions of the code can be compared by `diff`."""
    digest = _log_digest if kind == "log" else _cluster_digest
    failed = False
    with multiprocessing.get_context("spawn").Pool(processes, initializer=_prepare) as pool:
        for seed, (found, passed) in zip(seeds, pool.imap(digest, seeds), strict=True):
            failed |= not passed
            print(f"{kind} {seed} {found}{'' if passed else ' failed'}", flush=True)
    return int(failed)


def _log_digest(seed: int) -> tuple[str, bool]:
    outcome = run_history(seed)
    return outcome.digest, outcome.failure is None


def _cluster_digest(seed: int) -> tuple[str, bool]:
    outcome = run_seed(seed, keep_history=True)
    return outcome.digest, not outcome.problems


class _Summed(Protocol):
    @property
    def done(self) -> tuple[int, int]:
        """How many there were, and how many failed."""
        ...


T = TypeVar("T")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def _follow(name: str, outcomes: Iterable[T], totals: _Summed, count: int, take: Callable[[T], None]) -> None:
    """Takes them one by one, with a line on the terminal that says how far it is."""
    clock = SystemClock()
    started = shown_at = clock.elapsed()
    on_terminal = sys.stderr.isatty()
    for outcome in outcomes:
        take(outcome)
        if on_terminal and clock.elapsed() > shown_at + 0.2:
            shown_at = clock.elapsed()
            runs, failed = totals.done
            rate = runs / (shown_at - started)
            line = f"[{'#' * (30 * runs // count):30}] {name} {runs}/{count}, {failed} failed, {rate:.1f}/s, "
            left = _duration((count - runs) / rate)
            print(f"\r{line + left + ' left':78}", end="", file=sys.stderr, flush=True)
    if on_terminal:
        print("\r" + " " * 78 + "\r", end="", file=sys.stderr)


def _run_log(seeds: Sequence[int], processes: int) -> tuple[bool, Totals]:
    totals = Totals()

    def take(outcome: Outcome) -> None:
        totals.add(outcome)
        if outcome.failure is not None and len(totals.failures) <= FAILURES_SHOWN_MAX:
            print(f"\nseed {outcome.seed} of the log failed: {outcome.failure}")
            _say_how_to_repeat("log", outcome.seed, outcome.digest)

    _follow("logs", outcomes(seeds, processes=processes), totals, len(seeds), take)
    print(f"log: {totals.operations}")
    if totals.too_idle:
        print(f"in {totals.idle} of {totals.histories} histories nothing was acknowledged: they prove nothing")
    return totals.passed, totals


def _run_clusters(seeds: Sequence[int], processes: int) -> tuple[bool, ClusterTotals]:
    totals = ClusterTotals()

    def take(outcome: ClusterOutcome) -> None:
        totals.add(outcome)
        if outcome.problems and len(totals.failures) <= FAILURES_SHOWN_MAX:
            print(f"\nseed {outcome.seed} of the cluster failed: {outcome.problems[0].splitlines()[0]}", flush=True)

    _follow("clusters", cluster_outcomes(seeds, processes=processes), totals, len(seeds), take)
    print(f"cluster: {totals.operations}")
    for outcome in totals.failures[:SHRUNK_MAX]:
        smallest, runs = shrink(outcome)
        print("\n" + "\n".join(report(smallest)))
        print(f"  made smaller in {runs} runs")
        _say_how_to_repeat("cluster", outcome.seed, outcome.digest)
    for kind in totals.too_rare:
        print(f"{kind} occurred in {totals.seeds_with[kind]} of {totals.runs} seeds: too few to prove anything")
    return totals.passed, totals


def _say_how_to_repeat(kind: str, seed: int, digest: str) -> None:
    print(f"  again: python -m tools.sim --only {kind} --seed {seed} --count 1 --digest {digest}")
    print(f"  every event: python -m tools.sim --only {kind} --seed {seed} --count 1 --verbose", flush=True)


def _verbose(seeds: Iterable[int]) -> int:
    totals = Totals()
    for seed in seeds:
        outcome = run_history(seed, keep_events=True)
        totals.add(outcome)
        print("\n".join(outcome.events))
        print(f"seed {seed} digest {outcome.digest}: {outcome.failure or 'every promise held'}")
    print(totals)
    return 1 if totals.failures else 0


def _verbose_cluster(seeds: Iterable[int]) -> int:
    totals = ClusterTotals()
    for seed in seeds:
        outcome = run_seed(seed, keep_history=True)
        totals.add(outcome)
        assert outcome.history is not None
        print("\n".join(outcome.history.lines()))
        print("\n".join(report(outcome)) if outcome.problems else f"seed {seed}: every promise held")
        print(f"digest {outcome.digest}")
    print(totals)
    return 1 if totals.failures else 0


if __name__ == "__main__":
    sys.exit(main())
