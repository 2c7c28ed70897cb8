"""What the process has read from which tests fork brokers (processes.py). Imported there and nowhere else.

Like a broker itself, it does without pandas, which pyarrow would load.
"""

from __future__ import annotations

import gc
import sys

from pydanube.cli.broker import _WithoutPandas

sys.meta_path.insert(0, _WithoutPandas())

import uvloop  # noqa: E402, F401

import pydanube.api.process  # noqa: E402
import pydanube.cli.log  # noqa: E402, F401

gc.freeze()  # pages that no collection writes to stay shared
