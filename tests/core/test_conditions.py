"""What is wrong is said in words, once it is so for as long as the alert waits, and unknown stays unknown."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import yaml

from pydanube.core.cluster.cluster_conditions import DRAINED, BrokerFacts, ClusterFacts, Life, of_cluster
from pydanube.core.cluster.conditions import (
    BrokerNumbers,
    BrokerWatch,
    LatencyBuckets,
    OrphanedRanges,
    Severity,
    SubscriptionNumbers,
)
from pydanube.core.dispatch.behind import LagCourse, Trend

NOW_MS = 1_700_000_000_000
ALERTS = Path(__file__).resolve().parents[2] / "deploy" / "alerts.yml"
NOT_OURS = {"DanubeBrokersAbsent"}  # Prometheus has no targets: the product cannot know


def subscription(**numbers: int) -> SubscriptionNumbers:
    known = dict.fromkeys(SubscriptionNumbers._fields[2:], 0) | numbers
    return SubscriptionNumbers("/default/orders", "billing", **known)


def looks(
    watch: BrokerWatch, numbers: SubscriptionNumbers | BrokerNumbers, seconds: float, *, start: float = 0.0
) -> float:
    """The same again and again, every ten seconds. Returns when the last look was."""
    at = start
    broker = numbers if isinstance(numbers, BrokerNumbers) else BrokerNumbers()
    subscriptions = [numbers] if isinstance(numbers, SubscriptionNumbers) else []
    while at <= start + seconds:
        watch.look(at, NOW_MS + int(at * 1000), broker, subscriptions)
        at += 10
    return at - 10


def names(watch: BrokerWatch) -> list[str]:
    return [each.name for each in watch.conditions]


# --- one broker ------------------------------------------------------------------------------------------


def test_a_subscription_lags_only_when_it_stays_far_behind() -> None:
    watch = BrokerWatch()
    at = looks(watch, subscription(lag=1_001), 290)
    assert names(watch) == []
    at = looks(watch, subscription(lag=1_001), 10, start=at + 10)
    assert names(watch) == ["DanubeSubscriptionLagging"]
    (condition,) = watch.conditions
    assert condition.since_ms == NOW_MS and "1,001 messages behind" in condition.sentence
    assert condition.runbook == "docs/runbooks/DanubeSubscriptionLagging.md"
    looks(watch, subscription(lag=1_000), 0, start=at + 10)
    assert names(watch) == []


def test_a_subscription_with_consumers_to_which_nothing_is_delivered_is_stuck_and_an_idle_one_is_not() -> None:
    watch = BrokerWatch()
    at = looks(watch, subscription(lag=7, consumers=1, delivered=50), 890)
    assert names(watch) == []
    looks(watch, subscription(lag=7, consumers=1, delivered=50), 30, start=at + 10)
    assert names(watch) == ["DanubeSubscriptionStuck"]
    assert watch.conditions[0].severity is Severity.CRITICAL
    for healthy in (
        subscription(lag=7, consumers=1, delivered=51),
        subscription(lag=0, consumers=1, delivered=50),
        subscription(lag=7, consumers=0, delivered=50),
    ):
        idle = BrokerWatch()
        looks(idle, subscription(lag=7, consumers=1, delivered=50), 600)
        looks(idle, healthy, 0, start=610)
        looks(idle, subscription(lag=7, consumers=1, delivered=healthy.delivered), 600, start=620)
        assert names(idle) == []


def test_dead_letters_and_ack_timeouts_are_told_while_they_grow_and_not_for_ever() -> None:
    watch = BrokerWatch()
    looks(watch, subscription(delivered=100), 100)
    at = looks(watch, subscription(delivered=200, dead_lettered=3, timed_out=20), 300, start=110)
    assert names(watch) == ["DanubeAckTimeouts", "DanubeDeadLettersGrowing"]
    assert "3 messages became dead letters" in watch.conditions[1].sentence
    looks(watch, subscription(delivered=900, dead_lettered=3, timed_out=20), 700, start=at + 10)
    assert names(watch) == []


def test_counters_that_began_anew_are_no_growth() -> None:
    watch = BrokerWatch()
    at = looks(watch, subscription(dead_lettered=50, timed_out=9), 700)
    looks(watch, subscription(dead_lettered=1), 100, start=at + 10)
    assert names(watch) == []


def test_what_concerns_the_broker_itself() -> None:
    for numbers, name in (
        (BrokerNumbers(may_serve=False), "DanubeBrokerFenced"),
        (BrokerNumbers(lease_age_seconds=17, lease_ttl_seconds=32), "DanubeLeaseOld"),
        (BrokerNumbers(metadata_size_bytes=60, metadata_quota_bytes=100), "DanubeMetadataFilling"),
        (BrokerNumbers(disk_free_bytes=9, disk_used_bytes=91), "DanubeDiskNearlyFull"),
        (BrokerNumbers(log_size_bytes=91, log_limit_bytes=100), "DanubeLogNearlyFull"),
        (BrokerNumbers(upload_lag_seconds=301), "DanubeUploadStalled"),
        (BrokerNumbers(unopened={"/default/a": "no such file"}), "DanubeTopicNotOpen"),
    ):
        watch = BrokerWatch()
        looks(watch, numbers, 10)
        assert names(watch) == [name]


def test_nothing_is_said_of_what_is_not_known() -> None:
    watch = BrokerWatch()
    looks(watch, BrokerNumbers(), 1_000)
    assert names(watch) == []


def test_a_fenced_past_and_a_damaged_object_are_told_for_some_minutes() -> None:
    watch = BrokerWatch()
    looks(watch, BrokerNumbers(), 100)
    at = looks(watch, BrokerNumbers(fenced=1, object_errors=2), 60, start=110)
    assert names(watch) == ["DanubeBrokerFenced", "DanubeObjectDamaged"]
    looks(watch, BrokerNumbers(fenced=1, object_errors=2), 700, start=at + 10)
    assert names(watch) == []


def test_percentiles_are_of_the_last_minutes_and_not_since_the_start() -> None:
    bounds = (1.0, 10.0, 100.0)
    watch = BrokerWatch()
    watch.look(0, NOW_MS, BrokerNumbers(commits=LatencyBuckets(bounds, (0, 1_000_000, 0, 0))), [])
    watch.look(10, NOW_MS, BrokerNumbers(commits=LatencyBuckets(bounds, (0, 1_000_000, 100, 0))), [])
    assert watch.commits.p50 is not None and 10 < watch.commits.p50 < 100
    assert LatencyBuckets(bounds, (0, 0, 0, 0)).quantile(0.5) is None
    assert LatencyBuckets(bounds, (0, 0, 0, 5)).quantile(0.5) == 100.0


# --- the cluster -----------------------------------------------------------------------------------------


def broker(number: int, life: Life = Life.ANSWERS, **named: object) -> BrokerFacts:
    known: dict[str, object] = {"mode": "active"} | named
    return BrokerFacts(broker=number, address=f"host{number}:6650", life=life, **known)  # type: ignore[arg-type]


def conditions(*brokers: BrokerFacts, unassigned: tuple[str, ...] = (), leader: bool = True) -> dict[str, str]:
    return {each.name: each.sentence for each in of_cluster(ClusterFacts(NOW_MS, brokers, leader, unassigned))}


def test_all_is_well() -> None:
    assert conditions(broker(1), broker(2)) == {}


def test_a_broker_that_does_not_answer_is_named_with_since_when_and_what_it_has() -> None:
    away = broker(3, Life.SILENT, since_ms=NOW_MS - 12_000, topics=5, lease_seconds=32.0)
    found = conditions(broker(1), away)
    down = "broker host3:6650 does not answer since 22:13:08Z (12 s); it has 5 topics"
    assert found["DanubeBrokerDown"].startswith(down)
    assert "5 topics have no server: 5 of broker host3:6650, which does not answer" in found["DanubeTopicsUnassigned"]
    assert found["DanubeOrphanRange"] == (
        "messages that broker host3:6650 had not uploaded wait to be rescued from its disk: how many is not known"
    )
    told = conditions(broker(1), replace(away, not_uploaded_seconds=22.4))["DanubeOrphanRange"]
    assert told.endswith("wait to be rescued from its disk: those of about its last 22 s")
    assert "DanubeOrphanRange" not in conditions(broker(1), replace(away, topics=0))


def test_a_broker_that_stopped_in_order_is_a_warning_and_one_that_died_is_critical() -> None:
    (stopped,) = of_cluster(ClusterFacts(NOW_MS, [broker(1), broker(2, Life.STOPPED)], True))
    (died,) = of_cluster(ClusterFacts(NOW_MS, [broker(1), broker(2, Life.GONE)], True))
    assert (stopped.severity, died.severity) == (Severity.WARNING, Severity.CRITICAL)


def test_what_waits_to_be_rescued_is_counted_as_up_to_and_says_whose_disk_has_it() -> None:
    orphan = OrphanedRanges("/default/orders", 1, 22_040, (3,))
    found = conditions(broker(1, orphans=[orphan]), broker(3, Life.GONE))
    assert "up to 22,040 messages of 1 topic (/default/orders)" in found["DanubeOrphanRange"]
    assert "broker host3:6650" in found["DanubeOrphanRange"]
    for life, todo in ((Life.GONE, "start that broker again"), (Life.ANSWERS, "it is back and brings them")):
        told = of_cluster(ClusterFacts(NOW_MS, [broker(1, orphans=[orphan]), broker(3, life)], True))
        assert [each.todo[: len(todo)] for each in told if each.name == "DanubeOrphanRange"] == [todo]


def test_drained_brokers_are_a_warning_until_no_active_one_is_left() -> None:
    drained = broker(2, mode="drained", reason="stale_restart")
    (warning,) = of_cluster(ClusterFacts(NOW_MS, [broker(1), drained], True))
    (critical,) = of_cluster(ClusterFacts(NOW_MS, [drained], True))
    assert (warning.severity, critical.severity) == (Severity.WARNING, Severity.CRITICAL)
    assert "stale_restart" in warning.sentence


def test_a_broker_that_begins_anew_again_and_again_is_noticed() -> None:
    starts = [NOW_MS - minutes * 60_000 for minutes in (5, 10, 20, 90)]
    assert "3 times in the last hour" in conditions(broker(1, starts_ms=starts))["DanubeBrokerRestarts"]
    assert conditions(broker(1, starts_ms=starts[1:])) == {}


def test_the_worst_comes_first() -> None:
    found = of_cluster(
        ClusterFacts(NOW_MS, [broker(1), broker(2, mode="drained"), broker(3, Life.GONE)], False, ("/default/a",))
    )
    severities = [each.severity for each in found]
    assert severities == sorted(severities, key=lambda each: each is not Severity.CRITICAL)
    assert {"DanubeNoLeader", "DanubeTopicsUnassigned", DRAINED} <= {each.name for each in found}


def test_every_alert_is_evaluated_by_the_product_too() -> None:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"]} - NOT_OURS
    folder = ALERTS.parents[1] / "src/pydanube/core/cluster"
    files = (folder / "conditions.py", folder / "cluster_conditions.py", folder.parent / "pipelines/conditions.py")
    source = "".join(file.read_text() for file in files)
    missing = [name for name in alerts if f'"{name}"' not in source]
    assert missing == []


# --- how late --------------------------------------------------------------------------------------------


def test_the_rate_of_the_last_minute_says_when_it_will_have_caught_up() -> None:
    trend = Trend()
    for second, lag in zip(itertools.count(0, 10), (1_000, 900, 800), strict=False):
        trend.look(second, lag)
    course, seconds = trend.catch_up(20, 800)
    assert course is LagCourse.CATCHING_UP and seconds == 80
    assert str(trend.catch_up(20, 800)) == "at this rate it has caught up in about 80 s"
    assert trend.catch_up(20, 1_200).course is LagCourse.FALLING_BEHIND
    assert trend.catch_up(20, 1_000).course is LagCourse.STANDING
    assert trend.catch_up(20, 0).course is LagCourse.CAUGHT_UP


def test_messages_that_came_a_moment_ago_are_no_trend() -> None:
    trend = Trend()
    trend.look(0, 0)
    assert trend.catch_up(10, 3).course is LagCourse.FALLING_BEHIND
    assert trend.catch_up(10, 3, 0.2).course is LagCourse.KEEPING_UP
    assert trend.catch_up(10, 3, 8.0).course is LagCourse.FALLING_BEHIND
    assert trend.catch_up(10, 0, 0.0).course is LagCourse.CAUGHT_UP


def test_one_look_is_no_direction() -> None:
    trend = Trend()
    assert trend.catch_up(0, 5).course is LagCourse.UNKNOWN
    trend.look(0, 5)
    assert trend.catch_up(0, 5).course is LagCourse.UNKNOWN
