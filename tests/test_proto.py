"""The generated modules are what `make proto` makes, and they speak what the official client speaks.

The official client's modules and ours register the same names in one descriptor pool, so each side describes
itself in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
GENERATED = (Path("src/pydanube/wire/_pb"), Path("tests/stubs"))
OURS = ("pydanube.wire._pb.danube.DanubeApi_pb2", "pydanube.wire._pb.danube.SchemaRegistry_pb2")
THEIRS = ("danube.proto.DanubeApi_pb2", "danube.proto.SchemaRegistry_pb2")

# Prints every message, enum and service of the modules named in argv, by full name, as one JSON object.
DESCRIBE = """
import importlib, json, sys
from google.protobuf import descriptor_pb2

def messages(scope, message):
    name = f"{scope}.{message.name}"
    oneofs = [oneof.name for oneof in message.oneof_decl]
    yield name, {
        field.name: [field.number, field.type, field.label, field.type_name, field.proto3_optional,
                     oneofs[field.oneof_index] if field.HasField("oneof_index") else None]
        for field in message.field
    }
    for enum in message.enum_type:
        yield f"{name}.{enum.name}", {value.name: value.number for value in enum.value}
    for nested in message.nested_type:
        yield from messages(name, nested)

described = {}
for module in sys.argv[1:]:
    file = descriptor_pb2.FileDescriptorProto()
    importlib.import_module(module).DESCRIPTOR.CopyToProto(file)
    assert file.syntax == "proto3"
    for enum in file.enum_type:
        described[f"{file.package}.{enum.name}"] = {value.name: value.number for value in enum.value}
    for message in file.message_type:
        described.update(messages(file.package, message))
    for service in file.service:
        described[f"{file.package}.{service.name} (service)"] = {
            method.name: [method.input_type, method.output_type, method.client_streaming, method.server_streaming]
            for method in service.method
        }
print(json.dumps(described))
"""


def python(code: str, *arguments: str) -> str:
    """What a fresh interpreter prints."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, check=True, text=True, timeout=60).stdout


def described(modules: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(python(DESCRIBE, *modules))
    return found


def files_below(root: Path) -> dict[str, str]:
    found = (path for folder in GENERATED for path in (root / folder).rglob("*"))
    files = (path for path in found if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(root)): path.read_text() for path in files}


def test_generating_again_changes_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable}
    subprocess.run([REPOSITORY / "scripts" / "proto", tmp_path], env=environment, check=True, timeout=60)
    fresh, committed = files_below(tmp_path), files_below(REPOSITORY)
    assert fresh.keys() == committed.keys()
    for name in fresh:
        assert fresh[name] == committed[name], f"{name} is out of date: run `make proto`"


def test_whatever_the_official_client_says_means_the_same_to_us() -> None:
    ours, theirs = described(OURS), described(THEIRS)
    assert len(theirs) > 40
    for name, parts in theirs.items():
        if name.endswith(" (service)"):  # we may serve calls that this client does not know yet
            assert parts.items() <= ours[name].items(), name
        else:
            assert parts == ours[name], name


def test_what_we_have_beyond_the_official_python_client_is_known() -> None:
    services = {name: set(parts) for name, parts in described(OURS).items() if name.endswith(" (service)")}
    assert services["danube.StorageService (service)"] == {"ListSegmentDescriptors"}
    assert "ListSubjects" in services["danube_schema.SchemaRegistry (service)"]


def test_field_numbers_that_a_careful_reader_would_guess_wrong() -> None:
    ours = described(OURS)
    assert ours["danube.MsgID"]["topic_offset"][0] == 5
    assert ours["danube.TopicLookupResponse"]["request_id"][0] == 3


def test_every_service_has_the_path_that_clients_call() -> None:
    code = """
from pydanube.wire._pb.danube import DanubeAdmin_pb2, DanubeApi_pb2, SchemaRegistry_pb2
from pydanube.wire._pb.pydanube import admin_pb2
for module in (DanubeApi_pb2, SchemaRegistry_pb2, DanubeAdmin_pb2, admin_pb2):
    print(*(service.full_name for service in module.DESCRIPTOR.services_by_name.values()))
"""
    assert set(python(code).split()) == {
        *(f"danube.{s}" for s in ("ProducerService", "ConsumerService", "Discovery", "HealthCheck")),
        "danube.StorageService",
        "danube_schema.SchemaRegistry",
        *(f"danube_admin.{room}Admin" for room in ("Broker", "Cluster", "Namespace", "Topic", "Security")),
        "pydanube.admin.v1.Admin",
    }


def test_an_application_may_use_the_official_client_beside_ours() -> None:
    code = """
import sys, pydanube, pydanube.wire.frames, pydanube.wire.errors_on_wire
print(*sorted(module for module in sys.modules if module.startswith("pydanube.wire._pb.")))
"""
    # The package of the native protocol is ours alone; one module of the reference's packages would collide.
    assert python(code).split() == ["pydanube.wire._pb.pydanube", "pydanube.wire._pb.pydanube.stream_pb2"]


def test_the_native_protocol_and_the_official_client_live_in_one_process() -> None:
    code = "import pydanube.wire.frames, danube.proto.DanubeApi_pb2 as theirs; print(theirs.DESCRIPTOR.package)"
    assert python(code).strip() == "danube"
