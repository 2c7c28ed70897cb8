"""What the process for schemas answers, as values: every question and every answer is JSON.

    judge {type, definition, message, asked, history: [[version, type, definition, message], …]}
        ─► {fingerprint, differences: [[rule, path, old, new, sentence, version], …]} | {invalid} | {missing}
    check {key, type, definition, message, sizes} and the payloads, one after the other
        ─► {bad: [row, path, why] | null} | {unknown: true}: say the definition | {invalid} | {missing}

What a definition compiles to is kept, by `key`: a version never changes.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from pydanube.core.schemas.compare import compare
from pydanube.core.schemas.kinds import DEFINITION_SIZE_MAX, SchemaType, compatibility
from pydanube.schema import parsing
from pydanube.schema.parsing import Invalid, Missing, parse

Answer: TypeAlias = dict[str, Any]
Check: TypeAlias = Callable[[bytes], tuple[str, str] | None]  # path and why, of a payload that does not fit

KEPT_MAX: Final = 1_000  # compiled definitions
WHY_MAX: Final = 300


class Answering:
    """One process's: it keeps what it has compiled."""

    def __init__(self) -> None:
        self._checks: OrderedDict[str, Check] = OrderedDict()

    def answer(self, question: Mapping[str, Any], payloads: bytes = b"") -> Answer:
        try:
            return self._judge(question) if question["do"] == "judge" else self._check(question, payloads)
        except Invalid as error:
            return {"invalid": str(error)}
        except Missing as error:
            return {"missing": str(error)}
        except (MemoryError, RecursionError) as error:
            return {"invalid": f"it takes more than may be used to understand it ({type(error).__name__})"}

    # --- definitions --------------------------------------------------------------------------------

    def _judge(self, question: Mapping[str, Any]) -> Answer:
        asked = compatibility(question["asked"])
        new = parse(SchemaType(question["type"]), _sized(question["definition"]), question["message"])
        found = []
        for version, kind, definition, message in question["history"]:
            old = parse(SchemaType(kind), definition, message)
            if old.fingerprint != new.fingerprint:
                found += compare(new.parsed, old.parsed, asked, version, parsing.covers)
        return {"fingerprint": new.fingerprint, "differences": [list(each) for each in found]}

    # --- payloads -----------------------------------------------------------------------------------

    def _check(self, question: Mapping[str, Any], payloads: bytes) -> Answer:
        key = question["key"]
        check = self._checks.get(key)
        if check is None:
            if question["definition"] is None:
                return {"unknown": True}
            check = self._checks[key] = _compiled(
                SchemaType(question["type"]), question["definition"], question["message"]
            )
            if len(self._checks) > KEPT_MAX:
                self._checks.popitem(last=False)
        else:
            self._checks.move_to_end(key)
        at = 0
        for row, size in enumerate(question["sizes"]):
            try:
                wrong = check(payloads[at : at + size])
            except Exception as error:  # it is this payload, so it is refused: who hears `try again` would, for ever
                wrong = "", f"it cannot be checked ({type(error).__name__}: {parsing.said(error)})"
            if wrong is not None:
                path, why = (each.encode("utf-8", "replace").decode() for each in wrong)  # no half of a character
                return {"bad": [row, path, why[:WHY_MAX]]}
            at += size
        return {"bad": None}


def _sized(definition: str) -> str:
    if len(definition.encode()) > DEFINITION_SIZE_MAX:
        raise Invalid(f"it has more than {DEFINITION_SIZE_MAX // 1024} KiB")
    return definition


def _compiled(kind: SchemaType, definition: str, message: str) -> Check:
    understood = parse(kind, definition, message)
    match kind:
        case SchemaType.JSON_SCHEMA:
            return _json_check(parsing.json_validator(understood.parsed.plain))
        case SchemaType.AVRO:
            return _avro_check(parsing.avro_schema(understood.parsed.plain))
        case SchemaType.PROTOBUF:
            return _protobuf_check(parsing.message_class(understood))
        case _:
            raise Invalid(f"payloads of {kind} need no parser")


def _json_check(validator: Any) -> Check:
    def check(payload: bytes) -> tuple[str, str] | None:
        try:
            value = json.loads(payload)
        except (ValueError, RecursionError) as error:
            return "", f"not JSON: {error}"
        if validator.is_valid(value):
            return None
        wrong = next(iter(validator.iter_errors(value)))
        return "".join(f"/{part}" for part in wrong.instance_path), wrong.message

    return check


def _avro_check(schema: Any) -> Check:
    def check(payload: bytes) -> tuple[str, str] | None:
        try:
            parsing.read_avro(schema, payload)
        except MemoryError:
            return "", "the value takes more memory than may be used"
        except Exception as error:  # the library raises whatever a broken value leads to
            return "", f"not a value of the schema: {parsing.said(error)}"
        return None

    return check


def _protobuf_check(message: Any) -> Check:
    from google.protobuf.message import DecodeError

    def check(payload: bytes) -> tuple[str, str] | None:
        try:
            message.FromString(payload)
        except DecodeError as error:
            return "", parsing.said(error)
        return None

    return check
