"""Every option of the source does what it says: the readers that Spark calls, called by hand. No Spark is started."""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import monotonic
from typing import Any

import pyarrow as pa
import pytest
from pyspark import SparkFiles
from pyspark.sql.datasource import EqualTo, GreaterThanOrEqual, LessThan, LessThanOrEqual

import pydanube
from pydanube.config.stream import StreamConfig
from pydanube.errors import ConfigError, DanubeError, DeadlineExceeded, Unreachable
from pydanube.formats.batch import Envelope, encode, stamp
from pydanube.formats.batch import rows_of as pack
from pydanube.formats.parquet_read import open_object
from pydanube.formats.parquet_write import encode_object
from pydanube.spark.errors import MessagesLost, OffsetsWrong
from pydanube.spark.options import CONNECTION_OPTIONS, BrokerOptions, QueryOptions, SourceOptions
from pydanube.spark.plan import Bounds, Offsets, RangeSource
from pydanube.spark.reach import Reach
from pydanube.spark.rows import _groups
from pydanube.spark.source import DanubeReader, DanubeSource, DanubeStreamReader, FilteringReader, SparkPartition
from pydanube.testing.brokers import TestBroker
from tests.harness.certificates import Authority
from tests.harness.scripted import ScriptedBroker
from tests.spark.places import Place, numbers, place_in


def rows_of(reader: Any, parts: Any = None) -> list[dict[str, Any]]:
    """What executors make of the reader's parts, which travel to them as bytes."""
    found = []
    for part in reader.partitions() if parts is None else parts:
        sent = pickle.loads(pickle.dumps((reader, part)))
        for batch in sent[0].read(sent[1]):
            assert isinstance(batch, pa.RecordBatch)
            found += batch.to_pylist()
    return found


def batch(options: dict[str, str]) -> DanubeReader:
    return DanubeReader(SourceOptions.parse(options, streaming=False))


def stream(options: dict[str, str]) -> DanubeStreamReader:
    return DanubeStreamReader(SourceOptions.parse(options, streaming=True))


def next_of(reader: DanubeStreamReader, start: dict[str, Any]) -> dict[str, int]:
    """How far the next trigger goes."""
    found = reader.latestOffset(start, reader.getDefaultReadLimit())
    return dict(Offsets.from_json(found).next)


@pytest.fixture(scope="module")
def topic(place: Place) -> str:
    """A hundred messages: sixty in two objects, the rest with the broker."""
    made = place.new_topic("options")
    for first, end in ((0, 30), (30, 60), (60, 100)):
        place.send(made, numbers(first, end), keys=["a", "b"])
        if end < 100:
            place.upload(made)
    return made


# --- which topics ---------------------------------------------------------------------------------------


def test_a_list_of_topics_is_read_as_one(place: Place, topic: str) -> None:
    other = place.new_topic("listed")
    place.send(other, numbers(500, 510))
    found = rows_of(batch({"service.url": place.url, "subscribe": f"{topic}, {other}"}))
    assert sorted(int(row["payload"]) for row in found) == [*range(100), *range(500, 510)]


def test_a_pattern_finds_topics_and_a_stream_takes_new_ones_from_their_beginning(place: Place) -> None:
    first = place.new_topic("matched")
    place.send(first, numbers(0, 5))
    reader = stream({"service.url": place.url, "subscribePattern": "/default/matched-.*"})
    start = reader.initialOffset()
    assert Offsets.from_json(start).next == {first: 5}
    second = place.new_topic("matched")
    place.send(second, numbers(5, 8))
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    assert [int(row["payload"]) for row in rows_of(reader, reader.partitions(start, end))] == [5, 6, 7]
    reader.stop()


# --- from where to where --------------------------------------------------------------------------------


def test_offsets_bound_what_is_read(place: Place, topic: str) -> None:
    options = place.options(
        topic, startingOffsets=json.dumps({topic: 25}), endingOffsets=json.dumps({topic: 65}), columns="offset"
    )
    assert [row["offset"] for row in rows_of(batch(options))] == list(range(25, 65))


def test_times_bound_what_is_read(place: Place, topic: str) -> None:
    times = place.table(topic).column("publish_time").to_pylist()
    first, end = times[40], times[70]
    options = place.options(
        topic,
        startingTimestamp=first.isoformat(),
        endingTimestamp=json.dumps({topic: end.isoformat()}),
        columns="publish_time",
    )
    found = [row["publish_time"] for row in rows_of(batch(options))]
    assert found == [time for time in times if first <= time < end] and found


def test_a_stream_begins_where_it_is_told(place: Place, topic: str) -> None:
    times = place.table(topic).column("publish_time").to_pylist()
    for options, expected in (
        ({}, 100),
        ({"startingOffsets": "earliest"}, 0),
        ({"startingOffsets": json.dumps({topic: 42})}, 42),
        ({"startingTimestamp": times[60].isoformat()}, times.index(times[60])),
    ):
        reader = stream(place.options(topic, **options))
        assert Offsets.from_json(reader.initialOffset()).next == {topic: expected}
        reader.stop()


# --- how much -------------------------------------------------------------------------------------------


def test_a_trigger_takes_no_more_than_it_may_and_waits_for_no_less(place: Place, topic: str) -> None:
    start = Offsets(next={topic: 0}).to_json()
    size = sum(path.stat().st_size for path in place.objects(topic))
    for options, expected in (
        ({}, 100),
        ({"maxOffsetsPerTrigger": "7"}, 7),
        ({"minOffsetsPerTrigger": "100"}, 100),
        ({"minOffsetsPerTrigger": "101"}, 0),  # 15 minutes are not over
        ({"minOffsetsPerTrigger": "101", "maxTriggerDelay": "0s"}, 100),
    ):
        reader = stream(place.options(topic, **options))
        assert next_of(reader, start) == {topic: expected}, options
        reader.stop()
    reader = stream(place.options(topic, maxBytesPerTrigger=str(size // 6)))
    assert 1 <= next_of(reader, start)[topic] < 30
    reader.stop()


def test_available_now_ends_where_the_topics_ended_when_it_began(place: Place) -> None:
    topic = place.new_topic("ended")
    place.send(topic, numbers(0, 10))
    reader = stream(place.options(topic))
    reader.prepareForTriggerAvailableNow()
    place.send(topic, numbers(10, 20))
    assert next_of(reader, Offsets(next={topic: 0}).to_json()) == {topic: 10}
    assert Offsets.from_json(reader.reportLatestOffset()).next == {topic: 20}
    reader.stop()


def test_work_is_divided_as_it_is_asked_for(place: Place, topic: str) -> None:
    for options, least, most in (
        ({}, 1, 100),
        ({"minPartitions": "8"}, 8, 13),
        ({"maxRecordsPerPartition": "9"}, 12, 9),
    ):
        reader = batch(place.options(topic, **options))
        parts = [part for part in reader.partitions() if isinstance(part, SparkPartition)]
        assert len(parts) >= least and max(part.share.rows for part in parts) <= most, options
        assert sorted(row["offset"] for row in rows_of(reader, parts)) == list(range(100))


# --- what of it -----------------------------------------------------------------------------------------


def test_columns_can_be_chosen_and_headers_left_out(place: Place, topic: str) -> None:
    source = DanubeSource({**place.options(topic), "includeHeaders": "false"})
    assert "attributes" not in source.schema().names
    assert "attributes" not in rows_of(batch(place.options(topic, includeHeaders="false")))[0]
    [first, *_] = rows_of(batch(place.options(topic, columns="payload,epoch,topic")))
    assert list(first) == ["payload", "epoch", "topic"]


def test_filters_leave_out_objects_and_row_groups_that_cannot_pass(place: Place, topic: str) -> None:
    table = place.table(topic)
    middle: datetime = table.column("publish_time")[45].as_py()

    def reads(*filters: Any) -> tuple[list[Any], list[int]]:
        reader = FilteringReader(SourceOptions.parse(place.options(topic), streaming=False))
        left = list(reader.pushFilters(list(filters)))
        return left, [row["offset"] for row in rows_of(reader)]

    assert reads(GreaterThanOrEqual(("offset",), 20), LessThan(("offset",), 70)) == ([], list(range(20, 70)))
    assert reads(EqualTo(("topic",), "/default/another")) == ([], [])
    later = GreaterThanOrEqual(("publish_time",), middle)
    left, found = reads(later)
    assert left == [later] and set(range(45, 100)) <= set(found) and not set(found) & set(range(30))
    earlier = LessThanOrEqual(("publish_time",), table.column("publish_time")[0].as_py() - timedelta(seconds=1))
    assert reads(earlier)[1] == list(range(60, 100)), "what a broker has is for Spark to look at"
    unknown = EqualTo(("routing_key",), "zzz")
    assert reads(unknown) == ([unknown], list(range(60, 100)))


# --- loss -----------------------------------------------------------------------------------------------


def test_a_batch_of_what_is_not_there_fails_or_is_read_without_it(place: Place) -> None:
    topic = place.new_topic("removed")
    for first, end in ((0, 100), (100, 150)):
        place.send(topic, numbers(first, end))
        place.upload(topic)
    with pytest.raises(OffsetsWrong, match="there are messages up to 150 only"):
        batch(place.options(topic, startingOffsets=f'{{"{topic}": 151}}')).partitions()
    place.forget_below(topic, 100)
    from_zero = place.options(topic, startingOffsets=f'{{"{topic}": 0}}')
    with pytest.raises(MessagesLost, match=r"offsets 0 to 99 of .* cannot be read.*failOnDataLoss"):
        batch(from_zero).partitions()
    assert len(rows_of(batch({**from_zero, "failOnDataLoss": "false"}))) == 50


def test_a_stream_that_lost_messages_fails_or_counts_them(place: Place) -> None:
    topic = place.new_topic("loss")
    for first in (0, 20):
        place.send(topic, numbers(first, first + 20))
        place.upload(topic)
    place.forget_below(topic, 20)
    start = Offsets(next={topic: 5}).to_json()
    with pytest.raises(DanubeError, match=r"offsets 5 to 19 .* failOnDataLoss"):
        next_of(stream(place.options(topic)), start)
    reader = stream(place.options(topic, failOnDataLoss="false"))
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    assert Offsets.from_json(end).lost == {topic: 15}
    assert [row["offset"] for row in rows_of(reader, reader.partitions(start, end))] == list(range(20, 40))
    reader.stop()


def test_a_stream_waits_for_an_orphan_or_reads_it_once_it_is_rescued(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    topic = place.new_topic("orphan")
    for first in (0, 50):
        place.send(topic, numbers(first, first + 50))
        place.upload(topic)
    place.orphan(topic, 50)
    place.send(topic, numbers(100, 120))

    class Query:
        """A stream, trigger by trigger, as Spark runs it."""

        def __init__(self, **options: str) -> None:
            self.reader = stream(place.options(topic, startingOffsets="earliest", **options))
            self.at = self.reader.initialOffset()

        def trigger(self) -> list[int]:
            start, self.at = self.at, self.reader.latestOffset(self.at, self.reader.getDefaultReadLimit())
            return [row["offset"] for row in rows_of(self.reader, self.reader.partitions(start, self.at))]

    waiting, skipping = Query(), Query(orphans="skip")
    assert waiting.trigger() == list(range(50)) and waiting.trigger() == []
    [said] = [each.message for each in caplog.records if "stops in front of" in each.message]
    assert f"{topic} stops in front of offsets 50 to 99" in said, "once, not at every trigger"
    assert skipping.trigger() == [*range(50), *range(100, 120)]
    assert skipping.at["skipped"] == {topic: [[50, 100]]} and skipping.trigger() == []
    place.rescue(topic, 50)
    assert skipping.trigger() == list(range(50, 100)) and "skipped" not in skipping.at
    assert waiting.trigger() == list(range(50, 120))
    for query in (waiting, skipping):
        query.reader.stop()


def test_a_stream_waits_where_it_is_while_its_broker_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pydanube.spark.reach.OFFLINE_SECONDS", 0.1)
    with place_in(tmp_path) as place:
        topic = place.new_topic("away")
        place.send(topic, numbers(0, 60))
        place.upload(topic)
        place.send(topic, numbers(60, 100))
        options = {"storage.url": place.storage_url, "startingOffsets": "earliest"}
        reader = stream(place.options(topic, **options))
        read = reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit())
        assert Offsets.from_json(read).next == {topic: 100}
        place.stop()
        assert reader.latestOffset(read, reader.getDefaultReadLimit()) == read
        reader.stop()
        place.start()  # another port, and another epoch of the topic: the same topic
        place.send(topic, numbers(100, 110))
        reader = stream(place.options(topic, **options))
        end = reader.latestOffset(read, reader.getDefaultReadLimit())
        assert [row["payload"] for row in rows_of(reader, reader.partitions(read, end))] == numbers(100, 110)
        assert Offsets.from_json(end).marks[topic].epoch > Offsets.from_json(read).marks[topic].epoch
        reader.stop()


# --- a topic that is deleted and made again under its name ------------------------------------------------


def make_anew(place: Place, topic: str) -> None:
    place.asking(lambda client: client.delete_topic(topic))
    place.asking(lambda client: client.create_topic(topic))
    place.send(topic, [b"new"] * 100)


@pytest.mark.parametrize("uploaded", [(), ("old",), ("old", "new")])
def test_a_batch_never_has_rows_of_two_topics(place: Place, uploaded: tuple[str, ...]) -> None:
    topic = place.new_topic("anew")
    for _ in range(2):
        place.send(topic, [b"old"] * 30)
        if "old" in uploaded:
            place.upload(topic)
    parts = {}
    for fails in ("true", "false"):
        reader = batch(place.options(topic, maxRecordsPerPartition="30", failOnDataLoss=fails))
        parts[fails] = reader, reader.partitions()
    reader, [first, second] = parts["true"]
    assert len(rows_of(reader, [first])) == 30
    make_anew(place, topic)
    if "new" in uploaded:
        place.upload(topic)
    with pytest.raises(MessagesLost, match=r"offsets 30 to 59 .* deleted and another one made under its name"):
        rows_of(reader, [second])
    reader, both = parts["false"]
    assert rows_of(reader, both) == []


@pytest.mark.parametrize("start", ["earliest", "latest"])
@pytest.mark.parametrize("uploaded", [False, True])
def test_a_stream_does_not_go_on_in_the_middle_of_another_topic(place: Place, start: str, uploaded: bool) -> None:
    topic = place.new_topic("anew")
    place.send(topic, [b"old"] * 60)
    if uploaded:
        place.upload(topic)
    reader = stream(place.options(topic, startingOffsets=start))
    begin = reader.initialOffset()
    read = reader.latestOffset(begin, reader.getDefaultReadLimit())
    make_anew(place, topic)
    if uploaded:
        place.upload(topic)
    with pytest.raises(MessagesLost, match=r"offsets 0 to 59 .* deleted and another one made under its name"):
        reader.latestOffset(read, reader.getDefaultReadLimit())
    if start == "earliest":
        with pytest.raises(MessagesLost, match=r"offsets 0 to 59 .* deleted and another one made under its name"):
            rows_of(reader, reader.partitions(begin, read))  # a batch that was planned before
    reader.stop()
    reader = stream(place.options(topic, failOnDataLoss="false"))
    assert rows_of(reader, reader.partitions(begin, read)) == []
    end = reader.latestOffset(read, reader.getDefaultReadLimit())
    assert [row["offset"] for row in rows_of(reader, reader.partitions(read, end))] == list(range(60, 100))
    reader.stop()


# --- the query as a subscription --------------------------------------------------------------------------


def test_a_group_shows_how_far_the_query_is_behind(place: Place, topic: str) -> None:
    reader = stream(place.options(topic, **{"group.id": "shown"}))
    for offset in (10, 80):  # the first makes the subscription, the second moves it
        reader.commit(Offsets(next={topic: offset}).to_json())
        lag = place.asking(lambda client: client.lag(topic, "shown"))
        assert lag.messages == 100 - offset
    reader.stop()


# --- security ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestBroker, Authority]]:
    """A broker that only talks to those who have a certificate of its authority."""
    directory = tmp_path_factory.mktemp("secured")
    authority = Authority(directory)
    signed = authority.sign("broker")
    config = StreamConfig(cert_file=signed.cert_file, key_file=signed.key_file, ca_file=authority.file)
    with TestBroker(memory=True, stream=config) as broker:
        with pydanube.blocking.connect(broker.url, tls=authority.trusted(authority.sign("admin"))) as client:
            client.create_topic("/default/secret")
            with client.producer("/default/secret") as producer:
                producer.send(b"hush")
        yield broker, authority


def test_certificates_let_a_query_in(secured: tuple[TestBroker, Authority]) -> None:
    broker, authority = secured
    mine = authority.sign("spark")
    options = {"service.url": broker.url, "topic": "/default/secret", "timeout": "5"}
    known = {"tls.ca": str(authority.file), "tls.cert": str(mine.cert_file), "tls.key": str(mine.key_file)}
    assert [row["payload"] for row in rows_of(batch({**options, **known}))] == [b"hush"]
    with pytest.raises(DanubeError, match="certificate"):
        batch({**options, "tls.cert": known["tls.cert"], "tls.key": known["tls.key"]}).partitions()
    with pytest.raises(DanubeError, match="certificate"):
        batch({**options, "tls.ca": known["tls.ca"], "timeout": "1"}).partitions()
    with pytest.raises(ConfigError, match="certificates in PEM"):
        batch({**options, "tls.ca": str(mine.key_file.with_name("missing"))}).partitions()
    # As text they need no file on any executor.
    texts = {name: Path(file).read_text() for name, file in known.items()}
    assert [row["payload"] for row in rows_of(batch({**options, **texts}))] == [b"hush"]
    broken = texts["tls.key"].replace("A", "B")
    with pytest.raises(ConfigError, match="certificates in PEM") as caught:
        batch({**options, **texts, "tls.key": broken}).partitions()
    assert broken[40:80] not in str(caught.value)


def test_certificates_that_spark_distributes_are_found_by_their_names(
    secured: tuple[TestBroker, Authority], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, authority = secured
    mine = authority.sign("spark")
    for name, file in (("ca.pem", authority.file), ("me.pem", mine.cert_file), ("me.key", mine.key_file)):
        (tmp_path / name).write_bytes(Path(file).read_bytes())
    monkeypatch.setattr(SparkFiles, "_root_directory", str(tmp_path))  # as in a worker
    monkeypatch.setattr(SparkFiles, "_is_running_on_worker", True)
    options = {"service.url": broker.url, "topic": "/default/secret", "timeout": "5"}
    names = {"tls.ca": "ca.pem", "tls.cert": "me.pem", "tls.key": "me.key"}
    assert [row["payload"] for row in rows_of(batch({**options, **names}))] == [b"hush"]


def test_the_token_is_shown_to_the_broker() -> None:
    async def ask() -> str:
        async with ScriptedBroker() as broker:
            options = {"service.url": broker.url, "token": "let-me-in", "timeout": "1"}
            through = Reach(BrokerOptions.of(QueryOptions(options, CONNECTION_OPTIONS)))
            with through as reach, pytest.raises(DanubeError):  # it knows no topics
                await asyncio.to_thread(reach.states, ["/default/any"])
            return next(frame.command.hello.token for frame in broker.heard if frame.kind == "hello")

    assert asyncio.run(ask()) == "let-me-in"


def test_a_token_in_a_file_is_read_again_for_every_connection(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")

    async def ask() -> list[str]:
        async with ScriptedBroker() as broker:
            options = {"service.url": broker.url, "token.file": str(file), "timeout": "1"}
            with Reach(BrokerOptions.of(QueryOptions(options, CONNECTION_OPTIONS))) as reach:
                for text in ("first", "second"):
                    file.write_text(text)
                    with pytest.raises(DanubeError):  # it knows no topics
                        await asyncio.to_thread(reach.states, ["/default/any"])
                    await asyncio.to_thread(reach.call, lose_connections(reach))
            return [frame.command.hello.token for frame in broker.heard if frame.kind == "hello"]

    assert asyncio.run(ask()) == ["first", "second"]
    file.write_text("")
    with pytest.raises(ConfigError, match="it is empty"):
        batch({"service.url": "danube://127.0.0.1:9", "topic": "/default/t", "token.file": str(file)}).partitions()


async def lose_connections(reach: Reach) -> None:
    client = await reach.client()
    for link in list(client._brokers._connections.values()):
        link.end(Unreachable(link.url, "lost"))


def test_a_broker_that_says_nothing_is_waited_for_as_long_as_was_said() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        began = monotonic()
        with pytest.raises((DeadlineExceeded, Unreachable)):
            batch(
                {"service.url": f"danube://127.0.0.1:{silent.getsockname()[1]}", "topic": "/default/t", "timeout": "1"}
            ).partitions()
        assert monotonic() - began < 20  # the default is 30


def test_a_broker_that_dies_in_the_middle_is_a_sentence_and_not_an_end(tmp_path: Path) -> None:
    with TestBroker(tmp_path) as broker:
        with pydanube.blocking.connect(broker.url) as client, client.producer("/default/cut") as producer:
            producer.send(b"there")
        reader = batch({"service.url": broker.url, "topic": "/default/cut", "timeout": "1"})
        parts = reader.partitions()
    with pytest.raises(DanubeError) as caught:
        rows_of(reader, parts)
    assert broker.url.rpartition("/")[2] in str(caught.value) or "/default/cut" in str(caught.value)


# --- without Spark ------------------------------------------------------------------------------------------


def test_planning_needs_no_spark() -> None:
    program = "import sys, pydanube.spark.plan, pydanube.spark.options; print('pyspark' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "False", done.stderr


def test_times_without_a_zone_are_utc(place: Place, topic: str) -> None:
    naive = datetime.now(UTC).replace(tzinfo=None) + timedelta(hours=1)
    assert rows_of(batch(place.options(topic, startingTimestamp=naive.isoformat()))) == []


def test_the_store_can_be_elsewhere_than_the_broker_says(place: Place, tmp_path: Path) -> None:
    topic = place.new_topic("elsewhere")
    place.send(topic, numbers(0, 10))
    place.upload(topic)
    moved = tmp_path / "copy"
    (place.directory / "objects" / "default").joinpath(topic.rpartition("/")[2]).rename(tmp_path / "away")
    target = moved / topic[1:]
    target.parent.mkdir(parents=True)
    (tmp_path / "away").rename(target)
    options = place.options(topic, columns="payload")
    assert [r["payload"] for r in rows_of(batch({**options, "storage.url": f"file://{moved}"}))] == numbers(0, 10)


def test_row_groups_whose_times_or_keys_lie_outside_are_not_read() -> None:
    """An object of two row groups: 5 MiB each, of one hour and one key each."""
    hour = 3_600_000_000
    batches = []
    for number, key in enumerate(("k", "m")):
        messages = [Envelope(bytes(1 << 20), number * hour + row, key, "p") for row in range(5)]
        batch = encode(pack(messages), topic="/default/t")
        batches.append(stamp(batch, base_offset=5 * number, epoch=1, append_time=1))
    footer = open_object(encode_object("/default/t", 1, batches).data)
    assert len(footer.row_groups) == 2
    whole = RangeSource("/default/t", 0, 10, None)
    for bounds, groups in (
        ({}, [0, 1]),
        ({"time_first": 5}, [1]),
        ({"time_end": hour}, [0]),
        ({"key": "k"}, [0]),
        ({"key": "l"}, []),
    ):
        assert _groups(footer, whole, Bounds().narrowed(**bounds)) == groups, bounds
    assert _groups(footer, whole._replace(first=5), Bounds()) == [1]


def test_a_table_of_sql_keeps_its_options_in_its_schema_and_no_secrets(place: Place, topic: str) -> None:
    made = {**place.options(topic), **{f"option.{name}": value for name, value in place.options(topic).items()}}
    schema = DanubeSource({**made, "provider": "danube", "owner": "me"}).schema()
    queried = DanubeSource({"startingOffsets": json.dumps({topic: 90})})  # all that Spark tells when the table is read
    assert [row["offset"] for row in rows_of(queried.reader(schema))] == list(range(90, 100))
    with pytest.raises(ConfigError, match=r"token\.file"):
        DanubeSource({**made, "option.token": "secret"}).schema()
    with pytest.raises(ConfigError, match="a file"):
        DanubeSource({**made, "option.tls.ca": "-----BEGIN CERTIFICATE-----"}).schema()
