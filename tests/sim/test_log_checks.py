"""Which failures a log may stop for, by the failure table of ADR 1."""

from __future__ import annotations

import pytest

from pydanube.testing.disk_faults import Told
from tools.sim.log_checks import stop_is_justified

SEGMENT, NEW_SEGMENT = "wal/default/t/0001/0000-ab.wal", "wal/default/t/0001/0000-ab.wal.tmp"
JOURNAL, SPARE = "journal/0000.journal", "journal/spare.tmp"


@pytest.mark.parametrize(
    "told",
    [
        [],
        [
            Told("write", SEGMENT, "EMFILE"),
            Told("sync_directory", "wal", "EMFILE"),
            Told("create", NEW_SEGMENT, "EMFILE"),
        ],
        [Told("write", SEGMENT, "ENOSPC"), Told("write", NEW_SEGMENT, "ENOSPC"), Told("create", SPARE, "ENOSPC")],
        [Told("sync", SEGMENT, "ENOENT")],
        [Told("sync", JOURNAL, "EIO")],
        [Told("sync", JOURNAL, "EIO"), Told("sync", SPARE, "EIO", again=True)],
        [Told("sync", SPARE, "EIO")],
        [Told("write", NEW_SEGMENT, "EIO")],
        [Told("sync", "wal/default/t/0001/wal.ckpt.tmp", "EIO"), Told("read", SEGMENT, "EIO")],
        [Told("write", JOURNAL, "ENOSPC")],
    ],
)
@pytest.mark.parametrize("one", [True, False])
def test_a_log_goes_on(told: list[Told], one: bool) -> None:
    assert not stop_is_justified(told, one_synced_topic=one)


@pytest.mark.parametrize(
    "told",
    [
        [Told("sync", JOURNAL, "EIO"), Told("sync", JOURNAL, "EIO")],
        [Told("sync", JOURNAL, "EIO"), Told("write", SPARE, "ENOSPC")],
        [Told("write", JOURNAL, "ENOSPC"), Told("write", SPARE, "ENOSPC")],
        [Told("sync", NEW_SEGMENT, "EIO"), Told("sync", NEW_SEGMENT, "EIO")],
        [Told("rename", SEGMENT, "lost")],
        [Told("sync", SEGMENT, "EIO"), Told("write", NEW_SEGMENT, "ENOSPC")],
        [Told("sync_directory", "wal/default/t/0001", "EIO")],
        [Told("sync", SEGMENT, "EIO"), Told("write", SEGMENT, "EIO")],
    ],
)
@pytest.mark.parametrize("one", [True, False])
def test_a_log_may_stop(told: list[Told], one: bool) -> None:
    assert stop_is_justified(told, one_synced_topic=one)


def test_one_failed_sync_of_a_segment_stops_only_a_log_whose_journal_may_vouch_for_it() -> None:
    told = [Told("sync", SEGMENT, "EIO")]
    assert not stop_is_justified(told, one_synced_topic=True)
    assert stop_is_justified(told, one_synced_topic=False)
