"""What many simulated clusters did together, and how one that failed is reported: seed, schedule, a short history.

    totals.add(run_seed(7)); print(totals)
    print("\\n".join(report(outcome)))

A failing run is made smaller before it is reported: faults are left out one after the other as long as the same promise
is still broken. What remains is what it takes.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from pydanube.testing.checkers import shortened
from pydanube.testing.history import to_line
from tools.sim.cluster_faults import FAULT_KINDS
from tools.sim.cluster_operations import NEVER, OPERATIONS
from tools.sim.cluster_pressure import Pressure
from tools.sim.cluster_sim import COUNTED_EVERY, Outcome, planned, run_seed, settings
from tools.sim.coverage import unmet

SHRINK_RUNS_MAX: Final = 60
PROBLEMS_SHOWN_MAX: Final = 6
EVENTS_SHOWN_MAX: Final = 40
KIND_SHARE_MIN: Final = 0.05  # of the seeds, in which every kind of fault occurs


@dataclass(slots=True)
class ClusterTotals:
    """What many runs did together."""

    runs: int = 0
    seconds: float = 0.0  # of simulated time
    acknowledged: int = 0
    delivered: int = 0
    checked: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    seeds_with: Counter[str] = field(default_factory=Counter)  # a kind of fault
    crowded: int = 0  # runs with a hundred topics and more
    hits: Counter[str] = field(default_factory=Counter)  # calls that were aimed at and met
    met: Counter[str] = field(default_factory=Counter)  # public operations that were called
    counted: int = 0  # runs in which those were counted
    failures: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.runs += 1
        self.crowded += outcome.topics > 0
        self.hits.update(outcome.hits)
        self.met.update(outcome.met)
        self.counted += bool(outcome.met)
        self.seconds += outcome.seconds
        self.acknowledged += outcome.acknowledged
        self.delivered += outcome.delivered
        self.checked += outcome.checked
        self.faults.update(outcome.faults)
        self.seeds_with.update(outcome.faults.keys())
        if outcome.problems:
            self.failures.append(outcome)

    @property
    def too_rare(self) -> list[str]:
        """Kinds of faults that hardly ever happened, though there were seeds enough."""
        if self.runs < 200:
            return []
        return [kind for kind in sorted(FAULT_KINDS) if self.seeds_with[kind] < KIND_SHARE_MIN * self.runs]

    @property
    def passed(self) -> bool:
        return not self.failures and not self.too_rare

    @property
    def done(self) -> tuple[int, int]:
        return self.runs, len(self.failures)

    def __str__(self) -> str:
        return (
            f"{self.runs} clusters ({self.crowded} of 100 topics and more), {len(self.failures)} failed, "
            f"{self.seconds / 3600:.1f} h simulated, "
            f"{self.acknowledged} messages acknowledged, {self.delivered} delivered, {self.checked} checked, "
            f"{sum(self.faults.values())} faults"
        )

    @property
    def kinds(self) -> str:
        """How many faults there were of each kind, and how many calls were hit that were aimed at."""
        faults = ", ".join(f"{kind} {count}" for kind, count in sorted(self.faults.items()))
        return (
            f"{faults}; hit: {', '.join(f'{target} {count}' for target, count in sorted(self.hits.items())) or 'none'}"
        )

    @property
    def operations(self) -> str:
        """Which public operations of broker and cluster were met."""
        if not self.counted:
            return f"public operations are counted in every {COUNTED_EVERY}th seed: in none of these"
        never = unmet(self.met, *OPERATIONS, but=NEVER)
        told = f"{len(self.met)} public operations met (counted in {self.counted} runs)"
        return told + (f", never: {', '.join(never)}" if never else "") + f"; not simulated: {', '.join(NEVER)}"


def meaning(seed: int) -> str:
    """What this seed breaks, when, and in what kind of cluster, as a short word.

    Another word: the simulator has changed, and it is not the same run any more. The same word and another digest: the
    program has.
    """
    text = "\n".join([settings(), repr(Pressure.of(seed)), *(str(each) + str(each.seed) for each in planned(seed))])
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def shrink(outcome: Outcome, run: Callable[[int, Sequence[int]], Outcome] | None = None) -> tuple[Outcome, int]:
    """The same failure with as few faults as it takes, and how many runs that took."""
    again = run or (lambda seed, leave_out: run_seed(seed, leave_out=leave_out, keep_history=True))
    smallest, left_out = (
        outcome,
        {each.number for each in planned(outcome.seed)} - {each.number for each in outcome.schedule},
    )
    runs = 0
    piece = max(1, len(outcome.schedule) // 2)
    while piece and runs < SHRINK_RUNS_MAX:
        place = 0
        numbers = [each.number for each in smallest.schedule]
        while place < len(numbers) and runs < SHRINK_RUNS_MAX:
            tried = again(outcome.seed, sorted(left_out | set(numbers[place : place + piece])))
            runs += 1
            if tried.problems and tried.rules & outcome.rules:
                smallest, left_out = tried, left_out | set(numbers[place : place + piece])
                numbers = [each.number for each in smallest.schedule]
            else:
                place += piece
        piece //= 2
    return smallest, runs


def report(outcome: Outcome) -> list[str]:
    """A failure, for people."""
    lines = [f"seed {outcome.seed} ({meaning(outcome.seed)}) failed after {outcome.seconds:.0f} simulated seconds:"]
    lines += [f"  {problem}" for problem in outcome.problems[:PROBLEMS_SHOWN_MAX]]
    if len(outcome.problems) > PROBLEMS_SHOWN_MAX:
        lines.append(f"  … and {len(outcome.problems) - PROBLEMS_SHOWN_MAX} more")
    lines.append(f"schedule, {len(outcome.schedule)} of {len(planned(outcome.seed))} faults:")
    lines += [f"  {each}" for each in outcome.schedule]
    if outcome.history is not None and outcome.violations:
        lines.append("what happened to it:")
        found = shortened(outcome.history, outcome.violations[:2], events_max=EVENTS_SHOWN_MAX)
        lines += [f"  {to_line(event)}" for event in found]
    return lines
