"""What is true of all pages: links lead somewhere, commands and options exist, the reference is what the code says.

Pages whose commands need processes are followed in tests/e2e/test_pages.py; docs/client.md in test_client_page.py.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from pydanube.config import Flags, load
from pydanube.config.settings import SETTINGS, default
from pydanube.wire._pb.pydanube import stream_pb2 as pb
from tests.pages import DOCS, REPOSITORY, blocks, command_named
from tools.docs import configuration

README = REPOSITORY / "README.md"
PAGES = sorted([README, REPOSITORY / "ARCHITECTURE.md", REPOSITORY / "CHANGELOG.md", *DOCS.rglob("*.md")])
OURS = [README, *(DOCS / f"{name}.md" for name in ("getting-started", "concepts", "client", "operations", "index"))]

named = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@named
def test_every_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{target} does not exist"
        assert not anchor or anchor in anchors(found), f"{target}: no such heading"


def commands(page: Path) -> Iterator[list[str]]:
    """Everything that is written as a danube command, in blocks and between backquotes."""
    text = page.read_text()
    lines = [command for block in blocks(text) if block.language == "sh" for command in block.commands]
    lines += [line.partition("  #")[0].strip() for line in text.splitlines() if line.startswith("    danube ")]
    lines += re.findall(r"`(danube [a-z][^`\n]*)`", text)
    for line in lines:
        for part in line.split(" | "):
            words = shlex.split(part.replace("…", "").removeprefix(".venv/bin/"), comments=True)
            if words and words[0] == "danube":
                yield words[1:]


@pytest.mark.parametrize("page", OURS, ids=lambda page: page.name)
def test_every_command_and_option_exists(page: Path) -> None:
    for words in commands(page):
        command, left = command_named(words)
        known = {name for parameter in command.params for name in parameter.opts}
        asked = {word.partition("=")[0] for word in left if word.startswith("--")}
        assert asked <= known, f"danube {' '.join(words)}: {asked - known} are no options"
        assert not getattr(command, "commands", None) or not left, f"danube {' '.join(words)}: no such command"


@pytest.mark.parametrize("page", OURS, ids=lambda page: page.name)
def test_every_make_target_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text(), re.MULTILINE)) <= targets


def test_the_readme_is_short_and_every_page_is_listed() -> None:
    assert len(README.read_text().splitlines()) < 150
    listed = (DOCS / "index.md").read_text()
    for page in DOCS.glob("*.md"):
        assert page.name == "index.md" or f"]({page.name})" in listed, page.name


# --- configuration ------------------------------------------------------------------------------------


def test_the_configuration_page_is_what_the_code_says() -> None:
    assert (DOCS / "configuration.md").read_text() == configuration.page(), (
        "the page is old: python -m tools.docs.configuration > docs/configuration.md"
    )


def test_every_key_has_a_meaning_and_is_on_the_page() -> None:
    assert all(setting.meaning for setting in SETTINGS.values())
    page = (DOCS / "configuration.md").read_text()
    for key in SETTINGS:
        assert page.count(f"\n| `{key}` |") == 1, key


def test_every_default_may_stand_in_the_file_and_changes_nothing(tmp_path: Path) -> None:
    plain = load(Flags(mode="standalone"))
    file = tmp_path / "danube.yml"
    for key in SETTINGS:
        value = default(plain, key)
        if value is None or key in ("storage.durable.anonymous", "storage.durable.virtual_host_style"):
            continue  # there is none; and options of a store that a standalone broker does not have
        if isinstance(value, float):
            assert value.is_integer(), key
            value = int(value)
        nested: object = value
        for name in reversed(key.split(".")):
            nested = {name: nested}
        if key.startswith("policies."):
            assert isinstance(nested, dict)
            nested["policies"]["max_message_size"] = 0  # a file with any limit limits this too, unless it says
        file.write_text(yaml.safe_dump(nested))
        loaded = load(Flags(mode="standalone", config_file=file))
        assert {name: getattr(loaded, name) for name in loaded.__slots__ if name not in ("warnings", "given")} == {
            name: getattr(plain, name) for name in plain.__slots__ if name not in ("warnings", "given")
        }, key


def test_the_example_file_on_the_page_is_accepted(tmp_path: Path) -> None:
    [example] = [block for block in blocks(configuration.page()) if block.language == "yaml"]
    (tmp_path / "danube.yml").write_text(example.text)
    loaded = load(Flags(mode="standalone", config_file=tmp_path / "danube.yml"))
    assert loaded.storage.url == "s3://events/danube" and loaded.warnings == ()


def test_the_files_on_the_page_of_the_grpc_port_are_accepted(tmp_path: Path) -> None:
    examples = [block for block in blocks((DOCS / "grpc.md").read_text()) if block.language == "yaml"]
    configs = []
    for each in examples:
        (tmp_path / "danube.yml").write_text(each.text)
        configs.append(load(Flags(mode="standalone", config_file=tmp_path / "danube.yml")).grpc)
    switched_off, secured = configs
    assert switched_off.server == "grpcio"
    assert secured.scheme == "https" and secured.clients == "optional" and secured.server == "own"


# --- others -------------------------------------------------------------------------------------------


def test_the_commands_about_storage_are_numbered_as_on_the_wire() -> None:
    fields = pb.Command.DESCRIPTOR.fields_by_name
    section = (DOCS / "protocol.md").read_text().partition("### History in the object store")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", section, re.MULTILINE)
    assert {(int(number), name) for number, name in rows} == {
        (fields[name].number, fields[name].message_type.name)
        for name in ("describe_storage", "storage_info", "swap_objects", "describe_storages", "storage_infos")
    }
    described = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`[a-z_`, ]+) \|", section, re.MULTILINE))))
    assert described == set(pb.StorageInfo.DESCRIPTOR.fields_by_name)


def test_the_heartbeats_on_the_operations_page_are_ours() -> None:
    from pydanube.core.dispatch.lag import OBSERVE, OFF, PROFILES

    rows = re.findall(r"^\| `(\w+)` \| (\d+) ms \|", (DOCS / "operations.md").read_text(), re.MULTILINE)
    assert {name: int(ms) for name, ms in rows if name != OBSERVE} == PROFILES
    assert f"| `{OFF}` | never |" in (DOCS / "operations.md").read_text()


def test_the_walks_name_functions_that_are_there() -> None:
    text = (REPOSITORY / "ARCHITECTURE.md").read_text()
    walks = text[text.index("## Six walks") : text.index("## Words")]
    path, steps = "", 0
    for file, name in re.findall(r"([\w/]*(?:\.py)?):\d+ (\w+)", walks):
        path = file or path
        code = (REPOSITORY / "src/pydanube" / path).read_text()
        assert re.search(rf"^ *(async )?def {name}\b", code, re.MULTILINE), f"{path} has no {name}"
        steps += 1
    assert steps > 200, "the walks are not written as this test reads them"


def test_the_tour_names_files_that_are_there() -> None:
    text = (REPOSITORY / "ARCHITECTURE.md").read_text()
    roots = [REPOSITORY, REPOSITORY / "src/pydanube"]
    for path in re.findall(r"`([\w/]+\.py)`", text):
        assert any((root / path).exists() for root in roots), f"{path} does not exist"
