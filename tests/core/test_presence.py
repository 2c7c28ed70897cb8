"""Who was there in the last day is remembered, and what changes is told once."""

from __future__ import annotations

from pydanube.core.cluster.cluster_conditions import STALE_MS
from pydanube.core.cluster.lifecycle import BrokerMode, BrokerRegistration, BrokerState
from pydanube.core.cluster.presence import Attendance, Happening, Presence, PresenceChange
from pydanube.core.names import BrokerId

A, B = BrokerId(1), BrokerId(2)
TTL = 32.0


def registration(session: int = 7) -> BrokerRegistration:
    return BrokerRegistration(
        broker_url="http://host:6650",
        connect_url="",
        admin_addr="",
        prom_exporter="",
        stream_url="",
        session=session,
        home="",
    )


class Story:
    """A leader's records, as it would write them."""

    def __init__(self) -> None:
        self.attendance = Attendance(TTL)
        self.records: dict[BrokerId, Presence] = {}
        self.told: list[str] = []

    def step(
        self, seconds: float, *alive: BrokerId, states: dict[BrokerId, BrokerState] | None = None, session: int = 7
    ) -> list[PresenceChange]:
        changes = list(
            self.attendance.step(
                seconds,
                int(seconds * 1000),
                alive={broker: registration(session) for broker in alive},
                states=states or {},
                records=self.records,
                topics={A: ["/default/a", "/default/b"]},
            )
        )
        for change in changes:
            self.told += [change.kind] if change.kind else []
            if change.record is None:
                del self.records[change.broker]
            else:
                assert Presence.from_bytes(change.record.to_bytes()) == change.record
                self.records[change.broker] = change.record
        return changes


def test_a_broker_that_dies_stays_listed_for_a_day_and_is_told_once() -> None:
    story = Story()
    story.step(0, A, B)
    assert story.step(1, A, B) == []
    (gone,) = story.step(60, B)
    assert gone.kind == "died" and "with 2 topics" in gone.sentence
    silent = story.records[A].gone_ms
    assert silent == 60_000 - int(TTL * 2000 / 3)  # it missed the renewal at a third of its lease
    assert story.step(61, B) == [] and story.step((silent + STALE_MS) / 1000 - 1, B) == []
    story.step((silent + STALE_MS) / 1000, B)
    assert A not in story.records
    assert story.told == ["came", "came", "died"]


def test_one_that_stopped_in_order_did_not_die() -> None:
    story = Story()
    story.step(0, A)
    left = BrokerState(mode=BrokerMode.ACTIVE, has_left=True)
    (gone,) = story.step(5, states={A: left})
    assert gone.kind == "stopped" and story.records[A].in_order
    assert story.records[A].gone_ms == 5_000


def test_a_broker_is_not_said_to_be_gone_before_it_came() -> None:
    story = Story()
    story.step(50, A)
    story.step(52)
    assert story.records[A].gone_ms == 50_000


def test_a_new_leader_gives_brokers_that_it_has_not_seen_the_time_of_a_lease() -> None:
    story = Story()
    story.step(0, A, B)
    story.attendance = Attendance(TTL)
    assert story.step(100, B) == []
    assert story.step(100 + TTL - 1, B) == []
    assert [each.kind for each in story.step(100 + TTL, B)] == ["died"]


def crashed(times: int) -> dict[BrokerId, BrokerState]:
    return {A: BrokerState(mode=BrokerMode.ACTIVE, crashes=times)}


def test_starts_that_follow_no_orderly_stop_are_counted() -> None:
    story = Story()
    story.step(0, A)
    story.step(10)
    story.step(20, A, session=8, states=crashed(1))
    (anew,) = story.step(30, A, session=9, states=crashed(2))
    assert "began anew, without an orderly stop" in anew.sentence
    assert story.records[A].starts_ms == (20_000, 30_000) and story.records[A].gone_ms is None
    for second in range(40, 400, 10):
        story.step(second, A, session=second, states=crashed(second))
    assert len(story.records[A].starts_ms) == 10


def test_orderly_restarts_are_not_counted_whether_or_not_the_leader_saw_them_stop() -> None:
    story = Story()
    story.step(0, A)
    story.step(10, states={A: BrokerState(mode=BrokerMode.ACTIVE, has_left=True)})
    (back,) = story.step(20, A, session=8)
    (unseen,) = story.step(30, A, session=9)
    assert "is back" in back.sentence and "was restarted, in order" in unseen.sentence
    assert story.records[A].starts_ms == ()


def test_a_broker_that_is_drained_or_activated_is_told() -> None:
    story = Story()
    story.step(0, A, states={A: BrokerState(mode=BrokerMode.ACTIVE)})
    (drained,) = story.step(5, A, states={A: BrokerState(mode=BrokerMode.DRAINED, reason="stale_restart")})
    assert drained.sentence == "broker host:6650 is drained (stale_restart)"
    (active,) = story.step(6, A, states={A: BrokerState(mode=BrokerMode.ACTIVE, reason="admin_activate")})
    assert active.kind == "active"


def test_values_that_are_none_of_ours_are_none() -> None:
    for value in (b"", b"null", b"[]", b"{}", b'{"address": 1}'):
        assert Presence.from_bytes(value) is None and Happening.from_bytes(value) is None
    happening = Happening(time_ms=5, kind="order", sentence="Grüße", by="10.0.0.1:99")
    assert Happening.from_bytes(happening.to_bytes()) == happening
