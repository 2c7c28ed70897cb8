"""What a configuration file that was changed means for a broker that runs.

    log.level, log.format, policies.*, stream.limits.*    hold from now on
    everything else                                        needs a restart, and is named

Flags stay what they were at the start, and win over the file as they did then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, NamedTuple

from pydanube.config import Config
from pydanube.config.checks import shown
from pydanube.config.settings import SETTINGS, default

RELOADED: Final = tuple(key for key, setting in SETTINGS.items() if setting.reloaded)


class Changed(NamedTuple):
    key: str
    before: object
    after: object

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.after}"


class Reload(NamedTuple):
    """`config` is what holds from now on: of the new file only what may change while a broker runs."""

    config: Config
    changed: tuple[Changed, ...]
    restart: tuple[str, ...]  # keys that are others in the file, and hold after a restart
    overruled: tuple[str, ...]  # keys that are others in the file, where a flag wins


def reloaded(running: Config, read: Config) -> Reload:
    """`read` is of the same flags as `running`, and of the file as it is now."""
    changed, overruled = [], []
    for key in RELOADED:
        before, after = default(running, key), default(read, key)
        if before != after:
            changed.append(Changed(key, before, after))
        elif key in read.given and read.given[key] not in (after, running.given.get(key)):
            overruled.append(f"{key}: {SETTINGS[key].flag} wins")
    rest = [key for key in SETTINGS if key not in RELOADED and running.given.get(key) != read.given.get(key)]
    config = replace(
        running,
        lines=read.lines,
        policies=read.policies,
        stream=replace(running.stream, limits=read.stream.limits),
        given=_given(running.given, read.given),
    )
    return Reload(config, tuple(changed), tuple(rest), tuple(overruled))


def _given(running: Mapping[str, object], read: Mapping[str, object]) -> dict[str, object]:
    """What waits for a restart is not taken over: the next reload names it again."""
    kept = {key: value for key, value in running.items() if key not in RELOADED}
    return kept | {key: value for key, value in read.items() if key in RELOADED}


def in_words(config: Config) -> dict[str, object]:
    """What the file sets, by key, as one may show it: no secret."""
    found = {}
    for key, value in config.given.items():
        as_written = default(config, key)
        found[key] = shown(key, value if as_written is None else as_written)
    return found
