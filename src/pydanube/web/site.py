"""What every page shares: the gateway, the samples, the templates, and how answers and errors look.

A page is a function from a request to a template and what it shows. Asked for with `X-Fragment: live` it answers with
the part that changes, which the script puts in the place of the old one.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import parse_qsl, quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response

from pydanube import __version__
from pydanube.admin.gateway import Gateway
from pydanube.admin.sampler import Sampler
from pydanube.client.grpc.connection import BrokerRefused
from pydanube.core.names import SubscriptionName, TopicName
from pydanube.errors import ConfigError, DanubeError, InvalidName, TopicUnknown, Unavailable
from pydanube.web import charts, formats
from pydanube.web.guard import BODY_MAX_BYTES
from pydanube.web.operations import Operations

log = logging.getLogger(__name__)

FLASH: Final = "danube-said"
FLASH_MAX: Final = 1_000  # characters
THEME: Final = "danube-theme"
FIELDS_MAX: Final = 200
LIVE: Final = "live"
STATUS: Final[Mapping[str, int]] = {
    "NOT_FOUND": 404,
    "INVALID_ARGUMENT": 400,
    "OUT_OF_RANGE": 400,
    "ALREADY_EXISTS": 409,
    "FAILED_PRECONDITION": 409,
    "ABORTED": 409,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "RESOURCE_EXHAUSTED": 503,
    "DEADLINE_EXCEEDED": 504,
}

Page: TypeAlias = Callable[["Site", Request], Awaitable[Response]]


class NotHere(DanubeError):
    """A path, or a thing, that does not exist."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.sentence = sentence

    def __str__(self) -> str:
        return self.sentence


class BadRequest(DanubeError):
    """What was sent cannot be read; the sentence says why."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.sentence = sentence

    def __str__(self) -> str:
        return self.sentence


class Flash(NamedTuple):
    """What an action said, on the page that follows it."""

    kind: str  # done, failed
    text: str


@dataclass(frozen=True, slots=True)
class Site:
    gateway: Gateway
    sampler: Sampler
    operations: Operations
    read_only: bool = False
    templates: Environment = field(default_factory=lambda: _templates())

    # --- answers ----------------------------------------------------------------------------------------

    def show(self, request: Request, template: str, status: int = 200, **shown: Any) -> Response:
        """The page, or the part of it that changes."""
        self.sampler.watch()
        page = self.templates.get_template(template)
        context = {
            "site": self,
            "request": request,
            "path": request.url.path,
            "version": __version__,
            "theme": _theme(request),
            "flash": _flash(request),
            "samples": self.sampler.samples,
            "here": _here(request),
            "ranges": ranges_of(request),
            **shown,
        }
        if is_fragment(request) and LIVE in page.blocks:
            return HTMLResponse("".join(page.blocks[LIVE](page.new_context(context))), status)
        response = HTMLResponse(page.render(context), status)
        if context["flash"] is not None:
            response.delete_cookie(FLASH, samesite="strict", httponly=True)
        return response

    def error(self, request: Request, error: Exception) -> Response:
        """A sentence, on a page if a page was asked for. What was not expected is in the log."""
        status, sentence = status_of(error), sentence_of(error)
        tell_if_unexpected(request, error)
        if is_fragment(request):
            return PlainTextResponse(sentence, status)
        return self.show(request, "error.html", status, title=_title(status), sentence=sentence, active="")

    def back(self, to: str, said: str = "", failed: str = "") -> Response:
        """After an action: to the page that shows what became of it, with a sentence."""
        response = RedirectResponse(to, 303)
        kind, text = ("failed", failed) if failed else ("done", said)
        if text:
            value = base64.urlsafe_b64encode(json.dumps([kind, text[:FLASH_MAX]]).encode()).decode()
            response.set_cookie(FLASH, value, max_age=60, httponly=True, samesite="strict")
        return response


def status_of(error: Exception) -> int:
    if isinstance(error, BrokerRefused):
        return STATUS.get(error.code, 502)
    if isinstance(error, NotHere | TopicUnknown):
        return 404
    if isinstance(error, BadRequest | InvalidName | ConfigError):
        return 400
    if isinstance(error, Unavailable):
        return 503
    return 502 if isinstance(error, DanubeError) else 500


def sentence_of(error: Exception) -> str:
    if isinstance(error, BrokerRefused):
        return error.sentence
    if isinstance(error, DanubeError):
        return str(error)
    return "something went wrong in the web admin itself; its log says what"


def tell_if_unexpected(request: Request, error: Exception) -> None:
    if not isinstance(error, DanubeError):
        log.error("page failed", exc_info=error, extra={"method": request.method, "path": request.url.path})


def _title(status: int) -> str:
    return {404: "Not here", 503: "Nobody answers", 504: "Nobody answers"}.get(status, "That did not work")


def _flash(request: Request) -> Flash | None:
    try:
        kind, text = json.loads(base64.urlsafe_b64decode(request.cookies.get(FLASH, "")))
    except (ValueError, TypeError, binascii.Error):
        return None
    return Flash(kind, text) if kind in ("done", "failed") and isinstance(text, str) else None


def _theme(request: Request) -> str:
    theme = request.cookies.get(THEME, "")
    return theme if theme in ("light", "dark") else ""


def _here(request: Request) -> str:
    query = request.url.query
    return f"{request.url.path}?{query}" if query else request.url.path


RANGES: Final[Mapping[str, int]] = {"5m": 300, "15m": 900, "1h": 3600, "6h": 21600}  # seconds


def range_of(request: Request) -> int:
    """How far back charts go."""
    return RANGES.get(request.query_params.get("range", ""), RANGES["15m"])


def ranges_of(request: Request) -> list[tuple[str, str, bool]]:
    """Word, address and whether it is this one, for every range that charts have."""
    query = {name: value for name, value in request.query_params.items() if name != "range"}
    return [
        (word, f"{request.url.path}{query_text({**query, 'range': word})}", seconds == range_of(request))
        for word, seconds in RANGES.items()
    ]


def is_fragment(request: Request) -> bool:
    return request.headers.get("x-fragment") == LIVE


# --- what pages are asked with ----------------------------------------------------------------------------


async def form_of(request: Request) -> dict[str, str]:
    """The fields of a form. Raises BadRequest for one that is none, or too large."""
    body = await body_of(request)
    try:
        return dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=FIELDS_MAX))
    except UnicodeDecodeError as error:
        raise BadRequest(f"the form cannot be read: byte {error.start} is no UTF-8") from None
    except ValueError:
        raise BadRequest(f"the form has more than {FIELDS_MAX} fields") from None


async def body_of(request: Request) -> bytes:
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > BODY_MAX_BYTES:
            raise BadRequest(f"a request has {BODY_MAX_BYTES} bytes at most")
        chunks.append(chunk)
    return b"".join(chunks)


def topic_of(request: Request) -> TopicName:
    """Raises InvalidName."""
    return TopicName.of(request.path_params["namespace"], request.path_params["name"])


def subscription_of(request: Request) -> SubscriptionName:
    return SubscriptionName(request.path_params["subscription"])


def whole(values: Mapping[str, str], key: str, default: int, lowest: int = 0, highest: int = (1 << 63) - 1) -> int:
    """A number of a query or a form; what is none is the default. Raises ConfigError if it is not allowed."""
    text = values.get(key, "").strip().replace(",", "")
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and lowest <= int(text) <= highest):
        raise ConfigError(key, text[:50], f"a whole number from {lowest} to {highest}")
    return int(text)


# --- addresses of pages -------------------------------------------------------------------------------------


def topic_url(topic: str, *more: str, **query: object) -> str:
    parts = [quote(part, safe="") for part in (*topic.strip("/").split("/", 1), *more)]
    return f"/topics/{'/'.join(parts)}{query_text(query)}"


def subscription_url(topic: str, subscription: str, *more: str) -> str:
    return topic_url(topic, "subscriptions", subscription, *more)


def broker_url(broker_id: object, *more: str) -> str:
    return "/".join(["/brokers", quote(str(broker_id), safe=""), *more])


def query_text(query: Mapping[str, object]) -> str:
    kept = {name: value for name, value in query.items() if value not in (None, "")}
    return f"?{urlencode(kept)}" if kept else ""


def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("pydanube.web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters |= {
        "count": formats.count,
        "counted": formats.counted,
        "rate": formats.rate,
        "size": formats.size,
        "duration": formats.duration,
        "moment": formats.moment,
        "clock": formats.clock,
        "bare": formats.bare,
    }
    environment.globals |= {
        "topic_url": topic_url,
        "subscription_url": subscription_url,
        "broker_url": broker_url,
        "query_text": query_text,
        "offsets": formats.offsets,
        "happening": formats.happening,
        "with_addresses": formats.with_addresses,
        "spark": charts.spark,
        "tier_bar": charts.tier_bar,
        "meter": charts.meter,
        "stacked": charts.stacked,
    }
    return environment
