"""The source keeps the house rules, checked by reading it, never by running it.

Seven rules, each a function from a directory to a list of complaints:

    imports_that_point_up      imports follow the map; exceptions are named one by one
    impurities_in_core         core is the standard library without clock, file, socket or loop
    names_behind_ports         threads, time and randomness stay in the adapters
    paths_outside              no file mentions a place outside the repository
    assigned_from_outside      the parts of a broker are complete when they are made: nothing is set later
    sentences_without_subject  whoever, nobody, somebody: the caller, the owner, the consumer; the count only falls
    too_large                  a file has 550 lines and a class 30 methods at most

Every rule is tested twice: the repository obeys it, and a planted violation is found. A rule
that has never found anything proves nothing.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

import pydanube

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCE = REPOSITORY / "src" / "pydanube"

# --- the map --------------------------------------------------------------------------------------
#
#   cli                              starts what is a process of its own, and calls brokers
#   web  spark  pipeline             enter through the client and admin, like everyone else
#   admin                            what operators ask and order, in values
#   client              api          the front server on either side of the wire
#                       broker       service.py alone chooses adapters
#   cluster      history             history reads the log
#                log                 layers know ports, not adapters
#   wire         stores  schema      the protocol · implementations of ports · the process that parses schemas
#   formats                          bytes in, facts out
#            ports · config · telemetry
#                 core · errors      know nothing above

GROUND = frozenset({"core", "errors"})
SHARED = GROUND | {"ports", "config", "telemetry"}
LAYERS = frozenset({"wire", "cluster", "log", "history", "formats"})
ROOT = ""  # pydanube/__init__.py: the public names and the version

MAY_IMPORT: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("core", "errors"), GROUND),
    **dict.fromkeys(("ports", "config", "telemetry"), GROUND),
    "schema": GROUND,  # runs in a process of its own, where a broker never imports it
    "formats": SHARED,
    "stores": SHARED,
    "cluster": SHARED,
    "wire": SHARED | {"formats"},
    "log": SHARED | {"formats"},
    "history": SHARED | {"formats", "log"},
    "broker": SHARED | LAYERS,
    "api": SHARED | LAYERS | {"broker"},
    # A producer encodes the very batch that the log keeps.
    "client": SHARED | {"wire", "formats"},
    # What operators ask and order, in values: the only one beside the servers that knows the admin services.
    "admin": SHARED | {"client", "wire", "formats"},
    "cli": SHARED | {"client", "admin", "web", "pipeline", ROOT},
    # Executors read objects and batches themselves: history costs the brokers nothing.
    "spark": SHARED | {"client", ROOT, "formats", "history", "stores"},
    "pipeline": SHARED | {"client", ROOT, "formats", "history", "stores", "spark"},
    # Pages are a guest too, in a browser: they call brokers as the command line does.
    "web": SHARED | {"client", "admin", ROOT},
    ROOT: GROUND | {"client", "blocking"},
    "blocking": frozenset({"client"}),  # a name at the front server
    "__main__": frozenset({"cli"}),  # of the package, and of any layer: the same commands under another name
}
MAY_IMPORT_ANYTHING = frozenset({"testing"})  # and nothing above imports testing


class Exempt(NamedTuple):
    """`importer` (a file, or a folder ending in `/`) may import `module` and what is below it."""

    importer: str
    module: str
    because: str


EXEMPT = (
    Exempt("broker/service.py", "stores", "builds everything, so it alone chooses adapters"),
    Exempt("broker/stores.py", "stores", "is the part of service.py that chooses stores"),
    Exempt(
        "stores/metadata/etcd/",
        "wire._pb.pydanube.etcd_pb2",
        "etcd speaks protobuf; its messages are generated with all others",
    ),
    Exempt("cli/log.py", "broker.offline", "reads a data directory that no broker uses"),
    Exempt("cli/broker.py", "api", "is the server: the one command that runs a broker instead of calling one"),
)

# --- what must stay behind ports ------------------------------------------------------------------

# Core takes values and returns values: whatever waits, or differs from run to run, is a layer's.
NOT_IN_CORE = frozenset(
    {"asyncio", "selectors", "signal", "socket", "ssl", "time"}
    | {"concurrent", "multiprocessing", "subprocess", "threading"}
    | {"os", "shutil", "tempfile"}
    | {"random", "secrets", "uuid"}
)
ADAPTERS = frozenset({"stores", "api", "client", "admin", "cli", "spark", "pipeline", "web"})
MODULES_BEHIND_PORTS = frozenset({"uvloop", "grpc", "time", "random", "secrets", "uuid", "threading", "concurrent"})
FUNCTIONS_BEHIND_PORTS = frozenset({"to_thread", "run_in_executor", "urandom", "getrandom"})
CLOCK_READERS = frozenset({"now", "utcnow", "today"})  # of datetime and date; Clock has a now() too

# --- what is set from outside -----------------------------------------------------------------------

WIRED = ("api", "broker", "cluster", "telemetry")


class Late(NamedTuple):
    """`file` may assign `attribute` of an object that is not its own."""

    file: str
    attribute: str
    because: str


LATE: tuple[Late, ...] = ()

# --- words ----------------------------------------------------------------------------------------

OLD_IDIOM = re.compile(r"\b(?:whoever|nobody|somebody)\b", re.IGNORECASE)
OLD_IDIOM_MAX = 55  # what is left are sentences for users, which docs and tests quote; lower it with the count


# --- size -----------------------------------------------------------------------------------------

LINES_MAX = 550  # of a file; generated code does not count
METHODS_MAX = 30  # of a class


# --- the rules ------------------------------------------------------------------------------------


def imports_that_point_up(source: Path) -> list[str]:
    """Complains about every import of one of our layers that the map does not allow."""
    complaints = []
    for file, tree in parsed(source):
        layer = layer_of(file)
        if layer in MAY_IMPORT_ANYTHING:
            continue
        if layer not in MAY_IMPORT:
            complaints.append(f"{file}: {layer} is not on the map")
            continue
        for line, module in our_imports(source, file, tree):
            target = module.partition(".")[0]
            if target != layer and target not in MAY_IMPORT[layer] and not exempt(file, module):
                complaints.append(f"{file}:{line}: may not import {module or 'pydanube'}")
    return complaints


def impurities_in_core(source: Path) -> list[str]:
    """Complains about third-party imports in core and errors, and about impure ones in core."""
    complaints = []
    for file, tree in parsed(source):
        layer = layer_of(file)
        if layer not in GROUND:
            continue
        for line, name in foreign_imports(tree):
            top = name.partition(".")[0]
            if top not in sys.stdlib_module_names:
                complaints.append(f"{file}:{line}: {top} is not in the standard library")
            elif layer == "core" and top in NOT_IN_CORE:
                complaints.append(f"{file}:{line}: core may not import {top}")
        complaints += [
            f"{file}:{node.lineno}: core may not call open()"
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open"
        ]
    return complaints


def names_behind_ports(source: Path, *, simulator: bool = False) -> list[str]:
    """Complains about threads, time and randomness where the simulator could not replace them."""
    complaints = []
    for file, tree in parsed(source):
        layer = layer_of(file)
        if layer in ADAPTERS or file.startswith("wire/_pb/"):  # generated: its stubs import grpc
            continue
        seeded = simulator or layer == "testing"  # may draw random numbers, but only from a seed
        modules = MODULES_BEHIND_PORTS - {"random"} if seeded else MODULES_BEHIND_PORTS
        complaints += [
            f"{file}:{line}: {name} belongs behind a port"
            for line, name in foreign_imports(tree)
            if name.partition(".")[0] in modules
        ]
        for node in ast.walk(tree):
            name = used_name(node)
            if name in FUNCTIONS_BEHIND_PORTS:
                complaints.append(f"{file}:{line_of(node)}: {name} belongs behind a port")
            if reads_clock(node):
                complaints.append(f"{file}:{line_of(node)}: reading the clock belongs behind a port")
            if seeded and unseeded_random(node):
                complaints.append(f"{file}:{line_of(node)}: only random.Random(seed) is reproducible")
    return complaints


def paths_outside(repository: Path) -> list[str]:
    """Complains about every mention of a place that exists only where the code was written."""
    return [
        f"{file.relative_to(repository)}:{number}: mentions {match.group().decode()}"
        for file in files_of(repository)
        for number, line in enumerate(file.read_bytes().splitlines(), start=1)
        for match in OUTSIDE.finditer(line)
    ]


# Put together from pieces, so that this file passes its own test. A folder of that name further
# down a path (`docs/work/…`) is nobody's business.
OUTSIDE = re.compile(
    b"|".join(
        (
            rb"(?<![\w.-])" + b"/" + b"work" + b"/",
            b"\\.\\." + b"/" + b"shared",
            rb"(?<![\w.-])" + b"/" + b"root" + b"/",
            b"/" + b"opt" + b"/" + b"wheels",
        )
    )
)


def sentences_without_subject(source: Path) -> list[str]:
    """Lists every use of a word that stands where a sentence should name its subject."""
    return [
        f"{path.relative_to(source).as_posix()}:{number}: {match.group()}"
        for path in sorted(source.rglob("*.py"))
        if "_pb" not in path.parts
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        for match in OLD_IDIOM.finditer(line)
    ]


def too_large(source: Path) -> list[str]:
    """Complains about every file and class that should be two."""
    complaints = []
    for file, tree in parsed(source):
        if "_pb" in Path(file).parts:
            continue
        lines = source.joinpath(file).read_text().count("\n")
        if lines > LINES_MAX:
            complaints.append(f"{file}: {lines} lines, {LINES_MAX} at most")
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and (methods := methods_of(node)) > METHODS_MAX:
                complaints.append(f"{file}:{node.lineno}: {node.name} has {methods} methods, {METHODS_MAX} at most")
    return complaints


def methods_of(node: ast.ClassDef) -> int:
    return sum(isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) for child in node.body)


# --- reading the source ---------------------------------------------------------------------------


def assigned_from_outside(source: Path) -> list[str]:
    """Complains about `x.attr = ...`, x not self, if a class sets `attr` in its own methods, or has it as a callback.

    Fields of plain records are left alone, unless they are functions: data may be changed, wiring may not.
    """
    parts: set[str] = set()
    records: set[str] = set()
    files = list(parsed(source))
    for _, tree in files:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                declare(node, parts, records)
    return [
        f"{file}:{target.lineno}: sets {ast.unparse(target)} from outside"
        for file, tree in files
        if layer_of(file) in WIRED
        for target in assigned(tree)
        if owner_of(target) not in ("self", "cls") and target.attr in parts and target.attr not in records
    ]


def declare(made: ast.ClassDef, parts: set[str], records: set[str]) -> None:
    """Sorts the attributes of a class: into fields of records, and parts of everything else."""
    decorators = " ".join(ast.unparse(each) for each in made.decorator_list)
    is_record = "dataclass" in decorators and "frozen=True" not in decorators
    for node in made.body:
        if is_record and isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            (parts if "Callable" in ast.unparse(node.annotation) else records).add(node.target.id)
    parts.update(each.attr for each in assigned(made) if owner_of(each) == "self" and not is_record)


def assigned(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Attributes that are assigned, one by one, and those that are only declared."""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in [*targets, *([node.target] if isinstance(node, ast.AnnAssign) else [])]:
            for each in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
                if isinstance(each, ast.Attribute):
                    yield each


def owner_of(target: ast.Attribute) -> str:
    return ast.unparse(target.value)


def parsed(source: Path) -> Iterator[tuple[str, ast.Module]]:
    """Yields every module below `source` with its path relative to it."""
    for path in sorted(source.rglob("*.py")):
        yield path.relative_to(source).as_posix(), ast.parse(path.read_bytes(), str(path))


def layer_of(file: str) -> str:
    """`core` for `core/dispatch/ranges.py`, `errors` for `errors.py`, `ROOT` for `__init__.py`."""
    if file.endswith("__main__.py"):
        return "__main__"
    layer = file.partition("/")[0].removesuffix(".py")
    return ROOT if layer == "__init__" else layer


def our_imports(source: Path, file: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields the line and dotted name below pydanube of everything of ours that `file` imports.

    Imports inside functions and under TYPE_CHECKING count: the map is about who knows whom.
    """
    package = ["pydanube", *file.split("/")[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
            # `from pydanube.log import batch` names a module, `from pydanube.errors import Refused` does not.
            names = [
                f"{base}.{alias.name}" if is_module(source, f"{base}.{alias.name}") else base for alias in node.names
            ]
        else:
            continue
        for name in names:
            if name == "pydanube" or name.startswith("pydanube."):
                yield node.lineno, name.removeprefix("pydanube").removeprefix(".")


def is_module(source: Path, name: str) -> bool:
    if not name.startswith("pydanube."):
        return False
    path = source.joinpath(*name.split(".")[1:])
    # A layer that is on the map is a layer, even in a tree that does not contain it.
    known = name.count(".") == 1 and path.name in MAY_IMPORT.keys() | MAY_IMPORT_ANYTHING
    return known or path.is_dir() or path.with_suffix(".py").is_file()


def foreign_imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields the line and dotted name of every module imported that is not ours."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        else:
            continue
        for name in names:
            if name.partition(".")[0] != "pydanube":
                yield node.lineno, name


def exempt(file: str, module: str) -> bool:
    return any(
        (file == entry.importer or (entry.importer.endswith("/") and file.startswith(entry.importer)))
        and (module == entry.module or module.startswith(entry.module + "."))
        for entry in EXEMPT
    )


def used_name(node: ast.AST) -> str | None:
    """The name a node mentions: `x`, the `x` of `y.x`, or the `x` of `from y import x`."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
            return name
    return None


def reads_clock(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=name):
            return owner in {"datetime", "date"} and name in CLOCK_READERS
    return False


def unseeded_random(node: ast.AST) -> bool:
    """Whether a node uses the random module other than through a `Random` with a seed."""
    match node:
        case ast.ImportFrom(module="random", names=names):
            return any(alias.name != "Random" for alias in names)
        case ast.Attribute(value=ast.Name(id="random"), attr=name):
            return name != "Random"
        case ast.Call(func=ast.Name(id="Random") | ast.Attribute(attr="Random"), args=[], keywords=[]):
            return True
    return False


def line_of(node: ast.AST) -> int:
    return getattr(node, "lineno", 0)


def files_of(repository: Path) -> list[Path]:
    """The files that are, or would be, committed; where git knows of none, all but caches and logs."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=repository,
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout.decode()
    except (OSError, subprocess.CalledProcessError):
        listed = ""
    paths = [repository / name for name in listed.split("\0") if name]
    if not paths:
        paths = [path for path in repository.rglob("*") if not skipped(path.relative_to(repository))]
    return sorted(path for path in paths if path.is_file() and not path.is_symlink())


def skipped(path: Path) -> bool:
    caches = {".git", ".venv", ".hypothesis", "__pycache__", "build", "dist"}
    output = len(path.parts) == 1 and path.suffix == ".log"  # as in .gitignore: `make test >test.log`
    return output or any(part in caches or part.endswith(("_cache", ".egg-info")) for part in path.parts)


# --- the repository obeys -------------------------------------------------------------------------


def test_imports_point_the_way_the_map_says() -> None:
    assert imports_that_point_up(SOURCE) == []


def test_core_is_the_standard_library_without_clock_file_socket_or_loop() -> None:
    assert impurities_in_core(SOURCE) == []


def test_threads_time_and_randomness_stay_behind_ports() -> None:
    assert names_behind_ports(SOURCE) == []
    assert names_behind_ports(REPOSITORY / "tools" / "sim", simulator=True) == []


def test_no_file_mentions_a_place_outside_the_repository() -> None:
    assert paths_outside(REPOSITORY) == []


def test_no_part_of_a_broker_is_set_from_outside() -> None:
    excused = {(late.file, late.attribute) for late in LATE}
    complaints = assigned_from_outside(SOURCE)
    found = {(each.partition(":")[0], each.split()[2].rpartition(".")[2]): each for each in complaints}
    assert [found[each] for each in sorted(found.keys() - excused)] == []
    assert excused <= found.keys(), "an exemption that is not needed any more"


def test_sentences_name_their_subject() -> None:
    found = sentences_without_subject(SOURCE)
    assert len(found) <= OLD_IDIOM_MAX, found


def test_no_file_and_no_class_is_too_large() -> None:
    assert too_large(SOURCE) == []


def test_locks_pin_every_package_by_hash_and_name_no_address() -> None:
    for lock in (REPOSITORY / "requirements").glob("*.lock"):
        text = lock.read_text()
        assert "://" not in text and "--index" not in text and "--find-links" not in text, lock.name
        for name, (version, hashes) in locked(text).items():
            assert version and hashes, f"{lock.name}: {name} is not pinned with a hash"


@pytest.mark.parametrize(("smaller", "larger"), [("core", "test"), ("test", "spark")])
def test_a_lock_contains_the_smaller_one(smaller: str, larger: str) -> None:
    inner = locked((REPOSITORY / "requirements" / f"{smaller}.lock").read_text())
    outer = locked((REPOSITORY / "requirements" / f"{larger}.lock").read_text())
    assert {name: outer.get(name) for name in inner} == inner


def test_the_package_and_the_project_file_agree_on_the_version() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["version"] == pydanube.__version__


def locked(text: str) -> dict[str, tuple[str, frozenset[str]]]:
    """Package name to version (empty if not exact) and hashes, from a lock file's text."""
    entries = text.replace("\\\n", " ").splitlines()
    packages = {}
    for entry in filter(None, map(str.strip, entries)):
        name, _, rest = entry.partition("==")
        version, *_ = [*rest.split(), ""]
        packages[name] = (version, frozenset(re.findall(r"--hash=(sha256:[0-9a-f]{64})", entry)))
    return packages


# --- planted violations are found -----------------------------------------------------------------


def plant(directory: Path, file: str, text: str) -> Path:
    """Writes one file into an otherwise empty tree. Returns the tree."""
    path = directory / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return directory


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("core/dispatch/window.py", "from pydanube.ports import Clock"),
        ("core/dispatch/window.py", "import pydanube.log.wal"),
        ("errors.py", "from pydanube import ports"),
        ("ports.py", "from pydanube.stores.memory import MemoryDisk"),
        ("config.py", "from pydanube.telemetry import names"),
        ("stores/disk/files.py", "from pydanube.formats.batch import decode"),
        ("log/wal.py", "from pydanube.stores import files"),
        ("log/wal.py", "from pydanube.cluster.membership import Member"),
        ("wire/convert.py", "from ..log import wal"),
        ("formats/batch.py", "from pydanube.log import wal"),
        ("log/wal.py", "from pydanube.history import tier"),
        ("broker/topic.py", "from pydanube.stores.memory import MemoryDisk"),
        ("broker/topic.py", "from pydanube.api import server"),
        ("api/server.py", "from pydanube.client import producer"),
        ("api/server.py", "from pydanube.stores import files"),
        ("client/consumer.py", "from pydanube.broker import topic"),
        ("client/consumer.py", "from pydanube.log.wal import Wal"),
        ("client/consumer.py", "from pydanube.log import wal"),
        ("cli/data.py", "from pydanube.formats.batch import decode"),
        ("cli/data.py", "from pydanube.history.reader import HistoryReader"),
        ("cli/log.py", "from pydanube.broker import service"),
        ("spark/source.py", "from pydanube.wire import frames"),
        ("log/reader.py", "from pydanube.testing import FakeClock"),
        ("__init__.py", "from pydanube.broker import service"),
        ("__init__.py", "from . import log"),
        ("core/late.py", "def f():\n    from pydanube.log import wal"),
        ("core/typed.py", "import typing\nif typing.TYPE_CHECKING:\n    from pydanube import log"),
        ("attic/old.py", "x = 1"),
    ],
)
def test_an_import_against_the_map_is_found(tmp_path: Path, file: str, text: str) -> None:
    [complaint] = imports_that_point_up(plant(tmp_path, file, text))
    assert complaint.startswith(file)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("core/dispatch/window.py", "from pydanube.errors import Refused"),
        ("core/dispatch/window.py", "from .ranges import Ranges"),
        ("ports.py", "from pydanube.core.names import TopicName"),
        ("stores/memory.py", "from pydanube.ports import Disk"),
        ("log/wal.py", "from . import batch\nfrom ..core import ranges"),
        ("broker/service.py", "from pydanube.stores import files, memory"),
        ("api/server.py", "from pydanube.broker import topics"),
        ("client/producer.py", "from pydanube.formats.batch import encode\nfrom pydanube.wire import frames"),
        ("cli/log.py", "from pydanube.broker.offline import verify_directory"),
        ("pipeline/__main__.py", "from pydanube.cli.main import main"),
        ("cli/main.py", "from pydanube import __version__"),
        ("testing/cluster.py", "from pydanube.broker import service\nfrom pydanube.stores import memory"),
    ],
)
def test_an_import_along_the_map_is_not_complained_about(tmp_path: Path, file: str, text: str) -> None:
    assert imports_that_point_up(plant(tmp_path, file, text)) == []


def test_every_exemption_names_a_layer_that_needs_it() -> None:
    for entry in EXEMPT:
        layer, module_layer = layer_of(entry.importer), entry.module.partition(".")[0]
        assert module_layer not in MAY_IMPORT[layer], f"{entry.importer} may import {entry.module} anyway"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("core/dispatch/window.py", "import asyncio"),
        ("core/dispatch/window.py", "import time"),
        ("core/dispatch/window.py", "from random import Random"),
        ("core/dispatch/window.py", "import os.path"),
        ("core/dispatch/window.py", "def f():\n    import socket"),
        ("core/dispatch/window.py", "import pyarrow as pa"),
        ("core/dispatch/window.py", "text = open('notes').read()"),
        ("errors.py", "from grpc import StatusCode"),
    ],
)
def test_an_impure_import_in_core_is_found(tmp_path: Path, file: str, text: str) -> None:
    [complaint] = impurities_in_core(plant(tmp_path, file, text))
    assert complaint.startswith(file)


def test_the_pure_standard_library_is_welcome_in_core(tmp_path: Path) -> None:
    pure = "from __future__ import annotations\nimport struct\nfrom . import ranges"
    assert impurities_in_core(plant(tmp_path, "core/dispatch/window.py", pure)) == []


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("log/wal.py", "import uvloop"),
        ("broker/topic.py", "from grpc import aio"),
        ("log/wal.py", "import time"),
        ("log/wal.py", "from time import monotonic"),
        ("cluster/membership.py", "import random"),
        ("cluster/membership.py", "import uuid"),
        ("log/wal.py", "import threading"),
        ("log/wal.py", "from concurrent.futures import ThreadPoolExecutor"),
        ("log/wal.py", "async def f():\n    await asyncio.to_thread(print)"),
        ("log/wal.py", "from asyncio import to_thread"),
        ("log/wal.py", "async def f(loop):\n    await loop.run_in_executor(None, print)"),
        ("broker/topic.py", "import os\nname = os.urandom(8)"),
        ("broker/topic.py", "from os import urandom"),
        ("history/tier.py", "import datetime\nwhen = datetime.datetime.now()"),
        ("testing/loop.py", "import time"),
        ("testing/loop.py", "import random\nx = random.random()"),
        ("testing/loop.py", "from random import randint"),
        ("testing/loop.py", "import random\ngenerator = random.Random()"),
    ],
)
def test_threads_time_or_randomness_outside_the_adapters_are_found(tmp_path: Path, file: str, text: str) -> None:
    [complaint] = names_behind_ports(plant(tmp_path, file, text))
    assert complaint.startswith(file)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("stores/disk/files.py", "import threading\nimport time"),
        ("api/server.py", "import grpc"),
        ("client/brokers.py", "import random"),
        ("testing/loop.py", "import random\ngenerator = random.Random(42)"),
        ("log/wal.py", "def f(clock, loop):\n    return clock.now(), loop.time()"),
    ],
)
def test_adapters_seeds_and_ports_may_use_theirs(tmp_path: Path, file: str, text: str) -> None:
    assert names_behind_ports(plant(tmp_path, file, text)) == []


@pytest.mark.parametrize(
    "pieces",
    [
        ("/", "work", "/main"),
        ("file://", "/", "work", "/x"),
        ("..", "/shared", "/notes"),
        ("/", "root", "/.cache"),
        ("/opt", "/wheels"),
    ],
)
def test_a_mention_of_a_place_outside_is_found(tmp_path: Path, pieces: tuple[str, ...]) -> None:
    [complaint] = paths_outside(plant(tmp_path, "docs/notes.md", f"first line\nsee {''.join(pieces)}\n"))
    assert complaint.startswith("docs/notes.md:2:")


def test_a_folder_inside_the_repository_may_have_any_name(tmp_path: Path) -> None:
    assert paths_outside(plant(tmp_path, "notes.md", "/".join(["docs", "work", "plan.md"]))) == []


def test_a_sentence_without_a_subject_is_found(tmp_path: Path) -> None:
    text = '"""Nobody reads it, but the caller does."""\n'
    assert sentences_without_subject(plant(tmp_path, "log/wal.py", text)) == ["log/wal.py:1: Nobody"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("x = 1\n" * (LINES_MAX + 1), "log/wal.py: 551 lines, 550 at most"),
        (
            "class Wal:\n" + "    async def f(self): ...\n" * (METHODS_MAX + 1),
            "log/wal.py:1: Wal has 31 methods, 30 at most",
        ),
    ],
)
def test_a_file_or_class_that_is_too_large_is_found(tmp_path: Path, text: str, complaint: str) -> None:
    assert too_large(plant(tmp_path, "log/wal.py", text)) == [complaint]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("log/wal.py", "x = 1\n" * LINES_MAX),
        ("log/wal.py", "class Wal:\n" + "    def f(self): ...\n" * METHODS_MAX),
        ("wire/_pb/pydanube/client_pb2.py", "x = 1\n" * (LINES_MAX + 1)),
    ],
)
def test_the_bounds_themselves_and_generated_code_are_not_complained_about(
    tmp_path: Path, file: str, text: str
) -> None:
    assert too_large(plant(tmp_path, file, text)) == []


PARTS = """
class Part:
    def __init__(self):
        self.other = None

@dataclass
class Row:
    name: str = ""
    told: Callable[[], int] | None = None
"""


@pytest.mark.parametrize(
    "text",
    [
        "def build(part):\n    part.other = 1",
        "def build():\n    part = Part()\n    part.other = 1",
        "class Whole:\n    def __init__(self):\n        self.part.other = self",
        "def build(part, row):\n    part.x, row.told = 1, len",
    ],
)
def test_a_part_that_is_set_from_outside_is_found(tmp_path: Path, text: str) -> None:
    plant(tmp_path, "log/part.py", PARTS)
    [complaint] = assigned_from_outside(plant(tmp_path, "broker/whole.py", text))
    assert complaint.startswith("broker/whole.py")


@pytest.mark.parametrize(
    "text",
    [
        "class Whole:\n    def change(self):\n        self.other = 2",
        "def rename(row):\n    row.name = 'b'",
        "def fill(answer):\n    answer.unknown_to_us = 3",
    ],
)
def test_an_object_may_change_itself_and_records_are_data(tmp_path: Path, text: str) -> None:
    plant(tmp_path, "log/part.py", PARTS)
    assert assigned_from_outside(plant(tmp_path, "broker/whole.py", text)) == []
