"""`python -m tests.sim.find_planted [NAME…]`: by which seeds the planted defects are found, in this program.

Without names it asks about those that their kept seed does not find any more. What it prints goes to `FOUND_BY`
(`tests/sim/planted.py`) and to the table in docs/proof.md.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing.pool import Pool
from typing import Final

import pytest

from tests.sim.planted import FOUND_BY, PLANTED
from tools.sim.cluster_sim import run_seed

SEEDS_MAX: Final = 1000


def rules_broken(planted: tuple[str, int]) -> tuple[int, list[str]]:
    """The seed, and what the checkers say of it with the defect `planted`."""
    name, seed = planted
    logging.disable(logging.CRITICAL)
    with pytest.MonkeyPatch.context() as patch:
        outcome = run_seed(seed, tweak=PLANTED[name](patch))
    return seed, sorted({violation.rule for violation in outcome.violations})


def main(names: Sequence[str]) -> int:
    if not names:
        kept = list(FOUND_BY.items())
        with _processes() as pool:
            broken = pool.map(rules_broken, kept, chunksize=1)
        names = [name for (name, _), (_, rules) in zip(kept, broken, strict=True) if not rules]
    return max(map(_search, names), default=0)


def _search(name: str) -> int:
    with _processes() as pool:
        found = pool.imap(rules_broken, ((name, seed) for seed in range(SEEDS_MAX)))
        seed, rules = next(((seed, rules) for seed, rules in found if rules), (SEEDS_MAX, []))
    print(f"{name}: {seed}, {', '.join(rules)}" if rules else f"{name}: not found", flush=True)
    return 0 if rules else 1


def _processes() -> Pool:
    """Leaving it ends what they still do."""
    return multiprocessing.get_context("spawn").Pool(os.cpu_count())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
