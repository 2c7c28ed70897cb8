"""Places in a topic's log as they are typed: earliest, latest, an offset, or a time."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from pydanube.errors import ConfigError

if TYPE_CHECKING:
    from pydanube.client.messages import Place  # loads Arrow

TIMES: Final = "a time as 2026-11-15T09:00:00Z"
PLACES: Final = f"earliest, latest, an offset, or {TIMES}"


def parse_place(key: str, text: str) -> Place:
    """Raises ConfigError, which names `key` and what may stand there."""
    if text == "earliest":
        return "earliest"
    if text == "latest":
        return "latest"
    if text.isascii() and text.isdecimal() and int(text) < 1 << 64:
        return int(text)
    return parse_time(key, text, PLACES)


def parse_time(key: str, text: str, allowed: str = TIMES) -> datetime:
    """Without a time zone it is UTC. Raises ConfigError."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(key, text, allowed) from None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)
