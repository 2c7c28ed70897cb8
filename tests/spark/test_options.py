"""Options become values, or a sentence that says what to change. No Spark is started."""

from __future__ import annotations

import pytest

from pydanube.errors import ConfigError, DanubeError
from pydanube.spark.options import COLUMNS, EARLIEST, LATEST, AtTime, Everywhere, PerTopic, SourceOptions

URL = {"service.url": "danube://127.0.0.1:6651"}


def batch(**options: str) -> SourceOptions:
    return SourceOptions.parse({**URL, "topic": "/default/orders", **options}, streaming=False)


def stream(**options: str) -> SourceOptions:
    return SourceOptions.parse({**URL, "topic": "/default/orders", **options}, streaming=True)


def test_a_batch_reads_everything_and_a_stream_what_comes() -> None:
    assert (batch().starting, batch().ending) == (Everywhere("earliest"), Everywhere("latest"))
    assert stream().starting == Everywhere("latest")


def test_names_of_options_have_no_case() -> None:
    assert stream(MAXOFFSETSPERTRIGGER="7").rows_max == 7


def test_several_topics_come_as_a_list() -> None:
    found = SourceOptions.parse({**URL, "subscribe": "/default/a, /default/b"}, streaming=False)
    assert found.topics == ("/default/a", "/default/b")


def test_offsets_are_json_per_topic_with_the_kafka_numbers_for_the_edges() -> None:
    assert batch(startingOffsets='{"/default/orders": 5}').starting == PerTopic({"/default/orders": 5})
    assert batch(startingOffsets='{"/default/orders": -2}').starting == PerTopic({"/default/orders": EARLIEST})
    assert batch(endingOffsets='{"/default/orders": -1}').ending == PerTopic({"/default/orders": LATEST})


def test_times_are_milliseconds_or_iso() -> None:
    assert batch(startingTimestamp="1500").starting == AtTime(1_500_000)
    assert batch(startingTimestamp="1970-01-01T00:00:02+00:00").starting == AtTime(2_000_000)
    assert batch(endingTimestamp='{"/default/orders": 3}').ending == AtTime(None, {"/default/orders": 3000})


def test_attributes_can_be_left_out() -> None:
    assert batch().columns == COLUMNS
    assert "attributes" not in batch(includeHeaders="false").columns
    assert batch(columns="payload, offset").columns == ("payload", "offset")


def test_credentials_are_not_shown() -> None:
    shown = repr(batch(token="secret-1", **{"storage.options": '{"secret_access_key": "secret-2"}'}))
    assert "secret" not in shown


def test_messages_can_be_read_without_a_broker() -> None:
    found = SourceOptions.parse({"storage.url": "file:///data", "topic": "/default/a"}, streaming=False)
    assert found.connection.url is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"topic": "orders"}, "orders"),
        ({"subscribe": "/default/a"}, "one of topic, subscribe"),
        ({"subscribePattern": "("}, "one of topic"),
        ({"startingOffset": "earliest"}, "did you mean startingOffsets?"),
        ({"startingOffsets": "middle"}, "earliest"),
        ({"startingOffsets": '{"/default/orders": -3}'}, "-2 for earliest"),
        ({"startingOffsets": "earliest", "startingTimestamp": "1"}, "not both"),
        ({"startingTimestamp": "yesterday"}, "milliseconds since 1970"),
        ({"endingOffsets": "earliest"}, "nothing ends where it begins"),
        ({"endingOffsets": '{"/default/orders": -2}'}, "only for startingOffsets"),
        ({"maxOffsetsPerTrigger": "0"}, "1 or more"),
        ({"maxOffsetsPerTrigger": "5", "minOffsetsPerTrigger": "6"}, "at most maxOffsetsPerTrigger"),
        ({"maxTriggerDelay": "soon"}, "ms, s, m or h"),
        ({"failOnDataLoss": "perhaps"}, "true or false"),
        ({"orphans": "drop"}, "wait or skip"),
        ({"columns": "offset,ofset"}, "each once"),
        ({"columns": "attributes", "includeHeaders": "false"}, "without attributes"),
        ({"tls.cert": "a.pem"}, "tls.key together"),
        ({"storage.options": "[]"}, "JSON object"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_a_hint(options: dict[str, str], said: str) -> None:
    with pytest.raises(DanubeError) as caught:
        batch(**options)
    assert said in str(caught.value)


def test_a_stream_has_no_end() -> None:
    with pytest.raises(ConfigError, match="a stream has no end"):
        stream(endingOffsets="latest")


def test_somebody_must_be_reachable() -> None:
    with pytest.raises(ConfigError, match=r"service\.url"):
        SourceOptions.parse({"topic": "/default/a"}, streaming=False)


def test_options_of_a_table_of_sql_are_options() -> None:
    table = {"option.service.url": "danube://a", "option.topic": "/default/a", "provider": "danube", "owner": "me"}
    for options in (table, {**table, "service.url": "danube://a", "topic": "/default/a"}):
        assert SourceOptions.parse(options, streaming=False).topics == ("/default/a",)
    assert SourceOptions.parse({**table, "topic": "/default/b"}, streaming=False).topics == ("/default/b",)
    with pytest.raises(ConfigError, match="did you mean topic"):
        SourceOptions.parse({**table, "option.topc": "/default/a"}, streaming=False)
    with pytest.raises(ConfigError, match="owner"):  # of no table
        SourceOptions.parse({"service.url": "danube://a", "topic": "/default/a", "owner": "me"}, streaming=False)


def test_a_token_is_given_or_read_from_a_file_and_never_shown() -> None:
    options = {"service.url": "danube://a", "topic": "/default/a"}
    found = SourceOptions.parse({**options, "token.file": "/run/token"}, streaming=False).connection
    assert (found.token, found.token_file) == ("", "/run/token")
    with pytest.raises(ConfigError, match="either it or token"):
        SourceOptions.parse({**options, "token.file": "/run/token", "token": "x"}, streaming=False)
    pem = "-----BEGIN PRIVATE KEY-----secret"
    secret = SourceOptions.parse({**options, "tls.cert": pem, "tls.key": pem}, streaming=False).connection
    assert "secret" not in repr(secret)
