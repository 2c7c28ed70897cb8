"""What a pipeline may be declared to be, when it runs, and what is said of how it is doing."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pydanube.core.pipelines.declaration import Declaration, next_start_us
from pydanube.core.pipelines.schedule import Cron, Every, seconds_of
from pydanube.core.pipelines.status import Health, PipelineState, PipelineStatus, RunOutcome, verdict
from pydanube.errors import ConfigError, DanubeError

SECOND = 1_000_000
LAKE: dict[str, Any] = {
    "name": "orders",
    "job": "lake",
    "follow": "30s",
    "freshness": "5m",
    "settings": {"topic": "/default/orders", "target": "s3://lake/tables", "token": {"from_file": "/run/token"}},
}


def us(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()) * SECOND


def text(found: int | None) -> str:
    assert found is not None
    return f"{datetime.fromtimestamp(found / SECOND, UTC):%Y-%m-%d %H:%M}"


# --- when -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cron", "after", "then"),
    [
        ("15 3 * * *", "2026-11-18 03:14:59", "2026-11-18 03:15"),
        ("15 3 * * *", "2026-11-18 03:15:00", "2026-11-19 03:15"),
        ("*/20 * * * *", "2026-12-31 23:41:00", "2027-01-01 00:00"),
        ("0 9-17/4 * * mon-fri", "2026-11-20 17:00:00", "2026-11-23 09:00"),
        ("0 0 29 2 *", "2096-03-01 00:00:00", "2104-02-29 00:00"),
        ("0 0 13 * fri", "2026-11-14 00:00:00", "2026-11-20 00:00"),  # either of the two days
        ("0 0 * * 7", "2026-11-18 00:00:00", "2026-11-22 00:00"),
        ("@daily", "2026-11-18 12:00:00", "2026-11-19 00:00"),
        ("5 0 1 jan,jul *", "2026-11-18 12:00:00", "2027-01-01 00:05"),
    ],
)
def test_cron_says_the_next_minute_in_utc(cron: str, after: str, then: str) -> None:
    assert text(Cron.parse(cron).next_us(us(after))) == then


@pytest.mark.parametrize(
    "cron", ["", "* * * *", "60 * * * *", "* 24 * * *", "* * 0 * *", "5-1 * * * *", "*/0 * * * *", "a b c d e"]
)
def test_what_is_no_cron_is_refused(cron: str) -> None:
    with pytest.raises(ConfigError):
        Cron.parse(cron)


def test_a_day_that_never_comes_is_refused() -> None:
    with pytest.raises(ConfigError, match="a day that comes"):
        Cron.parse("0 0 31 2 *")


@given(st.integers(0, 4_102_444_800), st.sampled_from(["*/7 */5 * * *", "0 0 29 2 *", "3 4 5-9 * tue", "1 2 */3 6 *"]))
@settings(max_examples=50, deadline=None)
def test_what_cron_says_is_later_on_a_minute_and_matches_its_fields(after: int, cron: str) -> None:
    parsed = Cron.parse(cron)
    found = parsed.next_us(after * SECOND)
    assert found is not None and found > after * SECOND and found % (60 * SECOND) == 0
    at = datetime.fromtimestamp(found / SECOND, UTC)
    assert at.minute in parsed.minutes and at.hour in parsed.hours and at.month in parsed.months
    assert parsed.next_us(found - SECOND) == found, "nothing between lies in the fields, or it had been said"


def test_slots_that_were_missed_are_made_up_for_by_one_run() -> None:
    daily = Declaration.parse({**LAKE, "follow": None, "cron": "@daily"})
    started = us("2026-11-10 00:00:05")
    assert text(daily.due_us(started)) == "2026-11-11 00:00"
    late = us("2026-11-18 12:00:00")
    assert text(daily.due_us(late)) == "2026-11-19 00:00"


def test_a_clock_that_went_back_does_not_put_a_run_off_for_long() -> None:
    hourly = Declaration.parse({**LAKE, "follow": None, "every": "1h"})
    now = us("2026-11-18 12:00:00")
    assert next_start_us(hourly, us("2030-01-01 00:00:00"), now) == now + 3600 * SECOND


@pytest.mark.parametrize(("written", "seconds"), [("30s", 30), ("5m", 300), ("2h", 7200), ("1d", 86_400), (45, 45)])
def test_times_are_written_with_their_unit(written: object, seconds: int) -> None:
    assert seconds_of("every", written) == seconds
    assert seconds_of("every", str(Every(seconds)).removeprefix("every ")) == seconds


@pytest.mark.parametrize("written", ["5 minutes", "-5m", "1s", "", True, None, 2.5, "9999999d"])
def test_what_is_no_time_is_refused(written: object) -> None:
    with pytest.raises(ConfigError):
        seconds_of("every", written)


# --- declarations ---------------------------------------------------------------------------------------------


def test_a_declaration_is_stored_as_it_was_written() -> None:
    made = Declaration.parse(LAKE)
    assert made.to_json() == {**LAKE, "changed_us": 0, "freshness": "5m"}
    assert Declaration.from_bytes(made.to_bytes()) == made
    assert made.job_settings["follow_seconds"] == 30


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"nam": "x"}, "did you mean name?"),
        ({"freshnes": "5m"}, "did you mean freshness?"),
        ({"every": "1h"}, "one of follow"),
        ({"follow": None}, "one of follow"),
        ({"job": ""}, "the job's name"),
        ({"name": "Orders"}, "small letters"),
        ({"name": "../x"}, "small letters"),
        ({"paused": "no"}, "true or false"),
        ({"settings": ["x"]}, "names and values"),
        ({"settings": {"follow_seconds": 5}}, "say `follow: 30s` instead"),
        ({"settings": {"x": {"from_file": "relative"}}}, "the whole path"),
        ({"settings": {"x": {"from_env": "NOT A NAME"}}}, "the name of a variable"),
        ({"settings": {"x": "y" * 70_000}}, "bytes at most"),
        ({"freshness": "soon"}, "a time such as"),
    ],
)
def test_a_mistake_in_a_declaration_is_said(change: dict[str, Any], said: str) -> None:
    with pytest.raises(DanubeError, match=said):
        Declaration.parse({**LAKE, **change})


@pytest.mark.parametrize(
    "settings",
    [
        {"token": "s3cr3t"},
        {"target_options": {"secret_key": "s3cr3t"}},
        {"catalog": {"s3.secret-access-key": "s3cr3t"}},
        {"catalog": {"credential": "s3cr3t"}},
        {"catalog": {"uri": "postgresql://lake:s3cr3t@db/lake"}},
        {"spark": {"spark.hadoop.fs.s3a.secret.key": "s3cr3t"}},
        {"spark": {"spark.ssl.keyPassword": 4711}},
        {"target_options": {"account_key": "s3cr3t"}},
        {"target": "https://host/x?sig=s3cr3t"},
        {"anything": "-----BEGIN PRIVATE KEY-----s3cr3t"},
        {"list": [{"password": "s3cr3t"}]},
    ],
)
def test_the_text_of_a_secret_is_refused_and_not_repeated(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="from_env") as refused:
        Declaration.parse({**LAKE, "settings": settings})
    assert "s3cr3t" not in str(refused.value) and "4711" not in str(refused.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"token": {"from_env": "DANUBE_TOKEN"}},
        {"token.file": "/run/token"},
        {"tls": {"key": "/etc/tls/key.pem"}},
        {"key": "order_id"},
        {"spark": {"spark.hadoop.fs.s3a.aws.credentials.provider": "org.x.Y", "spark.authenticate": True}},
        {"catalog": {"uri": "http://catalog:8181", "oauth2-server-uri": "http://x/token"}},
    ],
)
def test_what_only_sounds_like_a_secret_is_stored(settings: dict[str, Any]) -> None:
    assert Declaration.parse({**LAKE, "settings": settings}).settings == settings


def test_what_a_newer_version_stored_is_not_read_as_something_else() -> None:
    assert Declaration.from_bytes(b'{"name":"x","job":"lake","follow":"5s","settings":{},"shards":4}') is None
    assert Declaration.from_bytes(b"not json") is None
    assert PipelineStatus.from_bytes(b'{"state":"dreaming"}') is None
    assert PipelineStatus.from_bytes(b'{"state":"running","colour":"red","runs":3}') == PipelineStatus(
        state=PipelineState.RUNNING, runs=3
    )
    assert PipelineStatus.from_bytes(b'{"runs":"many"}') is None


def test_a_status_is_read_as_it_was_written() -> None:
    status = PipelineStatus(
        state=PipelineState.RUNNING, outcome=RunOutcome.FAILED, error="no", fresh_us=5, quarantined_total=2
    )
    assert PipelineStatus.from_bytes(status.to_bytes()) == status


# --- how it is doing --------------------------------------------------------------------------------------------

NOW = us("2026-11-18 12:00:00")
DECLARED = Declaration.parse({**LAKE, "changed_us": NOW - 3600 * SECOND})
FRESH = PipelineStatus(state=PipelineState.RUNNING, started_us=NOW - 1000, fresh_us=NOW - 20 * SECOND, runs=1)


@pytest.mark.parametrize(
    ("status", "holder", "health"),
    [
        (FRESH, "a", Health.OK),
        (replace(FRESH, fresh_us=NOW - 301 * SECOND), "a", Health.STALE),
        (replace(FRESH, fresh_us=None), "a", Health.STALE),  # the goal has passed since it was declared
        (replace(FRESH, failures=1, outcome=RunOutcome.FAILED, error="boom"), "a", Health.FAILING),
        (replace(FRESH, failures=2, outcome=RunOutcome.STOPPED, error="boom"), "a", Health.FAILING),
        (replace(FRESH, failures=1, outcome=RunOutcome.NOT_GOOD, error="3 missing"), "a", Health.FAILING),
        (FRESH, "", Health.UNSUPERVISED),
        (None, "", Health.UNSUPERVISED),
        (None, "a", Health.UNKNOWN),
        (replace(FRESH, state=PipelineState.RELEASED, since_us=NOW - SECOND), "", Health.UNKNOWN),
        (replace(FRESH, state=PipelineState.WAITING, outcome=RunOutcome.LOST), "a", Health.UNKNOWN),
    ],
)
def test_only_what_is_known_to_be_well_is_ok(status: PipelineStatus | None, holder: str, health: Health) -> None:
    found = verdict(DECLARED, status, holder, NOW)
    assert found.health is health, found
    if status is not None and status.error:
        assert status.error in found.sentence


def test_a_pipeline_that_is_paused_says_so_and_what_went_wrong_before() -> None:
    found = verdict(
        replace(DECLARED, paused=True), replace(FRESH, failures=1, outcome=RunOutcome.FAILED, error="boom"), "a", NOW
    )
    assert found.health is Health.PAUSED and "boom" in found.sentence


@given(
    st.builds(
        PipelineStatus,
        state=st.sampled_from(PipelineState),
        outcome=st.none() | st.sampled_from(RunOutcome),
        failures=st.integers(0, 3),
        fresh_us=st.none() | st.integers(NOW - 10**10, NOW + 10**9),
        since_us=st.integers(NOW - 10**10, NOW),
    ),
    st.sampled_from(["", "a"]),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_nothing_that_failed_is_stale_or_has_no_supervisor_is_ever_ok(
    status: PipelineStatus, holder: str, paused: bool
) -> None:
    found = verdict(replace(DECLARED, paused=paused), status, holder, NOW)
    if found.health is Health.OK:
        assert not status.failures and holder and not paused
        assert status.fresh_us is not None and NOW - status.fresh_us <= 300 * SECOND
