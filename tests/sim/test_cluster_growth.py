"""What clients that came, waited and left leave behind in a broker: a leak of each kind is seen by `growth`.

Nothing fails in these runs, so they are short, and nothing but the leak can be what was found.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from pydanube.broker.base_topic import BaseTopic
from pydanube.broker.registrations import TopicProducers
from pydanube.broker.topic import Topic
from pydanube.log.topic_log import TopicLog
from pydanube.ports import Disk, Write
from pydanube.testing.cluster import Cluster
from tests.sim.planted_log import exchange, readers_that_gave_up_are_remembered
from tools.sim.cluster_sim import Outcome, planned, run_seed

pytestmark = pytest.mark.slow

SEED = 3
Tweak = Callable[[Cluster], None] | None


def a_task_waits_for_ever(patch: pytest.MonkeyPatch) -> Tweak:
    unsubscribe = BaseTopic.unsubscribe

    async def leaky(self: Any, name: Any) -> None:
        self.leaked = [*getattr(self, "leaked", []), asyncio.create_task(asyncio.Event().wait(), name="leaked")]
        await unsubscribe(self, name)

    patch.setattr(BaseTopic, "unsubscribe", leaky)
    return None


def a_future_is_remembered(patch: pytest.MonkeyPatch) -> Tweak:
    readers_that_gave_up_are_remembered(patch)
    return None


def a_session_is_opened_for_every_visit(patch: pytest.MonkeyPatch) -> Tweak:
    wait_beyond = Topic.wait_beyond
    producers = count(1_000_000)

    async def leaky(self: Topic, offset: int, seconds: float) -> None:
        assert isinstance(self.log, TopicLog)
        await self.log.open_session(next(producers))
        await wait_beyond(self, offset, seconds)

    patch.setattr(Topic, "wait_beyond", leaky)
    return None


def a_handle_is_kept(patch: pytest.MonkeyPatch) -> Tweak:
    patch.setattr(TopicProducers, "remove", lambda self, identity, registered: None)
    exchange(patch, TopicProducers, "_alive", ("self._forget(identity)", "pass"))
    return None


def a_file_stays_open(patch: pytest.MonkeyPatch) -> Tweak:
    """A file is written for whoever leaves, and neither synced nor removed."""
    disks: list[Disk] = []
    names = count()
    unsubscribe = BaseTopic.unsubscribe

    async def leaky(self: Any, name: Any) -> None:
        for disk in disks[-3:]:  # the newest of each broker; nothing is restarted here
            path = f"left-{next(names)}"
            await disk.create(path)
            await disk.write([Write(path, 0, [b"gone"])], sync=False)
        await unsubscribe(self, name)

    def keep(disk: Disk) -> Disk:
        disks.append(disk)
        return disk

    def tweak(cluster: Cluster) -> None:
        cluster.wrap_disk = keep

    patch.setattr(BaseTopic, "unsubscribe", leaky)
    return tweak


LEAKS: dict[str, Callable[[pytest.MonkeyPatch], Tweak]] = {
    "task leaked": a_task_waits_for_ever,
    "waiters": a_future_is_remembered,
    "sessions": a_session_is_opened_for_every_visit,
    "producers": a_handle_is_kept,
    "open files": a_file_stays_open,
}


def run_without_faults(tweak: Tweak) -> Outcome:
    return run_seed(SEED, tweak=tweak, leave_out=range(len(planned(SEED))))


def test_nothing_grows_where_nothing_is_left() -> None:
    assert run_without_faults(None).problems == []


@pytest.mark.parametrize("what", LEAKS)
def test_a_leak_is_found_by_what_it_leaves(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = run_without_faults(LEAKS[what](monkeypatch))
    found = [violation.what for violation in outcome.violations if violation.rule == "growth"]
    assert found and all(what in text for text in found), found
