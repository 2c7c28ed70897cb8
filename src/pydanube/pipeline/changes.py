"""Messages that change rows, for `mode: upsert`: decoded, and the last change of each key chosen.

    payload                       with envelope: debezium              what it does
    {"id": 1, "amount": 2.5}      {"op": "c", "after": {…}}, u, r      sets the row of its key
    empty, key in routing_key     {"op": "d", "before": {…}}, empty    deletes it: a tombstone
    a column as `deletes` says    –                                    deletes it

A Debezium envelope may be wrapped, as `{"schema": …, "payload": {"op": …}}`, or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from pydanube.pipeline import steps

DELETED: Final = "__deleted"
ORDER: Final = ("_append_time", "_topic", "_offset")  # in one topic that is the order of offsets
OPERATIONS: Final = ("c", "r", "u", "d")
_KEY: Final = "__key"


def decoded(
    rows: DataFrame,
    schema: StructType,
    *,
    key: Sequence[str],
    envelope: str = "none",
    deletes: Mapping[str, str] | None = None,
    version: str | None = None,
) -> DataFrame:
    """Raw rows with the row that they set, or the key that they delete, as `__value`, and `__deleted`.

    `reason` says why it can be neither. `deletes`: columns whose values, as text, make a row a deletion.
    """
    is_empty = F.length("payload") == 0
    item = _envelope(schema) if envelope == "debezium" else schema
    named = rows.withColumn("__text", steps.text()).withColumn(_KEY, _key_of(schema, key))
    parsed = named.withColumn("__parsed", F.when(~is_empty, steps.in_a_list(F.col("__text"), item)))
    found = F.col("__parsed.list")[0]
    no_row = F.lit(None).cast(schema)
    keyed = _row(schema, {name: F.col(_KEY)[name] for name in key})
    if envelope == "debezium":
        # As it is, or wrapped.
        operation, before, after = (
            F.coalesce(found[name], found["payload"][name]) for name in ("op", "before", "after")
        )
        gone = _row(
            schema,
            {
                name: F.coalesce(before[name], F.col(_KEY)[name]) if name in key else before[name]
                for name in schema.names
            },
        )
        value = F.when(operation == "d", gone).otherwise(after)
        is_deleted = is_empty | (operation == "d")
    else:
        value = F.when(found.isNotNull(), _row(schema, {name: found[name] for name in schema.names}))
        operation = None
        is_deleted = is_empty
        if deletes:
            fits = F.lit(True)
            for name, wanted in deletes.items():
                fits = fits & found[name].cast("string").eqNullSafe(wanted)
            is_deleted = is_empty | fits
    value = F.when(is_empty, keyed).when(steps.is_whole(F.col("__parsed")), value).otherwise(no_row)
    made = parsed.withColumn("__op", F.lit(None) if operation is None else operation)
    made = made.withColumn(DELETED, F.coalesce(is_deleted, F.lit(False))).withColumn("__value", value)
    reason = F.when(is_empty & steps.is_erased(), F.lit("the message was erased"))
    reason = reason.when(F.col("__text").isNull(), F.lit("the payload is not UTF-8"))
    reason = reason.when(~is_empty & ~steps.is_whole(F.col("__parsed")), steps.why_not_whole(F.col("__text")))
    if envelope == "debezium":
        unknown = F.concat(F.lit("the operation is not one of c, r, u and d: "), F.coalesce("__op", F.lit("none")))
        reason = reason.when(~is_empty & ~F.coalesce(F.col("__op").isin(*OPERATIONS), F.lit(False)), unknown)
        reason = reason.when(~F.col(DELETED) & F.col("__value").isNull(), F.lit("after is missing"))
    reason = reason.when(~F.col(DELETED) & F.col("__value").isNull(), F.lit(steps.OTHER_TYPE))
    for name in [*key, *([version] if version else [])]:
        missing = F.when(is_empty, f"the tombstone has no {name}: it is not in the routing key")
        reason = reason.when(F.col("__value")[name].isNull(), missing.otherwise(f"{name} is missing"))
    for field in schema.fields:
        if not field.nullable and field.name not in key:
            is_missing = ~F.col(DELETED) & F.col("__value")[field.name].isNull()
            reason = reason.when(is_missing, F.lit(f"{field.name} is missing"))
    return made.withColumn("reason", reason).drop("__text", "__parsed", "__op", _KEY)


def _envelope(schema: StructType) -> StructType:
    rows = StructType([StructField(field.name, field.dataType, True) for field in schema.fields])
    inner = StructType().add("op", StringType()).add("before", rows).add("after", rows)
    return StructType([*inner.fields, StructField("payload", inner)])


def _row(schema: StructType, columns: Mapping[str, Column]) -> Column:
    nothing = F.lit(None)
    return F.struct(*(columns.get(f.name, nothing).cast(f.dataType).alias(f.name) for f in schema.fields))


def _key_of(schema: StructType, key: Sequence[str]) -> Column:
    """The key that a routing key is: an object with its columns (wrapped or not), or the value of the only one."""
    columns = [StructField(name, schema[name].dataType, True) for name in key]
    inner = StructType(columns)
    form = StructType([*columns, StructField("payload", inner)])
    found = F.from_json(F.col("routing_key"), form, {"mode": "PERMISSIVE"})
    is_object = F.col("routing_key").startswith("{")
    plain = F.col("routing_key").try_cast(columns[0].dataType) if len(key) == 1 else F.lit(None)
    return F.struct(
        *(
            F.when(is_object, F.coalesce(found[each.name], found["payload"][each.name]))
            .otherwise(plain)
            .cast(each.dataType)
            .alias(each.name)
            for each in columns
        )
    )


def changes(rows: DataFrame, schema: StructType, *, time: str | None = None) -> DataFrame:
    """The good rows of `decoded`, as `steps.typed` has them, and whether they delete."""
    return steps.typed(rows, schema, time=time, also=(DELETED,))


def last_by_key(rows: DataFrame, keys: Sequence[str], version: str | None = None) -> DataFrame:
    """One row per key: that of the greatest version, if there are versions, and of these the last that was appended."""
    order = [*([F.desc(version)] if version is not None else []), *(F.desc(name) for name in ORDER)]
    place = Window.partitionBy(*keys).orderBy(*order)
    return rows.withColumn("__place", F.row_number().over(place)).where(F.col("__place") == 1).drop("__place")
