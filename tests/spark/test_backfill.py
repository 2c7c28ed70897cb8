"""Batches of *lake*: history by Spark's own reader, the live end by the stream, no seam; and where copies can be."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import duckdb
import pytest
from pyspark.sql import SparkSession

from pydanube.pipeline import backfill, lake, steps
from pydanube.pipeline.copies import EpochGroup, KnownEpochs, TimeSpan
from tests.spark.places import Place, numbers
from tests.spark.test_jobs import quiet
from tests.spark.test_steps import message, messages

DAY = date(2026, 11, 15)


def group(epoch: int | None, first: int, last: int, topic: str = "/default/t") -> EpochGroup:
    return EpochGroup(topic, epoch, DAY, 10, TimeSpan(first, last))


def test_copies_are_looked_for_only_where_two_epochs_of_a_topic_meet() -> None:
    known = KnownEpochs()
    assert known.with_copies([group(3, 0, 100)]) == {}, "one owner stores nothing twice"
    known.add([group(3, 0, 100), EpochGroup("/default/t", 3, None, 10, None)])
    assert known.with_copies([group(3, 50, 200)]) == {}
    assert known.with_copies([group(4, 101, 200)]) == {}, "all of it was published later"
    assert known.with_copies([group(4, 90, 200)]) == {"/default/t": (90, 100)}
    assert known.with_copies([group(4, 90, 200, "/default/u")]) == {}
    assert known.with_copies([group(2, 0, 0)]) == {"/default/t": (0, 0)}, "an orphan that was rescued comes late"
    both = [group(4, 100, 200), group(5, 150, 300)]
    assert known.with_copies(both) == {"/default/t": (100, 200)}
    assert known.with_copies([group(None, 500, 600)]) == {"/default/t": (500, 600)}, "nobody knows who stored it"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_only_rows_in_a_span_are_compared_and_all_others_stay(spark: SparkSession) -> None:
    noon = datetime(2026, 11, 15, 12, tzinfo=UTC)
    later = datetime(2026, 11, 15, 13, tzinfo=UTC)
    rows = steps.raw(
        messages(
            spark,
            message(0, b"a", sequence=0),
            message(1, b"a", sequence=0, epoch=2),  # a copy
            message(2, b"b", sequence=0, publish_time=later),
            message(3, b"b", sequence=0, publish_time=later, epoch=2),  # outside of the span: not looked at
            message(4, b"c", sequence=1),
        )
    )
    groups = steps.epoch_groups(rows)
    assert sorted((each.epoch, each.rows) for each in groups) == [(1, 3), (2, 2)]
    at = round(noon.timestamp() * 1_000_000)
    spans = {"/default/t": TimeSpan(at, at)}
    table = rows.where("offset = 4")
    found = steps.once_each(rows, spans, table)
    assert sorted(row["offset"] for row in found.collect()) == [0, 2, 3]
    assert steps.count_messages(rows, spans, table) == 3
    assert steps.once_each(rows, {}, table) is rows


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_history_goes_over_into_the_live_end_at_an_exact_offset(
    spark: SparkSession, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = place.new_topic("seam")
    for first in (0, 25):
        place.send(topic, numbers(first, first + 25))
        place.upload(topic)
    place.send(topic, numbers(50, 60))
    read: dict[int, bool] = {}
    sound = backfill.history_rows

    def watched(*asked: Any) -> Any:
        found = sound(*asked)
        read[asked[3]] = found is not None
        return found

    monkeypatch.setattr(lake, "history_rows", watched)
    settings = {
        **{"service.url": place.url, "topic": topic, "name": "seam", "target": str(tmp_path), "batch_rows": 20},
        **{"rows_per_file": 1000},
    }

    def run() -> list[tuple[Any, ...]]:
        report = lake.run(spark, settings, quiet())
        assert report.problems == []
        pattern = f"{tmp_path}/seam_raw/batch=*/date=*/*.parquet"
        query = f"select \"offset\", payload, batch from read_parquet('{pattern}', hive_partitioning=true) order by 1"
        return duckdb.sql(query).fetchall()

    found = run()
    assert read == {0: True, 1: True, 2: False}, "the last batch is partly on the broker's disk"
    assert [(offset, payload) for offset, payload, _ in found] == [(n, b"%d" % n) for n in range(60)]
    assert [int(batch) for _, _, batch in found] == [n // 20 for n in range(60)]

    # The last batch comes again when all of it is uploaded: it is read the other way, and is the same.
    place.upload(topic)
    for file in (tmp_path / "_checkpoint-seam" / "commits").glob("*2*"):
        file.unlink()
    assert run() == found and read[2] is True

    # What is not as it was planned is left to the stream: a topic made anew, an offset log of another form.
    planned = backfill.HistoryRows(spark.range(1), {topic: 20}, {topic: 1})
    assert planned.fits([EpochGroup(topic, 1, DAY, 20, None)])
    assert not planned.fits([EpochGroup(topic, 2, DAY, 20, None)])
    assert not planned.fits([EpochGroup(topic, 1, DAY, 19, None)])
    offsets = tmp_path / "_checkpoint-seam" / "offsets" / "2"
    version, *lines = offsets.read_text().splitlines()
    for text in ("v2\n" + "\n".join(lines), "\n".join([version, *lines, *lines[1:]]), f"{version}\n{{}}\n{{}}"):
        offsets.write_text(text)
        assert sound(spark, _source(settings), f"{tmp_path}/_checkpoint-seam", 2, None) is None
    assert json.loads(lines[1])["offsets"] == {topic: 60}


def _source(settings: dict[str, Any]) -> dict[str, str]:
    return lake.Lake.parse(settings).source
