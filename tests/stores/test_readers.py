"""Keys that are handed to readers: what is set, what clients are told, and what is refused."""

from __future__ import annotations

import pytest

from pydanube.errors import ConfigError, Unreachable
from pydanube.stores.objects.owned import check_store
from pydanube.stores.objects.readers import check_readers, readers_options, vended_keys
from pydanube.stores.objects.urls import open_object_store
from tests.e2e.objectstores import S3Server
from tests.support import run

OWN = {"access_key": "broker", "secret_key": "writes", "endpoint": "https://store.example:9000", "region": "eu-1"}
READER = {"access_key": "reader", "secret_key": "only reads"}


def test_nothing_is_handed_out_unless_it_is_set() -> None:
    assert vended_keys("s3://bucket", OWN, {}, {"AWS_ACCESS_KEY_ID": "broker"}) == {}
    assert vended_keys("file:///data", {}, {}, {}) == {}


def test_clients_are_told_the_readers_keys_and_where_the_store_is() -> None:
    told = vended_keys("s3://bucket/place", OWN, {**READER, "session_token": "for an hour"}, {})
    assert told == {
        "s3.access-key-id": "reader",
        "s3.secret-access-key": "only reads",
        "s3.session-token": "for an hour",
        "s3.endpoint": "https://store.example:9000",
        "s3.region": "eu-1",
        "client.region": "eu-1",
        "s3.path-style-access": "true",
    }
    outside = {**READER, "endpoint": "https://public.example", "region": "eu-2"}
    told = vended_keys("s3://bucket/place", OWN, outside, {})
    assert (told["s3.endpoint"], told["s3.region"]) == ("https://public.example", "eu-2")
    assert "s3.endpoint" not in vended_keys("s3://bucket", {}, READER, {"AWS_REGION": "us-1"})


@pytest.mark.parametrize(
    ("url", "options", "readers", "environment", "sentence"),
    [
        ("s3://bucket", OWN, {"access_key": "broker", "secret_key": "x"}, {}, "other keys than the broker's own"),
        ("s3://bucket", {}, READER, {"AWS_ACCESS_KEY_ID": "reader"}, "other keys than the broker's own"),
        ("s3://bucket", OWN, {"access_key": "reader"}, {}, "secret_key"),
        ("s3://bucket", OWN, {"region": "eu-1"}, {}, "access_key"),
        ("file:///data", {}, READER, {}, "for s3://"),
        ("gs://bucket", {}, READER, {}, "for s3://"),
    ],
)
def test_what_would_hand_out_the_brokers_own_keys_or_none_is_refused(
    url: str, options: dict[str, object], readers: dict[str, object], environment: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence) as refused:
        vended_keys(url, options, readers, environment)
    assert "only reads" not in str(refused.value) and "storage.readers." in str(refused.value)


def test_keys_that_may_write_are_refused_by_what_a_real_store_says(s3_server: S3Server) -> None:
    """Nothing is changed to find out."""

    async def inside() -> None:
        url = s3_server.url()
        own = await open_object_store(url, s3_server.options)
        assert await check_store(own, "cluster") is None
        before = {info.key: info async for info in own.list("")}

        async def judge(access_key: str, secret_key: str) -> Unreachable | None:
            readers = {"access_key": access_key, "secret_key": secret_key}
            store = await open_object_store(url, readers_options(s3_server.options, readers), environment={})
            try:
                return await check_readers(store)
            finally:
                await store.close()

        assert await judge(s3_server.reader_access_key, s3_server.reader_secret_key) is None
        with pytest.raises(ConfigError, match="this one may write"):
            await judge(s3_server.access_key, s3_server.secret_key)
        with pytest.raises(ConfigError, match="may list and get"):
            await judge("nobody", "knows")
        assert {info.key: info async for info in own.list("")} == before
        await own.close()

    run(inside())
