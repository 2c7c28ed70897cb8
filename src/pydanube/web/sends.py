"""How the sends to one topic went, from what its broker prints: too much to sample for every topic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from pydanube.web.samples import labels_of, number_of

SENDS: Final = "danube_producer_send_total"
LATENCY: Final = "danube_producer_send_latency_ms_bucket"
SIZE_SUM: Final = "danube_topic_message_size_bytes_sum"
SIZE_COUNT: Final = "danube_topic_message_size_bytes_count"


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
    latency = {f"send_latency_ms_p{share}": quantile(buckets, share / 100) for share in (50, 95, 99)}
    return {
        "quality": {
            "send_ok_total": ok,
            "send_error_total": sum(count for _, count in errors),
            "send_error_by_code": errors,
        },
        "latency_size": {**latency, "msg_size_bytes_avg": size_sum / size_count if size_count else None},
    }


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
