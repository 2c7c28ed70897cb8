"""JSON in and out of protobuf messages: their descriptors are the models of the JSON routes.

    order = order_of(body, values.UnloadBrokerRequest, required=("broker_id",))      checked, in sentences
    answer = json_of(found, numbers=("current_term",))                           every field, ids as strings

A field that the protocol gains is in the routes too. 64-bit numbers are strings, as protobuf's JSON has them: ids do
not fit the numbers of JavaScript. Those that are counts are named in `numbers`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, Final, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from starlette.requests import Request

from pydanube.errors import ConfigError
from pydanube.web.site import BadRequest, body_of

M = TypeVar("M", bound=Message)

NUMBER_MAX: Final = (1 << 31) - 1
JSON_KINDS: Final = {
    list: "a list",
    str: "a text",
    int: "a number",
    float: "a number",
    bool: "a truth",
    type(None): "null",
}


def json_of(message: Message, numbers: Collection[str] = ()) -> dict[str, Any]:
    """All fields by their names in the protocol; an optional one that is not set is null."""
    found = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    unset = {field.name: None for field in message.DESCRIPTOR.fields if field.name not in found}
    return {**found, **unset, **{name: getattr(message, name) for name in numbers if name in found}}


async def read_body(request: Request) -> Mapping[str, Any]:
    """Raises BadRequest, which says where it stops to be JSON, and nothing of what it holds."""
    try:
        body = json.loads(await body_of(request) or b"{}")
    except json.JSONDecodeError as error:
        why = f"{error.msg.lower()}, at line {error.lineno}, column {error.colno}"
        raise BadRequest(f"the body is no JSON: {why}") from None
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is no JSON: byte {error.start} is no UTF-8") from None
    except (ValueError, RecursionError):
        raise BadRequest(
            "the body is no JSON that can be read: a number is too long, or it is nested too deep"
        ) from None
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be a JSON object, and is {JSON_KINDS.get(type(body), 'something else')}")
    return body


def order_of(body: Mapping[str, Any], kind: type[M], required: Collection[str] = (), **defaults: Any) -> M:
    """A request with the fields that the body names, and the defaults of others. Raises BadRequest, ConfigError."""
    order = kind(**defaults)
    for field in kind.DESCRIPTOR.fields:
        if field.name in required:
            setattr(order, field.name, text(body, field.name))
        elif body.get(field.name) is not None:
            _put(order, field.name, field.type, body[field.name])
    return order


def _put(order: Message, name: str, kind: int, value: Any) -> None:
    if hasattr(getattr(order, name), "extend"):  # it is repeated
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise ConfigError(name, str(value)[:50], "a list of texts")
        getattr(order, name).extend(value)
    elif kind == FieldDescriptor.TYPE_BOOL:
        setattr(order, name, value is True)
    elif kind == FieldDescriptor.TYPE_STRING:
        setattr(order, name, str(value))
    else:
        setattr(order, name, whole(value, name))


def text(body: Mapping[str, Any], key: str) -> str:
    value = body.get(key)
    if value is None or value == "":
        raise BadRequest(f"{key} is missing")
    if not isinstance(value, str):
        raise ConfigError(key, value if isinstance(value, int | float) else str(value)[:50], "a text in quotes")
    return value


def whole(value: Any, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= NUMBER_MAX:
        raise ConfigError(key, str(value)[:50], "a whole number, 0 or more")
    return value
