"""The example runs, and says what is true."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "orders_pipeline.py"


def test_the_orders_example_finds_every_order(spark: SparkSession, capsys: pytest.CaptureFixture[str]) -> None:
    assert runpy.run_path(str(EXAMPLE))["run"](spark) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "2001 messages, 2000 orders, 1 in quarantine",
        "AT    482 orders    24602.56 EUR",
        "DE    485 orders    24069.54 EUR",
        "HU    511 orders    25527.26 EUR",
        "RO    522 orders    27220.40 EUR",
    ]
