"""How far the session's streams are behind, out of Spark's own progress: `StreamingQueryProgress`.

    trigger began at T ─► plans up to `endOffset` ─► `latestOffset` is asked for ─► … ─► the batch is done

What was published before T and lies below `endOffset` is done; if `endOffset` is the head as it was after T, then all
that was published before T is. Otherwise that moment is not known, and what was known before still holds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession


def facts(spark: SparkSession) -> dict[str, int]:
    """`fresh_us` and `behind_messages` over all streams that run, the worst of them; without what is not known."""
    try:
        found = [of_progress(query.lastProgress) for query in spark.streams.active]
    except (PySparkException, OSError):  # the session ends
        return {}
    fresh = [each.get("fresh_us") for each in found]
    behind = [each.get("behind_messages") for each in found]
    known: dict[str, int] = {}
    if found and None not in fresh:
        known["fresh_us"] = min(each for each in fresh if each is not None)
    if found and None not in behind:
        known["behind_messages"] = sum(each for each in behind if each is not None)
    return known


def of_progress(progress: Any) -> dict[str, int]:
    """Of one trigger; its sources are ours, or say nothing."""
    if progress is None or not progress.sources:
        return {}
    behind = 0
    for source in progress.sources:
        end, latest = next_of(source.endOffset), next_of(source.latestOffset)
        if end is None or latest is None:
            return {}
        behind += sum(max(head - end.get(topic, 0), 0) for topic, head in latest.items())
    found = {"behind_messages": behind}
    if behind == 0:
        found["fresh_us"] = _us(progress.timestamp)
    return found


def next_of(offset: Any) -> Mapping[str, int] | None:
    """The next offset of each topic, out of an offset as our source writes it; None: it is none of ours."""
    try:
        found = json.loads(offset) if isinstance(offset, str) else offset
        return {str(topic): int(each) for topic, each in found["offsets"].items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _us(timestamp: str) -> int:
    when = datetime.fromisoformat(timestamp.replace("Z", "+00:00"))
    return int((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() * 1e6)
