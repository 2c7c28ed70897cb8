"""What a broker is when it comes back: the scenarios of the resilience document, one row each."""

from __future__ import annotations

import json

import pytest

from pydanube.core.cluster.lifecycle import (
    TTL_SECONDS,
    BrokerLoss,
    BrokerMode,
    BrokerRegistration,
    BrokerState,
    Drain,
    Known,
    RegistrationDecision,
    RegistrationVerdict,
    enter_running,
    enter_starting,
    renewal_interval,
    retry_delay,
    serve_until,
)

HOME = "host-c:/data"
OLD, NEW = 11, 22  # sessions
ACTIVE = BrokerState(mode=BrokerMode.ACTIVE, reason="boot", session=OLD)
DEAD = BrokerLoss(session=OLD)
LONG_AGO = BrokerLoss(session=5)  # some other life


def entered(mode: str, reason: str, *, declared_dead: bool = False) -> RegistrationDecision:
    return RegistrationDecision(RegistrationVerdict.ENTER, BrokerMode(mode), reason, declared_dead)


# --- it runs, and its lease has run out -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scenario", "found", "entry"),
    [
        ("1: a glitch, the registration is still there", Known(ACTIVE, None, OLD, HOME), entered("active", "boot")),
        ("2: away longer than the TTL, declared dead", Known(ACTIVE, DEAD),
         entered("drained", "registration_expired", declared_dead=True)),
        ("the majority was away, however long", Known(ACTIVE, None), entered("active", "boot")),
        ("the same, with a record of an earlier life", Known(ACTIVE, LONG_AGO), entered("active", "boot")),
        ("a drained broker stays drained", Known(ACTIVE.drained("no_topics"), None), entered("drained", "no_topics")),
        ("the state was wiped", Known(None, None), entered("active", "boot")),
        ("drained by an operator, then declared dead", Known(ACTIVE.drained("drain_complete"), DEAD),
         entered("drained", "drain_complete", declared_dead=True)),
        ("declared dead while it drains", Known(ACTIVE.draining(Drain()), DEAD),
         entered("drained", "admin_unload", declared_dead=True)),
        ("declared dead twice", Known(ACTIVE.drained("stale_restart"), DEAD),
         entered("drained", "registration_expired", declared_dead=True)),
    ],
)  # fmt: skip
def test_a_running_broker_is_drained_only_if_it_was_declared_dead(
    scenario: str, found: Known, entry: RegistrationDecision
) -> None:
    assert enter_running(found, session=OLD) == entry


@pytest.mark.parametrize("lost", [None, DEAD])
def test_a_running_broker_whose_id_another_process_has_stops(lost: BrokerLoss | None) -> None:
    assert enter_running(Known(ACTIVE, lost, NEW, "elsewhere"), session=OLD).verdict is RegistrationVerdict.REPLACED


# --- it starts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scenario", "found", "entry"),
    [
        ("first boot", Known(), entered("active", "boot")),
        ("first boot beside a wiped state", Known(None, LONG_AGO), entered("active", "boot")),
        ("3a: restarted within the TTL", Known(ACTIVE, None, OLD, HOME), entered("active", "fast_restart")),
        ("3b: restarted after it was declared dead", Known(ACTIVE, DEAD),
         entered("drained", "stale_restart", declared_dead=True)),
        ("4: everything was down", Known(ACTIVE, None), entered("active", "full_cluster_restart")),
        ("4: the same, long after a life that was declared dead", Known(ACTIVE, LONG_AGO),
         entered("active", "full_cluster_restart")),
        ("stopped in order and back in time", Known(BrokerState(mode=BrokerMode.ACTIVE, session=OLD, has_left=True)),
         entered("active", "fast_restart")),
        ("stopped in order, back too late",
         Known(BrokerState(mode=BrokerMode.ACTIVE, session=OLD, has_left=True), DEAD),
         entered("drained", "stale_restart", declared_dead=True)),
        ("drained by an operator, restarted at once", Known(ACTIVE.drained("drain_complete"), None, OLD, HOME),
         entered("drained", "drain_complete")),
        ("drained by an operator, all restarted", Known(ACTIVE.drained("no_topics")), entered("drained", "no_topics")),
        ("draining goes on", Known(ACTIVE.draining(Drain())), entered("draining", "admin_unload")),
        ("drained for a stale restart, restarted again", Known(ACTIVE.drained("stale_restart"), None, OLD, HOME),
         entered("drained", "stale_restart")),
        ("drained by an operator, rebooted for longer than a lease", Known(ACTIVE.drained("no_topics"), DEAD),
         entered("drained", "no_topics", declared_dead=True)),
        ("joined, never activated, away for longer than a lease", Known(ACTIVE.drained("join"), DEAD),
         entered("drained", "join", declared_dead=True)),
    ],
)  # fmt: skip
def test_a_starting_broker_is_drained_only_if_it_was_declared_dead(
    scenario: str, found: Known, entry: RegistrationDecision
) -> None:
    assert enter_starting(found, home=HOME, join=False) == entry


def test_a_joining_broker_is_drained_at_its_first_start_and_what_it_was_at_later_ones() -> None:
    assert enter_starting(Known(), home=HOME, join=True) == entered("drained", "join")
    joined = BrokerState(mode=BrokerMode.DRAINED, reason="join", session=OLD)
    assert enter_starting(Known(joined), home=HOME, join=True) == entered("drained", "join")
    active = joined.activated("admin_activate")
    assert enter_starting(Known(active, None, OLD, HOME), home=HOME, join=True) == entered("active", "fast_restart")


def test_a_registration_from_another_directory_is_waited_for() -> None:
    for state in (None, ACTIVE):
        for lost in (None, DEAD):
            found = Known(state, lost, OLD, "host-d:/copy")
            assert enter_starting(found, home=HOME, join=False).verdict is RegistrationVerdict.WAIT


# --- times ----------------------------------------------------------------------------------------------------


def test_a_broker_serves_for_three_quarters_of_the_ttl_after_the_last_answered_renewal_was_sent() -> None:
    assert TTL_SECONDS == 32
    assert serve_until(100.0, 32.0) == 124.0
    assert serve_until(7.0, 3.0) == 9.25


def test_renewals_come_every_third_of_the_ttl_and_retries_back_off_to_five_seconds_at_most() -> None:
    assert renewal_interval(30.0) == 10.0
    assert [retry_delay(n, 32.0) for n in range(1, 7)] == [1, 2, 4, 5, 5, 5]
    assert retry_delay(10_000, 32.0) == 5
    # A shorter lease has the same ratios.
    assert [retry_delay(n, 3.2) for n in range(1, 5)] == pytest.approx([0.1, 0.2, 0.4, 0.5])


def test_a_glitch_of_fifteen_seconds_is_survived_wherever_it_falls() -> None:
    """Scenario 1 by arithmetic: the last renewal just before it, tries at 1, 2, 4, 5, 5 s after the first failure."""
    for last in range(-10, 1):
        at = last + renewal_interval(32.0)
        failures = 0
        while 0 <= at < 15:
            failures += 1
            at += retry_delay(failures, 32.0)
        assert at < last + 32


# --- what is stored -------------------------------------------------------------------------------------------


def test_values_come_back_as_they_were_written() -> None:
    registration = BrokerRegistration(
        broker_url="http://b:6650", connect_url="http://c:6650", admin_addr="b:50051", prom_exporter="b:9040",
        stream_url="danube://b:6651", session=2**63 - 1, home=HOME, lease=7,
    )  # fmt: skip
    assert BrokerRegistration.from_bytes(registration.to_bytes()) == registration
    assert json.loads(registration.to_bytes())["stream_url"] == "danube://b:6651"
    state = BrokerState(
        mode=BrokerMode.DRAINING,
        reason="admin_unload",
        session=3,
        drain=Drain(parallel_max=2, include=("a",), exclude=("b",)),
    )
    assert BrokerState.from_bytes(state.to_bytes()) == state
    back = ACTIVE.rejoined("rejoined", 3, 1_700_000_000_000)
    assert BrokerState.from_bytes(back.to_bytes()) == back
    assert b"rejoin" not in ACTIVE.to_bytes() and b"rejoins" not in back.activated("admin_activate").to_bytes()
    assert BrokerLoss.from_bytes(BrokerLoss(session=9, timestamp=4).to_bytes()) == BrokerLoss(session=9, timestamp=4)


def test_a_state_has_the_fields_of_the_document() -> None:
    stored = json.loads(ACTIVE.drained("registration_expired").to_bytes())
    assert (stored["mode"], stored["reason"]) == ("drained", "registration_expired")
    assert BrokerState.from_bytes(b'{"mode": "active"}') == BrokerState(mode=BrokerMode.ACTIVE)


@pytest.mark.parametrize("kind", [BrokerRegistration, BrokerState, BrokerLoss])
@pytest.mark.parametrize("value", [b"", b"null", b"[]", b"7", b'{"mode": "busy"}', b'{"session": "x"}', b"\xff"])
def test_foreign_values_are_nobodys(kind: type[BrokerRegistration | BrokerState | BrokerLoss], value: bytes) -> None:
    assert kind.from_bytes(value) is None


def test_a_drain_covers_what_is_included_and_not_excluded() -> None:
    assert Drain().covers("default")
    assert not Drain(exclude=("default",)).covers("default")
    assert Drain(include=("a",)).covers("a") and not Drain(include=("a",)).covers("b")
    assert not Drain(include=("a",), exclude=("a",)).covers("a")
