"""URLs and options to object stores: what is built, and what is refused. Nobody is asked over a network."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from obstore.store import AzureStore, GCSStore, S3Store

from pydanube.config.settings import SETTINGS
from pydanube.errors import ConfigError, DiskFailed
from pydanube.ports import Disk
from pydanube.stores.disk.memory import MemoryDisk
from pydanube.stores.objects.cloud import RemoteObjectStore, Store
from pydanube.stores.objects.directory import FileObjectStore
from pydanube.stores.objects.providers import make_store
from pydanube.stores.objects.settings import OPTIONS, StoreSettings, parse_url
from pydanube.stores.objects.urls import open_object_store
from tests.support import run

SECRET = "do-not-print-me"
KEYS = {"access_key": "AKIA1", "secret_key": SECRET}
ACCOUNT = {"account_name": "acme", "account_key": "c2VjcmV0"}


@pytest.fixture(autouse=True)
def no_cloud_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)


def built(url: str, options: Mapping[str, object], environment: Mapping[str, str] | None = None) -> Store:
    """obstore reads the real environment, and we what is given: a test that needs one sets both."""
    return make_store(StoreSettings(parse_url("storage.url", url), options, environment or {}))


def opened(url: str, options: Mapping[str, object] | None = None, **more: Any) -> Any:
    return run(open_object_store(url, options, environment={}, **more))


def refusal(url: str, options: Mapping[str, object] | None = None, **more: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        opened(url, options, **more)
    assert SECRET not in str(caught.value) and SECRET not in repr(caught.value)
    return caught.value


# --- s3 ---------------------------------------------------------------------------------------------


def test_an_s3_store_has_the_bucket_the_prefix_and_the_options() -> None:
    store = built("s3://history/danube/eu", {**KEYS, "region": "eu-north-1"})
    assert isinstance(store, S3Store)
    assert store.prefix == "danube/eu"
    assert store.config == {"bucket": "history", "region": "eu-north-1", "disable_bulk_delete": "true"}
    assert store.credential_provider is not None
    assert store.credential_provider() == {
        "access_key_id": "AKIA1",
        "secret_access_key": SECRET,
        "token": None,
        "expires_at": None,
    }
    assert SECRET not in repr(store)


def test_obstore_itself_never_tries_again_and_never_gives_up_before_us() -> None:
    store = built("s3://history", KEYS)
    assert store.retry_config is not None and store.retry_config["max_retries"] == 0
    assert store.client_options is not None
    assert store.client_options["timeout"] == "1h"


def test_plain_http_is_spoken_only_with_an_endpoint_that_says_so() -> None:
    for endpoint, allowed in (("http://127.0.0.1:9000", True), ("https://s3.example.com", False), (None, False)):
        options = KEYS if endpoint is None else {**KEYS, "endpoint": endpoint}
        store = built("s3://history", options)
        assert store.client_options is not None
        assert str(store.client_options["allow_http"]).lower() == str(allowed).lower()


def test_an_endpoint_is_path_style_unless_the_bucket_is_a_host() -> None:
    store = built("s3://history", {**KEYS, "endpoint": "https://s3.example.com:9000/"})
    assert store.config["endpoint_url_s3"] == "https://s3.example.com:9000"
    store = built("s3://history", {**KEYS, "endpoint": "https://s3.example.com:9000", "virtual_host_style": True})
    assert store.config["endpoint_url_s3"] == "https://history.s3.example.com:9000"
    assert store.config["virtual_hosted_style_request"] == "true"


def test_an_endpoint_of_the_environment_may_be_plain_http(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9000", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    store = built("s3://history", {}, environment)
    assert store.client_options is not None and str(store.client_options["allow_http"]).lower() == "true"
    assert store.credential_provider is None  # obstore takes them from the environment


def test_a_session_token_comes_with_its_keys() -> None:
    store = built("s3://history", {**KEYS, "session_token": "t"})
    assert store.credential_provider is not None and store.credential_provider()["token"] == "t"  # type: ignore[index]


def test_anonymous_requests_are_not_signed() -> None:
    store = built("s3://history", {"anonymous": True})
    assert store.config["skip_signature"] == "true"


def test_a_role_needs_the_token_of_its_machine() -> None:
    options = {"role_arn": "arn:aws:iam::1:role/danube"}
    with pytest.raises(ConfigError, match=r"storage\.durable\.role_arn.*AWS_WEB_IDENTITY_TOKEN_FILE"):
        built("s3://history", options)
    store = built("s3://history", options, {"AWS_WEB_IDENTITY_TOKEN_FILE": "/var/run/token"})
    assert store.config["role_arn"] == "arn:aws:iam::1:role/danube"


@pytest.mark.parametrize("by_variable", [True, False])
def test_a_profile_is_read_from_the_files_of_the_aws_tools(tmp_path: Path, by_variable: bool) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text(
        f"[work]\naws_access_key_id = AKIA2\naws_secret_access_key = {SECRET}%x\n"
    )
    (tmp_path / ".aws/config").write_text("[profile work]\nregion = eu-west-3\n")
    environment = {"HOME": str(tmp_path), **({"AWS_PROFILE": "work"} if by_variable else {})}
    store = built("s3://history", {} if by_variable else {"profile": "work"}, environment)
    assert store.config["region"] == "eu-west-3"
    assert store.credential_provider is not None
    assert store.credential_provider()["access_key_id"] == "AKIA2"  # type: ignore[index]
    assert store.credential_provider()["secret_access_key"] == f"{SECRET}%x"  # type: ignore[index]


def test_a_profile_that_is_not_there_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'work'.*aws_access_key_id.*credentials"):
        built("s3://history", {"profile": "work"}, {"HOME": str(tmp_path)})
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text(f"aws_secret_access_key = {SECRET}")
    with pytest.raises(ConfigError, match="no file of profiles") as caught:
        built("s3://history", {"profile": "work"}, {"HOME": str(tmp_path)})
    assert SECRET not in str(caught.value)


def test_an_endpoint_without_any_credentials_is_refused() -> None:
    error = refusal("s3://history", {"endpoint": "http://127.0.0.1:9000"})
    assert error.key == "storage.durable.access_key"
    assert "http://127.0.0.1:9000" in error.allowed and "anonymous" in error.allowed


# --- gs and az --------------------------------------------------------------------------------------


def test_a_gcs_store_has_the_bucket_the_prefix_and_the_options(tmp_path: Path) -> None:
    store = built("gs://history/danube", {"anonymous": True, "endpoint": "http://127.0.0.1:4443", "project": "p"})
    assert isinstance(store, GCSStore)
    assert store.prefix == "danube"
    assert store.config["bucket"] == "history"
    assert store.config["base_url"] == "http://127.0.0.1:4443"
    assert store.config["skip_signature"] == "true"
    assert store.client_options is not None and str(store.client_options["allow_http"]).lower() == "true"
    assert store.retry_config is not None and store.retry_config["max_retries"] == 0


def test_a_gcs_account_that_cannot_be_read_is_refused_without_its_text(tmp_path: Path) -> None:
    error = refusal("gs://history", {"credentials_json": f'{{"private_key": "{SECRET}"'})
    assert error.key == "storage.url" and "credentials_json" in error.allowed
    error = refusal("gs://history", {"credentials_path": str(tmp_path / "missing.json")})
    assert "credentials_path" in error.allowed
    error = refusal("gs://history", {"credentials_path": "a", "credentials_json": "b"})
    assert "either credentials_path or credentials_json" in error.allowed


def test_an_azure_store_has_the_container_the_prefix_and_the_options() -> None:
    store = built("az://history/danube", {**ACCOUNT, "endpoint": "http://127.0.0.1:10000/acme"})
    assert isinstance(store, AzureStore)
    assert store.prefix == "danube"
    assert store.config["container_name"] == "history"
    assert store.config["account_name"] == "acme"
    assert store.config["account_key"] == "c2VjcmV0"
    assert store.config["endpoint"] == "http://127.0.0.1:10000/acme"
    assert store.client_options is not None and str(store.client_options["allow_http"]).lower() == "true"
    assert "c2VjcmV0" not in repr(store)
    store = built("az://history", {"account_name": "acme", "anonymous": True})
    assert store.config["skip_signature"] == "true"


def test_azure_needs_an_account() -> None:
    assert refusal("az://history", {"account_key": "c2VjcmV0"}).key == "storage.durable.account_name"
    error = refusal("az://history", {"account_name": "acme", "account_key": f"{SECRET} is no base64"})
    assert error.key == "storage.url" and "account_key" in error.allowed


@pytest.mark.parametrize(("url", "options"), [("s3://b", KEYS), ("gs://b", {"anonymous": True}), ("az://b", ACCOUNT)])
def test_a_cloud_is_opened_without_a_network(url: str, options: dict[str, object]) -> None:
    assert isinstance(opened(url, options), RemoteObjectStore)


# --- files ------------------------------------------------------------------------------------------


def test_a_file_url_is_a_directory_that_is_made(tmp_path: Path) -> None:
    async def main() -> None:
        store = await open_object_store(f"file://{tmp_path}/new/ob%20jects/")
        await store.put("default/orders/data-0-9-1.parquet", [b"x"])
        await store.close()

    run(main())
    assert (tmp_path / "new/ob jects/default/orders/data-0-9-1.parquet").read_bytes() == b"x"


def test_a_file_url_may_be_on_a_disk_of_the_callers(tmp_path: Path) -> None:
    made: dict[str, Disk] = {}
    store = opened("file:///srv/danube", make_disk=lambda root: made.setdefault(root, MemoryDisk()))
    assert isinstance(store, FileObjectStore)
    assert list(made) == ["/srv/danube"]


def test_a_directory_in_which_one_may_not_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    # Not even root makes directories among processes.
    for url in (f"file://{tmp_path}/file", f"file://{tmp_path}/file/below", "file:///proc/danube"):
        error = refusal(url)
        assert (error.key, error.value) == ("storage.url", url)
        assert "a directory in which this process may write" in error.allowed


def test_a_disk_that_takes_no_files_is_refused_with_its_own_words() -> None:
    class ReadOnly(MemoryDisk):
        async def create(self, path: str) -> None:
            raise DiskFailed(path, "create", "Read-only file system")

    error = refusal("file:///srv/danube", make_disk=lambda root: ReadOnly())
    assert "create: Read-only file system" in error.allowed


# --- what is no URL ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("", "file:///directory"),
        ("history", "file:///directory"),
        ("/srv/danube", "file:///directory"),
        ("s3:history", "file:///directory"),
        ("ftp://history", "file:///directory"),
        ("S3A://history", "file:///directory"),
        ("memory://", "file:///directory"),
        ("s3://", "s3://bucket/prefix"),
        ("s3:///prefix", "s3://bucket/prefix"),
        ("gs:///prefix", "gs://bucket/prefix"),
        ("az://", "az://container/prefix"),
        ("s3://a b/c", "s3://bucket/prefix"),
        ("s3://bucket:9000/prefix", "s3://bucket/prefix"),
        ("s3://bucket/../other", "a prefix of letters"),
        ("s3://bucket/a//b", "a prefix of letters"),
        ("s3://bucket/a%2fb", "a prefix of letters"),
        ("s3://bucket/prefix?x=y", "without a question mark"),
        ("s3://bucket/prefix#x", "without a question mark"),
        ("file://relative/dir", "three slashes"),
        ("file:relative", "file:///directory"),
        ("file://", "three slashes"),
        ("file:///", "a directory of its own"),
        ("s3://[bucket", "file:///directory"),
        (f"s3://key:{SECRET}@bucket/prefix", "without credentials"),
        (f"s3://bucket/prefix?secret={SECRET}", "without a question mark"),
        (f"ftp://bucket/prefix?secret={SECRET}", "file:///directory"),
    ],
)
def test_what_is_no_url_of_a_store_is_refused_with_what_would_be(url: str, wanted: str) -> None:
    error = refusal(url, KEYS if url.startswith("s3") else {})
    assert error.key == "storage.url"
    assert wanted in error.allowed


def test_the_error_names_the_setting_that_the_url_came_from() -> None:
    assert str(refusal("ftp://x", key="--storage-url")).startswith("--storage-url = 'ftp://x' is not allowed: ")


# --- what is no option ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "options", "key"),
    [
        ("s3://b", {"access_key": "a"}, "secret_key"),
        ("s3://b", {"secret_key": SECRET}, "access_key"),
        ("s3://b", {"session_token": SECRET}, "access_key"),
        ("s3://b", {**KEYS, "profile": "work"}, "profile"),
        ("s3://b", {**KEYS, "anonymous": True}, "anonymous"),
        ("s3://b", {**KEYS, "anonymous": "yes"}, "anonymous"),
        ("s3://b", {**KEYS, "region": ""}, "region"),
        ("s3://b", {**KEYS, "region": 5}, "region"),
        ("s3://b", {**KEYS, "endpoint": "127.0.0.1:9000"}, "endpoint"),
        ("s3://b", {**KEYS, "endpoint": "ftp://127.0.0.1"}, "endpoint"),
        ("s3://b", {**KEYS, "endpoint": f"http://a:{SECRET}@127.0.0.1"}, "endpoint"),
        ("s3://b", {**KEYS, "account_key": SECRET}, "account_key"),
        ("s3://b", {**KEYS, "acess_key": SECRET}, "acess_key"),
        ("gs://b", KEYS, "access_key"),
        ("az://b", {**ACCOUNT, "region": "eu"}, "region"),
        ("file:///srv/danube", {"region": "eu"}, "region"),
    ],
)
def test_an_option_that_is_wrong_or_of_another_store_is_refused(url: str, options: dict[str, object], key: str) -> None:
    assert refusal(url, options).key == f"storage.durable.{key}"


def test_every_option_of_the_configuration_file_is_an_option_of_some_store() -> None:
    configured = {key.removeprefix("storage.durable.") for key in SETTINGS if key.startswith("storage.durable.")}
    assert {name for names in OPTIONS.values() for name in names} == configured - {"root", "backend"}
