"""What the installed PySpark offers to Python sources. The rest of this package asks here, and imports nothing newer.

    4.0    batch and stream readers, batch writers in Arrow; no filters, no limits of a trigger
    4.1    filters of batch reads, stream writers in Arrow
    4.2    limits of a trigger, Trigger.AvailableNow in several batches, the latest offset in the progress

Spark 3.5 has no Python data sources. Names that are missing get a stand-in that Spark never makes an instance of.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pyspark.sql import datasource

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceStreamArrowWriter,
        EqualNullSafe,
        EqualTo,
        Filter,
        GreaterThan,
        GreaterThanOrEqual,
        In,
        LessThan,
        LessThanOrEqual,
    )
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
else:
    try:
        _limits: Any = import_module("pyspark.sql.streaming.datasource")
    except ImportError:
        _limits = None

    def _offered(module: Any, name: str, *bases: type) -> Any:
        return getattr(module, name, None) or type(name, bases, {})

    # The worker of 4.0 gives Arrow batches to every writer that is a DataSourceArrowWriter, streaming or not.
    DataSourceStreamArrowWriter = _offered(
        datasource, "DataSourceStreamArrowWriter", datasource.DataSourceStreamWriter, datasource.DataSourceArrowWriter
    )
    Filter = _offered(datasource, "Filter")
    EqualNullSafe, EqualTo = _offered(datasource, "EqualNullSafe"), _offered(datasource, "EqualTo")
    GreaterThan, GreaterThanOrEqual = _offered(datasource, "GreaterThan"), _offered(datasource, "GreaterThanOrEqual")
    LessThan, LessThanOrEqual = _offered(datasource, "LessThan"), _offered(datasource, "LessThanOrEqual")
    In = _offered(datasource, "In")
    ReadLimit, ReadMaxRows = _offered(_limits, "ReadLimit"), _offered(_limits, "ReadMaxRows")
    ReadAllAvailable = _offered(_limits, "ReadAllAvailable")
    SupportsTriggerAvailableNow = _offered(_limits, "SupportsTriggerAvailableNow")

__all__ = [
    "DataSourceStreamArrowWriter",
    "EqualNullSafe",
    "EqualTo",
    "Filter",
    "GreaterThan",
    "GreaterThanOrEqual",
    "In",
    "LessThan",
    "LessThanOrEqual",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxRows",
    "SupportsTriggerAvailableNow",
]
