"""docs/protocol.md says what the code does: its bytes decode, its tables are complete, its numbers are ours."""

import re
from pathlib import Path

import pytest

from pydanube.api.native.handles import DELIVER_OVERHEAD_BYTES
from pydanube.config.settings import SETTINGS
from pydanube.config.stream import FRAME_BYTES_MAX, FRAME_BYTES_MIN, StreamLimits
from pydanube.core.dispatch.consumer_window import DispatchLimits
from pydanube.core.names import TopicName, partition_of_key, producer_id
from pydanube.formats import batch
from pydanube.formats.batch import Envelope
from pydanube.wire import frames
from pydanube.wire._pb.pydanube import stream_pb2 as pb
from pydanube.wire.errors_on_wire import CODES, FIELDS
from pydanube.wire.frames import FrameDecoder, encode
from pydanube.wire.status import SENTENCE_SIZE_MAX_BYTES

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "protocol.md").read_text()
PROTO = (REPOSITORY / "proto" / "pydanube" / "stream.proto").read_text()
TOPIC = TopicName("/default/hello")


def hex_of(name: str) -> bytes:
    """The bytes of a block; two spaces end them and begin an explanation."""
    match = re.search(rf"^```hex {name}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert match, name
    return bytes.fromhex("".join(line.partition("  ")[0] for line in match[1].splitlines()))


def rows_under(heading: str) -> list[list[str]]:
    """The cells of the tables in one section, without their heads."""
    section = PAGE.partition(f"\n## {heading}")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


# --- bytes --------------------------------------------------------------------------------------------


def test_the_hello_is_what_a_client_sends() -> None:
    hello = pb.Hello(magic=frames.MAGIC, version_min=1, version_max=1, client="doc 1.0")
    assert hex_of("hello") == b"".join(encode(pb.Command(request_id=1, hello=hello)))
    [frame] = FrameDecoder().feed(hex_of("hello"))
    assert frames.negotiate(frame.command.hello) == 1


def test_the_welcome_is_what_a_broker_answers() -> None:
    [frame] = FrameDecoder().feed(hex_of("welcome"))
    assert frame.command.request_id == 1
    welcome = frame.command.welcome
    frames.check_welcome(welcome)
    assert (welcome.version, welcome.broker_id, welcome.frame_size_max) == (1, 42, 16 << 20)
    assert (welcome.in_flight_max, welcome.keepalive_seconds) == (8, 30)


def test_the_batch_is_one_that_a_broker_stores() -> None:
    parsed = batch.parse(hex_of("batch-header") + hex_of("batch-body"))
    assert batch.messages(parsed) == [Envelope(b"hi", 1_700_000_000_000_000, "k", "doc", request_id=1)]
    header = parsed.header
    assert header.topic_hash == batch.topic_hash(TOPIC)
    assert header.producer_id == producer_id(TOPIC, "doc")
    assert (header.session, header.first_sequence) == (12884901889, 0)


def test_the_produce_frame_is_the_prefix_and_the_batch() -> None:
    stored = hex_of("batch-header") + hex_of("batch-body")
    [frame] = FrameDecoder().feed(hex_of("produce") + stored)
    assert frame.kind == "produce"
    assert (frame.command.request_id, frame.command.produce.producer) == (2, 1)
    assert frame.body == stored


def test_the_explanations_beside_the_bytes_are_their_lengths() -> None:
    body = hex_of("batch-body")
    assert len(hex_of("batch-header")) == batch.HEADER_SIZE
    metadata = int.from_bytes(body[4:8], "little")
    prose = " ".join(PAGE.split())
    assert f"length ({metadata} bytes of metadata behind the first 8)" in prose
    assert f"{len(body) - 8 - metadata} bytes of columns" in prose


# --- tables -------------------------------------------------------------------------------------------


def test_every_code_is_in_the_table_with_its_name_and_fields() -> None:
    table = {(int(code), name): fields for code, name, fields, _ in rows_under("8. Errors")[1:]}
    ours = {(int(code), pb.Code.Name(code)): ", ".join(FIELDS[kind]) for kind, code in CODES.items()}
    assert table == ours
    assert all(advice for *_, advice in rows_under("8. Errors"))


def test_the_header_table_is_the_format() -> None:
    table = rows_under("11. The batch")[1 : 1 + len(batch.Header._fields)]
    assert [int(position) for position, *_ in table] == [
        sum(int(size) for _, size, *_ in table[:row]) for row in range(len(table))
    ]
    assert int(table[-1][0]) + int(table[-1][1]) == batch.HEADER_SIZE
    shorter = {"header version": "version", "envelope version": "envelope"}
    names = [shorter.get(row[2], row[2].replace(" crc32c", "_crc")) for row in table]
    assert names == list(batch.Header._fields)


def test_the_column_table_is_the_envelope() -> None:
    table = rows_under("11. The batch")[2 + len(batch.Header._fields) :]
    assert [row[0] for row in table] == batch.ENVELOPE.names
    types = {"timestamp[us, UTC]": "timestamp[us, tz=UTC]"}
    for (_, kind, null, *_), field in zip(table, batch.ENVELOPE, strict=True):
        assert types.get(kind, kind) == str(field.type).replace(" ('attributes')", "")
        assert (null == "yes") == field.nullable


def test_the_limits_are_ours() -> None:
    limits = " ".join(value for _, value, _ in rows_under("10. Limits")[1:])
    for number in (
        frames.COMMAND_SIZE_MAX,
        frames.HANDSHAKE_SIZE_MAX,
        frames.FRAME_SIZE_LIMIT,
        frames.IN_FLIGHT_MAX,
        frames.RANGES_MAX,
        frames.PERMITS_MAX,
        batch.UNCOMPRESSED_LENGTH_MAX,
        DispatchLimits().consumer_unacked_max,
        SENTENCE_SIZE_MAX_BYTES,
    ):
        assert re.search(rf"\b{number}\b", limits), number
    assert str(frames.FRAME_SIZE_LIMIT) in PROTO


def test_every_setting_of_the_port_is_in_the_table_with_its_default() -> None:
    table = {key.strip("`"): default for key, default, _ in rows_under("13. Settings of a broker")[1:]}
    assert set(table) == {key for key in SETTINGS if key.startswith("stream.")}
    for name in StreamLimits.__slots__:
        assert table[f"stream.limits.{name}"] == str(getattr(StreamLimits(), name))
    assert (FRAME_BYTES_MIN, FRAME_BYTES_MAX) == (frames.HANDSHAKE_SIZE_MAX, frames.FRAME_SIZE_LIMIT)
    assert str(DELIVER_OVERHEAD_BYTES) in PAGE


def test_keys_are_routed_as_the_page_says() -> None:
    number = 0xCBF29CE484222325
    for byte in b"user-7":
        number = (number ^ byte) * 0x100000001B3 % 2**64
    assert partition_of_key("user-7", 5) == number % 5


@pytest.mark.parametrize("kind", [field.name for field in pb.Command.DESCRIPTOR.oneofs_by_name["kind"].fields])
def test_the_proto_file_says_who_sends_a_command(kind: str) -> None:
    [line] = re.findall(rf"^    \w+ {kind} = \d+;  // (.*)$", PROTO, re.MULTILINE)
    assert line.startswith(("client", "broker", "both"))
    assert ("body:" in line) == (kind in frames.WITH_BODY)
