"""Every error arrives as what it was raised as."""

import inspect
from collections.abc import Iterator

import pytest

from pydanube import errors
from pydanube.core.declared import fields_of
from pydanube.core.schemas import refusals
from pydanube.errors import DanubeError
from pydanube.wire._pb.pydanube import stream_pb2 as pb
from pydanube.wire.errors_on_wire import CODES, FIELDS, from_wire, to_wire
from pydanube.wire.frames import FrameDecoder, encode

ALL = [
    kind
    for module in (errors, refusals)
    for _, kind in inspect.getmembers(module, inspect.isclass)
    if issubclass(kind, DanubeError) and kind.__module__ == module.__name__
]
# What a client says about itself never travels, nor what a broker says of its object store or of a process of its own;
# all else needs a code.
LOCAL = {
    "BufferFull",
    "ClientClosed",
    "ConsumerStopped",
    "DeadlineExceeded",
    "NeverOpened",
    "RequestFailed",
    "ProcessEnded",
    "SchemaTooCostly",
    "StoreRefused",
}
# Nobody does anything else about these than about their family: the sentence is what matters.
AS_FAMILY = {"ResourcesShort", "TooManyConnections"}
KINDS = [kind for kind in ALL if kind.__name__ not in LOCAL | AS_FAMILY]

VALUES = {
    "str": ("/default/ü", "", "x"),
    "int": (7, 0, -1, 2**63 - 1, 2**63, 2**64 - 1),
    "int | None": (None, 0, 12),
    "object": ("text", 5, 2.5, True, False, None),
}


def examples(kind: type[DanubeError]) -> Iterator[DanubeError]:
    """Errors of this kind with all sorts of values that their fields may have."""
    if not FIELDS[kind]:
        yield kind("what happened")
        return
    declared: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        declared |= vars(base).get("__annotations__", {})
    for turn in range(6):
        chosen = [VALUES[declared[name]] for name in FIELDS[kind]]
        yield kind(*(values[turn % len(values)] for values in chosen))


def sent(error: BaseException) -> pb.Error:
    """What the other side reads."""
    [frame] = FrameDecoder().feed(b"".join(encode(pb.Command(request_id=1, error=to_wire(error)))))
    return frame.command.error


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_arrives_with_its_class_fields_and_sentence(kind: type[DanubeError]) -> None:
    for error in examples(kind):
        message = sent(error)
        arrived = from_wire(message)
        assert type(arrived) is kind
        assert arrived.args == error.args
        assert vars(arrived) == vars(error)
        assert [type(value) for value in vars(arrived).values()] == [type(value) for value in vars(error).values()]
        assert str(arrived) == str(error) == message.sentence
        assert arrived.retryable == error.retryable == message.retryable


@pytest.mark.parametrize(
    "error", [errors.ResourcesShort("a/b.wal", "Too many open files"), errors.TooManyConnections(12, 256)]
)
def test_an_error_without_a_code_arrives_as_its_family_with_its_own_sentence(error: DanubeError) -> None:
    assert type(error).__name__ in AS_FAMILY
    arrived = from_wire(sent(error))
    assert type(arrived) is errors.Unavailable and str(arrived) == str(error) and arrived.retryable


def test_every_class_has_its_own_code_and_every_code_its_class() -> None:
    assert set(CODES) == set(KINDS)
    assert sorted(CODES.values()) == sorted(set(pb.Code.values()) - {pb.CODE_UNSPECIFIED})


@pytest.mark.parametrize("kind", KINDS)
def test_the_hundred_of_a_code_is_its_family_and_its_name_the_classs(kind: type[DanubeError]) -> None:
    families = {0: DanubeError, 1: errors.Refused, 2: errors.Unavailable, 3: errors.DataDamaged}
    assert issubclass(kind, families[CODES[kind] // 100])
    name = pb.Code.Name(CODES[kind])
    assert name.replace("_", "") == ("INTERNAL" if kind is DanubeError else kind.__name__.upper())


@pytest.mark.parametrize(
    ("code", "kind"),
    [(199, errors.Refused), (299, errors.Unavailable), (399, errors.DataDamaged), (999, DanubeError), (0, DanubeError)],
)
def test_of_an_unknown_code_the_family_and_the_sentence_are_kept(code: int, kind: type[DanubeError]) -> None:
    arrived = from_wire(pb.Error(code=code, sentence="something new"))  # type: ignore[arg-type]
    assert type(arrived) is kind
    assert str(arrived) == "something new"


def test_of_fields_that_do_not_fit_the_family_and_the_sentence_are_kept() -> None:
    message = to_wire(errors.InvalidName("topic name", "x", "no"))
    message.fields["name"].integer = 5  # has no length
    assert repr(from_wire(message)) == f"Refused({message.sentence!r})"
    del message.fields["name"]
    assert type(from_wire(message)) is errors.Refused


def test_more_fields_than_we_know_do_no_harm() -> None:
    message = to_wire(errors.TopicUnknown("/default/a"))
    message.fields["hint"].text = "of a newer broker"
    assert repr(from_wire(message)) == "TopicUnknown('/default/a')"


@pytest.mark.parametrize("kind", [kind for kind in ALL if kind.__name__ in LOCAL])
def test_a_local_error_that_travels_after_all_keeps_family_and_sentence(kind: type[DanubeError]) -> None:
    count = 1 if kind is errors.ProcessEnded else len(fields_of(kind))
    error = kind(*["topic", 3, "why"][:count])
    arrived = from_wire(sent(error))
    family = next(base for base in kind.__mro__[1:] if base.__name__ not in LOCAL)
    assert type(arrived) is family
    assert str(arrived) == str(error)
    assert arrived.retryable == error.retryable


def test_a_class_without_a_code_travels_as_its_ancestor() -> None:
    class Odd(errors.TopicUnknown):
        pass

    assert repr(from_wire(to_wire(Odd("/default/a")))) == "TopicUnknown('/default/a')"


def test_a_bug_tells_the_peer_its_kind_and_nothing_of_the_inside() -> None:
    message = sent(KeyError("/secret/path"))
    assert message.code == pb.INTERNAL and not message.retryable
    assert "KeyError" in message.sentence and "secret" not in message.sentence
    assert type(from_wire(message)) is DanubeError


def test_the_longest_error_fits_into_a_command() -> None:
    long = "水" * 100_000
    message = sent(errors.LogDamaged(long, long, 2**64 - 1, 0, None, long))
    assert message.ByteSize() < 8_000
    assert message.fields["path"].text.endswith("水...")
    assert type(from_wire(message)) is errors.LogDamaged


def test_text_that_is_no_utf_8_still_travels() -> None:
    assert sent(errors.InvalidBatch("a lone surrogate: \ud800")).fields["what"].text == "a lone surrogate: ?"


def test_a_value_that_is_no_scalar_travels_as_its_looks() -> None:
    arrived = from_wire(sent(errors.ConfigError("a.b", [1, 2], "one number")))
    assert isinstance(arrived, errors.ConfigError)
    assert arrived.value == "[1, 2]"


def test_an_unasked_error_names_what_has_ended() -> None:
    error = errors.NotServed("/default/a", "moving")
    assert to_wire(error, consumer=4).consumer == 4
    assert to_wire(error, producer=5).producer == 5
    assert to_wire(RuntimeError(), producer=5).producer == 5
