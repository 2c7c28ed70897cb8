"""docs/configuration.md, made from the code: `python -m tools.docs.configuration > docs/configuration.md`.

Keys, what is allowed and defaults come from `pydanube.config`, flags and environment variables from the commands
themselves. A test fails when the page is not what this prints.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Any, Final

import typer.main

from pydanube.cli.main import build_app
from pydanube.config import Config, Flags, load
from pydanube.config.file import ALIASES, REPLACED
from pydanube.config.settings import SETTINGS, default
from pydanube.errors import ConfigError

NOT_EMPTY: Final = "a text that is not empty"
WHOLE_MAX: Final = str(2**31 - 1)

# Sections of the file as the page has them: a heading, the beginning of their keys, and what is said first.
SECTIONS: Final = (
    ("The broker and its ports", ("broker.",), "A port of 0 is one of the system's choice."),
    (
        "General",
        ("cluster_name", "bootstrap_namespaces", "auto_create_topics", "admin_tls", "auth.", "log.", "web."),
        "",
    ),
    (
        "Metadata of a cluster",
        ("meta_store.", "cluster."),
        "See [metadata](metadata.md). A standalone broker uses SQLite.",
    ),
    ("Which broker gets a topic", ("load_manager.",), "For clusters."),
    (
        "Storage",
        ("storage.",),
        "Options below `storage.durable` belong to one kind of store and are refused by others.",
    ),
    ("Delivery", ("dispatch.",), "Defaults of subscriptions that have no setting of their own."),
    (
        "Limits of topics",
        ("policies.",),
        "Of the bootstrap namespaces; 0 is no limit. They are for topics that have no policy of their own. "
        "In a cluster, and as soon as the file has one of these keys, `max_message_size` is 10485760 unless the file "
        "says otherwise.",
    ),
    ("The native port", ("stream.",), "See [protocol §13](protocol.md#13-settings-of-a-broker)."),
)

INTRODUCTION: Final = """\
# Configuration

<!-- Made by `python -m tools.docs.configuration > docs/configuration.md`. Do not edit. -->

`danube broker` takes flags and a YAML file (`--config-file`). A flag wins over the file, the file wins over the
default. Everything is read once, at the start. An unknown key, a value that is not allowed, and security that does not
exist yet are refused with one line that names the key. Nothing is ignored silently.

```yaml
broker: {host: 0.0.0.0, advertised_listeners: {broker_url: "http://broker-1.example:6650"}}
storage: {url: "s3://events/danube", upload: {interval_seconds: 10}}
dispatch: {heartbeat_interval: high_priority}
```

Keys below are written with dots: `storage.upload.max_mb` is `max_mb` below `upload` below `storage`. Without `--mode`,
a broker with a file is part of a cluster.
"""

WHILE_RUNNING: Final = """\
## Check it, and change it while the broker runs

`danube broker --check`, with the flags of the start, checks flags, file, directories, ports, certificates and the URL
of the store, says with what a broker would run, and starts nothing: exit code 0 if all is well, else 2. It may be run
beside the broker.

SIGHUP (`systemctl reload`, `kill -HUP`) has the broker read its file again. `log`, `policies` and `stream.limits` hold
from then on: limits of a namespace for topics that are open, those of `stream.limits` for connections that come. The
line `configuration reloaded` names what changed and what needs a restart. A file with a mistake changes nothing, and
the log says why. SIGHUP never ends the broker, not even when the terminal that it was started in is closed: one that
comes while it starts is heard when it serves. Only in the first twentieth of a second, in which Python itself starts,
no program can hear it (`nohup danube broker …` covers that, too).

## Set while the broker runs

These are kept in the metadata store. They win over the file, also after a restart.

| what | of | command |
|---|---|---|
| heartbeat | a subscription | `danube admin subscriptions set-heartbeat` |
| heartbeat | a topic's subscriptions that have none of their own | `danube admin topics set-heartbeat` |
| unacknowledged messages | a subscription | `danube admin subscriptions set-dispatch-config` |
| redelivery, ack timeout, dead letters | a subscription | `danube admin subscriptions set-failure-policy` |
| limits (`policies`, without retention) | a namespace | `danube admin namespaces set-policies` |
| how long history is kept | a topic | `danube admin topics retention` |
| how long history is kept | a namespace | `danube admin namespaces retention` |
"""


def page() -> str:
    """The whole page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    config = load(Flags(mode="standalone"))
    yield INTRODUCTION
    yield from _flags()
    yield from _environment()
    yield WHILE_RUNNING
    yield "## Keys of the file\n"
    for heading, beginnings, said in SECTIONS:
        yield f"### {heading}\n"
        if said:
            yield f"{said}\n"
        yield from _table(config, [key for key in SETTINGS if key.startswith(beginnings)])
        yield ""
    yield from _others()


def _table(config: Config, keys: list[str]) -> Iterator[str]:
    yield "| key | default | allowed | meaning |"
    yield "|---|---|---|---|"
    for key in keys:
        setting = SETTINGS[key]
        flag = f" Flag: `{setting.flag}`." if setting.flag else ""
        yield f"| `{key}` | {_shown(default(config, key))} | {_allowed(key)} | {setting.meaning}{flag} |"


def _shown(value: object) -> str:
    match value:
        case None:
            return "–"
        case bool():
            return f"`{str(value).lower()}`"
        case list():
            return f"`[{', '.join(map(str, value))}]`"
        case float():
            return f"`{value:g}`"
    return f"`{value}`"


def _allowed(key: str) -> str:
    """In the words of the error that a wrong value gets."""
    for wrong in (object(), "?", ["?"]):
        try:
            SETTINGS[key].check(key, wrong)
        except ConfigError as error:
            if error.allowed not in (NOT_EMPTY, "a list of texts"):
                several = "a list of texts: " if isinstance(wrong, list) else ""
                return several + error.allowed.replace(f" to {WHOLE_MAX}", " on").replace("|", "\\|")
    return "a list of texts" if isinstance(_taken(key, ["a:1"]), tuple) else "a text"


def _taken(key: str, value: object) -> object:
    try:
        return SETTINGS[key].check(key, value)
    except ConfigError:
        return None


# --- flags and variables ------------------------------------------------------------------------------


def _flags() -> Iterator[str]:
    yield "## Flags of `danube broker`\n"
    yield "| flag | default | meaning | key |"
    yield "|---|---|---|---|"
    keys = {setting.flag: key for key, setting in SETTINGS.items() if setting.flag}
    for option in _command("broker").params:
        flag = option.opts[0]
        if flag == "--help":
            continue
        shown = option.show_default if isinstance(option.show_default, str) else _flag_default(option)
        key = f"`{keys[flag]}`" if flag in keys else "–"
        name = f"{flag} {option.metavar}".replace("|", "\\|") if option.metavar else flag
        yield f"| `{name}` | {shown or '–'} | {_text(option)} | {key} |"
    yield ""


def _flag_default(option: Any) -> str:
    if option.default is None or option.default is False:
        return ""
    return f"`{getattr(option.default, 'value', option.default)}`"


def _text(option: Any) -> str:
    said = (option.help or f"{option.rich_help_panel}.").replace("|", "\\|")
    kind = type(option.default)
    return f"{said} One of {', '.join(kind)}." if issubclass(kind, StrEnum) else said


def _environment() -> Iterator[str]:
    yield "## Environment variables\n"
    yield "A flag wins over the variable.\n"
    yield "| variable | default | instead of |"
    yield "|---|---|---|"
    for variable, (shown, places) in sorted(_variables().items()):
        yield f"| `{variable}` | {shown} | {', '.join(places)} |"
    yield "| `DANUBE_CONFIG_DIR` | `~/.config/danube` | where `danube context` keeps its file |"
    yield (
        "\nObject stores also take the variables of their providers: `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`,\n"
        "`GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_ACCOUNT_NAME`, `AZURE_STORAGE_ACCOUNT_KEY`.\n"
    )


def _variables() -> dict[str, tuple[str, list[str]]]:
    found: dict[str, tuple[str, list[str]]] = {}
    for words, command in _walk("danube", typer.main.get_command(build_app())):
        for option in command.params:
            if isinstance(option.envvar, str):
                shown = "" if option.default is None else f"`{option.default}`"
                entry = found.setdefault(option.envvar, (shown or "–", []))
                entry[1].append(f"`{words} {option.opts[0]}`")
    return found


def _walk(words: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield words, command
    for name, below in getattr(command, "commands", {}).items():
        yield from _walk(f"{words} {name}", below)


def _command(name: str) -> Any:
    return typer.main.get_command(build_app()).commands[name]  # type: ignore[attr-defined]


def _others() -> Iterator[str]:
    yield "### Other names\n"
    yield "The original's spellings of the same settings.\n"
    yield "| key | is |"
    yield "|---|---|"
    for other, key in ALIASES.items():
        if key in SETTINGS:
            yield f"| `{other}` | `{key}` |"
    yield "\n### Without effect\n"
    yield "Accepted from files of the original, with a warning.\n"
    yield "| key | instead |"
    yield "|---|---|"
    for key, said in {
        **REPLACED,
        **{other: REPLACED[key] for other, key in ALIASES.items() if key in REPLACED},
    }.items():
        yield f"| `{key}` | {said} |"


if __name__ == "__main__":
    print(page(), end="")
