"""`danube pipeline`: jobs over topics, on Spark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pydanube.cli.exits import Exit
from pydanube.cli.output import Output, OutputOption, print_json

HELP = "Jobs over topics, on Spark: make tables of them, prove them, replay them, count them."

app = typer.Typer(no_args_is_help=True)

RUN = """Run a job: lake, compact, audit, replay, erase, maintain or stats.

    danube pipeline run audit --set service.url=danube://127.0.0.1:6651 --set topic=/default/orders

Settings come from a YAML or JSON file (--conf) and from --set, which wins. Spark runs in this process, on all cores, \
unless --master or --remote names a cluster. Exit code 0: done, and nothing is wrong; 1: something is, and is said.
"""


@app.command("run", help=RUN)
def run(
    job: Annotated[str, typer.Argument(help="lake, compact, audit, replay, erase, maintain or stats.")],
    conf: Annotated[Path | None, typer.Option(help="The job's settings, YAML or JSON.")] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="One setting.")] = None,
    keys: Annotated[
        list[str] | None, typer.Option("--key", metavar="KEY", help="erase: a routing key; may be given again.")
    ] = None,
    master: Annotated[
        str | None,
        typer.Option(
            help="Spark's master: spark://host:7077, yarn, k8s://…; by default as spark-submit says, else local[*]."
        ),
    ] = None,
    remote: Annotated[str | None, typer.Option(help="A Spark Connect server, sc://host:15002, instead.")] = None,
    output: OutputOption = Output.table,
) -> None:
    from pydanube.pipeline.run import run_job

    is_json = output is Output.json
    given = tuple(changes or ())
    if keys:
        given = (*given, f"key={json.dumps(keys, ensure_ascii=False)}")
    report = run_job(job, conf=conf, changes=given, master=master, remote=remote, as_json=is_json)
    if is_json:
        print_json(report.to_json())
    else:
        for line in report.lines():
            typer.echo(line)
    if not report.is_good:
        raise typer.Exit(Exit.NOT_GOOD)


@app.command("jobs")
def jobs(output: OutputOption = Output.table) -> None:
    """List the jobs."""
    from pydanube.pipeline.run import JOBS

    if output is Output.json:
        print_json(dict(JOBS))
        return
    for name, what in JOBS.items():
        typer.echo(f"{name:<8} {what}")
