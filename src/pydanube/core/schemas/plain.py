"""Payloads of the types that need no parser."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pydanube.core.schemas.kinds import SchemaType

NUMBER_SIZES: Final = (4, 8)


def misfit(kind: SchemaType, payloads: Sequence[bytes]) -> tuple[int, str, str] | None:
    """Row, path and why of the first payload that does not fit a plain type."""
    for row, payload in enumerate(payloads):
        if kind is SchemaType.NUMBER and len(payload) not in NUMBER_SIZES:
            return row, "", f"a number has 4 or 8 bytes, and this has {len(payload)}"
        if kind is SchemaType.STRING:
            try:
                str(payload, "utf-8")
            except UnicodeDecodeError as error:
                return row, "", f"not UTF-8 at byte {error.start}"
    return None
