"""Job *maintain*: small files of Iceberg tables become large ones, old snapshots go, and files that nothing names.

    plan ─► rewrite a group of files ─► compare all rows ─► commit ─► … ─► expire ─► sweep
            (until the budget is used up)

No row that a reader sees is changed, beside writers and readers. docs/adr/0014-maintaining-tables.md has the reasons,
and what happens when something fails. Spark is not needed.
"""

from __future__ import annotations

import logging
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from time import monotonic
from typing import Any, Final, NamedTuple

from pydanube.core.units import MIB
from pydanube.errors import ConfigError, InvalidObject, Unreachable
from pydanube.pipeline.report import JobReport, QueryWatch
from pydanube.pipeline.settings import JobSettings, local_path, scheme_of
from pydanube.pipeline.table_sweep import SharedPlace, expired, newest_place, sweep

log = logging.getLogger(__name__)

NEEDS_SPARK: Final = False
KNOWN: Final = (
    "target", "name", "format", "catalog", "tables", "target_file_mb", "small_mb", "files_min", "orphan_hours",
    "budget_seconds", "budget_mb",
)  # fmt: skip
KINDS: Final = ("raw", "typed", "quarantine")
COMMITS_MAX: Final = 8  # one group against writers that are always faster
COMPARED_ROWS: Final = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenancePlan:
    """The job's settings, checked."""

    target: str
    catalog: Mapping[str, Any] = field(repr=False)  # secrets
    tables: Sequence[str]
    are_named: bool  # by the user, one by one
    target_bytes: int
    small_bytes: int
    files_min: int
    orphan_seconds: float
    budget_seconds: float
    budget_bytes: float

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> MaintenancePlan:
        settings = JobSettings(values, KNOWN, "maintain")
        form = settings.one_of("format", "iceberg", ("iceberg", "parquet"))
        if form == "parquet":
            what = (
                "iceberg: a directory has no commit, so that readers would see rows twice or not at all while files "
                "are replaced; larger batches (batch_rows, follow_seconds) make larger files"
            )
            raise ConfigError("format", form, what)
        target, catalog = (settings.place("target") or "").rstrip("/"), settings.mapping("catalog")
        if not catalog and (not target or scheme_of(target) not in ("", "file")):
            raise ConfigError("catalog", None, "PyIceberg's settings, as for lake; or target: a directory of lake")
        tables, name = settings.texts("tables"), settings.text("name")
        if not tables and not name:
            raise ConfigError("name", None, "the name that lake had, or tables: identifiers in the catalog")
        target_mb = settings.number("target_file_mb", 256) or 256
        small_mb = settings.number("small_mb", max(1, target_mb * 3 // 4)) or 1
        if small_mb > target_mb:
            raise ConfigError("small_mb", small_mb, f"at most target_file_mb ({target_mb})")
        seconds, megabytes = settings.number("budget_seconds"), settings.number("budget_mb")
        return cls(
            target=target,
            catalog=catalog,
            tables=tables or [f"danube.{name}_{kind}".replace("-", "_") for kind in KINDS],
            are_named=bool(tables),
            target_bytes=target_mb * MIB,
            small_bytes=small_mb * MIB,
            files_min=settings.number("files_min", 5, least=2) or 5,
            orphan_seconds=(settings.number("orphan_hours", 24) or 24) * 3600.0,
            budget_seconds=float("inf") if seconds is None else seconds,
            budget_bytes=float("inf") if megabytes is None else megabytes * MIB,
        )


def check(values: dict[str, Any]) -> MaintenancePlan:
    """The settings, checked without a catalog. Raises ConfigError."""
    return MaintenancePlan.parse(values)


def run(spark: object, values: dict[str, Any], watch: QueryWatch) -> JobReport:
    """`spark` is not used. Raises ConfigError, Unreachable."""
    plan = check(values)
    report = JobReport("maintain", {"tables": {}})
    budget = MaintenanceBudget(plan)
    for name, table in _tables(plan).items():
        watch.says(f"maintaining {name}")
        report.values["tables"][name] = TableJob(plan, name, table, budget, report.problems, watch).run()
    report.values["budget_used_up"] = budget.is_over
    return report


class MaintenanceBudget:
    """Of all tables together; it is looked at between two groups."""

    def __init__(self, plan: MaintenancePlan) -> None:
        self._plan = plan
        self._began = monotonic()
        self._bytes = 0
        self.is_over = False

    def allows(self, size: int) -> bool:
        plan = self._plan
        if monotonic() - self._began >= plan.budget_seconds or self._bytes + size > plan.budget_bytes:
            self.is_over = True
        else:
            self._bytes += size
        return not self.is_over


def _tables(plan: MaintenancePlan) -> dict[str, Any]:
    from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

    from pydanube.pipeline.iceberg import QUERY

    try:
        catalog = _catalog(plan)
        found: dict[str, Any] = {}
        for name in plan.tables:
            try:
                found[name] = catalog.load_table(name)
            except (NoSuchTableError, NoSuchNamespaceError):
                if plan.are_named:
                    raise ConfigError("tables", name, "a table of the catalog: it has none of this name") from None
    except ConfigError:
        raise
    except Exception as error:  # of whatever library the catalog is reached by: any of them means the same
        why = str(error).partition("\n")[0] or type(error).__name__
        raise Unreachable("the Iceberg catalog", why) from error
    if not found:
        raise ConfigError(
            "name", plan.tables[0], f"a name that lake had: the catalog has none of {', '.join(plan.tables)}"
        )
    for name, table in found.items():
        if not plan.are_named and QUERY not in table.properties:
            raise ConfigError("name", name, "a table that lake wrote: list it in tables to maintain it all the same")
    return found


def _catalog(plan: MaintenancePlan) -> Any:
    """As `lake` chooses it. Makes nothing: neither a catalog nor a directory."""
    from pyiceberg.catalog import load_catalog

    if plan.catalog:
        chosen = {name: str(value) for name, value in plan.catalog.items()}
    else:
        target = local_path("target", plan.target)
        if not os.path.isfile(f"{target}/catalog.sqlite"):
            raise ConfigError("target", plan.target, "a directory of lake: it has no catalog.sqlite")
        chosen = {"type": "sql", "uri": f"sqlite:///{target}/catalog.sqlite", "warehouse": f"file://{target}"}
    if chosen.get("type") == "sql":
        uri = chosen.get("uri", "")
        if uri.startswith("sqlite:////") and not Path(uri.removeprefix("sqlite:///")).is_file():
            raise ConfigError("catalog.uri", uri, "a catalog that is there: this file is not")
        chosen.setdefault("init_catalog_tables", "false")
    return load_catalog("danube", **chosen)


class Group(NamedTuple):
    """Files of one partition that are to become one."""

    files: Sequence[Any]  # pyiceberg's DataFile

    @property
    def size(self) -> int:
        return sum(each.file_size_in_bytes for each in self.files)

    @property
    def rows(self) -> int:
        return sum(each.record_count for each in self.files)


class TableJob:
    """The job on one table."""

    def __init__(
        self,
        plan: MaintenancePlan,
        name: str,
        table: Any,
        budget: MaintenanceBudget,
        problems: list[str],
        watch: QueryWatch,
    ) -> None:
        self._plan = plan
        self._name = name
        self._table = table
        self._budget = budget
        self._problems = problems
        self._watch = watch

    def run(self) -> dict[str, Any]:
        files, sizes, rows = self._state()
        values: dict[str, Any] = {"files_before": files, "bytes_before": sizes, "rows_before": rows}
        done: Counter[str] = Counter()
        groups = list(self._groups())
        for number, group in enumerate(groups):
            if not self._budget.allows(group.size):
                done["groups_left"] = len(groups) - number
                break
            self._watch.says(f"rewriting {self._name}", number, len(groups))
            done[self._rewrite(group)] += 1
        snapshots = len(self._table.refresh().metadata.snapshots)
        done["snapshots_expired"] = self._expire()
        swept = self._sweep()
        files, sizes, rows = self._state()
        return {
            **values,
            "files_after": files,
            "bytes_after": sizes,
            "rows_after": rows,
            "groups_rewritten": done["rewritten"],
            "groups_given_up": done["given up"],
            "groups_left": done["groups_left"],
            "snapshots_before": snapshots,
            "snapshots_expired": done["snapshots_expired"],
            "orphans_removed": swept[0],
            "orphan_bytes_removed": swept[1],
        }

    def _state(self) -> tuple[int, int, int]:
        """Files, bytes and rows of the current snapshot, as its files say; deleted rows of delete files still count."""
        files = [each.file for each in self._table.refresh().scan().plan_files()]
        return len(files), Group(files).size, Group(files).rows

    # --- plan -----------------------------------------------------------------------------------------

    def _groups(self) -> Iterator[Group]:
        """Of each partition, small files in their order, so many that they make a large one or are worth it."""
        newest = newest_place(self._table)
        spec = self._table.spec().spec_id
        by_partition: dict[Any, list[Any]] = defaultdict(list)
        for task in self._table.scan().plan_files():
            file = task.file
            is_ours = newest is not None and file.file_path.startswith(newest)
            is_small = file.file_size_in_bytes < self._plan.small_bytes
            if is_small and not is_ours and not task.delete_files and file.spec_id == spec:
                by_partition[_partition(file)].append(file)
        for files in by_partition.values():
            waiting: list[Any] = []
            size = 0
            for file in sorted(files, key=lambda each: str(each.file_path)):
                if waiting and size + file.file_size_in_bytes > self._plan.target_bytes:
                    yield from self._worth(waiting, is_full=True)
                    waiting, size = [], 0
                waiting.append(file)
                size += file.file_size_in_bytes
            yield from self._worth(waiting, is_full=False)

    def _worth(self, files: Sequence[Any], *, is_full: bool) -> Iterator[Group]:
        if len(files) >= (2 if is_full else self._plan.files_min):
            yield Group(files)

    # --- rewrite --------------------------------------------------------------------------------------

    def _rewrite(self, group: Group) -> str:
        """What became of it: `rewritten` or `given up`."""
        path = self._table.location_provider().new_data_location(f"maintain-{token_hex(16)}.parquet")
        try:
            made = self._written(group, path)
        except Exception as error:  # of Arrow, or of the store's library: the old files are as they were
            why = " ".join(str(error).split()) or type(error).__name__
            where = next((each.file_path for each in group.files if Path(each.file_path).name in why), None)
            which = f" ({where})" if where else f" ({len(group.files)} files from {group.files[0].file_path} on)"
            self._problems.append(f"{self._name}: a group of files was left as it is{which}: {why}")
            self._remove(path)
            return "given up"
        return self._commit(group, made, path)

    def _written(self, group: Group, path: str) -> Any:
        """The new file, in the store and compared with the old ones. Raises InvalidObject if they differ."""
        import pyarrow as pa
        import pyarrow.parquet as pq
        from pyiceberg.io.pyarrow import schema_to_pyarrow

        io = self._table.io
        # With the numbers of the columns: not every table says which names they have had.
        schema = schema_to_pyarrow(self._table.schema(), include_field_ids=True)
        with io.new_output(path).create() as stream, pq.ParquetWriter(stream, schema, compression="zstd") as writer:
            for batch in self._old(group):
                writer.write_table(pa.Table.from_batches([batch]).cast(schema))
        with io.new_input(path).open() as stream:
            _check_equal(self._old(group), pq.ParquetFile(stream).iter_batches(COMPARED_ROWS), path)
        made = self._described(group, path)
        if made.record_count != group.rows:
            raise InvalidObject(path, f"it has {made.record_count} rows, the files that it replaces say {group.rows}")
        return made

    def _described(self, group: Group, path: str) -> Any:
        """What the table is told of the new file; its partition is that of the old ones, however that is made."""
        import pyarrow.parquet as pq
        from pyiceberg.io.pyarrow import (
            compute_statistics_plan,
            data_file_statistics_from_parquet_metadata,
            parquet_path_to_id_mapping,
        )
        from pyiceberg.manifest import DataFile, DataFileContent, FileFormat

        metadata, file = self._table.metadata, self._table.io.new_input(path)
        schema = metadata.schema()
        with file.open() as stream:
            footer = pq.read_metadata(stream)
        plan, ids = compute_statistics_plan(schema, metadata.properties), parquet_path_to_id_mapping(schema)
        return DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=path,
            file_format=FileFormat.PARQUET,
            partition=group.files[0].partition,
            file_size_in_bytes=len(file),
            sort_order_id=None,  # the files are put behind each other
            spec_id=group.files[0].spec_id,
            equality_ids=None,
            key_metadata=None,
            **data_file_statistics_from_parquet_metadata(footer, plan, ids).to_serialized_dict(),
        )

    def _old(self, group: Group) -> Iterator[Any]:
        """Rows of the old files, in the table's columns of now; one file in memory."""
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.io.pyarrow import ArrowScan
        from pyiceberg.table import FileScanTask

        metadata = self._table.metadata
        for file in group.files:
            scan = ArrowScan(metadata, self._table.io, self._table.schema(), AlwaysTrue())
            yield from scan.to_record_batches([FileScanTask(file)])

    def _commit(self, group: Group, made: Any, path: str) -> str:
        from pyiceberg.exceptions import CommitFailedException, ValidationException

        from pydanube.pipeline.iceberg import transaction

        for _ in range(COMMITS_MAX):
            if not self._is_as_planned(group):
                break
            parent = self._table.metadata.current_snapshot_id
            try:
                with transaction(self._table) as change, change.update_snapshot().overwrite() as producer:
                    for file in group.files:
                        producer.delete_data_file(file)
                    producer.append_data_file(made)
            except CommitFailedException:
                self._table.refresh()
                continue
            except ValidationException:
                break
            except Exception as error:
                # It may have been committed: the new file stays, and is swept if nothing names it.
                why = " ".join(str(error).split()) or type(error).__name__
                self._problems.append(
                    f"{self._name}: whether {path} was committed is not known ({why}); run the job again"
                )
                return "given up"
            self._check_rows(parent)
            return "rewritten"
        log.info("group given up", extra={"table": self._name, "files": len(group.files)})
        self._remove(path)
        return "given up"

    def _is_as_planned(self, group: Group) -> bool:
        """Whether the files are all still in the table, and nothing of them was deleted."""
        tasks = {task.file.file_path: task for task in self._table.scan().plan_files()}
        found = [tasks.get(each.file_path) for each in group.files]
        return all(task is not None and not task.delete_files for task in found)

    def _check_rows(self, parent_id: int) -> None:
        """The commit's snapshot has as many rows as the one before it."""
        metadata = self._table.metadata
        ours, parent = metadata.current_snapshot(), metadata.snapshot_by_id(parent_id)
        if ours is None or parent is None or ours.parent_snapshot_id != parent_id:
            return  # somebody was faster again; that commit was compared when its file was made
        counts = [
            sum(
                (each.added_rows_count or 0) + (each.existing_rows_count or 0)
                for each in snapshot.manifests(self._table.io)
            )
            for snapshot in (parent, ours)
        ]
        if counts[0] != counts[1]:
            self._problems.append(
                f"{self._name}: snapshot {ours.snapshot_id} has {counts[1]} rows, the one before it {counts[0]}: "
                f"roll back to {parent_id}"
            )

    def _remove(self, path: str) -> None:
        with suppress(OSError):
            self._table.io.delete(path)

    # --- expire and sweep -----------------------------------------------------------------------------

    def _expire(self) -> int:
        from pyiceberg.exceptions import CommitFailedException

        from pydanube.pipeline.iceberg import transaction

        for _ in range(COMMITS_MAX):
            ids = expired(self._name, self._table.refresh().metadata)
            if not ids:
                return 0
            try:
                with transaction(self._table) as change:
                    change.expire(ids)
                return len(ids)
            except CommitFailedException:
                continue
        return 0  # a busy writer; it expires them itself

    def _sweep(self) -> tuple[int, int]:
        try:
            return sweep(self._table, self._plan.orphan_seconds)
        except (SharedPlace, OSError) as error:
            self._problems.append(f"{self._name}: orphans were left: {error}")
            return 0, 0


def _partition(file: Any) -> tuple[Any, ...]:
    return tuple(file.partition[at] for at in range(len(file.partition)))


def _check_equal(old: Iterator[Any], new: Iterator[Any], path: str) -> None:
    """Raises InvalidObject unless both have the same rows in the same order."""
    import pyarrow as pa

    at = 0
    theirs: list[Any] = []
    for ours in new:
        have = sum(each.num_rows for each in theirs)
        while have < ours.num_rows and (batch := next(old, None)) is not None:
            theirs.append(batch)
            have += batch.num_rows
        if have < ours.num_rows:
            raise InvalidObject(path, f"it has more rows than the {at + have} of the files that it replaces")
        table = pa.Table.from_batches(theirs)
        if not table.slice(0, ours.num_rows).equals(pa.Table.from_batches([ours]).cast(table.schema)):
            raise InvalidObject(path, f"a row from {at} to {at + ours.num_rows - 1} differs from what it replaces")
        at += ours.num_rows
        theirs = [each for each in table.slice(ours.num_rows).to_batches() if each.num_rows]
    if theirs or next((each for each in old if each.num_rows), None) is not None:
        raise InvalidObject(path, f"it has only the first {at} rows of the files that it replaces")
