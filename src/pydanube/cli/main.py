"""The entry point of the `danube` command: finds the subcommands, and answers for their errors.

A user never sees a traceback. What we know is wrong is one line on stderr and an exit code for its kind
(`exits.py`), also a mistake on the command line; a reader that leaves early (`danube log dump | head`) is no mistake
(`streams.py`). An error that is none of ours is one line too, exit code 70, and `python -X dev -m pydanube …` shows
where it came from.
"""

import pydanube.cli.hangups  # noqa: F401  first of all: from here on a SIGHUP does not end a broker

# isort: split
import contextlib
import os
import sys
from functools import cache
from importlib.util import find_spec
from typing import Annotated

import typer

from pydanube import __version__
from pydanube.cli.contexts import CHOSEN, Chosen
from pydanube.cli.exits import Exit, code_of
from pydanube.cli.streams import ReaderLeft, guarded
from pydanube.cli.words import Words

# The root of what typer raises for a mistake on the command line; it has no public name of its own.
CommandLineError: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError")


def broker() -> None:
    """`danube-broker …` is `danube broker …`."""
    sys.argv.insert(1, "broker")
    main()


def admin() -> None:
    """`danube-admin …` is `danube admin …`."""
    sys.argv.insert(1, "admin")
    main()


def main() -> None:
    """Runs the command in `sys.argv` and exits; the console scripts and `python -m pydanube`."""
    with guarded():
        code = _run()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(ReaderLeft):
                stream.flush()
    sys.exit(code)


def _run() -> str | int | None:
    """The exit code."""
    try:
        code: object = build_app()(prog_name="danube", standalone_mode=False)
    except SystemExit as leaving:
        return leaving.code
    except (KeyboardInterrupt, typer.Abort):
        return Exit.INTERRUPTED
    except ReaderLeft:
        return Exit.DONE
    except CommandLineError as error:
        return _report_usage(error)
    except Exception as error:
        return _report(error)
    return code if isinstance(code, int) else Exit.DONE


def build_app(*, whole: bool = False) -> typer.Typer:
    """Returns the command with its subcommands: with all, if `whole`, else with those that the words may mean."""
    app = typer.Typer(
        name="danube",
        help="PyDanube, a reliable pub/sub and streaming platform.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,  # errors are main()'s to report
        cls=Words,
    )
    app.callback()(_options)
    from pydanube.cli import broker, context, data, pipeline, top

    app.command("broker", help=broker.HELP, no_args_is_help=True)(broker.broker)
    app.command("produce")(data.produce)
    app.command("consume", no_args_is_help=True)(data.consume)
    app.command("top")(top.top)
    app.add_typer(_admin_app(), name="admin")
    app.add_typer(context.app, name="context", help=context.HELP)
    import pydanube.cli.pipelines  # noqa: F401  (adds itself to it)

    app.add_typer(pipeline.app, name="pipeline", help=pipeline.HELP)
    # The log commands read data directories offline and bring Arrow along: a client installed without them still has
    # a working `danube`, and the other commands do not wait for them.
    if (whole or _first_word() in ("", "log")) and find_spec("pydanube.cli.log") is not None:
        from pydanube.cli import log

        app.add_typer(log.app, name="log", help="Look at a data directory: verify, dump, demo.")
    return app


@cache
def _admin_app() -> typer.Typer:
    """`danube admin`. Its parts are added once, also if a process runs several commands."""
    import pydanube.cli.limits
    import pydanube.cli.maintenance
    import pydanube.cli.redrive
    import pydanube.cli.serve
    from pydanube.cli import admin, cluster, moves, schemas, storage, subscriptions

    admin.app.add_typer(subscriptions.app, name="subscriptions", help=subscriptions.HELP)
    admin.app.add_typer(storage.app, name="storage", help=storage.HELP)
    admin.app.add_typer(cluster.app, name="cluster", help=cluster.HELP)
    admin.app.add_typer(schemas.app, name="schemas", help=schemas.HELP)
    admin.topics.add_typer(moves.orphans, name="orphan", help=moves.HELP)
    import pydanube.cli.status  # noqa: F401  (adds itself to several of them)

    return admin.app


def _first_word() -> str:
    """The command that was typed; while the shell completes a line, the one that is in it."""
    typed = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or ""
    words = typed.split()[1:] if "_DANUBE_COMPLETE" in os.environ else sys.argv[1:]
    return next((word for word in words if not word.startswith("-")), "")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"danube {__version__}")
        raise typer.Exit()


def _options(
    ctx: typer.Context,
    context: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            envvar="DANUBE_CONTEXT",
            help="The cluster to talk to: `danube context list` shows them.",
            show_default="the one in use",
        ),
    ] = None,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """Options of `danube` itself, before any subcommand."""
    source = ctx.get_parameter_source("context")
    CHOSEN.set(Chosen(context or None, is_typed=source is not None and source.name == "COMMANDLINE"))


def _report_usage(error: Exception) -> int:
    """Typer's sentence, and where to read on. For a command without its words typer has printed the help already."""
    said = " ".join(error.format_message().split())  # type: ignore[attr-defined]
    if type(error).__name__ != "NoArgsIsHelpError":
        ctx = getattr(error, "ctx", None)
        where = f"`{ctx.command_path} --help` shows what there is" if ctx is not None else ""
        said = said.rstrip(".")
        print(f"danube: {said[:1].lower()}{said[1:]}{' ' if said.endswith('?') else '; '}{where}", file=sys.stderr)
    return Exit.USAGE


def _report(error: Exception) -> int:
    """Says in one line what went wrong. Returns the exit code."""
    from pydanube.errors import DanubeError

    if sys.flags.dev_mode:
        raise error
    if isinstance(error, DanubeError):
        message = str(error)
    elif isinstance(error, OSError):
        message = _describe(error)
    else:
        message = f"internal error: {type(error).__name__}: {error} (python -X dev -m pydanube shows where)"
    print(f"danube: {' '.join(message.split())}", file=sys.stderr)
    return code_of(error)


def _describe(error: OSError) -> str:
    """The operating system's reason and the file it is about, without the number."""
    reason = (error.strerror or str(error)).lower()
    return f"{error.filename}: {reason}" if error.filename is not None else reason


if __name__ == "__main__":
    main()
