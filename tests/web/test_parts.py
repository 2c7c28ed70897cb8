"""The parts of the web admin that need no broker: words for numbers, pictures, answers that are kept for a moment."""

from __future__ import annotations

import asyncio
import json
import math
import re

import pytest

from pydanube.admin.gateway import Cached
from pydanube.admin.series import Series
from pydanube.errors import Unreachable
from pydanube.telemetry import Telemetry
from pydanube.web import formats
from pydanube.web.charts import ChartPart, Line, Tier, chart, nice, spark, tier_bar
from pydanube.web.operations import PHASES, Operation, Operations
from pydanube.web.sends import log_of, quantile, sends_to
from tests.support import run, settle

# --- words ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (formats.count(1_234_567), "1,234,567"),
        (formats.count(None), "–"),
        (formats.rate(0.0), "0"),
        (formats.rate(0.04), "0.04"),
        (formats.rate(3.14), "3.1"),
        (formats.rate(1_500.4), "1,500"),
        (formats.size(999), "999 B"),
        (formats.size(1_200_000), "1.2 MB"),
        (formats.duration(0.25), "250 ms"),
        (formats.duration(90), "2 min"),
        (formats.offsets(0, 10), "0…9"),
        (formats.offsets(5, 5), "none"),
        (formats.happening("died", "broker 7 is gone"), "Broker 7 is gone"),
        (
            formats.happening("order", "UnloadTopic topic=/a/b to_broker=7 reason=too much"),
            "Unload topic: topic /a/b, to broker 7, reason too much",
        ),
        (formats.happening("order", "Rebalance"), "Rebalance"),
        (formats.with_addresses("by 1519554345483687871, 12345", {"1519554345483687871": "h:1"}), "by h:1, 12345"),
        (formats.moment(0), "1970-01-01 00:00:00.000Z"),
        (formats.moment(1 << 62), f"{1 << 62} µs"),
    ],
)
def test_numbers_are_written_as_people_read_them(said: str, text: str) -> None:
    assert said == text


@pytest.mark.parametrize(
    ("data", "size", "mode", "kind"),
    [
        (b'{"a": 1}', 8, "auto", "json"),
        (b"[1, 2", 5, "auto", "text"),
        (b"42", 2, "auto", "text"),  # JSON too, but nobody calls it that
        ("grüß".encode()[:4], 6, "auto", "text"),  # cut through a character
        (b"\x00\x01", 2, "auto", "hex"),
        (b"\xff\xfe", 2, "auto", "hex"),
        (b"\xff\xfe", 2, "text", "text"),
        (b'{"a": 1}', 8, "hex", "hex"),
        (b"", 0, "auto", "text"),
        (b"[" * 100_000, 100_000, "auto", "text"),
        (b'{"a": NaN}', 10, "auto", "json"),
    ],
)
def test_a_payload_is_shown_as_what_it_is(data: bytes, size: int, mode: str, kind: str) -> None:
    assert formats.payload(data, size, mode).kind == kind


def test_bytes_are_shown_sixteen_to_a_line() -> None:
    text = formats.hexadecimal(bytes(range(65, 85)))
    assert text.splitlines()[0] == "00000000  41 42 43 44 45 46 47 48  49 4a 4b 4c 4d 4e 4f 50  ABCDEFGHIJKLMNOP"
    assert text.splitlines()[1].endswith("QRST")


# --- pictures -------------------------------------------------------------------------------------------


def series(*values: float | None) -> Series:
    return [(1_000.0 + 5 * place, value) for place, value in enumerate(values)]


def test_a_chart_has_a_line_for_every_stretch_without_a_gap() -> None:
    made = chart("Throughput", "messages/s", [Line("in", 1, series(1.0, 2.0, None, None, 3.0, None, 4.0))])
    assert made.svg.count('class="line c1"') == 2  # one look that came late is no gap
    assert "in: 4 messages/s now, 4 at most" in made.sentence
    assert json.loads(made.points)[0]["values"] == [1.0, 2.0, None, None, 3.0, None, 4.0]


def test_what_is_known_of_a_sum_is_drawn_with_dashes_and_the_legend_says_so() -> None:
    whole, part = series(5.0, 6.0, None, None, None, 7.0), series(None, None, 2.0, 3.0, 4.0, None)
    made = chart("Throughput", "messages/s", [Line("in", 1, whole, 4.0, False, part)])
    assert made.svg.count('class="line c1"') == 2 and made.svg.count('class="line part c1"') == 1
    assert made.is_partial and made.lines[0].now is None and made.lines[0].at_least == 4.0
    assert "in: unknown, at least 4 messages/s, now" in made.sentence and "dashed" in made.sentence
    assert json.loads(made.points)[0]["known"] == [None, None, 2.0, 3.0, 4.0, None]
    well = chart("Throughput", "messages/s", [Line("in", 1, series(5.0, 6.0), 6.0, True, series(None, None))])
    assert not well.is_partial and json.loads(well.points)[0]["known"] == []


def test_a_chart_begins_with_the_first_sample_but_shows_two_minutes_at_least() -> None:
    long = chart("Lag", "messages", [Line("behind", 3, series(*[None] * 100, *[1.0] * 50))])
    assert len(long.lines[0].series) == 50
    short = chart("Lag", "messages", [Line("behind", 3, series(*[None] * 100, 1.0))])
    assert len(short.lines[0].series) == 24
    assert chart("Lag", "messages", [Line("behind", 3, series(*[None] * 50))]).is_empty


def test_the_axis_ends_at_a_round_number_above_everything() -> None:
    for value in (0.0, 1.0, 9.9, 10.0, 11.0, 225.0, 999.0, 1_000.0, 1_001.0, 5_500_000.0):
        top = nice(value)
        assert value <= top <= max(2 * value, 10) and (top / 2).is_integer()


def test_a_line_that_was_always_nothing_is_no_picture() -> None:
    assert spark(series(0.0, 0.0, None)) == ""
    assert spark(series(0.0, 5.0)).count("<path") == 1


def test_a_tier_is_drawn_where_its_offsets_are_and_never_invisible() -> None:
    bar = tier_bar(Tier("cloud", "Cloud", [ChartPart(0, 50), ChartPart(99, 100)]), 0, 100)
    boxes = [(float(x), float(width)) for x, width in re.findall(r'x="([\d.]+)" y="0" width="([\d.]+)"', bar)]
    assert boxes[0] == (0.0, 500.0)
    assert boxes[1][1] >= 4.0 and sum(boxes[1]) <= 1000.0
    assert "<rect" not in tier_bar(Tier("disk", "Disk", [ChartPart(0, 5)]), 10, 20)


# --- operations -----------------------------------------------------------------------------------------


def test_the_steps_of_a_move_are_done_under_way_or_open() -> None:
    move = Operation(1, "move", "/default/a", "Move", 0.0, phase="cursors")
    assert [state for _, _, state, _ in move.steps()] == ["done", "done", "now", "open", "open", "open", "open"]
    move.phases_ms = dict.fromkeys(PHASES, 2.0)
    move.finished_at = 1.0
    assert {state for _, _, state, _ in move.steps()} == {"done"}
    assert move.pause_ms == 8.0
    failed = Operation(2, "move", "/default/a", "Move", 0.0, finished_at=1.0, failure="no", phases_ms={"upload": 1.0})
    assert [state for _, _, state, _ in failed.steps()][:2] == ["done", "open"]


def test_an_operation_that_breaks_ends_with_a_sentence(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        operations = Operations()

        async def refused(_: Operation) -> None:
            raise Unreachable("the broker", "it is away")

        async def broken(_: Operation) -> None:
            raise ValueError("secret")

        first = operations.begin("move", "/default/a", "Move", refused)
        second = operations.begin("drain", "1", "Drain", broken)
        assert operations.running("move", "/default/a") is first
        await settle()
        assert (first.state, "it is away" in first.failure) == ("failed", True)
        assert second.state == "failed" and "secret" not in second.failure
        assert [each.kind for each in operations.of("move", "drain")] == ["drain", "move"]
        await operations.close()

    run(check())
    assert "secret" in caplog.text  # for whoever has to mend it


# --- what is asked for once -----------------------------------------------------------------------------


def test_an_answer_is_kept_then_shown_while_a_new_one_comes_then_waited_for() -> None:
    async def check() -> None:
        now, asked = 0.0, 0
        gate = asyncio.Event()
        gate.set()

        async def ask() -> int:
            nonlocal asked
            asked += 1
            mine = asked
            await gate.wait()
            return mine

        cached = Cached(ask, 3.0, lambda: now)
        assert await cached.get() == 1
        now = 2.9
        assert await cached.get() == 1 and asked == 1
        now, _ = 4.0, gate.clear()
        assert await cached.get() == 1  # and asks behind it
        await settle()
        assert await cached.get() == 1 and asked == 2  # once
        gate.set()
        await settle()
        assert await cached.get() == 2
        now = 100.0
        assert await cached.get() == 3  # much too old to be shown
        cached.forget()
        assert await cached.get() == 4

    run(check())


def test_a_failure_is_told_and_not_remembered() -> None:
    async def check() -> None:
        now, is_away = 0.0, False

        async def ask() -> int:
            if is_away:
                raise Unreachable("the broker", "it is away")
            return 1

        cached = Cached(ask, 3.0, lambda: now)
        await cached.get()
        now, is_away = 4.0, True
        assert await cached.get() == 1  # what was known; the question behind it fails
        await settle()
        with pytest.raises(Unreachable):
            await cached.get()
        is_away = False
        assert await cached.get() == 1

    run(check())


def test_a_quantile_lies_between_the_bounds_of_its_bucket() -> None:
    buckets = [(1.0, 50.0), (2.0, 90.0), (math.inf, 100.0)]
    assert quantile(buckets, 0.25) == 0.5
    assert quantile(buckets, 0.5) == 1.0
    assert quantile(buckets, 0.7) == 1.5
    assert quantile(buckets, 0.99) == 2.0, "beyond the last bound nothing is known"
    assert quantile([], 0.5) is None and quantile([(1.0, 0.0), (math.inf, 0.0)], 0.5) is None


def test_what_is_counted_of_another_topic_is_not_counted() -> None:
    lines = [
        'danube_producer_send_total{topic="/default/a",result="ok",error_code="OK",broker="1"} 7',
        'danube_producer_send_total{topic="/default/a",result="error",error_code="InvalidArgument",broker="1"} 2',
        'danube_producer_send_total{topic="/default/b",result="ok",error_code="OK",broker="1"} 70',
        'danube_topic_message_size_bytes_sum{topic="/default/a",broker="1"} 700',
        'danube_topic_message_size_bytes_count{topic="/default/a",broker="1"} 7',
    ]
    found = sends_to("/default/a", "\n".join(lines))
    assert found["quality"] == {
        "send_ok_total": 7,
        "send_error_total": 2,
        "send_error_by_code": [["InvalidArgument", 2]],
    }
    assert found["latency_size"]["msg_size_bytes_avg"] == 100 and found["latency_size"]["send_latency_ms_p50"] is None


def test_the_log_and_the_cloud_tier_of_a_broker_have_the_numbers_that_it_prints() -> None:
    telemetry = Telemetry()
    telemetry.broker = "7"
    telemetry.wal.appends.inc(40)
    telemetry.wal.append_bytes.inc(4_000)
    telemetry.wal.groups.inc(4)
    telemetry.wal.group_latency.add(2.0, times=4)
    telemetry.waiting = lambda: (0, 0, 0.0)  # it has a cloud tier
    telemetry.cloud.objects.inc(3)
    telemetry.cloud.bytes.inc(3_000)
    found = log_of(telemetry.snapshot().text().decode())
    latency = [found.pop(f"wal_flush_latency_ms_p{share}") for share in (50, 95, 99)]
    assert latency == sorted(latency) and 0 < latency[0] <= 2.0
    assert found == {
        "scope": "broker",
        "wal_append_total": 40,
        "wal_append_bytes_total": 4_000,
        "wal_flush_total": 4,
        "cloud_upload_objects_total": 3,
        "cloud_upload_bytes_total": 3_000,
    }
