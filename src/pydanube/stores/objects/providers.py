"""obstore's stores of S3, GCS and Azure, from checked settings. Nothing is sent yet.

What the options leave open, the environment says, as each cloud's own tools have it (AWS_*, GOOGLE_*, AZURE_*); obstore
reads it. What an option says, the environment does not change.
"""

from __future__ import annotations

from configparser import ConfigParser
from configparser import Error as ParserError
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from pydanube.errors import ConfigError
from pydanube.stores.objects.cloud import Store
from pydanube.stores.objects.settings import StoreSettings

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig, S3Credential

AWS_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
AWS_CREDENTIALS: Final = (
    *("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE"),
    *("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
)
# RemoteObjectStore tries again and knows when to stop; two of that kind would multiply.
NO_RETRIES: Final[RetryConfig] = {"max_retries": 0, "retry_timeout": timedelta(seconds=1)}


def make_store(settings: StoreSettings) -> Store:
    """Raises ConfigError."""
    try:
        match settings.place.scheme:
            case "s3":
                return _s3(settings)
            case "gs":
                return _gcs(settings)
            case scheme:
                assert scheme == "az"
                return _azure(settings)
    except (BaseError, ValueError, OSError) as error:
        raise settings.place.refuse(settings.without_secrets(str(error))) from None


def _s3(settings: StoreSettings) -> S3Store:
    settings.only_one_of("access_key", "profile", "role_arn", "anonymous")
    for name, other in (("access_key", "secret_key"), ("secret_key", "access_key"), ("session_token", "access_key")):
        settings.needs(name, other)
    endpoint = settings.endpoint or settings.variable(*AWS_ENDPOINTS)
    # Single deletes, which every server has; bulk deletes are not used.
    config: dict[str, Any] = {"disable_bulk_delete": True}
    region = settings.text("region")
    credential: S3Credential | None = None
    if settings.switch("anonymous"):
        config["skip_signature"] = True
    elif settings.text("access_key"):
        credential = _credential(*map(settings.text, ("access_key", "secret_key", "session_token")))
    elif settings.text("role_arn"):
        if not settings.variable("AWS_WEB_IDENTITY_TOKEN_FILE"):
            raise settings.refuse("role_arn", "a role, together with the variable AWS_WEB_IDENTITY_TOKEN_FILE")
        config["role_arn"] = settings.text("role_arn")
    elif profile := settings.text("profile") or _profile_of_environment(settings):
        credential, region_of_profile = _read_profile(profile, settings)
        region = region or region_of_profile
    elif endpoint and not settings.variable(*AWS_CREDENTIALS):
        # Else obstore would ask the machine it runs on, as if that were one of Amazon's.
        allowed = f"credentials for {endpoint}: access_key and secret_key, or anonymous: true"
        raise ConfigError("storage.durable.access_key", None, allowed)
    if region:
        config["region"] = region
    if settings.switch("virtual_host_style"):
        config["virtual_hosted_style_request"] = True
    if settings.endpoint:
        # The setting that wins over every other way to name an endpoint.
        config["aws_endpoint_url_s3"] = _s3_endpoint(settings)
    return S3Store(
        settings.place.root,
        prefix=settings.place.prefix or None,
        config=config,  # type: ignore[arg-type]  # made name by name
        client_options=_client(endpoint),
        retry_config=NO_RETRIES,
        # A function and no setting: else a session token of the environment would join keys that it does not belong to.
        credential_provider=None if credential is None else lambda: credential,
    )


def _s3_endpoint(settings: StoreSettings) -> str:
    if not settings.switch("virtual_host_style"):
        return settings.endpoint
    scheme, _, rest = settings.endpoint.partition("://")
    return f"{scheme}://{settings.place.root}.{rest}"


def _gcs(settings: StoreSettings) -> GCSStore:
    settings.only_one_of("credentials_path", "credentials_json", "anonymous")
    config: dict[str, Any] = {}  # `project` is for making buckets, which we do not
    if settings.text("credentials_path"):
        config["application_credentials"] = settings.text("credentials_path")
    if settings.text("credentials_json"):
        config["service_account_key"] = settings.text("credentials_json")
    if settings.switch("anonymous"):
        config["skip_signature"] = True
    if settings.endpoint:
        config["base_url"] = settings.endpoint
    return GCSStore(
        settings.place.root,
        prefix=settings.place.prefix or None,
        config=config,  # type: ignore[arg-type]  # made name by name
        client_options=_client(settings.endpoint or settings.variable("GOOGLE_BASE_URL")),
        retry_config=NO_RETRIES,
    )


def _azure(settings: StoreSettings) -> AzureStore:
    settings.only_one_of("account_key", "anonymous")
    config: dict[str, Any] = {}
    if settings.text("account_name"):
        config["account_name"] = settings.text("account_name")
    elif not settings.variable("AZURE_STORAGE_ACCOUNT_NAME"):
        raise settings.refuse("account_name", "the storage account, here or in AZURE_STORAGE_ACCOUNT_NAME")
    if settings.text("account_key"):
        config["account_key"] = settings.text("account_key")
    if settings.switch("anonymous"):
        config["skip_signature"] = True
    if settings.endpoint:
        config["endpoint"] = settings.endpoint
    return AzureStore(
        settings.place.root,
        prefix=settings.place.prefix or None,
        config=config,  # type: ignore[arg-type]  # made name by name
        client_options=_client(settings.endpoint or settings.variable("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")),
        retry_config=NO_RETRIES,
    )


def _client(endpoint: str) -> ClientConfig:
    return {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=5),
        "timeout": timedelta(hours=1),  # RemoteObjectStore's are shorter, and know how much is to be moved
    }


# --- profiles of Amazon's own tools -----------------------------------------------------------------


def _profile_of_environment(settings: StoreSettings) -> str:
    return "" if settings.variable("AWS_ACCESS_KEY_ID") else settings.variable("AWS_PROFILE")


def _read_profile(name: str, settings: StoreSettings) -> tuple[S3Credential, str]:
    """Credentials and region, from the files ~/.aws/credentials and ~/.aws/config."""
    home = Path(settings.variable("HOME") or "~").expanduser() / ".aws"
    keys_file = Path(settings.variable("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials")
    config_file = Path(settings.variable("AWS_CONFIG_FILE") or home / "config")
    found: dict[str, str] = {}
    for file, section in ((config_file, name if name == "default" else f"profile {name}"), (keys_file, name)):
        parser = ConfigParser(interpolation=None)
        try:
            parser.read(file, "utf-8")
        except (ParserError, UnicodeDecodeError):  # whose text may quote a secret
            raise ConfigError(
                "storage.durable.profile", name, f"a profile, but {file} is no file of profiles"
            ) from None
        if parser.has_section(section):
            found |= dict(parser.items(section))
    key, secret = found.get("aws_access_key_id", ""), found.get("aws_secret_access_key", "")
    if not key or not secret:
        allowed = f"a profile with aws_access_key_id and aws_secret_access_key in {keys_file} or {config_file}"
        raise ConfigError("storage.durable.profile", name, allowed)
    return _credential(key, secret, found.get("aws_session_token", "")), found.get("region", "")


def _credential(key: str, secret: str, token: str) -> S3Credential:
    return {"access_key_id": key, "secret_access_key": secret, "token": token or None, "expires_at": None}
