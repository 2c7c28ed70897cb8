"""OpenLineage: a job's runs as events, for catalogs that draw what is made of what. An option of every job.

    lineage.url         where events are posted: a server's root (then /api/v1/lineage), or the whole URL
    lineage.file        or a file that gets one event a line
    lineage.namespace   of the job; danube
    lineage.job         its name; the job and its `name` setting, or its first topic
    lineage.token       of the server, sent as a bearer

START when the job begins; at the end COMPLETE, FAIL with its sentence, or ABORT if it was interrupted. Datasets have
the names that the specification wants: the namespace is scheme and authority of where they are, the name the path
there; a topic is `danube://host:port` and its name. A server that is away, slow or refuses costs nothing but its
events: they are sent beside the job, the end waits for END_SECONDS at most, and the report says how many arrived.
"""

from __future__ import annotations

import json
import logging
import threading
import urllib.request
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from pydanube import __version__
from pydanube.errors import ConfigError
from pydanube.pipeline.settings import JobSettings, scheme_of

log = logging.getLogger(__name__)

KNOWN: Final = ("lineage.url", "lineage.file", "lineage.namespace", "lineage.job", "lineage.token")
SCHEMA: Final = "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent"
ERROR_SCHEMA: Final = "https://openlineage.io/spec/facets/1-0-1/ErrorMessageRunFacet.json#/$defs/ErrorMessageRunFacet"
PRODUCER: Final = f"https://pypi.org/project/pydanube/{__version__}"
PATH: Final = "/api/v1/lineage"
SEND_SECONDS: Final = 5.0
END_SECONDS: Final = 6.0
PORT: Final = 6651


class Dataset(NamedTuple):
    namespace: str
    name: str

    def to_json(self) -> dict[str, str]:
        return {"namespace": self.namespace, "name": self.name}


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageSettings:
    url: str | None
    file: str | None
    namespace: str
    job: str
    token: str | None = field(repr=False)

    @classmethod
    def parse(cls, job: str, values: Mapping[str, Any], settings: Mapping[str, Any]) -> LineageSettings | None:
        """`values` are those of KNOWN, `settings` the job's own. None: nothing is wanted. Raises ConfigError."""
        if not values:
            return None
        found = JobSettings(values, KNOWN, "lineage")
        url, file = found.text("lineage.url"), found.place("lineage.file")
        if (url is None) == (file is None):
            raise ConfigError("lineage.url", None, "either lineage.url or lineage.file")
        if url is not None:
            url = _posted_to(url)
        topics = settings.get("topics") or settings.get("topic") or ""
        first = topics[0] if isinstance(topics, list) and topics else str(topics).partition(",")[0]
        return cls(
            url=url,
            file=file,
            namespace=found.text("lineage.namespace", "danube") or "danube",
            job=found.text("lineage.job") or f"{job}.{settings.get('name') or first.rpartition('/')[2] or job}",
            token=found.text("lineage.token"),
        )


def _posted_to(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise ConfigError("lineage.url", "(hidden)", "http://host:port or https://host, without a user in it")
    return f"{url.rstrip('/')}{PATH}" if parts.path in ("", "/") else url


# --- what is made of what ---------------------------------------------------------------------------------------


def inputs_of(settings: Mapping[str, Any]) -> list[Dataset]:
    """The topics."""
    given = settings.get("topics") or settings.get("topic") or ()
    names = [each.strip() for each in given.split(",")] if isinstance(given, str) else [str(each) for each in given]
    where = settings.get("service.url")
    if where:
        parts = urlsplit(str(where).split(",")[0].strip())
        namespace = f"danube://{parts.hostname or 'localhost'}:{parts.port or PORT}"
        return [Dataset(namespace, name) for name in names if name]
    storage = str(settings.get("storage.url", "")).rstrip("/")
    return [dataset_at(f"{storage}/{name.strip('/')}") for name in names if name]


def outputs_of(job: str, settings: Mapping[str, Any]) -> list[Dataset]:
    if job == "lake":
        target = str(settings.get("target", "")).rstrip("/")
        inputs = inputs_of(settings)
        name = settings.get("name") or (inputs[0].name.rpartition("/")[2] if inputs else "lake")
        kinds = ("raw", "typed", "quarantine") if settings.get("schema") else ("raw",)
        names = [f"{name}_{kind}".replace("-", "_") for kind in kinds]
        if settings.get("format") == "iceberg":
            return _tables(settings, [f"danube.{each}" for each in names])
        return [dataset_at(f"{target}/{each}") for each in names]
    if job == "maintain":
        given = settings.get("tables") or ()
        named = given.split(",") if isinstance(given, str) else given
        name = str(settings.get("name")).replace("-", "_")
        return _tables(settings, named or [f"danube.{name}_{kind}" for kind in ("raw", "typed", "quarantine")])
    if job == "replay":
        if settings.get("to_file"):
            return [dataset_at(str(settings["to_file"]))]
        return inputs_of({**settings, "topics": None, "topic": settings.get("to_topic")})
    if job == "stats":
        return [dataset_at(str(settings[each])) for each in ("page", "json") if settings.get(each)]
    return inputs_of(settings) if job in ("compact", "erase") else []


def _tables(settings: Mapping[str, Any], identifiers: Sequence[str]) -> list[Dataset]:
    """Iceberg tables, by their identifiers in the warehouse."""
    catalog = settings.get("catalog")
    warehouse = catalog.get("warehouse") if isinstance(catalog, Mapping) else None
    where = dataset_at(str(warehouse if isinstance(warehouse, str) else settings.get("target", "")))
    return [Dataset(where.namespace, each.strip()) for each in identifiers]


def dataset_at(place: str) -> Dataset:
    """By the naming rules: `file` and the whole path; scheme, authority and the path there."""
    scheme = scheme_of(place)
    if scheme in ("", "file"):
        path = urlsplit(place).path if scheme else str(Path(place).absolute())
        return Dataset("file", path)
    parts = urlsplit(place)
    if scheme in ("s3a", "s3n"):
        scheme = "s3"
    authority = parts.netloc.rpartition("@")[2] if scheme not in ("abfs", "abfss", "wasb", "wasbs") else parts.netloc
    name = parts.path if scheme in ("hdfs", "viewfs") else parts.path.strip("/")
    return Dataset(f"{scheme}://{authority}", name or "/")


def event(
    kind: str,
    run_id: str,
    settings: LineageSettings,
    inputs: Sequence[Dataset],
    outputs: Sequence[Dataset],
    at: datetime,
    error: str = "",
) -> dict[str, Any]:
    """A RunEvent. `kind` is START, COMPLETE, FAIL or ABORT."""
    run: dict[str, Any] = {"runId": run_id}
    if error:
        facet = {"_producer": PRODUCER, "_schemaURL": ERROR_SCHEMA, "message": error, "programmingLanguage": "PYTHON"}
        run["facets"] = {"errorMessage": facet}
    return {
        "eventType": kind,
        "eventTime": at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "run": run,
        "job": {"namespace": settings.namespace, "name": settings.job},
        "inputs": [each.to_json() for each in inputs],
        "outputs": [each.to_json() for each in outputs],
        "producer": PRODUCER,
        "schemaURL": SCHEMA,
    }


# --- sending ----------------------------------------------------------------------------------------------------


class Lineage:
    """Of one run: `began`, then `ended`, once each. None of them raises, or waits for longer than END_SECONDS."""

    def __init__(self, settings: LineageSettings | None, job: str, values: Mapping[str, Any]) -> None:
        self._settings = settings
        self._run_id = str(uuid.uuid4())
        self._datasets = (inputs_of(values), outputs_of(job, values)) if settings is not None else ([], [])
        self._events: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._sent = self._made = 0
        self._why = ""
        self._thread = threading.Thread(target=self._send_all, name="lineage", daemon=True)

    def began(self) -> None:
        if self._settings is not None:
            self._thread.start()
            self._put("START")

    def ended(self, kind: str, error: str = "") -> str | None:
        """What became of the events, in words; None: none were wanted."""
        if self._settings is None:
            return None
        self._put(kind, error)
        self._events.put(None)
        self._thread.join(END_SECONDS)
        if self._sent == self._made:
            return f"{self._sent} events sent"
        why = self._why or "no answer in time"
        log.warning("lineage not sent", extra={"sent": self._sent, "of": self._made, "why": why})
        return f"{self._sent} of {self._made} events sent: {why}"

    def _put(self, kind: str, error: str = "") -> None:
        assert self._settings is not None
        self._made += 1
        self._events.put(event(kind, self._run_id, self._settings, *self._datasets, datetime.now(UTC), error))

    def _send_all(self) -> None:
        for each in self._waiting():
            try:
                self._send(json.dumps(each).encode())
                self._sent += 1
            except Exception as error:  # whatever it is, the job goes on
                reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
                self._why = f"{type(error).__name__}: {reason}"[:200]

    def _waiting(self) -> Iterator[dict[str, Any]]:
        while (found := self._events.get()) is not None:
            yield found

    def _send(self, body: bytes) -> None:
        settings = self._settings
        assert settings is not None
        if settings.file is not None:
            with Path(settings.file).open("ab") as file:
                file.write(body + b"\n")
            return
        assert settings.url is not None
        headers = {"Content-Type": "application/json"}
        if settings.token:
            headers["Authorization"] = f"Bearer {settings.token}"
        request = urllib.request.Request(settings.url, body, headers, method="POST")
        with urllib.request.urlopen(request, timeout=SEND_SECONDS) as answer:
            answer.read()
