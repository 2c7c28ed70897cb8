"""Every PySpark that has Python data sources reads, follows and writes topics. Each has an environment of its own.

Made once from the package registry, in build/pyspark-*; what runs in `make test` is the newest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections import Counter
from pathlib import Path

import pytest

from pydanube.spark.java import java_home, version_of
from tests.spark.places import Place, numbers

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("version_query.py")
VERSIONS = ("4.0", "4.1", "4.2")
# As pyproject.toml has it for those who read and write topics with Spark, without what tests compare with.
PACKAGES = ("crc32c", "grpcio", "numpy", "obstore", "pandas>=2.2,<3", "protobuf>=6.30,<8", "pyarrow>=21", "pyyaml")


def python_with(version: str) -> Path:
    """An interpreter with this PySpark and what our package needs, but not the package."""
    made = ROOT / "build" / f"pyspark-{version}"
    python, stamp = made / "bin" / "python", made / "made-by-test"
    if not stamp.exists():  # an interrupted install is repeated
        venv.create(made, with_pip=True, clear=True)
        install = [str(python), "-m", "pip", "-q", "--disable-pip-version-check", "install"]
        subprocess.run([*install, f"pyspark=={version}.*", *PACKAGES], check=True, timeout=1200)
        stamp.touch()
    return python


def java() -> str | None:
    """Older Sparks are made for 17 and 21; the extra brings a newer one."""
    home = java_home()
    if home is not None and version_of(f"{home}/bin/java") > 21:
        pytest.fail("a Java 17 or 21 must be installed for this test")
    return home


def run(python: Path, *arguments: str) -> dict[str, object]:
    home = java()
    environment = {name: value for name, value in os.environ.items() if name != "PYSPARK_PYTHON"}
    environment |= {"PYTHONPATH": f"{ROOT / 'src'}", **({"JAVA_HOME": home} if home else {})}
    done = subprocess.run(
        [str(python), str(PROGRAM), *arguments], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
    return told


@pytest.mark.parametrize("version", VERSIONS)
def test_a_topic_is_read_followed_and_written(version: str, place: Place, tmp_path: Path) -> None:
    python = python_with(version)
    source, target = place.new_topic("from-version"), place.new_topic("to-version")
    place.send(source, numbers(0, 3000))
    place.upload(source)
    place.send(source, numbers(3000, 4000))
    told = run(python, place.url, source, target, str(tmp_path / "checkpoint"))
    assert str(told["version"]).startswith(version)
    assert (told["rows"], told["some"]) == ([4000, 4000, 3999], [10, 11, 12, 13, 14])
    found = Counter(place.payloads(target))
    assert sum(found.values()) == 4007 and set(found) == set(numbers(0, 4000))
    # Started again, the stream goes on from its checkpoint; and so it does when there is nothing new.
    place.send(source, numbers(4000, 4100))
    for runs in (2, 3):
        run(python, place.url, source, target, str(tmp_path / "checkpoint"))
        copied = Counter(place.payloads(target))
        assert set(copied) == set(numbers(0, 4100)) and sum(copied.values()) == 4100 + runs * 7


def test_the_environment_of_these_tests_is_the_newest() -> None:
    import pyspark

    assert tuple(map(int, pyspark.__version__.split(".")[:2])) > max(
        tuple(map(int, version.split("."))) for version in VERSIONS
    )
    assert sys.version_info >= (3, 11)
