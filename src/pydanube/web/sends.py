"""How the sends to one topic went, and the log they went to, from what its broker prints.

It is too much to sample for every topic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydanube.admin.metrics_text import SENDS, labels_of, number_of

LATENCY: Final = "danube_producer_send_latency_ms_bucket"
SIZE_SUM: Final = "danube_topic_message_size_bytes_sum"
SIZE_COUNT: Final = "danube_topic_message_size_bytes_count"
FLUSHES: Final = "danube_wal_flush_latency_ms_bucket"
LOG_COUNTS: Final[Mapping[str, str]] = {
    "danube_wal_append_total": "wal_append_total",
    "danube_wal_append_bytes_total": "wal_append_bytes_total",
    "danube_wal_flush_total": "wal_flush_total",
    "danube_cloud_upload_objects_total": "cloud_upload_objects_total",
    "danube_cloud_upload_bytes_total": "cloud_upload_bytes_total",
}


def sends_to(topic: str, text: str) -> dict[str, Any]:
    """`quality` and `latency_size` as the JSON routes have them. What nothing was counted of is None."""
    ok, errors, buckets = 0, [], []
    size_sum = size_count = 0.0
    for line in text.split("\n"):
        name, brace, rest = line.partition("{")
        if not brace or name not in (SENDS, LATENCY, SIZE_SUM, SIZE_COUNT):
            continue
        inside, _, value = rest.rpartition("} ")
        labels, number = labels_of(inside), number_of(value)
        if labels.get("topic") != topic or math.isnan(number):
            continue
        if name == SENDS and labels.get("result") == "ok":
            ok += int(number)
        elif name == SENDS:
            errors.append([labels.get("error_code", ""), int(number)])
        elif name == LATENCY:
            buckets.append((number_of(labels.get("le", "")), number))
        elif name == SIZE_SUM:
            size_sum = number
        else:
            size_count = number
    return {
        "quality": {
            "send_ok_total": ok,
            "send_error_total": sum(count for _, count in errors),
            "send_error_by_code": errors,
        },
        "latency_size": {
            **_quantiles("send_latency_ms", buckets),
            "msg_size_bytes_avg": size_sum / size_count if size_count else None,
        },
    }


def log_of(text: str) -> dict[str, Any]:
    """`reliable` as the JSON routes have it. A broker has one log and one cloud tier for all its topics."""
    counts = dict.fromkeys(LOG_COUNTS.values(), 0)
    buckets = []
    for line in text.split("\n"):
        if not line.startswith(("danube_wal_", "danube_cloud_")):
            continue
        name, _, rest = line.partition("{")
        inside, _, value = rest.rpartition("} ")
        number = number_of(value)
        if name in LOG_COUNTS and not math.isnan(number):
            counts[LOG_COUNTS[name]] = int(number)
        elif name == FLUSHES:
            buckets.append((number_of(labels_of(inside).get("le", "")), number))
    return {"scope": "broker", **counts, **_quantiles("wal_flush_latency_ms", buckets)}


def _quantiles(name: str, buckets: Sequence[tuple[float, float]]) -> dict[str, float | None]:
    return {f"{name}_p{share}": quantile(buckets, share / 100) for share in (50, 95, 99)}


def quantile(buckets: Sequence[tuple[float, float]], share: float) -> float | None:
    """By upper bounds and how many lie below them, as Prometheus' histogram_quantile has it."""
    rising = sorted(buckets)
    if not rising or not rising[-1][1]:
        return None
    wanted = share * rising[-1][1]
    below, under = 0.0, 0.0
    for bound, count in rising:
        if count >= wanted:
            return below if math.isinf(bound) else below + (bound - below) * (wanted - under) / (count - under or 1)
        below, under = bound, count
    return below
