"""What a broker knows of its cluster, when it is told of changes out of turn."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pydanube.cluster.view import View
from pydanube.core import keys
from pydanube.core.names import BrokerId, TopicName
from pydanube.ports import Delete, Put
from pydanube.stores.metadata.memory import MemoryMetadataStore
from pydanube.stores.work.memory_clock import MemoryClock

TOPIC = TopicName("/default/orders")
OLD, NEW = BrokerId(2), BrokerId(3)


def view() -> View:
    clock = MemoryClock()
    return View(MemoryMetadataStore(clock), clock, ttl_seconds=32.0)


def put(broker: BrokerId) -> list[Put | Delete]:
    return [Put(keys.assignment(broker, TOPIC), b"null")]


def delete(broker: BrokerId) -> list[Put | Delete]:
    return [Delete(keys.assignment(broker, TOPIC))]


def test_an_older_assignment_that_is_heard_of_late_does_not_hide_who_has_the_topic() -> None:
    seen = view()
    seen.notice(put(NEW), 20)
    seen.notice(put(OLD), 15)
    assert seen.hosts == {TOPIC: NEW}
    seen.notice(delete(OLD), 20)
    assert seen.hosts == {TOPIC: NEW} and seen.assigned == {NEW: {TOPIC: 20}}


def test_the_owner_before_has_the_topic_again_when_only_the_newer_assignment_goes() -> None:
    seen = view()
    seen.notice(put(OLD), 15)
    seen.notice(put(NEW), 20)
    seen.notice(delete(NEW), 21)
    assert seen.hosts == {TOPIC: OLD}
    seen.notice(delete(OLD), 22)
    assert seen.hosts == {} and seen.assigned == {}


@given(st.lists(st.tuples(st.sampled_from([OLD, NEW, BrokerId(4)]), st.booleans()), max_size=12).flatmap(
    lambda changes: st.permutations(list(enumerate(changes, 1)))
))  # fmt: skip
def test_in_whatever_order_changes_are_heard_the_host_is_who_was_assigned_last(
    changes: list[tuple[int, tuple[BrokerId, bool]]],
) -> None:
    seen = view()
    for revision, (broker, there) in changes:
        seen.notice(put(broker) if there else delete(broker), revision)
        newest = max(((topics[TOPIC], owner) for owner, topics in seen.assigned.items()), default=None)
        assert seen.hosts.get(TOPIC) == (newest[1] if newest else None)
