"""SIGHUP before there is a broker that could read its configuration again: it is remembered, and ends nothing.

`main.py` imports this file first, before what takes time to load. Until the first line of the package runs, some
hundredths of a second after exec, the process is Python's alone and a SIGHUP ends it, as it ends every program.
"""

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Final

PROGRAMS: Final = frozenset({"danube", "danube-cli"})
BROKER_PROGRAM: Final = "danube-broker"
MODULE: Final = os.path.join("pydanube", "__main__.py")  # `python -m pydanube`
WITH_VALUE: Final = "--context"  # the option of `danube` itself whose value is a word of its own


class Hangups:
    """Those that came since the last `forget`."""

    def __init__(self) -> None:
        self.came = False

    def remember(self) -> None:
        """From now on. A handler, and not SIG_IGN, which programs that the broker starts would inherit."""
        signal.signal(signal.SIGHUP, self._on_signal)

    def forget(self) -> None:
        self.came = False

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.came = True


def starts_broker(argv: Sequence[str]) -> bool:
    """Whether this is the command line of `danube broker`. Any other command ends with its terminal."""
    program, words = argv[0] if argv else "", iter(argv[1:])
    name = os.path.basename(program)
    if name == BROKER_PROGRAM:
        return True
    if name not in PROGRAMS and not program.endswith(MODULE):
        return False  # the command was imported: its signals are not ours
    for word in words:
        if word == WITH_VALUE:
            next(words, None)
        elif not word.startswith("-"):
            return word == "broker"
    return False


HANGUPS: Final = Hangups()

if starts_broker(sys.argv):
    HANGUPS.remember()
