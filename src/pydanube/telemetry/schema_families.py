"""What was asked of messages' schemas, as Prometheus knows it: by the names of the reference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from pydanube.telemetry.families import Family, counter_family


def schema_families(
    topics: Iterable[tuple[str, Mapping[str, int], Mapping[str, int]]],
) -> Iterator[Family]:
    """Topic, messages that were looked at by policy, and messages that did not fit by reason."""
    every = list(topics)
    checked = [((topic, policy), count) for topic, checks, _ in every for policy, count in checks.items()]
    text = "Messages whose schema was looked at, by the topic's policy"
    yield counter_family("danube_schema_validation", text, ("topic", "policy"), checked)
    failed = [((topic, reason), count) for topic, _, failures in every for reason, count in failures.items()]
    text = "Messages that do not fit their topic's schema: refused under enforce, accepted under warn"
    yield counter_family("danube_schema_validation_failures", text, ("topic", "reason"), failed)
