"""What a broker finds out about its object store at the start, on a real S3-compatible server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from pydanube.errors import ConfigError, Unreachable
from pydanube.stores.objects.cloud import Patience
from pydanube.stores.objects.owned import OwnedObjectStore, check_store
from pydanube.stores.objects.urls import open_object_store
from pydanube.testing.ports import free_ports
from tests.e2e.objectstores import S3Server
from tests.support import run

pytestmark = pytest.mark.slow

HASTY = Patience(attempt_seconds=1.0, deadline_seconds=1.0, pause_seconds_first=0.01)


async def started(
    url: str, options: Mapping[str, object], cluster: str = "north", patience: Patience | None = None
) -> Unreachable | None:
    store = await open_object_store(url, options, patience=patience)
    return await check_store(store, cluster, url=url)


def test_a_bucket_is_the_clusters_after_the_first_start(s3_server: S3Server) -> None:
    url = s3_server.url()
    assert run(started(url, s3_server.options)) is None
    assert run(started(url, s3_server.options)) is None
    with pytest.raises(ConfigError, match=r"'north'.*'south'"):
        run(started(url, s3_server.options, "south"))
    # Another prefix of the same bucket is another store.
    assert run(started(f"{url}/south", s3_server.options, "south")) is None


def test_everything_lives_below_the_prefix(s3_server: S3Server) -> None:
    async def main() -> None:
        bucket = s3_server.bucket()
        whole, part = [await open_object_store(f"s3://{bucket}{p}", s3_server.options) for p in ("", "/a/b/")]
        await part.put("c/d.raw", [b"x"])
        await whole.put("a/bc/d.raw", [b"y"])
        assert [info.key async for info in part.list("")] == ["c/d.raw"]
        assert [info.key async for info in whole.list("")] == ["a/b/c/d.raw", "a/bc/d.raw"]

    run(main())


@pytest.mark.parametrize("change", [{"secret_key": "a-wrong-one"}, {"access_key": "nobody"}])
def test_wrong_credentials_are_refused_with_what_was_tried_and_what_to_set(
    s3_server: S3Server, change: dict[str, object]
) -> None:
    url = s3_server.url()
    with pytest.raises(ConfigError) as caught:
        run(started(url, {**s3_server.options, **change}))
    said = str(caught.value)
    assert url in said and s3_server.endpoint in said and "403" in said
    assert "storage.durable.access_key" in said and "AWS_SECRET_ACCESS_KEY" in said
    assert "a-wrong-one" not in said and s3_server.secret_key not in said


def test_credentials_that_may_only_read_are_refused(s3_server: S3Server) -> None:
    url = s3_server.url()
    assert run(started(url, s3_server.options)) is None
    with pytest.raises(ConfigError, match="may list, get, put and delete"):
        run(started(url, s3_server.reader_options))


def test_a_missing_bucket_is_refused(s3_server: S3Server) -> None:
    with pytest.raises(ConfigError, match=r"NoSuchBucket.*a bucket that exists"):
        run(started("s3://never-made/danube", s3_server.options))


def test_anonymous_requests_are_refused_by_a_bucket_that_has_an_owner(s3_server: S3Server) -> None:
    with pytest.raises(ConfigError, match="403"):
        run(started(s3_server.url(), {"endpoint": s3_server.endpoint, "anonymous": True}))


def test_a_server_that_is_not_there_is_no_mistake_of_the_configuration(s3_server: S3Server) -> None:
    (port,) = free_ports(1)
    options = {**s3_server.options, "endpoint": f"http://127.0.0.1:{port}"}
    answer = run(started(s3_server.url(), options, patience=HASTY))
    assert isinstance(answer, Unreachable)
    assert f"127.0.0.1:{port}" in answer.peer and "refused" in answer.why.lower()


def test_keys_of_the_environment_do_as_well(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret_key)
    monkeypatch.setenv("AWS_REGION", s3_server.region)
    assert run(started(s3_server.url(), {})) is None


def test_options_win_over_the_environment(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_TOKEN"):
        monkeypatch.setenv(name, "of-something-else")
    for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert run(started(s3_server.url(), s3_server.options)) is None


def test_of_many_brokers_that_start_at_once_all_of_one_cluster_go_on(s3_server: S3Server) -> None:
    async def main() -> None:
        url = s3_server.url()
        stores = [
            OwnedObjectStore(await open_object_store(url, s3_server.options), "north" if n % 2 else "south", url)
            for n in range(4)
        ]
        answers = await asyncio.gather(*(store.ask() for store in stores), return_exceptions=True)
        assert [answer is None for answer in answers] in ([True, False, True, False], [False, True, False, True]), (
            answers
        )

    run(main())
