"""YAML that people write, and refusals that say where it is wrong and never what stands there.

PyYAML quotes the line, the alias or the tag that it stumbles over, and any of them may be a password whose quotation
mark was forgotten.
"""

from __future__ import annotations

import re
from typing import Final

from pydanube.config.checks import HIDDEN
from pydanube.errors import ConfigError

# Names of tokens and signs are YAML's own words. Everything else in quotes is the file's.
_OF_YAML: Final = re.compile(r"<[a-z ]+>|[^\w\s]|\\[nrt]")
_QUOTED: Final = re.compile(r"'(\\.|[^'])*'|\"(\\.|[^\"])*\"")


def parse_yaml(text: str, key: str, source: str, allowed: str = "YAML") -> object:
    """What the text says; `source` is where it is from. Raises ConfigError."""
    import yaml  # here: commands that have no file need not wait for it

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        why = _problem(error)
    except ValueError:  # of a day that no calendar has, or a number without digits
        why = "a date or a number in it does not exist; put it in quotes if it is a text"
    except RecursionError:
        why = "it is nested too deeply"
    raise ConfigError(key, source, f"{allowed} ({why})") from None


def _problem(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "it cannot be read"
    shown = _QUOTED.sub(lambda found: found[0] if _OF_YAML.fullmatch(found[0][1:-1]) else HIDDEN, str(problem))
    return f"{shown}; line {mark.line + 1}, column {mark.column + 1}" if mark is not None else shown
