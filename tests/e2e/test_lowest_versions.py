"""The lower bounds of pyproject.toml work, and leave room for what people install beside us.

Environments of their own, from the package index: minutes, and a network.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

REPOSITORY = Path(__file__).resolve().parents[2]
TOOLS = (
    *("cryptography", "danube-client", "duckdb", "hypothesis", "pandas", "polars"),
    *("pytest", "pytest-timeout", "pytest-xdist"),
)
# The client, what it shares with brokers, and a broker that it talks to.
TESTS = (
    *("test_client_*.py", "test_consumer_memory.py", "test_errors_on_wire.py", "test_few_rows.py", "test_frames.py"),
    *("test_policies_cli.py", "test_native_server.py", "test_stream_tls.py", "test_workers.py"),
)
# The system's certificates, as scripts/lock has them; and never another interpreter.
ENVIRONMENT = {**os.environ, "UV_SYSTEM_CERTS": "1", "UV_PYTHON_DOWNLOADS": "never", "UV_NO_CONFIG": "1"}


def run(*command: object, **more: str) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=REPOSITORY, env={**ENVIRONMENT, **more}, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}{done.stderr[-6000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def uv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("uv")
    run(sys.executable, "-m", "venv", place)
    run(place / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "uv")
    return place / "bin" / "uv"


@pytest.fixture
def wanted(tmp_path: Path) -> Path:
    """What the product needs, as its wheel says it."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    file = tmp_path / "wanted.in"
    file.write_text("\n".join(project["dependencies"]))
    return file


def pinned(name: str) -> str:
    """The version with which we test."""
    found = re.search(rf"^{name}==\S+", (REPOSITORY / "requirements" / "spark.lock").read_text(), re.MULTILINE)
    assert found is not None, name
    return found[0]


def resolved(uv: Path, *words: object) -> dict[str, str]:
    said = run(uv, "pip", "compile", "--quiet", "--python-version", "3.11", "--no-header", "--no-annotate", *words)
    return dict(re.findall(r"^([\w.-]+)==(\S+)", said, re.MULTILINE))


def test_the_clients_tests_pass_at_the_lowest_versions(uv: Path, wanted: Path, tmp_path: Path) -> None:
    lowest = resolved(uv, "--resolution", "lowest-direct", wanted)
    for name, bound in re.findall(r"^([\w-]+)>=([\d.]+)", wanted.read_text(), re.MULTILINE):
        assert lowest[name].startswith(bound), f"{name} {bound} does not exist: {lowest[name]} is the lowest"
    place = tmp_path / "lowest"
    python = place / "bin" / "python"
    run(uv, "venv", "--quiet", "--python", sys.executable, place)
    versions = [f"{name}=={version}" for name, version in lowest.items()]
    tools = [pinned(name) for name in TOOLS]
    run(uv, "pip", "install", "--quiet", "--python", python, "--only-binary", ":all:", *versions, *tools)
    tests = sorted(file for pattern in TESTS for file in (REPOSITORY / "tests").rglob(pattern))
    options = ("-q", "-n", "2", "-p", "no:cacheprovider", "--basetemp", tmp_path / "tests")
    run(python, "-m", "pytest", *options, *tests, PYTHONPATH=str(REPOSITORY / "src"))


@pytest.mark.parametrize("neighbour", ["mlflow", "dbt-core", "apache-beam"])
def test_the_newest_of_what_others_install_fits_beside_us(uv: Path, wanted: Path, neighbour: str) -> None:
    alone = wanted.with_name("alone.in")
    alone.write_text(neighbour)
    assert resolved(uv, alone, wanted)[neighbour] == resolved(uv, alone)[neighbour]
