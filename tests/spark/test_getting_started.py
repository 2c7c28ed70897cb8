"""Part 5 of docs/getting-started.md: the program for Spark prints what the page says."""

from __future__ import annotations

import contextlib
import io

import pytest
from pyspark.sql import SparkSession

import pydanube
from tests.pages import DOCS, blocks, missing
from tests.spark.places import Place

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_the_moved_topic_is_a_table(spark: SparkSession, place: Place) -> None:
    part = [block for block in blocks((DOCS / "getting-started.md").read_text()) if block.heading.startswith("5.")]
    program, command, said = part
    assert command.text == f".venv/bin/python {program.name}\n"
    with pydanube.blocking.connect(place.url) as client, client.producer("/default/moving") as producer:
        for number in range(500):
            producer.send_nowait(b"%d" % number)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(program.text.replace("danube://127.0.0.1:6651", place.url), {})  # in the session that is there
    assert missing(said.text, output.getvalue()) is None, output.getvalue()
