"""No refusal quotes what may be a secret: not a file's line, not a value below a misspelt name, no URL's password."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from pydanube.config import Flags, load
from pydanube.errors import ConfigError
from pydanube.pipeline.settings import JobSettings, read_settings
from pydanube.spark.options import CONNECTION_OPTIONS, QueryOptions

MARKER = "hunter2-hunter2"

# What happens to people who edit a file at night; each reader must refuse it, or take it for what it says.
BROKEN = (
    'secret_key: "{}',
    "secret_key: '{}",
    "secret_key: {}: x",
    "secret_key: a\n\ttoken: {}",
    "secret_key: [{}",
    "secret_key: {{{}",
    "secret_key: *{}",
    "secret_key: !{} x",
    "secret_key: !!{} x",
    "secret_key: !e!{} x",
    "secret_key: @{}",
    "secret_key: %{}",
    "secret_key: `{}",
    'secret_key: "\\{}"',
    "secret_key: &a {}\n  b: c",
    "secret_key: |{}\n  x",
    "secret_key: x\n{}\nb: c",
    "? [{}]\n: x",
    "secret_key: {}\0",
    "%YAML {}\n---\na: b",
    "- secret_key: {}",
    "{}",
    "storage: {{durable: {{secret_key: {}, secret_key: {}",
)
# Not YAML's own complaints, but of what it builds with.
UNBUILDABLE = ("a: 2026-13-45", "a: 0b_", "a: " + "[" * 400)


def of_config(text: str, tmp_path: Path) -> None:
    file = tmp_path / "danube.yml"
    file.write_text(text)
    load(Flags(mode="standalone", config_file=file))


def of_job(text: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yml"
    file.write_text(text)
    read_settings(file)


def of_set(text: str, tmp_path: Path) -> None:
    read_settings(None, [f"columns={text}"])


READERS = (of_config, of_job, of_set)


def refusal(act: Callable[[], object]) -> ConfigError | None:
    try:
        act()
    except ConfigError as error:
        return error
    return None


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("text", BROKEN)
def test_a_slip_in_yaml_does_not_print_the_line_that_it_is_in(
    text: str, reader: Callable[[str, Path], None], tmp_path: Path
) -> None:
    given = text.format(*[MARKER] * text.count("{}"))
    error = refusal(lambda: reader(given, tmp_path))
    assert error is not None or reader is not of_config, "the broker has no such setting"
    if error is not None:
        assert "hunter2" not in f"{error} {error!r} {error.args} {pickle.dumps(error)!r} {error.__cause__!r}"
        assert error.__context__ is None or error.__suppress_context__, "a traceback would quote it"


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("text", UNBUILDABLE)
def test_values_that_cannot_be_are_refused_in_a_sentence(
    text: str, reader: Callable[[str, Path], None], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="YAML"):
        reader(text, tmp_path)


def test_the_sentence_says_where_the_slip_is_and_what(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"found unexpected end of stream.*line 2, column \d+"):
        of_config('cluster_name: a\nstorage: {durable: {secret_key: "x', tmp_path)
    with pytest.raises(ConfigError, match=r"expected ',' or '}', but got '<stream end>'.*line 1"):
        of_config("storage: {a: b", tmp_path)
    with pytest.raises(yaml.YAMLError, match="hunter2"):
        yaml.safe_load(f'secret_key: "{MARKER}')  # why all this is


def test_what_stands_under_a_name_that_does_not_exist_is_not_shown(tmp_path: Path) -> None:
    for act in (
        lambda: JobSettings({"tokn": MARKER}, ["token"]),
        lambda: JobSettings({"pasword": MARKER}, ["topic"]),
        lambda: QueryOptions({"tokn": MARKER}, CONNECTION_OPTIONS),
        lambda: QueryOptions({"storage.options": f'{{"secret_key": "{MARKER}"'}, CONNECTION_OPTIONS).mapping(
            "storage.options"
        ),
        lambda: JobSettings({"storage.options": [MARKER]}, CONNECTION_OPTIONS).mapping("storage.options"),
        lambda: read_settings(None, [MARKER]),
        lambda: of_config(f"storage: {{durable: {{sercet: {MARKER}}}}}", tmp_path),
        lambda: of_config(f"storage: {{url: 'https://me:{MARKER}@host/bucket'}}", tmp_path),
        lambda: of_config(f"meta_store: {{etcd: ['http://me:{MARKER}@host']}}", tmp_path),
    ):
        error = refusal(act)
        assert error is not None and "hunter2" not in str(error)


@pytest.mark.parametrize(
    "change",
    [
        f"token={MARKER}",
        f"storage.options={{secret_key: {MARKER}}}",
        f"catalog={{token: {MARKER}}}",
        f"tls.key=-----BEGIN PRIVATE KEY-----{MARKER}",
    ],
)
def test_a_secret_on_the_command_line_is_refused_because_everybody_on_the_machine_sees_it(change: str) -> None:
    with pytest.raises(ConfigError, match="command line") as caught:
        read_settings(None, [change])
    assert "hunter2" not in str(caught.value)
    assert read_settings(None, ["token.file=/run/secrets/danube", "key=customer-17", "tls.key=/etc/key.pem"])
