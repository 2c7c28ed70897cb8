from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pydanube.core.names import (
    OBJECTS_AT_THE_ROOT,
    NamespaceName,
    SubscriptionName,
    TopicName,
    consumer_id,
    fnv1a_64,
    parse_broker_id,
    partition_of_key,
    producer_id,
)
from pydanube.errors import InvalidName


@pytest.mark.parametrize(
    "text",
    ["/default/orders", "/ns_1/a-b_c", "/été/größe", "/default/orders-part-0", "/1/2",
     "/shop.eu/orders.v1", "/1.2/3.4.5", "/default/danube-store.json", "/__a/_._", "/default/-.-"],
)  # fmt: skip
def test_good_topic_names_print_as_they_were_written(text: str) -> None:
    topic = TopicName(text)
    assert str(topic) == text
    assert TopicName.of(topic.namespace, topic.name) == topic


@pytest.mark.parametrize(
    "text",
    [
        "", "/", "//", "default/orders", "/default", "/default/", "//orders", "/default/orders/", "/a/b/c",
        "x/default/orders", "/default/a..b", "/default/a.", "/default/.a", "/default/.",
        "/default/..", "/../a", "/a./b", "/default/a b", "/default/a#b", "/default/orders\n",
        "/default/a\x00", "/default/" + "x" * 201, "/default/" + "é" * 101, "/default/e\u0301", "/default/\ud800",
    ],
)  # fmt: skip
def test_bad_topic_names_are_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(InvalidName, match="should be /namespace_name/topic_name"):
        TopicName(text)


@given(st.text(max_size=30))
def test_a_name_that_is_accepted_is_safe_as_a_directory(text: str) -> None:
    try:
        topic = TopicName(text)
    except InvalidName:
        return
    for part in (topic.namespace, topic.name):
        assert part and not set(part) & set("/\\\0: ") and not part.startswith(".") and not part.endswith(".")
        assert len(part.encode()) <= 200


def test_a_partition_knows_its_base_and_number() -> None:
    base = TopicName("/default/orders")
    assert base.partition_names(2) == ["/default/orders-part-0", "/default/orders-part-1"]
    partition = base.partition_name(12)
    assert (partition.base, partition.partition_number) == (base, 12)
    assert (base.base, base.partition_number) == (base, None)


@pytest.mark.parametrize(
    "text",
    ["/d/a-part-", "/d/a-part-01", "/d/a-part-x", "/d/-part-0", "/d/a-part-1234567", "/d/a.-part-0", "/d/a-part-0.1"],
)
def test_what_only_looks_like_a_partition_is_a_plain_topic(text: str) -> None:
    assert TopicName(text).partition_number is None
    assert TopicName(text).base == text


def test_a_longer_name_is_no_partition_of_a_shorter_one() -> None:
    assert TopicName("/default/foo-part-1").is_partition_of("/default/foo")
    assert not TopicName("/default/foobar").is_partition_of("/default/foo")
    assert not TopicName("/default/foobar-part-1").is_partition_of("/default/foo")


def test_names_survive_pickling() -> None:
    topic = pickle.loads(pickle.dumps(TopicName("/default/orders")))
    assert type(topic) is TopicName and topic == "/default/orders"


@pytest.mark.parametrize("text", ["sub", "my subscription", "ß-1.2:x", "x" * 200, "a.b", ".a", "a.", "..."])
def test_subscription_names_may_be_any_printable_text(text: str) -> None:
    assert SubscriptionName(text) == text


@pytest.mark.parametrize("text", ["", "a/b", "a\n", ".", "..", "x" * 201, "\ud800"])
def test_subscription_names_that_would_break_a_key_are_refused(text: str) -> None:
    with pytest.raises(InvalidName, match="is not a subscription name"):
        SubscriptionName(text)


@pytest.mark.parametrize("name", sorted(OBJECTS_AT_THE_ROOT))
def test_a_namespace_is_not_called_as_an_object_at_the_root_of_the_store(name: str) -> None:
    for make in (lambda: NamespaceName(name), lambda: TopicName(f"/{name}/orders")):
        with pytest.raises(InvalidName, match="an object of every object store is called so"):
            make()


def test_a_namespace_is_one_part() -> None:
    assert NamespaceName("default") == "default"
    with pytest.raises(InvalidName, match="is not a namespace name"):
        NamespaceName("a/b")


@pytest.mark.parametrize("text", ["", "0", "-1", "01", "1.5", "x", str(2**64), "٣"])
def test_bad_broker_ids_are_refused(text: str) -> None:
    with pytest.raises(InvalidName, match="is not a broker id"):
        parse_broker_id(text)
    assert parse_broker_id("10285063371164059634") == 10285063371164059634


@given(st.text(), st.text())
def test_ids_are_stable_positive_and_signed_in_java(first: str, second: str) -> None:
    topic = TopicName("/default/orders")
    for identity in (producer_id(topic, first), consumer_id(topic, SubscriptionName("s"), second)):
        assert 1 <= identity < 2**63
    assert producer_id(topic, first) == producer_id(TopicName(str(topic)), first)
    assert (producer_id(topic, first) == producer_id(topic, second)) == (first == second)


def test_keys_are_routed_as_official_clients_do() -> None:
    # Published test vectors of FNV-1a 64.
    assert fnv1a_64(b"") == 0xCBF29CE484222325
    assert fnv1a_64(b"a") == 0xAF63DC4C8601EC8C
    assert fnv1a_64(b"foobar") == 0x85944171F73967E8
    assert partition_of_key("foobar", 3) == 0x85944171F73967E8 % 3
