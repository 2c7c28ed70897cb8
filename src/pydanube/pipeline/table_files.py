"""The files of a Parquet table, on whatever its URL says.

| URL                                  | bookkeeping and listing       | rows are written and read by          |
|--------------------------------------|-------------------------------|---------------------------------------|
| a path, `file:/path`, `file:///path` | this machine's file system    | Spark                                 |
| `s3://`, `gs://`, `az://`            | our object stores             | tasks, with Arrow (`task_files.py`)   |
| any other (`s3a://`, `hdfs://`, …)   | Hadoop's FileSystem, in Spark | Spark                                 |

A URL that nothing here can serve is refused with a sentence, before a query starts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from secrets import token_hex
from typing import Any, Final, Protocol

from pyarrow.parquet import read_metadata
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StructField, StructType

from pydanube.errors import ConfigError
from pydanube.pipeline.partitions import BY_DATE, DIRECTORY, TableLayout, with_directory, with_divisions
from pydanube.pipeline.settings import local_path, scheme_of
from pydanube.pipeline.task_files import ObjectAccess, OpenObjects, WrittenFile, read_by_tasks, write_by_tasks
from pydanube.stores.objects.settings import StoreSettings, parse_url

OBJECTS: Final = ("s3", "gs", "az")
PLACES_MAX: Final = 256  # directories that are listed one by one; for more the whole table is
_BATCH: Final = re.compile(r"batch=(\d+)")


class TableFiles(Protocol):
    """What a Parquet table needs of the place where it is."""

    url: str

    def text(self, name: str) -> str | None:
        """A small file's content; None if there is none."""
        ...

    def keep(self, name: str, text: str) -> None:
        """Replaces a small file: who reads it finds all of the old text or all of the new."""
        ...

    def batches(self) -> list[int]: ...

    def replace(self, batch: int, rows: DataFrame, rows_per_file: int, layout: TableLayout = BY_DATE) -> int:
        """Makes the rows the batch's only ones, in files by date or as the layout says; returns how many they have."""
        ...

    def read(self, schema: StructType, batch: int) -> DataFrame:
        """The rows of a batch that is there."""
        ...

    def read_before(self, schema: StructType, batch: int | None = None, since: date | None = None) -> DataFrame:
        """The rows of the batches below `batch`, or of all, with the column `batch`.

        `since` leaves out what is of an earlier date.
        """
        ...

    def read_among(self, schema: StructType, batches: list[int]) -> DataFrame:
        """The rows of these batches, which are there, with the column `batch`."""
        ...


def table_files(
    spark: SparkSession, url: str, options: Mapping[str, object] | None = None, *, key: str = "target"
) -> TableFiles:
    """Raises ConfigError. `options` are those of an object store; `key` is what errors call the setting."""
    scheme = scheme_of(url)
    if scheme in OBJECTS:
        return ObjectFiles(spark, ObjectAccess(url.rstrip("/"), options or {}, key))
    if scheme in ("", "file"):
        return LocalFiles(spark, local_path(key, url))
    return HadoopFiles(spark, url, key=key)


def check_objects(key: str, url: str, options: Mapping[str, object]) -> None:
    """Raises ConfigError, for a URL or options that no object store has. Makes no request."""
    StoreSettings(parse_url(key, url), options, os.environ)


def batch_directory(batch: int) -> str:
    return f"batch={batch:012}"


class _SparkFiles:
    """Files that Spark writes and reads by itself."""

    def __init__(self, spark: SparkSession, url: str) -> None:
        self.url = url.rstrip("/")
        self._spark = spark

    def batches(self) -> list[int]:
        raise NotImplementedError

    def _rows(self, directory: str) -> int:
        raise NotImplementedError

    def replace(self, batch: int, rows: DataFrame, rows_per_file: int, layout: TableLayout = BY_DATE) -> int:
        directory = f"{self.url}/{batch_directory(batch)}"
        rows, names = with_divisions(rows, layout, rows.schema, "")
        writer = rows.write.mode("overwrite").option("maxRecordsPerFile", rows_per_file)
        writer.partitionBy(*names).parquet(directory)
        return self._rows(directory)

    def read(self, schema: StructType, batch: int) -> DataFrame:
        found = self._spark.read.schema(schema).parquet(f"{self.url}/{batch_directory(batch)}")
        return found.select(*schema.names)  # without what divides the files

    def read_before(self, schema: StructType, batch: int | None = None, since: date | None = None) -> DataFrame:
        wanted = _with_batch(schema)
        if not self.batches():  # Spark refuses a directory without files
            return self._spark.createDataFrame([], wanted)
        found = self._spark.read.schema(wanted).parquet(self.url).select(*wanted.names)
        # Both are directories: Spark opens no file of others.
        if batch is not None:
            found = found.where(F.col("batch") < batch)
        return found if since is None else found.where(F.col("date") >= F.lit(since))

    def read_among(self, schema: StructType, batches: list[int]) -> DataFrame:
        if not batches:
            return self._spark.createDataFrame([], _with_batch(schema))
        if len(batches) > PLACES_MAX:
            return self.read_before(schema).where(F.col("batch").isin(batches))
        places = [f"{self.url}/{batch_directory(batch)}" for batch in batches]
        wanted = _with_batch(schema)
        return self._spark.read.option("basePath", self.url).schema(wanted).parquet(*places).select(*wanted.names)


class LocalFiles(_SparkFiles):
    """A directory that this machine and all executors have."""

    def text(self, name: str) -> str | None:
        file = Path(self.url) / name
        return file.read_text() if file.is_file() else None

    def keep(self, name: str, text: str) -> None:
        file = Path(self.url) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        made = file.with_name(f"{name}.new")
        made.write_text(text)
        made.replace(file)

    def batches(self) -> list[int]:
        return _numbers(path.name for path in Path(self.url).glob("batch=*"))

    def _rows(self, directory: str) -> int:
        return sum(file.rows for file in files_in(directory))


def files_in(directory: str) -> list[WrittenFile]:
    """The Parquet files below a directory of this machine, and how many rows they say they have."""
    found = sorted(str(path) for path in Path(directory).rglob("*.parquet"))
    return [WrittenFile(path, read_metadata(path).num_rows) for path in found]


class HadoopFiles(_SparkFiles):
    """A file system of Spark's own, by the gateway to its JVM."""

    def __init__(self, spark: SparkSession, url: str, *, key: str) -> None:
        super().__init__(spark, url)
        self._hadoop = hadoop_of(spark, url, key=key)

    def text(self, name: str) -> str | None:
        # `keep` may have ended between its last two steps; the new text is whole then.
        for each in (name, f"{name}.new"):
            path = self._hadoop.path(f"{self.url}/{each}")
            if self._hadoop.system.exists(path):
                stream = self._hadoop.system.open(path)
                try:
                    return str(self._hadoop.jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
                finally:
                    stream.close()
        return None

    def keep(self, name: str, text: str) -> None:
        made, path = (self._hadoop.path(f"{self.url}/{each}") for each in (f"{name}.new", name))
        stream = self._hadoop.system.create(made, True)
        try:
            stream.write(bytearray(text.encode()))
        finally:
            stream.close()
        self._hadoop.system.delete(path, False)
        if not self._hadoop.system.rename(made, path):
            raise OSError(f"{self.url}/{name}.new cannot be renamed to {name}")

    def batches(self) -> list[int]:
        found = self._hadoop.system.globStatus(self._hadoop.path(f"{self.url}/batch=*"))
        return _numbers(each.getPath().getName() for each in found or ())

    def _rows(self, directory: str) -> int:
        parquet = self._hadoop.jvm.org.apache.parquet.hadoop
        listing = self._hadoop.system.listFiles(self._hadoop.path(directory), True)
        rows = 0
        while listing.hasNext():
            path = listing.next().getPath()
            if path.getName().endswith(".parquet"):
                file = parquet.util.HadoopInputFile.fromPath(path, self._hadoop.conf)
                reader = parquet.ParquetFileReader.open(file)
                try:
                    rows += reader.getRecordCount()
                finally:
                    reader.close()
        return rows


class Hadoop:
    """A file system of Spark's JVM."""

    def __init__(self, jvm: Any, conf: Any, url: str) -> None:
        self.jvm = jvm
        self.conf = conf
        self.system = self.path(url).getFileSystem(conf)

    def path(self, url: str) -> Any:
        return self.jvm.org.apache.hadoop.fs.Path(url)


def hadoop_of(spark: SparkSession, url: str, *, key: str) -> Hadoop:
    """Raises ConfigError if Spark has no file system for the URL, or this session cannot ask it."""
    session: Any = spark
    jvm = getattr(session, "_jvm", None)
    if jvm is None:
        what = "a path, or s3://, gs:// or az://: other file systems are Spark's, and need a session without Connect"
        raise ConfigError(key, url, what)
    try:
        return Hadoop(jvm, session._jsparkSession.sessionState().newHadoopConf(), url)
    except Exception as error:  # py4j's own class is not for us to import, and any failure means no
        java = getattr(error, "java_exception", None)
        why = " ".join(str(java.toString() if java is not None else error).split())
        hint = ", or s3:// which needs no jar" if key == "target" and scheme_of(url).startswith("s3") else ""
        what = f"a place for which this Spark has a file system{hint}; it says: {why}"
        raise ConfigError(key, url, what) from error


class ObjectFiles:
    """A prefix of an object store. Tasks stage files, and the driver copies those that count to where readers look.

    So a task that Spark gave up, and that still writes, writes to files that no reader names.
    """

    def __init__(self, spark: SparkSession, access: ObjectAccess) -> None:
        self.url = access.url
        self._spark = spark
        self._access = access

    @contextmanager
    def _open(self) -> Iterator[OpenObjects]:
        with self._access.open() as files:
            yield files

    def text(self, name: str) -> str | None:
        with self._open() as files:
            try:
                return str(files.get(name).to_pybytes(), "utf-8")
            except FileNotFoundError:
                return None

    def keep(self, name: str, text: str) -> None:
        with self._open() as files:
            files.call(files.store.put(name, [text.encode()]))

    def batches(self) -> list[int]:
        with self._open() as files:
            return _numbers(files.keys("batch="))

    def replace(self, batch: int, rows: DataFrame, rows_per_file: int, layout: TableLayout = BY_DATE) -> int:
        by = "date"
        if layout != BY_DATE:
            rows, by = with_directory(rows, layout, rows.schema), DIRECTORY
        directory, staged = batch_directory(batch), f"_staged/{batch_directory(batch)}-{token_hex(8)}"
        found = write_by_tasks(rows, self._access, staged, rows_per_file=rows_per_file, date_inside=False, by=by)
        with self._open() as files:
            for old in files.keys(f"{directory}/"):
                files.call(files.store.delete(old))
            for file in found:
                files.call(files.store.copy(file.path, file.path.replace(staged, directory, 1)))
            # With what earlier attempts left: this driver is the only one of its query.
            for left in files.keys("_staged/"):
                files.call(files.store.delete(left))
            stored = set(files.keys(f"{directory}/"))
        return sum(file.rows for file in found if file.path.replace(staged, directory, 1) in stored)

    def read(self, schema: StructType, batch: int) -> DataFrame:
        with self._open() as files:
            return self._frame(schema, files.keys(f"{batch_directory(batch)}/"))

    def read_before(self, schema: StructType, batch: int | None = None, since: date | None = None) -> DataFrame:
        with self._open() as files:
            keys = files.keys("batch=")
        if batch is not None:
            keys = [key for key in keys if _numbers([key])[0] < batch]
        if since is not None:
            # Files that are divided otherwise stay.
            date_keys = (key.partition("/")[2] for key in keys)
            wanted = [not each.startswith("date=") or each >= f"date={since.isoformat()}/" for each in date_keys]
            keys = [key for key, is_wanted in zip(keys, wanted, strict=True) if is_wanted]
        return self._frame(_with_batch(schema), keys)

    def read_among(self, schema: StructType, batches: list[int]) -> DataFrame:
        with self._open() as files:
            if len(batches) > PLACES_MAX:
                wanted = set(batches)
                keys = [key for key in files.keys("batch=") if wanted.issuperset(_numbers([key]))]
            else:
                keys = [key for batch in batches for key in files.keys(f"{batch_directory(batch)}/")]
        return self._frame(_with_batch(schema), keys)

    def _frame(self, schema: StructType, keys: list[str]) -> DataFrame:
        return read_by_tasks(self._spark, self._access, [key for key in keys if key.endswith(".parquet")], schema)


def _with_batch(schema: StructType) -> StructType:
    return StructType([*schema.fields, StructField("batch", LongType())])


def _numbers(names: Iterable[str]) -> list[int]:
    """The batches that directories, or files in them, are named after."""
    return sorted({int(found[1]) for found in map(_BATCH.match, names) if found})
