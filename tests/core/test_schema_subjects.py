"""Subjects, modes, policies, and what is decided about a batch: values in, values out."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pydanube.core.schemas.enforcing import Reason, TopicSchema, doubts, sentence_of
from pydanube.core.schemas.kinds import (
    Compatibility,
    CompatibilityMode,
    Direction,
    SchemaPolicy,
    SchemaType,
    compatibility,
    policy,
    schema_type,
    subject_name,
)
from pydanube.core.schemas.plain import misfit
from pydanube.core.schemas.refusals import SchemaUnknown
from pydanube.core.schemas.subjects import (
    VERSIONS_MAX,
    SchemaVersion,
    SubjectRecord,
    VersionMark,
    deleted,
    registered,
    with_compatibility,
)
from pydanube.errors import ConfigError, InvalidName, LimitReached, Refused

AVRO = SchemaType.AVRO


def test_words_are_read_in_any_case_and_every_other_is_refused_with_those_that_may_be() -> None:
    assert [schema_type(word) for word in ("JSON", "proto", "int", "Avro")] == [
        SchemaType.JSON_SCHEMA, SchemaType.PROTOBUF, SchemaType.NUMBER, SchemaType.AVRO,
    ]  # fmt: skip
    assert compatibility(" Backward:strict ") == Compatibility(CompatibilityMode.BACKWARD, True)
    assert policy("WARN") is SchemaPolicy.WARN
    for read in (schema_type, compatibility, policy):
        with pytest.raises(ConfigError, match="one of"):
            read("sideways")


def test_each_mode_says_who_reads_whom() -> None:
    back, forth = Direction.BACKWARD, Direction.FORWARD
    found = {mode.value: (mode.directions, mode.is_transitive) for mode in CompatibilityMode}
    assert found == {
        "none": ((), False), "backward": ((back,), False), "forward": ((forth,), False),
        "full": ((back, forth), False), "backward_transitive": ((back,), True),
        "forward_transitive": ((forth,), True), "full_transitive": ((back, forth), True),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["", "_index", "a/b", "a b", "ü", "a" * 201, ".", "..", "a\n"])
def test_a_subject_that_could_be_no_key_is_refused(name: str) -> None:
    with pytest.raises(InvalidName):
        subject_name(name)


OPERATIONS = st.lists(st.tuples(st.sampled_from(("register", "delete")), st.integers(0, 6)), max_size=40)


@settings(max_examples=100)
@given(OPERATIONS)
def test_a_number_means_one_text_for_ever_and_one_version_is_always_in_use(operations: list[tuple[str, int]]) -> None:
    record: SubjectRecord | None = None
    texts: dict[int, str] = {}
    for what, number in operations:
        if what == "register":
            done = registered(record, "s", AVRO, f"print{number}", schema_id=4)
            record = done.record
            assert done.is_new == (done.number not in texts)
            assert texts.setdefault(done.number, f"print{number}") == f"print{number}"
        elif record is not None:
            with contextlib.suppress(SchemaUnknown, Refused):
                record = deleted(record, number)
        if record is not None:
            assert record.active() and record.latest in texts and record.schema_id == 4
            assert [each.number for each in record.versions] == list(range(1, len(texts) + 1))
            assert SubjectRecord.from_bytes(record.to_bytes()) == record


def test_a_subject_has_a_bound() -> None:
    full = SubjectRecord(1, "s", AVRO, versions=tuple(VersionMark(n, f"p{n}") for n in range(1, VERSIONS_MAX + 1)))
    assert len(full.to_bytes()) < 600_000
    with pytest.raises(LimitReached, match="5000"):
        registered(full, "s", AVRO, "new", schema_id=1)


def test_which_versions_a_new_one_is_compared_with() -> None:
    record = SubjectRecord(
        1, "s", AVRO, versions=(VersionMark(1, "a"), VersionMark(2, "b", "deleted"), VersionMark(3, "c"))
    )
    assert record.compared(Compatibility(CompatibilityMode.BACKWARD)) == [3]
    assert record.compared(Compatibility(CompatibilityMode.BACKWARD_TRANSITIVE)) == [3, 1]
    assert record.compared(Compatibility(CompatibilityMode.NONE)) == []
    assert with_compatibility(record, record.compatibility) is record


def test_a_producer_writes_the_latest_version_or_the_one_that_it_names() -> None:
    record = SubjectRecord(
        1, "s", AVRO, versions=(VersionMark(1, "a"), VersionMark(2, "b", "deleted"), VersionMark(3, "c"))
    )
    assert (record.chosen(), record.chosen(1), record.chosen(at_least=3)) == (3, 1, 3)
    for wanted in ((2, 0), (4, 0), (0, 4)):
        with pytest.raises(SchemaUnknown):
            record.chosen(*wanted)


def test_a_version_is_stored_and_read_again() -> None:
    version = SchemaVersion(2, AVRO, "{ü}".encode(), "sha256:x", "d", ("message:a.B",), 5, "me")
    assert SchemaVersion.from_bytes(2, version.to_bytes()) == version
    assert version.message == "a.B"


# --- messages that are published --------------------------------------------------------------------

KNOWN = SubjectRecord(7, "s", AVRO, versions=(VersionMark(1, "a", "deleted"), VersionMark(2, "b")))


@pytest.mark.parametrize(
    ("pair", "reason"),
    [
        ((7, 2), None),
        ((7, 1), Reason.UNKNOWN),
        ((7, 3), Reason.UNKNOWN),
        ((8, 2), Reason.SUBJECT),
        ((None, None), Reason.MISSING),
        ((7, None), Reason.MISSING),
        ((0, 0), Reason.MISSING),
    ],
)
def test_what_speaks_against_a_batch(pair: tuple[int | None, int | None], reason: Reason | None) -> None:
    fresh = doubts([pair], KNOWN, is_fresh=True)
    assert [each.reason for each in fresh] == ([reason] if reason else [])
    guessed = [each.reason for each in doubts([pair], KNOWN, is_fresh=False)]
    assert guessed == ([] if reason is None else [reason if reason is Reason.MISSING else None]), "it may be younger"
    for each in fresh:
        assert "s" in sentence_of(each, "s", KNOWN.latest)


def test_what_a_topic_asks_is_stored_and_a_label_of_earlier_versions_is_read_as_a_warning() -> None:
    config = TopicSchema("s", SchemaPolicy.ENFORCE, True)
    assert TopicSchema.from_bytes(config.to_bytes()) == config
    assert TopicSchema.from_bytes(None, b'"s"') == TopicSchema("s", SchemaPolicy.WARN)
    assert TopicSchema.from_bytes(None).is_open and TopicSchema("s", SchemaPolicy.NONE).is_open
    with pytest.raises(ValueError):
        TopicSchema.from_bytes(b'{"validation_policy": "maybe"}')


def test_payloads_of_plain_types() -> None:
    assert misfit(SchemaType.NUMBER, [bytes(4), bytes(8), b"x"]) == (2, "", "a number has 4 or 8 bytes, and this has 1")
    assert misfit(SchemaType.STRING, [b"a", b"a\xff"]) == (1, "", "not UTF-8 at byte 1")
    assert misfit(SchemaType.BYTES, [b"\xff"]) is None
