"""docs/web-admin.md says what is true: its commands and routes exist, its table of states is complete."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator

import pytest

from pydanube.admin.gateway import TopicRow
from pydanube.admin.series import Thing
from pydanube.config import Flags, load
from pydanube.web import topic_pages, views
from pydanube.web.json_routes import routes
from pydanube.web.operations import Operations
from pydanube.wire._pb.pydanube import admin_pb2 as ours
from tests.pages import DOCS, blocks, command_named
from tests.web.pages import Web, opened

PAGE = (DOCS / "web-admin.md").read_text()
COMMANDS = [command for block in blocks(PAGE) if block.language == "sh" for command in block.commands]


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    with opened() as web:
        web.run(web.client.create_topic("/default/orders"))
        yield web


def test_every_command_has_the_options_it_is_shown_with() -> None:
    found = [shlex.split(command)[1:] for command in COMMANDS if command.startswith("danube ")]
    assert len(found) >= 4
    for words in found:
        command, left = command_named(words)
        known = {name for parameter in command.params for name in parameter.opts}
        assert {word for word in left if word.startswith("--")} <= known, words


def test_the_table_of_options_is_complete() -> None:
    command, _ = command_named(["admin", "serve"])
    known = {name for parameter in command.params for name in parameter.opts} - {"--help"}
    assert set(re.findall(r"^\| `(--[\w-]+)` \|", PAGE, re.MULTILINE)) == known


def test_the_requests_for_tools_are_answered(web: Web) -> None:
    asked = [shlex.split(command) for command in COMMANDS if command.startswith("curl ")]
    assert len(asked) == 5
    for words in asked:
        path = words[-1].removeprefix("http://127.0.0.1:8080")
        if "-d" in words:
            answer = web.order(path, **json.loads(words[words.index("-d") + 1]))
            assert answer.json["success"]
        else:
            answer = web.get(path)
        assert answer.status == 200, words


def test_the_routes_for_tools_are_all_named(web: Web) -> None:
    section = PAGE[PAGE.index("## For tools") :]
    named = {name.replace("{topic}", "{}").replace("{id}", "{}") for name in re.findall(r"`([a-z][\w/{}]*)`", section)}
    absent = ("schemas", "security")
    known = {
        re.sub(r"\{.*?\}", "{}", route.path.removeprefix("/ui/v1/"))  # type: ignore[attr-defined]
        for route in routes(web.site)
    }
    assert {each for each in known if not each.startswith(absent)} == named - {
        *("errors", "message", "reliable"),
        *("messages", "key", "attribute", "text", "time", "until", "offset", "count", "next_offset"),
    }


def test_the_states_on_the_page_are_those_that_pages_show() -> None:
    def thing(**levels: float) -> Thing:
        return Thing(levels=levels, has_past=False)

    row, operations = TopicRow("/default/orders", "1", "Reliable"), Operations()
    idle = views.flow_chip(thing(messages_in=0.0))
    states = {
        views.flow_chip(thing(messages_in=5.0)).word,
        idle.word,
        views.flow_chip(thing(lag=2_000.0)).word,
        views.flow_chip(thing(blocked=1.0)).word,
        views.topic_chip(row._replace(broker_id=""), thing(), operations).word,
        views.flow_chip(thing()).word,
        topic_pages._chip(ours.TopicStateResponse(state="moving"), idle).word,
        topic_pages._chip(ours.TopicStateResponse(orphans=[ours.OrphanState()]), idle).word,
    }
    table = PAGE[PAGE.index("| state | meaning |") :].partition("\n\n")[0]
    assert set(re.findall(r"^\| ([\w ]+) \| (?!meaning)", table, re.MULTILINE)) == states
    assert views.is_lagging(thing(lag=1_000.0)) and not views.is_lagging(thing(lag=999.0))
    assert not views.is_lagging(thing(lag=1_000.0, messages_in=100.0))  # not more than ten seconds


def test_where_the_pages_listen_is_said_by_a_flag_or_a_key() -> None:
    assert load(Flags(mode="standalone")).web_addr == "127.0.0.1:8080"
    assert load(Flags(mode="standalone", web_addr="off")).web_addr == ""
    assert load(Flags(mode="standalone", web_addr="127.0.0.1:9090")).web_addr == "127.0.0.1:9090"


@pytest.mark.parametrize(("text", "address"), [("off", ""), ("'off'", ""), ("'[::1]:80'", "[::1]:80")])
def test_a_file_may_switch_them_off(tmp_path_factory: pytest.TempPathFactory, text: str, address: str) -> None:
    file = tmp_path_factory.mktemp("config") / "danube.yml"
    file.write_text(f"web:\n  listen: {text}\n")
    assert load(Flags(mode="standalone", config_file=file)).web_addr == address


def test_the_pictures_are_there_and_small_and_are_those_that_the_demo_takes() -> None:
    pictures = set(re.findall(r"pictures/([\w-]+\.png)", PAGE))
    assert len(pictures) >= 6
    for name in pictures:
        assert 10_000 < (DOCS / "pictures" / name).stat().st_size < 220_000, name
    assert pictures == {path.name for path in (DOCS / "pictures").iterdir()}
    assert pictures == set(re.findall(r'"([\w-]+\.png)"', (DOCS.parent / "examples/demo/pictures.py").read_text()))
