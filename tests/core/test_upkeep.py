"""When the history of a metadata store goes, and how much of it."""

from __future__ import annotations

from pydanube.core.cluster.upkeep import Compacting


def test_the_leader_compacts_every_five_minutes_to_where_the_store_was_five_minutes_ago() -> None:
    keeping = Compacting(300.0)
    done = {
        minute: revision
        for minute in range(31)
        if (revision := keeping.step(60.0 * minute, 100 + minute, leads=True)) is not None
    }
    assert done == {5: 100, 10: 105, 15: 110, 20: 115, 25: 120, 30: 125}


def test_who_does_not_lead_compacts_nothing_and_knows_what_to_do_when_it_does() -> None:
    keeping = Compacting(300.0)
    assert [keeping.step(60.0 * minute, minute, leads=False) for minute in range(20)] == [None] * 20
    assert keeping.step(1200.0, 20, leads=True) == 15


def test_a_store_in_which_nothing_happens_is_left_alone() -> None:
    keeping = Compacting(300.0)
    done = [keeping.step(60.0 * minute, 7, leads=True) for minute in range(60)]
    assert [revision for revision in done if revision is not None] == [7]


def test_after_a_long_pause_the_last_revision_that_is_old_enough_counts() -> None:
    keeping = Compacting(300.0)
    keeping.step(0.0, 10, leads=True)
    keeping.step(60.0, 20, leads=True)
    assert keeping.step(3600.0, 9000, leads=True) == 20


def test_never_less_than_what_it_is_to_keep_is_kept() -> None:
    keeping = Compacting(300.0)
    keeping.step(0.0, 10, leads=True)
    assert keeping.step(299.0, 20, leads=True) is None
    assert keeping.step(301.0, 30, leads=True) == 10
