"""The flags of `danube broker`, once: their names and types, and what --help says of them.

The command makes its options of them (`cli/broker.py`), in this order; docs/cli.md and docs/configuration.md are made
of the command. `load` checks what was typed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, NamedTuple

from pydanube.config.settings import LEVELS, LINES

LISTEN: Final = "Where it listens"
CLIENTS: Final = "What clients are told"
CLUSTER: Final = "Cluster (not used by a standalone broker)"
STORAGE: Final = "History"
EDGE: Final = "Edge (does not exist yet: refused)"
LOGS: Final = "Log lines (stderr)"


class Flag(NamedTuple):
    """What --help says. `shown` is the default as it has it: flags have none, since the file may say otherwise."""

    help: str
    metavar: str | None = None
    shown: str | None = None
    panel: str | None = None
    choices: tuple[str, ...] = ()
    any_case: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """The command line of `danube broker`, as typed. None: not given."""

    mode: Annotated[
        str | None,
        Flag("standalone: one broker, nothing else needed. cluster: several, see below."),
    ] = None
    data_dir: Annotated[
        Path | None,
        Flag("Where everything is kept; made if it is missing.", shown="./danube-data"),
    ] = None
    config_file: Annotated[
        Path | None,
        Flag("Settings in YAML: docs/configuration.md has the keys. Flags win over it."),
    ] = None
    broker_addr: Annotated[
        str | None,
        Flag("Clients: gRPC.", metavar="IP:PORT", shown="127.0.0.1:6650", panel=LISTEN),
    ] = None
    admin_addr: Annotated[
        str | None,
        Flag("danube admin: gRPC.", metavar="IP:PORT", shown="127.0.0.1:50051", panel=LISTEN),
    ] = None
    prom_exporter: Annotated[
        str | None,
        Flag("HTTP: /metrics, /health/live, /health/ready.", metavar="IP:PORT", shown="127.0.0.1:9040", panel=LISTEN),
    ] = None
    stream_addr: Annotated[
        str | None,
        Flag("Clients: the native protocol.", metavar="IP:PORT", shown="127.0.0.1:6651", panel=LISTEN),
    ] = None
    web_addr: Annotated[
        str | None,
        Flag("The web admin, in a browser.", metavar="IP:PORT|off", shown="127.0.0.1:8080 if standalone", panel=LISTEN),
    ] = None
    advertised_addr: Annotated[
        str | None,
        Flag(
            "The address that clients are told to use, if it is not the one listened on.",
            metavar="HOST:PORT",
            panel=CLIENTS,
        ),
    ] = None
    connect_url: Annotated[
        str | None,
        Flag("The proxy in front of this broker, if there is one.", metavar="URL", panel=CLIENTS),
    ] = None
    raft_addr: Annotated[
        str | None,
        Flag("Where the metadata store's members talk.", metavar="IP:PORT", panel=CLUSTER),
    ] = None
    seed_nodes: Annotated[str | None, Flag("The first members.", metavar="A,B,C", panel=CLUSTER)] = None
    join: Annotated[bool, Flag("Join a cluster that runs.", panel=CLUSTER)] = False
    etcd: Annotated[
        str | None,
        Flag("An etcd that is there already, instead of --seed-nodes.", metavar="HOST:PORT,…", panel=CLUSTER),
    ] = None
    registration_ttl: Annotated[
        float | None,
        Flag(
            "A broker that is silent for so long loses its topics. The same on every broker.",
            metavar="SECONDS",
            shown="32",
            panel=CLUSTER,
        ),
    ] = None
    shutdown_timeout: Annotated[
        float | None,
        Flag(
            "How long SIGTERM may take to hand topics over.",
            metavar="SECONDS",
            shown="30, or 0.05 per topic",
            panel=CLUSTER,
        ),
    ] = None
    storage_url: Annotated[
        str | None,
        Flag(
            "Where history is kept: file:///dir, s3://bucket/prefix, gs://… or az://….",
            metavar="URL",
            shown="a directory beside the log",
            panel=STORAGE,
        ),
    ] = None
    upload_interval: Annotated[
        float | None,
        Flag("How often new messages go to the object store.", metavar="SECONDS", shown="30", panel=STORAGE),
    ] = None
    check: Annotated[
        bool,
        Flag("Check flags, file, directories, ports and URLs, say what would run, and start nothing."),
    ] = False
    edge_config: Annotated[Path | None, Flag("Edge mode's settings.", panel=EDGE)] = None
    edge_token: Annotated[str | None, Flag("Edge mode's token.", panel=EDGE)] = field(default=None, repr=False)
    log_level: Annotated[
        str | None,
        Flag(
            "The least that is written: debug, info, warning or error.",
            shown="info",
            panel=LOGS,
            choices=LEVELS,
            any_case=True,
        ),
    ] = None
    log_format: Annotated[
        str | None,
        Flag("text for people, json for machines.", shown="text", panel=LOGS, choices=LINES),
    ] = None
