"""docs/cli.md, made from the commands themselves: `python -m tools.docs.commands > docs/cli.md`.

A test fails when the page is not what this prints.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, Final

import typer.main

from pydanube.cli.exits import MEANINGS
from pydanube.cli.main import build_app

INTRODUCTION: Final = """\
# Commands

<!-- Made by `python -m tools.docs.commands > docs/cli.md`. Do not edit. -->

Every command says with `--help` what is on this page. The rules are the same for all of them:

- A terminal gets tables, a pipe plain lines, and `--output json` is for scripts. Results go to standard output,
  everything else to standard error.
- Whatever goes wrong is one line on standard error, which says what and what to do, and an exit code for its kind:
  [below](#exit-codes).
- A reader that leaves early (`danube admin topics list | head -1`) is no mistake: orders are carried out, commands that
  print for ever end, and the exit code is that of what was done.
- Which cluster a command talks to: its option (`--endpoint`, `--service-addr`), else `danube --context NAME`, else the
  variables `DANUBE_ADMIN_ENDPOINT` and `DANUBE_SERVICE_ADDR`, else `DANUBE_CONTEXT`, else the context in use
  ([`danube context use`](#danube-context-use)), else this machine. Contexts are in `~/.config/danube/contexts.json`, or
  in the directory `DANUBE_CONFIG_DIR`; only their owner may read them.
- Messages go through the native protocol (`danube://host:6651`), or through gRPC if the address says so
  (`http://host:6650`).
- `danube-broker`, `danube-admin` and `danube-cli`, the original's names, are `danube broker`, `danube admin` and
  `danube`.
- `danube --install-completion` teaches bash, zsh or fish to complete commands, options, and names of topics,
  namespaces, brokers and subscriptions, which it asks the broker for.
"""
GENERAL: Final = frozenset({"help", "install_completion", "show_completion"})
EXAMPLE: Final = re.compile(r"(danube|seq|python) ")


def page() -> str:
    """The whole page."""
    return "\n".join(_lines()).rstrip() + "\n"


def commands() -> Iterator[tuple[str, Any]]:
    """All that are not hidden, with the words that call them, groups before what is in them."""
    yield from _walk("danube", typer.main.get_command(build_app(whole=True)))


def _walk(words: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield words, command
    for name, below in getattr(command, "commands", {}).items():
        if not below.hidden:
            yield from _walk(f"{words} {name}", below)


def _lines() -> Iterator[str]:
    yield INTRODUCTION
    yield from _exit_codes()
    yield from _contents()
    for words, command in commands():
        if not hasattr(command, "commands"):
            yield f"## {words}\n"
            yield from _help(command)
            yield from _usage(words, command)
            yield from _arguments(command)
        elif _options(command):
            yield f"## {words}\n"
            yield from _help(command)
            yield f"Options of `{words}` stand before the command's name: `{words} {_example(command)} …`.\n"
            yield from _arguments(command)


def _exit_codes() -> Iterator[str]:
    yield "## Exit codes\n"
    yield "| code | |"
    yield "|---|---|"
    for code, meaning in MEANINGS.items():
        yield f"| {code:d} | {_cell(meaning)} |"
    yield ""
    yield "## All commands\n"


def _contents() -> Iterator[str]:
    yield "| command | |"
    yield "|---|---|"
    for words, command in commands():
        if not hasattr(command, "commands"):
            anchor = words.replace(" ", "-")
            yield f"| [`{words}`](#{anchor}) | {_first_sentence(command)} |"
    yield ""


def _first_sentence(command: Any) -> str:
    paragraph = _text(command).partition("\n\n")[0]
    return _cell(re.split(r"(?<=[.!?]) (?=[A-Z])", " ".join(paragraph.split()))[0])


def _text(command: Any) -> str:
    return inspect.cleandoc((command.help or "").replace("\f", ""))


def _help(command: Any) -> Iterator[str]:
    """Paragraphs as they are; lines that are commands as code."""
    for paragraph in _text(command).split("\n\n"):
        lines = [line.strip() for line in paragraph.splitlines()]
        if EXAMPLE.match(lines[0]):
            yield "```sh"
            yield from lines
            yield "```\n"
        else:
            yield "\n".join(lines) + "\n"


def _usage(words: str, command: Any) -> Iterator[str]:
    arguments = [_name(each) for each in command.params if each.param_type_name == "argument"]
    options = ["[OPTIONS]"] if _options(command) else []
    yield f"`{' '.join([words, *options, *arguments])}`\n"


def _example(command: Any) -> str:
    return str(next(iter(command.commands)))


def _options(command: Any) -> list[Any]:
    return [each for each in command.params if each.param_type_name == "option" and each.name not in GENERAL]


def _arguments(command: Any) -> Iterator[str]:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = _options(command)
    if not arguments and not options:
        return
    yield "| | default | |"
    yield "|---|---|---|"
    for each in (*arguments, *options):
        if each.hidden:
            continue
        name = _name(each) if each in arguments else _flags(each)
        variable = f" Variable: `{each.envvar}`." if isinstance(each.envvar, str) else ""
        yield f"| `{_cell(name)}` | {_default(each)} | {_cell(each.help or '')}{_choices(each)}{variable} |"
    yield ""


def _name(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return str(name) if argument.required or name.startswith("[") else f"[{name}]"


def _flags(option: Any) -> str:
    names = ", ".join([*reversed(option.opts), *option.secondary_opts])
    if option.is_flag:
        return names
    return f"{names} {option.metavar or _kind(option)}"


def _kind(option: Any) -> str:
    if isinstance(option.default, StrEnum):
        return "CHOICE"
    is_number = isinstance(option.default, int | float) or option.min is not None or option.max is not None
    return "N" if is_number else "TEXT"


def _choices(option: Any) -> str:
    if not isinstance(option.default, StrEnum):
        return ""
    return f" One of {', '.join(f'`{each.value}`' for each in type(option.default))}."


def _default(option: Any) -> str:
    if isinstance(option.show_default, str):
        return _cell(option.show_default)
    value = option.default
    if option.required:
        return "required"
    if value is None or value is False or value == () or callable(value):
        return "–"
    if value is True:
        return "yes"
    return f"`{getattr(value, 'value', value)}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
