"""`danube admin schemas`: subjects, their versions, what may follow, and what a topic asks.

danube admin schemas register orders --schema-type avro --file order.avsc
danube admin schemas check orders --schema-type avro --file next.avsc       exit code 0 compatible, 1 not
danube admin schemas set-compatibility orders --mode full_transitive
danube admin schemas configure-topic /default/orders --subject orders --policy enforce
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from pydanube.admin import schema_calls as calls
from pydanube.cli.admin import TopicArgument, ask
from pydanube.cli.exits import Exit
from pydanube.cli.output import Output, OutputOption, print_done, print_fields, print_rows
from pydanube.core.schemas.kinds import CompatibilityMode, SchemaPolicy
from pydanube.errors import ConfigError

HELP: Final = "Schemas: register, look at, check, delete; what a topic asks of its messages."

app = typer.Typer(no_args_is_help=True, help=HELP)

TAGS_HELP: Final = "Kept with the version; message:NAME says which message of a Protobuf file payloads are."

SubjectArgument = Annotated[str, typer.Argument(metavar="SUBJECT", help="The name that versions of a schema share.")]
TypeOption = Annotated[str, typer.Option(help="json_schema, avro, protobuf, string, number or bytes.")]
FileOption = Annotated[Path | None, typer.Option(help="The definition.")]
TextOption = Annotated[str | None, typer.Option(help="The definition itself, instead of --file.")]
VersionOption = Annotated[int | None, typer.Option(min=1, help="Without it the latest.")]


def _definition(kind: str, file: Path | None, schema: str | None) -> bytes:
    if file is not None and schema is not None:
        raise ConfigError("--schema", schema[:40], "nothing beside --file")
    if file is not None:
        try:
            return file.read_bytes()
        except OSError as error:
            raise ConfigError("--file", str(file), f"a file that can be read ({error.strerror})") from error
    if schema is None and kind.lower() in ("json", "json_schema", "avro", "proto", "protobuf"):
        raise ConfigError("--file", None, "the definition, or --schema with its text")
    return (schema or "").encode()


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


@app.command("register")
def register(
    subject: SubjectArgument,
    schema_type: TypeOption,
    file: FileOption = None,
    schema: TextOption = None,
    description: Annotated[str, typer.Option(help="Kept with the version.")] = "",
    tags: Annotated[
        list[str] | None, typer.Option(help="Kept with the version; message:NAME of a Protobuf file.")
    ] = None,
    output: OutputOption = Output.table,
) -> None:
    """Register a version. The same text again is the version that it was."""
    text = _definition(schema_type, file, schema)
    done = ask(calls.register(subject, schema_type, text, description=description, tags=tags or []))
    fields = {"schema_id": done.schema_id, "version": done.version, "is_new_version": done.is_new_version}
    what = "registered" if done.is_new_version else "known already"
    sentence = f"Schema {what}: {subject}, version {done.version}, ID {done.schema_id}"
    print_done(sentence, output, subject=subject, fingerprint=done.fingerprint, **fields)


@app.command("get")
def get(
    subject: Annotated[str | None, typer.Argument(metavar="[SUBJECT]", help="Or --id.")] = None,
    schema_id: Annotated[int | None, typer.Option("--id", min=1, help="As messages carry it.")] = None,
    version: VersionOption = None,
    output: OutputOption = Output.table,
) -> None:
    """Show a version with its text; a deleted one too, by its number."""
    if (subject is None) == (schema_id is None):
        raise ConfigError("SUBJECT", subject, "a subject or --id, and not both")
    if schema_id is None:
        assert subject is not None
        latest = ask(calls.latest(subject))
        found = latest if version is None else ask(calls.get(latest.schema_id, version))
    else:
        found = ask(calls.get(schema_id, version))
    fields: dict[str, Any] = {
        "subject": found.subject,
        "schema_id": found.schema_id,
        "version": found.version,
        "schema_type": found.schema_type,
        "compatibility_mode": found.compatibility_mode,
        "fingerprint": found.fingerprint,
        "description": found.description,
        "tags": list(found.tags),
        "created_at": _time(found.created_at),
        "created_by": found.created_by,
        "definition": found.schema_definition.decode("utf-8", "replace"),
    }
    print_fields(fields, output)


@app.command("versions")
def versions(subject: SubjectArgument, output: OutputOption = Output.table) -> None:
    """The versions in use."""
    columns = ("version", "created_at", "created_by", "description", "fingerprint")
    rows = [
        {**{name: getattr(each, name) for name in columns}, "created_at": _time(each.created_at)}
        for each in ask(calls.versions(subject)).versions
    ]
    print_rows(rows, columns, output)


@app.command("list-subjects")
def list_subjects(output: OutputOption = Output.table) -> None:
    """All subjects."""
    columns = ("subject", "schema_type", "latest_version", "compatibility_mode", "schema_id", "tags")
    found = ask(calls.subjects()).subjects
    rows = [{**{name: getattr(each, name) for name in columns}, "tags": list(each.tags)} for each in found]
    print_rows(rows, columns, output)


@app.command("check")
def check(
    subject: SubjectArgument,
    schema_type: TypeOption,
    file: FileOption = None,
    schema: TextOption = None,
    mode: Annotated[str | None, typer.Option(help="Instead of the subject's.")] = None,
    output: OutputOption = Output.table,
) -> None:
    """Say whether a text may be registered now. Changes nothing; exit code 1 if it may not."""
    answer = ask(calls.check(subject, schema_type, _definition(schema_type, file, schema), mode))
    if output is Output.json:
        print_fields({"is_compatible": answer.is_compatible, "errors": list(answer.errors)}, output)
    else:
        print("Compatible: true" if answer.is_compatible else "\n".join(["Compatible: false", *answer.errors]))
    if not answer.is_compatible:
        raise typer.Exit(Exit.NOT_GOOD)


@app.command("get-compatibility")
def get_compatibility(subject: SubjectArgument, output: OutputOption = Output.table) -> None:
    """Which mode a subject has."""
    found = ask(calls.latest(subject))
    print_fields({"subject": subject, "compatibility_mode": found.compatibility_mode}, output)


@app.command("set-compatibility")
def set_compatibility(
    subject: SubjectArgument,
    mode: Annotated[str, typer.Option(help=f"{', '.join(CompatibilityMode)}; :strict behind it for JSON Schema.")],
    output: OutputOption = Output.table,
) -> None:
    """Set what new versions must satisfy. Versions that are there stay."""
    ask(calls.set_compatibility(subject, mode))
    print_done(f"Compatibility mode set: {mode}", output, subject=subject, compatibility_mode=mode)


@app.command("delete")
def delete(
    subject: SubjectArgument,
    version: Annotated[int, typer.Option(min=1, help="The number of the version.")],
    confirm: Annotated[bool, typer.Option("--confirm", help="Without it nothing is done.")] = False,
    output: OutputOption = Output.table,
) -> None:
    """Take a version out of use. Messages that refer to it can be read as before."""
    if not confirm:
        raise ConfigError("--confirm", False, f"given, to take version {version} of {subject} out of use")
    ask(calls.delete_version(subject, version))
    print_done(f"Schema version deleted: {subject}, version {version}", output, subject=subject, version=version)


@app.command("configure-topic")
def configure_topic(
    topic: TopicArgument,
    subject: Annotated[str | None, typer.Option(help="Without it the one that the topic has.")] = None,
    policy: Annotated[
        SchemaPolicy, typer.Option(help="What becomes of a message that does not fit.")
    ] = SchemaPolicy.WARN,
    payloads: Annotated[bool, typer.Option("--payloads", help="Check payloads, too.")] = False,
    output: OutputOption = Output.table,
) -> None:
    """Set what a topic asks of its messages, those of producers that are open too."""
    if subject is None:
        ask(calls.update_policy(topic, policy.value, payloads=payloads))
    else:
        ask(calls.configure_topic(topic, subject, policy.value, payloads=payloads))
    print_done(f"Topic schema set: {topic}, policy {policy.value}", output, topic=topic, policy=policy.value)


@app.command("topic")
def topic_schema(topic: TopicArgument, output: OutputOption = Output.table) -> None:
    """Show what a topic asks of its messages."""
    found = ask(calls.topic_config(topic))
    fields = {
        "topic": topic,
        "schema_subject": found.schema_subject or None,
        "validation_policy": found.validation_policy,
        "payloads_are_checked": found.enable_payload_validation,
        "schema_id": found.schema_id or None,
    }
    print_fields(fields, output)
