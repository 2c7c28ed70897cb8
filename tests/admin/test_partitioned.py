"""The rows of a topic's partitions as one: sums, the worst of them, and what is not known of it."""

from __future__ import annotations

from collections.abc import Sequence

from pydanube.admin import values
from pydanube.admin.partitioned import connection_groups, partition_count, subscription_groups


def subscription(
    topic: str, lag: int, course: str, broker: int = 1, hope: float | None = None
) -> values.SubscriptionState:
    return values.SubscriptionState(
        topic=topic,
        name="audit",
        lag_messages=lag,
        lag_seconds=lag / 10,
        catch_up_seconds=hope,
        course=course,
        broker_id=broker,
        consumers=2,
        unacked=1,
    )


def of(states: Sequence[values.SubscriptionState], unanswered: Sequence[str] = ()) -> values.SubscriptionList:
    return values.SubscriptionList(subscriptions=states, unanswered=unanswered)


PARTS = [
    subscription(f"/default/clicks-part-{number}", 10 * number, "keeping_up", 1 + number % 2) for number in (2, 0, 1)
]
ORDERS = subscription("/default/orders", 7, "standing")


def test_a_subscription_of_a_partitioned_topic_is_one_row_furthest_behind_first() -> None:
    one, alone = subscription_groups(of([ORDERS, *PARTS]))
    assert (one.state.topic, one.state.lag_messages, one.state.lag_seconds) == ("/default/clicks", 30, 2.0)
    assert (one.state.consumers, one.state.unacked, one.state.course) == (2, 3, "keeping_up")
    assert [part.topic[-1] for part in one.parts] == ["0", "1", "2"] and partition_count(one) == "3"
    assert one.state.broker_id == 0  # several
    assert (alone.state, alone.parts, partition_count(alone)) == (ORDERS, (), "")


def test_a_whole_is_as_bad_as_its_worst_partition_and_caught_up_only_when_all_are() -> None:
    some = [subscription("/a/t-part-0", 5, "catching_up", hope=3.0), subscription("/a/t-part-1", 0, "caught_up")]
    [one] = subscription_groups(of(some))
    assert (one.state.course, one.state.catch_up_seconds) == ("catching_up", 3.0)
    [one] = subscription_groups(of([*some, subscription("/a/t-part-2", 1, "falling_behind")]))
    assert one.state.course == "falling_behind" and not one.state.HasField("catch_up_seconds")
    blocked = values.SubscriptionState(topic="/a/t-part-2", name="audit", is_blocked=True, course="caught_up")
    [one] = subscription_groups(of([*some, blocked]))
    assert one.state.is_blocked and not one.state.HasField("lag_messages")


def test_the_lag_is_unknown_while_nobody_speaks_for_a_partition() -> None:
    [alone, one] = subscription_groups(of([*PARTS[:2], ORDERS], ["/default/other", "/default/clicks-part-1"]))[::-1]
    assert (one.unanswered, one.lag_at_least, partition_count(one)) == (1, 20, "2 of 3")
    assert not one.state.HasField("lag_messages") and not one.state.HasField("catch_up_seconds")
    assert one.state.course == "unknown" and not one.state.HasField("lag_seconds")
    assert alone.state == ORDERS and alone.unanswered == 0


def connection(topic: str, name: str, port: int, broker: int) -> values.ConnectionState:
    return values.ConnectionState(
        kind="consumer",
        name=name,
        topic=topic,
        subscription="audit",
        address=f"10.0.0.5:{port}",
        since_us=port,
        unacked=1,
        rate=2.5,
        broker_id=broker,
    )


def test_a_consumer_of_several_partitions_is_one_row_and_of_one_partition_that_partition() -> None:
    parts = [connection(f"/default/clicks-part-{number}", "worker", 50 + number, 1 + number % 2) for number in range(3)]
    single, other = connection("/default/clicks-part-2", "another", 60, 2), connection("/default/orders", "w", 70, 1)
    one, *rest = connection_groups(values.ConnectionList(connections=[*parts, single, other]))
    assert (one.state.topic, one.state.name, one.state.address) == ("/default/clicks", "worker", "10.0.0.5")
    assert (one.state.since_us, one.state.unacked, one.state.rate, partition_count(one)) == (50, 3, 7.5, "3")
    assert [(group.state, group.parts) for group in rest] == [(single, ()), (other, ())]
    [one] = connection_groups(
        values.ConnectionList(connections=parts[:2], unanswered=["/default/clicks-part-2", "/default/orders"])
    )
    assert partition_count(one) == "2 of 3"
    assert not one.state.HasField("unacked") and not one.state.HasField("rate")
