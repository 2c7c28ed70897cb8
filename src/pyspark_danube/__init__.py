"""Lets Spark find `format("danube")` by itself: it looks for `DefaultSource` in every top-level package `pyspark_*`."""

from pydanube.spark.source import DanubeSource


class DefaultSource(DanubeSource):
    """Reads and writes PyDanube's topics. See `pydanube.spark`."""
