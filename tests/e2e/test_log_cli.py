"""`danube log` as a user meets it: real directories, exit codes, and never a traceback."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

import pydanube
from pydanube.cli.exits import Exit
from pydanube.errors import DirectoryInUse
from pydanube.formats.batch import Envelope, encode, rows_of
from pydanube.log.wal import Wal, WalConfig
from pydanube.stores.disk.files import FileDisk
from pydanube.stores.work.system import SystemClock, SystemWork
from tests.e2e import processes
from tests.e2e.processes import danube_here
from tests.support import run

Done: TypeAlias = subprocess.CompletedProcess[str]

TOPIC = "/default/orders"
SMALL = WalConfig(segment_bytes=4096, ballast_bytes=0, journal_bytes=1 << 20)


def danube(*arguments: object, expect: int = 0, run: Callable[..., Done] = danube_here) -> Done:
    done = run(*arguments)
    assert "Traceback" not in done.stderr + done.stdout, done.stderr
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def complaint(*arguments: object, expect: int = Exit.USAGE) -> str:
    """The one line that a refused command says."""
    done = danube(*arguments, expect=expect)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("danube: ")
    return line


async def _fill(directory: Path, topics: int) -> None:
    disk = FileDisk(directory)
    wal = await Wal.open(disk, SystemClock(), SystemWork(), SMALL)
    for n in range(topics):
        log = await wal.topic(f"{TOPIC}{n or ''}", epoch=1)
        session = await log.open_session(0xABC)
        for i in range(10):
            rows = [Envelope(f"message {i}.{row}".encode(), routing_key=f"k{row}") for row in range(3)]
            await log.append(
                encode(rows_of(rows), topic=log.topic, producer_id=0xABC, session=session, first_sequence=3 * i)
            )
    await wal.close()
    disk.close()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    run(_fill(directory, topics=2))
    return directory


@pytest.fixture
def data(original: Path, tmp_path: Path) -> Path:
    """A data directory with two topics of 30 messages in 10 batches."""
    return Path(shutil.copytree(original, tmp_path / "data"))


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A live process that appends to six topics in `tmp_path / "live"` for ever."""
    (tmp_path / "live").mkdir()
    command = [sys.executable, "-m", "pydanube", "log", "writer", str(tmp_path / "live"), "1", "--topics", "6"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("opened")
        for _ in range(50):
            assert process.stdout.readline()
        yield process
        process.kill()
        process.stdout.read()


def tree(directory: Path) -> dict[str, str]:
    """Every file but LOCK: that says who holds the directory, and for a while this is us."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != "LOCK"
    }


def flip_a_byte(data: Path) -> tuple[Path, int]:
    """In the third message of the first topic; where."""
    path = sorted((data / "wal/default/orders").rglob("*.wal"))[0]
    content = bytearray(path.read_bytes())
    position = content.index(b"message 1.1")
    content[position] ^= 1
    path.write_bytes(content)
    return path.relative_to(data), position


# --- verify -----------------------------------------------------------------------------------------


def test_verify_prints_a_table_of_what_a_good_directory_holds_and_changes_nothing(data: Path) -> None:
    before = tree(data)
    done = danube("log", "verify", data)
    assert "2 topics, 60 messages: everything verifies" in done.stdout
    assert any(line.split()[:3] == [TOPIC, "0…29", "30"] and line.endswith("ok") for line in _lines(done.stdout))
    assert tree(data) == before


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]


def test_verify_prints_json_for_scripts(data: Path) -> None:
    report = json.loads(danube("log", "verify", data, "--output", "json").stdout)
    assert report["ok"] is True and report["problems"] == []
    assert [(topic["topic"], topic["head"], topic["messages"], topic["batches"]) for topic in report["topics"]] == [
        (TOPIC, 30, 30, 10),
        (f"{TOPIC}1", 30, 30, 10),
    ]


def test_verify_names_file_position_and_offsets_of_a_flipped_byte_and_exits_1(data: Path) -> None:
    path, position = flip_a_byte(data)
    before = tree(data)
    done = danube("log", "verify", data, expect=1)
    (finding,) = [line for line in done.stdout.splitlines() if line.startswith("damage:")]
    assert f"{TOPIC}: {path} at position " in finding
    assert int(finding.partition(" at position ")[2].partition(":")[0]) <= position
    assert "offsets 3 up to 6 cannot be read" in finding
    assert "57 messages: damage found" in done.stdout
    assert tree(data) == before
    report = json.loads(danube("log", "verify", data, "-o", "json", expect=1).stdout)
    assert report["ok"] is False and str(path) in report["topics"][0]["problems"][0]


def test_verify_refuses_a_directory_in_use_and_names_the_pid(writer: subprocess.Popen[str], tmp_path: Path) -> None:
    line = complaint("log", "verify", tmp_path / "live", expect=Exit.REFUSED)
    assert f"in use by process {writer.pid}: stop it first" in line
    with pytest.raises(DirectoryInUse) as refusal:
        run(_open(tmp_path / "live"))
    assert refusal.value.pid == writer.pid
    # A killed one leaves the directory usable at once, journals and all, and verify leaves them there.
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert list((tmp_path / "live/journal").glob("*.journal"))
    before = tree(tmp_path / "live")
    report = json.loads(danube("log", "verify", tmp_path / "live", "-o", "json").stdout)
    assert len(report["topics"]) == 6 and all(topic["messages"] > 0 for topic in report["topics"])
    assert tree(tmp_path / "live") == before
    run(_open(tmp_path / "live"))


async def _open(directory: Path) -> None:
    disk = FileDisk(directory)
    try:
        wal = await Wal.open(disk, SystemClock(), SystemWork(), SMALL)
        await wal.close()
    finally:
        disk.close()


def test_verify_refuses_what_is_no_data_directory(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "missing"):
        assert "the data directory of a broker: it has a file FORMAT in it" in complaint(
            "log", "verify", tmp_path / name
        )
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (
            '{"product": "pydanube", "format": 7}',
            "has format 7 and this version reads formats up to 1: upgrade PyDanube",
        ),
        ("what is this", "a data directory of PyDanube"),
    ],
)
def test_verify_refuses_another_format_with_what_to_do(data: Path, text: str, answer: str) -> None:
    (data / "FORMAT").write_text(text)
    code = Exit.NOT_GOOD if text.startswith("{") else Exit.USAGE
    assert answer in complaint("log", "verify", data, expect=code)


def test_an_output_that_does_not_exist_is_refused(data: Path) -> None:
    assert "--output = 'xml' is not allowed: table or json" in complaint("log", "verify", data, "-o", "xml")


# --- dump -------------------------------------------------------------------------------------------


def test_dump_prints_the_batches_from_an_offset_on(data: Path) -> None:
    before = tree(data)
    everything = danube("log", "dump", data, TOPIC).stdout.splitlines()
    assert len(everything) == 11
    assert everything[0].startswith("session opened") and everything[1].startswith("0…2 ")
    assert "epoch 1" in everything[1] and "producer abc seq 0" in everything[1]
    some = danube("log", "dump", data, TOPIC, "--from", 13, "-n", 2).stdout.splitlines()
    assert [line.split()[0] for line in some] == ["12…14", "15…17"]
    assert danube("log", "dump", data, TOPIC, "--from", 1000).stdout == ""
    assert tree(data) == before


def test_dump_prints_messages_too_for_people_and_as_json(data: Path) -> None:
    lines = danube("log", "dump", data, TOPIC, "--from", 27, "--messages").stdout.splitlines()
    assert len(lines) == 4 and lines[0].startswith("27…29")
    assert lines[1].split() == ["27", "key=k0", "b'message", "9.0'"]
    (line,) = danube("log", "dump", data, TOPIC, "--from", 27, "-m", "-o", "json").stdout.splitlines()
    dumped = json.loads(line)
    assert (dumped["base_offset"], dumped["rows"], dumped["epoch"], dumped["first_sequence"]) == (27, 3, 1, 27)
    assert [message["payload"] for message in dumped["messages"]] == [f"message 9.{row}" for row in range(3)]
    assert dumped["messages"][1]["routing_key"] == "k1"


def test_dump_names_damage_on_stderr_goes_on_behind_it_and_exits_1(data: Path) -> None:
    path, _ = flip_a_byte(data)
    done = danube("log", "dump", data, TOPIC, expect=1)
    offsets = [line.split()[0] for line in done.stdout.splitlines()[1:]]
    assert offsets == ["0…2", *(f"{first}…{first + 2}" for first in range(6, 30, 3))]
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"damage: {path} at position ") and "offsets 3 up to 6 cannot be read" in line


def test_dump_of_an_unknown_topic_says_how_to_find_the_known_ones(data: Path) -> None:
    for name in ("/default/nothing", "orders", "/default/.."):
        line = complaint("log", "dump", data, name)
        assert f"{name!r} is not a topic in this data directory" in line and "`danube log verify` lists them" in line


def test_dump_into_a_reader_that_leaves_early_is_quiet(data: Path) -> None:
    danube_dump = f"{sys.executable} -m pydanube log dump {data} {TOPIC} -m -o json"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; (for i in 1 2; do {danube_dump}; done) | head -1"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stderr == "" and done.returncode == 0
    assert len(done.stdout.splitlines()) == 1


def test_a_mistake_on_the_command_line_is_explained_and_exits_2(data: Path) -> None:
    for arguments in (["log", "dump", data, TOPIC, "--from", "-1"], ["fly"]):
        done = danube(*arguments, expect=2)
        assert done.stderr.startswith("danube: ") and done.stderr.count("\n") == 1 and done.stdout == ""
        assert "--help` shows what there is" in done.stderr


# --- demo and the server ------------------------------------------------------------------------------


def test_demo_appends_kills_recovers_and_verifies(tmp_path: Path) -> None:
    done = danube("log", "demo", "--rounds", 2, "--seconds", 0.3, "--keep", tmp_path / "kept", run=processes.danube)
    assert done.stdout.count("kill -9") == 2
    assert "acknowledged batches, 0 missing" in " ".join(done.stdout.split())
    assert "everything verifies" in done.stdout


def test_danube_tells_its_version() -> None:
    assert danube("--version", run=processes.danube).stdout == f"danube {pydanube.__version__}\n"


def test_danube_alone_shows_its_help() -> None:
    done = subprocess.run([sys.executable, "-m", "pydanube"], capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 2)  # as the version of click has it
    assert "Usage" in done.stdout and "Look at a data directory" in done.stdout
    assert done.stderr == ""


def test_interrupting_a_command_is_quiet(tmp_path: Path) -> None:
    (tmp_path / "live").mkdir()
    command = [sys.executable, "-m", "pydanube", "log", "writer", str(tmp_path / "live"), "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert "Traceback" not in process.stderr.read()
    assert process.returncode == 130
