"""Every key of the original's configuration file: docs/drop-in.md says what becomes of it, and it does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from pydanube.config import Flags, load
from pydanube.config.file import ALIASES, read
from pydanube.config.settings import SETTINGS
from pydanube.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "drop-in.md"
ROWS = re.findall(r"^\| `([a-z_.]+)` \| (\w+) \| `(.+)` \|$", PAGE.read_text(), re.MULTILINE)


def written(rows: list[tuple[str, str, str]], file: Path) -> Path:
    found: dict[str, object] = {}
    for key, _, example in rows:
        *sections, name = key.split(".")
        section = found
        for each in sections:
            section = section.setdefault(each, {})  # type: ignore[assignment]
        section[name] = yaml.safe_load(example)
    file.write_text(yaml.safe_dump(found))
    return file


def test_the_table_is_there() -> None:
    assert len(ROWS) == len({key for key, _, _ in ROWS}) > 70


@pytest.mark.parametrize(("key", "what", "example"), ROWS, ids=[row[0] for row in ROWS])
def test_a_key_of_the_original_is_taken_mapped_or_named_in_a_warning(
    tmp_path: Path, key: str, what: str, example: str
) -> None:
    rows = [(key, what, example)]
    if key.startswith("auth.") and key != "auth.mode":
        rows.append(("auth.mode", "taken", "none"))
    values, warnings = read(written(rows, tmp_path / "danube.yml"))
    named = [warning for warning in warnings if warning.startswith(f"{key} has no effect: ")]
    if what == "warning":
        assert len(named) == 1 and key not in values
        return
    assert not warnings
    setting = key if what == "taken" else ALIASES[key]
    if key != "auth.mode":
        assert setting in SETTINGS
    assert setting in values
    if what == "mapped":
        assert setting != key


def test_a_file_with_every_key_at_once_starts_a_cluster_of_one(tmp_path: Path) -> None:
    rows = [row for row in ROWS if row[1] != "mapped" and not row[0].startswith("storage.durable.")]
    rows = [row for row in rows if row[0] != "meta_store.seed_nodes"]
    config = load(Flags(config_file=written(rows, tmp_path / "danube.yml")))
    assert config.mode == "cluster" and config.cluster.seed_nodes == ("127.0.0.1:7650",)
    assert sum("has no effect" in warning for warning in config.warnings) == sum(row[1] == "warning" for row in rows)


def test_security_that_is_asked_for_is_never_left_out(tmp_path: Path) -> None:
    for text in ("auth: {mode: tls, tls: {cert_file: a}}", "admin_tls: true", "auth: {jwt: {secret_key: a}}"):
        file = tmp_path / "danube.yml"
        file.write_text(text)
        with pytest.raises(ConfigError):
            load(Flags(config_file=file))
