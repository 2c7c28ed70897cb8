"""The rules of the shared journal keep every promise in all interleavings that these budgets allow, and each is needed.

An exploration without an end before its depth says that no state is left: not a sample, all of them.
"""

from __future__ import annotations

from typing import Final

import pytest

from tests.model.journal import RULES, Budget, Found, empty, explore, served

NOTHING: Final = Budget(messages=2, deaths=0, crashes=0, losses=0, moves=0, deletions=0, journals=2)
DEPTH: Final = 80

# What must go wrong so that the model needs the rule.
NEEDED: Final[dict[str, dict[str, int]]] = {
    "ack_when_known": {"crashes": 1},
    "show_committed": {"crashes": 1},
    "same_number": {"losses": 1, "crashes": 1},
    "end_before_claim": {"deaths": 1},
    "floor_before_removal": {"crashes": 1},
    "end_stays": {"deaths": 1},
    "end_above_floor": {"deaths": 1},
    "compare_history": {"deaths": 1},
    "prune_described": {"moves": 1, "crashes": 1},
    "seal_waits": {"moves": 1, "crashes": 1, "journals": 3},
    "pieces_by_epoch": {"deletions": 1, "crashes": 1},
    "repeat_waits": {"crashes": 1},
    "disk_is_cache": {"crashes": 2, "journals": 3},
    "known_is_read": {"deaths": 1},
    "end_conflict_read": {"crashes": 1},
    "compare_owner": {"crashes": 1, "journals": 3},
    "describe_compares": {"deletions": 1},
}


def found(*, without: tuple[str, ...] = (), **budget: int) -> Found:
    return explore(served(NOTHING._replace(**budget)), without=without, depth_max=DEPTH)


@pytest.mark.parametrize(
    "rule", [pytest.param(rule, marks=pytest.mark.long if rule == "seal_waits" else ()) for rule in NEEDED]
)
def test_without_this_rule_a_promise_is_broken(rule: str) -> None:
    result = found(without=(rule,), **NEEDED[rule])
    assert result.violation, f"not found in {result.states} states: {RULES[rule]}"
    assert len(result.trace) == result.depth


@pytest.mark.parametrize(
    "budget",
    [
        {"losses": 1},
        {"deaths": 1},
        {"crashes": 1},
        {"moves": 1},
        {"deaths": 1, "losses": 1},
        {"crashes": 1, "losses": 1},
        {"crashes": 1, "moves": 1},
    ],
    ids=str,
)
def test_no_interleaving_breaks_a_promise(budget: dict[str, int]) -> None:
    result = found(**budget)
    assert not result.violation, "\n".join(result.trace)
    assert result.depth < DEPTH, "there are states that nobody looked at"


@pytest.mark.long
def test_a_claim_that_does_not_wait_for_an_open_put_is_harmless_while_pieces_are_chosen_by_epoch() -> None:
    """Two rules that guard the same door: it opens only without both."""
    assert set(RULES) - set(NEEDED) == {"claim_waits"}
    assert not found(without=("claim_waits",), moves=1, losses=1).violation
    assert found(without=("claim_waits", "pieces_by_epoch"), deletions=1, crashes=1).violation


@pytest.mark.long
@pytest.mark.parametrize(
    "budget",
    [
        {"deaths": 1, "moves": 1},
        {"crashes": 1, "journals": 3},
        {"deaths": 1, "crashes": 1, "journals": 3},
        {"deletions": 1, "crashes": 1},
        {"moves": 1, "crashes": 1, "losses": 1},
        {"moves": 2, "deaths": 1},
        {"moves": 1, "crashes": 1, "journals": 3},
        {"messages": 3, "deaths": 1, "losses": 1},
    ],
    ids=str,
)
def test_no_interleaving_of_more_failures_breaks_a_promise(budget: dict[str, int]) -> None:
    result = found(**budget)
    assert not result.violation, "\n".join(result.trace)
    assert result.depth < DEPTH, "there are states that nobody looked at"


@pytest.mark.long
def test_from_an_empty_store_no_twenty_steps_break_a_promise() -> None:
    everything = Budget(messages=2, deaths=1, crashes=1, losses=1, moves=1, deletions=1, journals=3)
    result = explore(empty(everything), depth_max=20, states_max=1_500_000)
    assert not result.violation, "\n".join(result.trace)
