"""Who may ask what, before any page is reached.

Host            an address, localhost, or a name that was allowed: else 421. A page of another site whose name
                suddenly means this machine (DNS rebinding) reads nothing and changes nothing.
POST            only from our own pages, or from a tool that is no browser: Origin and Sec-Fetch-Site say so.
read-only       no POST at all: 403.
/iceberg/v1/    answers every method, and is read-only by itself.
every answer    says what a browser may do with it: run our script files, nothing inline, in no frame.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pydanube.admin.gateway import ASKED_BY

BODY_MAX_BYTES: Final = 256 * 1024
METHODS: Final = ("GET", "HEAD", "POST")
ICEBERG: Final = "/iceberg/v1/"
SECURITY: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
READ_ONLY: Final = "this web admin is read-only; use danube admin, or one that was started without --read-only"
FOREIGN: Final = "refused: the request comes from another site's page"


class Guard:
    def __init__(self, app: ASGIApp, *, allowed_hosts: Collection[str] = (), read_only: bool = False) -> None:
        self._app = app
        self._allowed = {name.lower() for name in allowed_hosts}
        self._read_only = read_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = MutableHeaders(scope=message)
                for name, value in SECURITY.items():
                    given[name] = value
                given.setdefault("cache-control", "no-store")
            await send(message)

        why = self._refusal(scope["method"], scope["path"], headers)
        if why is not None:
            status, sentence = why
            await PlainTextResponse(f"{sentence}\n", status)(scope, receive, guarded)
            return
        ASKED_BY.set((scope.get("client") or ("",))[0])  # also for what goes on in the background
        await self._app(scope, receive, guarded)

    def _refusal(self, method: str, path: str, headers: Headers) -> tuple[int, str] | None:
        host = headers.get("host", "")
        if not self._is_ours(host):
            return 421, (
                f"this web admin does not answer to the name {host[:100]!r}; use its address, "
                "or start it with --allow-host and that name"
            )
        is_table = path.startswith(ICEBERG)
        if method not in METHODS and not is_table:
            return 405, "only GET and POST are answered here"
        if method in ("GET", "HEAD"):
            return None
        if not _is_own_page(headers, host):
            return 403, FOREIGN
        if is_table:
            return None  # it changes nothing, whatever the method, and says so in its clients' language
        if self._read_only:
            return 403, READ_ONLY
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > BODY_MAX_BYTES:
            return 413, f"a request has {BODY_MAX_BYTES} bytes at most"
        return None

    def _is_ours(self, host: str) -> bool:
        name = host_name(host)
        if name in ("localhost", *self._allowed):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def host_name(host: str) -> str:
    """Without its port, in small letters."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_own_page(headers: Headers, host: str) -> bool:
    """Browsers say where a request comes from, and scripts cannot change it. What says nothing is no browser."""
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = headers.get("origin")
    if origin is None:
        return True
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    # Not the scheme: a proxy in front may speak TLS.
    return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower()
