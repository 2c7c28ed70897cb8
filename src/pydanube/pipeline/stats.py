"""Job *stats*: what happened in topics, hour by hour: a table, and a page with a picture.

The page is one file of HTML that needs nothing else.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from pydanube.pipeline import steps
from pydanube.pipeline.report import JobReport, QueryWatch
from pydanube.pipeline.settings import CONNECTION, TOPICS, JobSettings
from pydanube.spark.options import SourceOptions

KNOWN: Final = (*CONNECTION, *TOPICS, "start_time", "end_time", "top_keys", "page", "json")
DEAD_LETTER: Final = "x-original-topic"  # an attribute that only dead letters have
WIDTH, HEIGHT, PAD = 900, 220, 46
COLOURS: Final = ("#2463a5", "#b3541e", "#2f7d4f", "#7a4ba0", "#8a6d00", "#a03557")


def check(values: dict[str, Any]) -> tuple[JobSettings, dict[str, str]]:
    """The settings, checked without Spark, and the source's options. Raises ConfigError."""
    settings = JobSettings(values, KNOWN, "stats")
    settings.number("top_keys", 10)
    columns = "topic,offset,publish_time,append_time,routing_key,attributes,payload"
    options = {**settings.connection(), "columns": columns, "subscribe": ",".join(settings.topics())}
    for name, option in (("start_time", "startingTimestamp"), ("end_time", "endingTimestamp")):
        if name in settings:
            options[option] = settings.text(name) or ""
    SourceOptions.parse(options, streaming=False)
    return settings, options


def run(spark: SparkSession, values: dict[str, Any], watch: QueryWatch) -> JobReport:
    settings, options = check(values)
    messages = spark.read.format("danube").options(**options).load()
    watch.says("counting")
    hours = [row.asDict() for row in steps.hourly(messages).orderBy("topic", "hour").collect()]
    keys = [row.asDict() for row in steps.top_keys(messages, settings.number("top_keys", 10) or 10).collect()]
    dead = messages.where(F.col("attributes")[DEAD_LETTER].isNotNull()).count()
    report = JobReport("stats", {"topics": {}, "dead_letters": dead, "top_keys": keys})
    for row in hours:
        total = report.values["topics"].setdefault(row["topic"], {"messages": 0, "bytes": 0})
        total["messages"] += row["messages"]
        total["bytes"] += row["bytes"]
    shown = [{**row, "hour": row["hour"].isoformat()} for row in hours]
    if "json" in settings:
        Path(settings.text("json") or "").write_text(
            json.dumps({"hours": shown, "top_keys": keys, "dead_letters": dead})
        )
    if "page" in settings:
        Path(settings.text("page") or "").write_text(page(shown, keys, dead))
        report.values["page"] = settings.text("page")
    report.values["hours"] = len(hours)
    return report


def page(hours: Sequence[dict[str, Any]], keys: Sequence[dict[str, Any]], dead_letters: int) -> str:
    """One page of HTML."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>Topics, hour by hour</title>",
        "<style>body{font:15px/1.45 system-ui,sans-serif;max-width:960px;margin:2rem auto;color:#1a1a1a}"
        "table{border-collapse:collapse;width:100%;margin:1rem 0}td,th{padding:.25rem .6rem;text-align:right;"
        "border-bottom:1px solid #ddd}td:first-child,th:first-child,td:nth-child(2){text-align:left}"
        "svg text{font:12px system-ui,sans-serif;fill:#444}</style>",
        f"<h1>Topics, hour by hour</h1><p>{dead_letters:,} dead letters.</p>",
        chart(hours, "messages", "Messages per hour"),
        chart(hours, "latency_p99_ms", "Milliseconds from producer to log, 99th percentile"),
        table(hours),
        "<h2>Busiest keys</h2>",
        table(keys),
    ]
    return "\n".join(parts)


def chart(hours: Sequence[dict[str, Any]], column: str, title: str) -> str:
    """One line per topic, as SVG."""
    moments = sorted({row["hour"] for row in hours})
    topics = sorted({row["topic"] for row in hours})
    highest = max((row[column] or 0 for row in hours), default=0) or 1
    step = (WIDTH - 2 * PAD) / max(1, len(moments) - 1)
    lines = [f"<h2>{html.escape(title)}</h2><svg viewBox='0 0 {WIDTH} {HEIGHT + 20 * len(topics)}' role=img>"]
    lines.append(f"<line x1={PAD} y1={HEIGHT - PAD} x2={WIDTH - PAD} y2={HEIGHT - PAD} stroke='#999'/>")
    lines.append(f"<text x=2 y={PAD - 8}>{highest:,.0f}</text><text x=2 y={HEIGHT - PAD}>0</text>")
    if moments:
        lines.append(f"<text x={PAD} y={HEIGHT - PAD + 18}>{html.escape(moments[0][:16])}</text>")
        lines.append(
            f"<text x={WIDTH - PAD} y={HEIGHT - PAD + 18} text-anchor=end>{html.escape(moments[-1][:16])}</text>"
        )
    for number, topic in enumerate(topics):
        values = {row["hour"]: row[column] or 0 for row in hours if row["topic"] == topic}
        colour = COLOURS[number % len(COLOURS)]
        places = [
            (PAD + step * place, HEIGHT - PAD - (HEIGHT - 2 * PAD) * values.get(moment, 0) / highest)
            for place, moment in enumerate(moments)
        ]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        lines.append(f"<polyline points='{points}' fill=none stroke='{colour}' stroke-width=2 />")
        lines += [f"<circle cx={x:.1f} cy={y:.1f} r=2.5 fill='{colour}'/>" for x, y in places]
        y = HEIGHT + 20 * number
        lines.append(f"<rect x={PAD} y={y - 9} width=12 height=12 fill='{colour}'/>")
        lines.append(f"<text x={PAD + 18} y={y + 2}>{html.escape(topic)}</text>")
    return "".join([*lines, "</svg>"])


def table(rows: Sequence[dict[str, Any]]) -> str:
    if not rows:
        return "<p>Nothing.</p>"
    head = "".join(f"<th>{html.escape(name)}</th>" for name in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(_cell(value))}</td>" for value in row.values()) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
