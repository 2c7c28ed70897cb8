"""What the web admin refuses before any page is reached."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from pydanube.web.app import build
from pydanube.web.guard import ICEBERG
from tests.web.pages import HOST, Web, opened

TOPIC = "/topics/default/orders"


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    with opened() as web:
        web.run(web.client.create_topic("/default/orders"))
        web.run(web.client.create_topic("/default/victim"))
        yield web


def browser(web: Web, **guard: Any) -> Web:
    """Another one, at a site that was started with other flags."""
    return Web(web._thread, web.site, web.broker, web.client, **guard)


@pytest.mark.parametrize("host", [HOST, "127.0.0.1", "localhost:8080", "LOCALHOST", "[::1]:8080", "10.1.2.3:80"])
def test_an_address_or_localhost_is_answered(web: Web, host: str) -> None:
    assert web.request("GET", "/topics", host=host).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "", "localhost.evil", "[::1"]
)
def test_a_name_that_only_means_this_machine_reads_nothing(web: Web, host: str) -> None:
    refused = web.request("GET", "/topics", host=host)
    assert refused.status == 421 and "--allow-host" in refused.body and "orders" not in refused.body


def test_a_name_that_was_allowed_is_answered(web: Web) -> None:
    behind_a_proxy = browser(web, allowed_hosts=["Danube.example.com"])
    assert behind_a_proxy.request("GET", "/topics", host="danube.example.com").status == 200
    assert behind_a_proxy.request("GET", "/topics", host="danube.example.org").status == 421


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": "null"},
        {"origin": f"http://{HOST}", "sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": f"ftp://{HOST}"},
    ],
)
def test_a_post_from_another_site_changes_nothing(web: Web, headers: dict[str, str]) -> None:
    body = b"confirm=/default/victim"
    refused = web.request("POST", "/topics/default/victim/delete", body, headers)
    assert refused.status == 403 and "another site" in refused.body
    assert "/default/victim" in web.run(web.client.list_topics())
    json = web.request("POST", "/ui/v1/topics/actions", b'{"action":"delete","topic":"/default/victim"}', headers)
    assert json.status == 403
    assert "/default/victim" in web.run(web.client.list_topics())


def every_post(web: Web) -> list[str]:
    """The path of each form and of each JSON route that changes something, with something in its braces."""
    application = build(web.site)
    assert isinstance(application, Starlette)
    paths = [
        each.path for each in application.routes if isinstance(each, Route) and each.methods and "POST" in each.methods
    ]
    return [re.sub(r"\{.*?\}", "x", path) for path in paths]


def test_no_form_and_no_route_that_changes_anything_is_reached_from_another_site_or_in_read_only_mode(web: Web) -> None:
    reader = browser(web, read_only=True)
    paths = every_post(web)
    assert len(paths) > 15
    for path in ("/brokers/x/drain", "/brokers/x/activate", "/cluster/rebalance", "/ui/v1/cluster/actions"):
        assert path in paths
    for path in paths:
        refused = web.request("POST", path, b"{}", {"origin": "https://evil.example"})
        assert refused.status == 403 and "another site" in refused.body, path
        refused = reader.request("POST", path, b"{}", {"origin": f"http://{HOST}"})
        if path.startswith(ICEBERG):  # read-only by itself
            assert refused.status == 406 and "for readers" in refused.body
        else:
            assert refused.status == 403 and "read-only" in refused.body, path


def test_a_proxy_that_speaks_tls_is_the_same_site(web: Web) -> None:
    proxied = browser(web, allowed_hosts=["danube.example.com"])
    headers = {"origin": "https://danube.example.com", "sec-fetch-site": "same-origin"}
    answer = proxied.request("POST", "/namespaces/create", b"name=proxied", headers, host="danube.example.com")
    assert answer.status == 303
    assert "proxied" in web.run(web.site.gateway.namespaces())


def test_read_only_shows_everything_and_refuses_every_post(web: Web) -> None:
    reader = Web(web._thread, replace(web.site, read_only=True), web.broker, web.client, read_only=True)
    for path in ("/cluster", "/topics", TOPIC, "/namespaces", "/dead-letters", "/topics/new", f"{TOPIC}/delete"):
        page = reader.get(path)
        assert page.status == 200 and "read-only" in page.text
        assert "<button" not in page.body.replace('<button id="theme"', "").replace('<button class="plain">', "")
        assert 'method="post"' not in page.body or "This web admin is read-only" in page.text
    for path in ("/topics/new", f"{TOPIC}/move", "/cluster/rebalance", "/ui/v1/topics/actions", "/nowhere"):
        refused = reader.request("POST", path, b"{}", {"origin": f"http://{HOST}"})
        assert refused.status == 403 and "read-only" in refused.body


def test_every_answer_says_what_a_browser_may_do_with_it(web: Web) -> None:
    for answer in (
        web.get("/topics"),
        web.get("/static/live.js"),
        web.get("/ui/v1/cluster"),
        web.get("/nowhere"),
        web.request("GET", "/topics", host="evil.example"),
    ):
        policy = answer.headers["content-security-policy"]
        assert "script-src 'self'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "server" not in answer.headers


def test_no_page_needs_what_the_policy_forbids(web: Web) -> None:
    for path in ("/cluster", "/topics", TOPIC, "/namespaces", "/dead-letters", f"{TOPIC}/messages"):
        body = web.get(path).body
        assert (
            " style=" not in body
            and " onclick" not in body
            and "<script>" not in body
            and "://"
            not in body.replace(f"http://{web.broker.grpc_url.removeprefix('http://')}", "").replace(
                "http://127.0.0.1", ""
            )
        ), path


def test_other_methods_and_large_bodies_are_refused(web: Web) -> None:
    assert web.request("DELETE", "/topics").status == 405
    assert web.request("PUT", "/topics").status == 405
    assert web.request("POST", "/namespaces/create", b"x" * 300_000).status == 413
    lied = web.request("POST", "/namespaces/create", b"name=" + b"x" * 300_000, {"content-length": "10"})
    assert lied.status in (303, 400) and web.run(web.site.gateway.namespaces()).count("x" * 300_000) == 0


def test_a_browser_keeps_what_has_a_version_in_its_name_and_asks_for_the_rest(web: Web) -> None:
    found = re.findall(r'(?:href|src)="(/static/[^"]+)"', web.get("/topics").body)
    assert len(found) >= 6
    for path in found:
        answer = web.get(path)
        assert answer.status == 200, path
        assert ("immutable" in answer.headers["cache-control"]) == path.startswith("/static/vendor/"), path
        assert path.startswith("/static/vendor/") == bool(re.search(r"-\d+\.\d+\.\d+\.", path)), path
    assert web.get("/topics").headers["cache-control"] == "no-store"


def test_a_path_out_of_the_static_files_leads_nowhere(web: Web) -> None:
    for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "/static/"):
        assert web.request("GET", path).status == 404
