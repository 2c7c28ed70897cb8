"""A few thousand damaged streams of frames in every test run, and proof that the fuzzer would notice."""

from random import Random

import pytest

from pydanube.errors import ProtocolViolation
from pydanube.ports import Buffer
from pydanube.wire import frames as wire
from pydanube.wire._pb.pydanube import stream_pb2 as pb
from pydanube.wire.frames import Frame, FrameDecoder
from tests.fuzz import frames as fuzz


def test_a_damaged_stream_gives_the_same_frames_and_the_same_violation_however_it_is_cut() -> None:
    result = fuzz.FUZZER.run(seed=1, first=0, count=5_000, jobs=2)
    assert result.failures == []
    assert result.tried == 5_000
    # Damage must get past the lengths, or the fuzzer tests two comparisons and nothing else.
    assert result.outcomes["frames"] > 1_000
    assert sum(n for kind, n in result.outcomes.items() if "no protobuf message" in kind) > 500
    assert sum(n for kind, n in result.outcomes.items() if "may not have one" in kind) > 10


def test_every_kind_of_command_is_a_seedling_and_valid() -> None:
    kinds = set()
    for seedling in fuzz.seedlings():
        [frame] = FrameDecoder(fuzz.FRAME_SIZE_MAX).feed(seedling.data)
        kinds.add(frame.kind)
        fuzz.look_at(frame)
    assert kinds == {field.name for field in pb.Command.DESCRIPTOR.oneofs_by_name["kind"].fields}


def test_an_input_is_the_same_whenever_it_is_made() -> None:
    inputs = [fuzz.generate(7, index) for index in range(200)]
    assert [fuzz.generate(7, index) for index in reversed(range(200))] == inputs[::-1]
    assert [fuzz.generate(8, index) for index in range(200)] != inputs


def test_every_kind_of_damage_changes_something_and_never_fails() -> None:
    random = Random(5)
    for damage in set(fuzz.DAMAGES):
        changed = 0
        for seedling in fuzz.seedlings():
            data = bytearray(seedling.data)
            damage(random, data)
            changed += data != seedling.data
        assert changed > 5, damage.__name__


def noticed(decoder: type[FrameDecoder]) -> str:
    """What the fuzzer says of a decoder with a flaw."""
    for index in range(500):
        try:
            fuzz.attempt(1, index, lambda: decoder(fuzz.FRAME_SIZE_MAX))
        except fuzz.Wrong as wrong:
            return str(wrong)
    return "nothing"


class Forgetful(FrameDecoder):
    """Loses what stood in front of a violation in the same read."""

    def feed(self, data: Buffer) -> list[Frame]:
        frames = super().feed(data)
        if self.violation is not None:
            raise self.violation
        return frames


class Lenient(FrameDecoder):
    """Takes a frame that is one byte too long."""

    def __init__(self, frame_size_max: int) -> None:
        super().__init__(frame_size_max + 1)


class Careless(FrameDecoder):
    """Hands out memory that the next read writes over."""

    def feed(self, data: Buffer) -> list[Frame]:
        return [frame._replace(body=memoryview(bytearray(frame.body))) for frame in super().feed(data)]


class Shifted(FrameDecoder):
    """Cuts bodies out of the read where they stand."""

    def feed(self, data: Buffer) -> list[Frame]:
        found = super().feed(data)
        return [frame._replace(body=memoryview(b"." + bytes(frame.body))[1:]) for frame in found]


class Greedy(FrameDecoder):
    @property
    def buffered_bytes(self) -> int:
        return super().buffered_bytes and fuzz.FRAME_SIZE_MAX * 2


@pytest.mark.parametrize(
    ("decoder", "sentence"),
    [
        (Forgetful, "frames and broken=True expected"),
        (Lenient, "frames and broken=True expected"),
        (Careless, "can be written to"),
        (Shifted, "not aligned"),
        (Greedy, "it keeps 4000 bytes"),
        (FrameDecoder, "nothing"),
    ],
)
def test_a_flaw_in_the_decoder_is_noticed(decoder: type[FrameDecoder], sentence: str) -> None:
    assert sentence in noticed(decoder)


def test_an_error_that_is_no_violation_counts_as_a_failure() -> None:
    class Broken(FrameDecoder):
        def feed(self, data: Buffer) -> list[Frame]:
            raise IndexError("memoryview")

    with pytest.raises(IndexError):
        fuzz.attempt(1, 0, lambda: Broken(fuzz.FRAME_SIZE_MAX))


def test_what_looks_into_a_command_may_only_raise_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    command = pb.Command(ack=pb.Ack(consumer=1, ranges=[5, 3]))
    frame = Frame("ack", command, memoryview(b""))
    fuzz.look_at(frame)  # a violation is fine

    def silent(numbers: object) -> None:
        raise ProtocolViolation("")

    monkeypatch.setattr(wire, "ranges_of", silent)
    with pytest.raises(fuzz.Wrong, match="says nothing"):
        fuzz.look_at(frame)
