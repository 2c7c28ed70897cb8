"""What a pipeline is declared to be: a job, its settings, when it runs, how fresh its result is to be.

    name: orders
    job: lake
    follow: 30s                    or every: 1h, or cron: "15 3 * * *" (UTC): one of them
    freshness: 5m                  how old the newest data of the result may be
    settings: {service.url: danube://10.0.0.1:6651, topic: /default/orders, target: s3://lake/tables,
               token: {from_file: /run/secrets/danube-token}, target_options: {secret_key: {from_env: LAKE_SECRET}}}

A declaration is kept where every operator reads it, so it has no secrets: where one belongs stands a file's path or the
name of a variable, which the supervisor's process reads. Which settings a job knows is the job's own matter, checked by
the registry of jobs (`pipeline/registry.py`) before anything is stored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, Final, Self, TypeAlias
from urllib.parse import parse_qsl, urlsplit

from pydanube.core.pipelines.schedule import Cron, Every, seconds_of
from pydanube.errors import ConfigError, InvalidName

FIELDS: Final = ("name", "job", "follow", "every", "cron", "freshness", "settings", "paused", "master", "remote")
WHEN: Final = ("follow", "every", "cron")
FOLLOW_SETTING: Final = "follow_seconds"  # of jobs that can follow
SIZE_MAX_BYTES: Final = 64 * 1024
DEPTH_MAX: Final = 8
FROM_FILE: Final = "from_file"
FROM_ENV: Final = "from_env"
HIDDEN: Final = "(hidden)"

_NAME: Final = re.compile(r"[a-z0-9](?:[a-z0-9_-]|\.(?=[a-z0-9])){0,63}")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Settings that hold secrets, by a word of their name; a file's path and a class's name are none.
_SECRET: Final = re.compile(
    r"secret|passw|credential|token|signature|private[._-]?key|account[._-]?key|api[._-]?key"
    r"|(?:^|[._-])(?:sas|pwd|auth)(?:$|[._-])",
    re.IGNORECASE,
)
_NO_SECRET: Final = re.compile(r"(?:file|path|provider|url|uri|type|enabled|class)$", re.IGNORECASE)

Schedule: TypeAlias = Every | Cron


def pipeline_name(text: object) -> str:
    """Raises InvalidName."""
    if not isinstance(text, str) or not _NAME.fullmatch(text):
        rule = "use small letters, digits, '-', '_' and single dots, at most 64, a letter or digit first"
        raise InvalidName("pipeline name", str(text)[:100], rule)
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """Exactly one of `follow_seconds` and `schedule` is set. `changed_us`: when it was applied as it is."""

    name: str
    job: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    follow_seconds: int | None = None
    schedule: Schedule | None = None
    freshness_seconds: int | None = None
    paused: bool = False
    master: str | None = None
    remote: str | None = None
    changed_us: int = 0

    @classmethod
    def parse(cls, values: object) -> Self:
        """What a person wrote, or what is stored. Raises ConfigError and InvalidName."""
        if not isinstance(values, Mapping):
            raise ConfigError("pipeline", str(values)[:100], "names and values: name, job, settings, …")
        check_names(values, (*FIELDS, "changed_us"), "a pipeline")
        name = pipeline_name(values.get("name"))
        job = values.get("job")
        if not isinstance(job, str) or not job:
            raise ConfigError("job", job, "the job's name: `danube pipeline jobs` lists them")
        settings = values.get("settings") or {}
        if not isinstance(settings, Mapping):
            raise ConfigError("settings", HIDDEN, "names and values")
        check_settings(settings)
        given = [each for each in WHEN if values.get(each) is not None]
        if len(given) != 1:
            what = "one of follow: 30s, every: 1h and cron: '15 3 * * *'"
            raise ConfigError("follow", ", ".join(given) or None, what)
        follow = values.get("follow")
        goal = values.get("freshness")
        paused = values.get("paused", False)
        if not isinstance(paused, bool):
            raise ConfigError("paused", paused, "true or false")
        changed_us = values.get("changed_us", 0)
        made = cls(
            name=name,
            job=job,
            settings=dict(settings),
            follow_seconds=None if follow is None else seconds_of("follow", follow, shortest=1),
            schedule=_schedule(values),
            freshness_seconds=None if goal is None else seconds_of("freshness", goal, shortest=1),
            paused=paused,
            master=_text(values, "master"),
            remote=_text(values, "remote"),
            changed_us=changed_us if isinstance(changed_us, int) else 0,
        )
        if len(made.to_bytes()) > SIZE_MAX_BYTES:
            raise ConfigError("pipeline", name, f"{SIZE_MAX_BYTES:,} bytes at most, as JSON")
        return made

    @classmethod
    def from_bytes(cls, stored: bytes) -> Self | None:
        """None: it cannot be read, as one of a newer version."""
        try:
            return cls.parse(json.loads(stored))
        except (ValueError, ConfigError, InvalidName):
            return None

    def to_json(self) -> dict[str, Any]:
        """As a person would write it, in one order."""
        found: dict[str, Any] = {"name": self.name, "job": self.job}
        if self.follow_seconds is not None:
            found["follow"] = str(Every(self.follow_seconds)).removeprefix("every ")
        elif isinstance(self.schedule, Every):
            found["every"] = str(self.schedule).removeprefix("every ")
        elif self.schedule is not None:
            found["cron"] = self.schedule.text
        if self.freshness_seconds is not None:
            found["freshness"] = str(Every(self.freshness_seconds)).removeprefix("every ")
        found["settings"] = dict(self.settings)
        for name in ("master", "remote"):
            if (value := getattr(self, name)) is not None:
                found[name] = value
        if self.paused:
            found["paused"] = True
        found["changed_us"] = self.changed_us
        return found

    def to_bytes(self) -> bytes:
        return json.dumps(self.to_json(), ensure_ascii=False, separators=(",", ":")).encode()

    def says_the_same(self, other: Declaration) -> bool:
        """Whether to apply one over the other changes nothing."""
        return replace(self, changed_us=0) == replace(other, changed_us=0)

    def runs_the_same(self, other: Declaration) -> bool:
        """Whether a run of one is a run of the other: a goal, and when the next one begins, do not end a run."""
        mine, theirs = (
            (each.job, dict(each.settings), each.follow_seconds, each.master, each.remote) for each in (self, other)
        )
        return mine == theirs

    @property
    def follows(self) -> bool:
        return self.follow_seconds is not None

    @property
    def when(self) -> str:
        if self.follow_seconds is not None:
            return f"follows, {Every(self.follow_seconds)}"
        return str(self.schedule)

    @property
    def job_settings(self) -> dict[str, Any]:
        """What the job is given."""
        follow = {} if self.follow_seconds is None else {FOLLOW_SETTING: self.follow_seconds}
        return {**self.settings, **follow}

    def due_us(self, last_us: int | None) -> int:
        """When the next run begins, `last_us` being the start of the last one."""
        return self.changed_us if self.schedule is None else self.schedule.due_us(last_us, self.changed_us)


def check_names(values: Mapping[Any, object], known: Collection[str], whose: str) -> None:
    """Raises ConfigError for a name that is not known, with what was probably meant. The value is not repeated."""
    for name in values:
        if name not in known:
            meant = get_close_matches(str(name), known, 1)
            hint = f"did you mean {meant[0]}?" if meant else f"{whose} may have {', '.join(sorted(known))}"
            raise ConfigError(str(name)[:100], HIDDEN, hint)


def _schedule(values: Mapping[str, Any]) -> Schedule | None:
    if (every := values.get("every")) is not None:
        return Every(seconds_of("every", every))
    if (cron := values.get("cron")) is not None:
        return Cron.parse(str(cron))
    return None


def _text(values: Mapping[str, Any], name: str) -> str | None:
    value = values.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not value or _url_secret(value):
        raise ConfigError(name, HIDDEN, "a URL without a secret in it")
    return value


# --- secrets ------------------------------------------------------------------------------------------------


def reference_of(value: object) -> tuple[str, str] | None:
    """(`from_file`, path) or (`from_env`, variable), if the value refers to one."""
    if isinstance(value, Mapping) and len(value) == 1:
        [(how, where)] = value.items()
        if how in (FROM_FILE, FROM_ENV) and isinstance(where, str):
            return how, where
    return None


def variables_of(settings: Mapping[str, Any]) -> frozenset[str]:
    """The variables of the supervisor's environment that the settings refer to."""
    found = (reference_of(value) for _, value in _leaves("", settings, 0))
    return frozenset(each[1] for each in found if each is not None and each[0] == FROM_ENV)


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raises ConfigError for the text of a secret, and for a reference that cannot be one. No value is repeated."""
    if FOLLOW_SETTING in settings:
        raise ConfigError(FOLLOW_SETTING, settings[FOLLOW_SETTING], "not a setting here: say `follow: 30s` instead")
    for path, value in _leaves("", settings, 0):
        reference = reference_of(value)
        if reference is not None:
            how, where = reference
            if how == FROM_FILE and not where.startswith("/"):
                raise ConfigError(path, where, "from_file: the whole path of a file on the supervisor's machine")
            if how == FROM_ENV and not _VARIABLE.fullmatch(where):
                raise ConfigError(path, HIDDEN, "from_env: the name of a variable of the supervisor's environment")
        elif isinstance(value, Mapping):
            raise ConfigError(path, HIDDEN, f"names and values, {DEPTH_MAX} levels deep at most")
        elif value is not None and not isinstance(value, str | int | float | bool):
            raise ConfigError(path, HIDDEN, "text, a number, true, false, a list, or names and values")
        elif not isinstance(value, bool) and value and _is_secret(path, str(value)):
            what = "no text of a secret, for all who list pipelines read it: {from_file: /path} or {from_env: NAME}"
            raise ConfigError(path, HIDDEN, what)


def _leaves(path: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if reference_of(value) is not None or depth > DEPTH_MAX:
        yield path, value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _leaves(f"{path}.{name}" if path else str(name), each, depth + 1)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(path, each, depth + 1)
    else:
        yield path, value


def _is_secret(path: str, value: str) -> bool:
    named = bool(_SECRET.search(path)) and not _NO_SECRET.search(path)
    return named or "-----BEGIN" in value or _url_secret(value)


def _url_secret(value: str) -> bool:
    """`scheme://user:password@host`, or a signature or token in a query."""
    if "://" not in value:
        return False
    try:
        parts = urlsplit(value)
        return bool(parts.password) or any(
            _SECRET.search(name) or name.lower() == "sig" for name, _ in parse_qsl(parts.query)
        )
    except ValueError:
        return "@" in value


def next_start_us(declaration: Declaration, last_us: int | None, now_us: int) -> int:
    """As `due_us`, for a clock that went back: a last start that lies ahead was now."""
    return declaration.due_us(None if last_us is None else min(last_us, now_us))
