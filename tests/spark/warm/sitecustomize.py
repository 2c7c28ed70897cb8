"""Python runs this first. What a daemon of Spark has imported, the workers that are forked from it need not import."""

import sys

if "pyspark.daemon" in sys.orig_argv:
    import pydanube.spark.sink
    import pydanube.spark.source  # noqa: F401
