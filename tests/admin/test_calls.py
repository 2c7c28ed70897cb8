"""Every call of the admin services is one that a broker has, with the messages that it takes and answers with."""

from __future__ import annotations

import inspect
from datetime import UTC, datetime
from typing import Any

import pytest

from pydanube.admin import calls, values
from pydanube.client.grpc.connection import GrpcCall
from pydanube.wire._pb.danube import DanubeAdmin_pb2
from pydanube.wire._pb.pydanube import admin_pb2, pipelines_pb2, status_pb2

SERVICES = {
    service.full_name: service
    for file in (DanubeAdmin_pb2, admin_pb2, status_pb2, pipelines_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
}
FUNCTIONS = [
    function
    for name, function in vars(calls).items()
    if inspect.isfunction(function) and function.__module__ == calls.__name__
]
# A value for every parameter, by its annotation.
VALUES = {
    "str": "x",
    "str | None": "x",
    "int": 3,
    "int | None": 3,
    "bool": True,
    "str | int | datetime": 7,
    "Mapping[str, str]": {"x": "y"},
}
STREAMS = {"move_topic", "verify_storage"}


def called(function: Any) -> GrpcCall[Any]:
    given = {}
    for each in inspect.signature(function).parameters.values():
        kind = str(each.annotation)
        given[each.name] = getattr(values, kind.removeprefix("values."))() if "values." in kind else VALUES[kind]
    if function is calls.retention:
        del given["namespace"]  # of a topic, or of a namespace
    found: GrpcCall[Any] = function(**given)
    return found


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_call_is_a_method_of_its_service_with_its_messages(function: Any) -> None:
    call = called(function)
    service, _, name = call.method.partition("/")
    method = SERVICES[service].methods_by_name[name]
    assert method.input_type.full_name == call.request.DESCRIPTOR.full_name
    assert method.output_type.full_name == call.answer.DESCRIPTOR.full_name
    assert method.server_streaming == (function.__name__ in STREAMS)


def test_what_only_asks_changes_nothing_and_what_orders_does() -> None:
    asking = {function.__name__ for function in FUNCTIONS if not called(function).changes}
    verbs = ("activate", "add", "apply", "change", "create", "delete", "discard", "drain", "forget", "move", "promote")
    more = ("remove", "seek", "set_", "unload", "unsubscribe", "verify")
    assert not [name for name in asking if name.startswith((*verbs, *more)) or name == "rebalance"]
    assert {"list_brokers", "describe_topic", "explain", "peek", "retention", "topic_state", "lag"} <= asking
    assert not calls.verify_storage("/default/a", repair=False).changes


@pytest.mark.parametrize(
    ("to", "where", "value"),
    [
        ("earliest", "earliest", None),
        ("latest", "latest", None),
        (0, "offset", 0),
        (datetime(2026, 11, 15, 9, 0, 0, 1, UTC), "time_us", 1_794_733_200_000_001),
    ],
)
def test_a_subscription_is_moved_to_an_end_an_offset_or_a_time(to: Any, where: str, value: int | None) -> None:
    request: Any = calls.seek("/default/a", "s", to).request
    assert request.WhichOneof("to") == where
    assert value is None or getattr(request, where) == value


def test_a_topic_is_partitioned_if_it_has_partitions() -> None:
    assert calls.create_topic("/default/a", reliable=True).method.endswith("/CreateTopic")
    request: Any = calls.create_topic("/default/a", reliable=False, partitions=4).request
    assert (request.base_name, request.partitions, request.dispatch_strategy) == (
        "/default/a",
        4,
        DanubeAdmin_pb2.NonReliable,
    )
