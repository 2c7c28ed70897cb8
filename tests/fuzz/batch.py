"""A byte-level fuzzer for `batch.parse`.

    python -m tests.fuzz.batch --count 200000 --seed 7
    python -m tests.fuzz.batch --seed 7 --first 1234 --count 1     repeats one input

Goal: whatever bytes come in, `parse` either returns a batch that every later reader can look at in full, or raises
InvalidBatch. It never raises anything else, crashes, hangs, or allocates by a length that it has not checked.

Method: take a valid batch and damage it: flip bits, edit numbers, splice, truncate, insert, repeat. In half of the
inputs lengths and checksums are then made right again, so that the damage reaches the Arrow layer; and where `parse`
answers that the header says something else about the rows than the body (rows, logical checksum, latest publish
time), the header is changed to what it wants and the input is tried again.

Inputs run in child processes, a chunk at a time. A child notes the number of each input before it tries it; so the
parent knows which one a child died of or hangs on, and goes on behind it. Input i of a seed is always the same.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import mmap
import os
import re
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

import pyarrow as pa
from crc32c import crc32c

from pydanube.errors import InvalidBatch
from pydanube.log import batch
from pydanube.log.batch import Envelope, Header

HEADER: Final = struct.Struct("<4sBBBBQIIIQQQQQqqIII")
CODEC_NAMES: Final = {1: "lz4_raw", 2: "zstd"}
CHUNK: Final = 5_000
HANG_SECONDS: Final = 20.0
FAILURES_MAX: Final = 20
# Twice the largest body, and what decoding one needs beside it.
ALLOCATED_BYTES_MAX: Final = 4 * batch.UNCOMPRESSED_LENGTH_MAX

Parse = Callable[[bytes], batch.Batch]


# --- valid batches ----------------------------------------------------------------------------------


def sealed(header: Header, plain: bytes, *, stored: bytes | None = None) -> bytes:
    """A batch with `plain` as its body, compressed as the header says, with right lengths and checksums.

    `stored` takes the place of the compressed body.
    """
    if stored is None:
        stored = plain
        if header.codec in CODEC_NAMES:
            stored = pa.Codec(CODEC_NAMES[header.codec]).compress(plain, asbytes=True)
    header = header._replace(
        body_length=len(stored), uncompressed_length=len(plain), body_crc=crc32c(stored), header_crc=0
    )
    return with_header_crc(HEADER.pack(*header) + stored)


def with_header_crc(data: bytes) -> bytes:
    if len(data) < HEADER.size:
        return data
    return data[: HEADER.size - 4] + struct.pack("<I", crc32c(data[: HEADER.size - 4])) + data[HEADER.size :]


class Seedling(NamedTuple):
    """A valid batch to damage: its header, its body before compression, and all of it."""

    header: Header
    plain: bytes
    data: bytes


@cache
def seedlings() -> tuple[Seedling, ...]:
    """Small batches of every shape: few rows and many, all columns and only the needed ones, every codec."""
    plenty = Envelope(b"payload", 1_700_000_000_000_000, "key", "producer", {"a": "b", "c": "ü"}, 7, 2, request_id=9)
    shapes: list[list[Envelope]] = [
        [Envelope(b"")],
        [Envelope(b"x" * 33, 5)],
        [plenty],
        [plenty, Envelope(b""), Envelope(bytes(range(200)), -1, "", "", {"": ""}, -1, -1, -1)],
        [Envelope(b"%d" % i, i, f"k{i}" if i % 3 else None, attributes={"n": "1"} if i % 2 else {}) for i in range(20)],
        [Envelope(bytes([i]) * 300, i, "é" * 9) for i in range(16)],
    ]
    made = []
    for shape in shapes:
        rows = batch.rows_of(shape)
        plain = rows.serialize().to_pybytes()
        header = batch.encode(rows, topic="fuzz", producer_id=3, session=1, first_sequence=40).header
        for codec in (0, 1, 2):
            sown = header._replace(codec=codec)
            made.append(Seedling(sown, plain, sealed(sown, plain)))
    return tuple(made)


# --- damage -----------------------------------------------------------------------------------------

# Values to fear in a length, a count or an offset.
NUMBERS: Final = (
    0, 1, -1, 2, 7, 8, 64, 127, 128, 255, 256, 2**15, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40,
    2**62, 2**63 - 1, -(2**31), -(2**63), batch.UNCOMPRESSED_LENGTH_MAX, batch.UNCOMPRESSED_LENGTH_MAX + 1,
)  # fmt: skip


def flip_bits(random: Random, data: bytearray) -> None:
    for _ in range(random.choice((1, 1, 1, 2, 8))):
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def set_byte(random: Random, data: bytearray) -> None:
    data[random.randrange(len(data))] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))


def edit_number(random: Random, data: bytearray) -> None:
    """Another number, or a little more or less than it was, where one may stand."""
    size = random.choice((2, 4, 4, 8, 8))
    if len(data) < size:
        return
    place = random.randrange(len(data) - size + 1)
    if random.random() < 0.9:
        place -= place % min(size, 4)
    number = int.from_bytes(data[place : place + size], "little")
    number = random.choice((random.choice(NUMBERS), number + random.choice((-8, -4, -1, 1, 4, 8))))
    data[place : place + size] = (number % 256**size).to_bytes(size, "little")


def truncate(random: Random, data: bytearray) -> None:
    if random.random() < 0.5:
        del data[random.randrange(len(data)) :]
    else:
        del data[-random.randrange(1, 17) :]


def insert(random: Random, data: bytearray) -> None:
    place = random.randrange(len(data) + 1)
    data[place:place] = random.choice((bytes(8), random.randbytes(random.randrange(1, 20)), b"\xff" * 4))


def remove(random: Random, data: bytearray) -> None:
    place = random.randrange(len(data))
    del data[place : place + random.choice((1, 4, 8, 16))]


def repeat(random: Random, data: bytearray) -> None:
    first = random.randrange(len(data))
    piece = data[first : first + random.randrange(1, 65)]
    place = random.randrange(len(data) + 1)
    data[place : place + random.choice((0, len(piece)))] = piece


def splice(random: Random, data: bytearray) -> None:
    """Goes on like another batch from some place, often the same place, on."""
    other = random.choice(seedlings())
    donor = random.choice((other.data, other.plain))
    place = random.randrange(len(data))
    data[place:] = donor[random.choice((place, random.randrange(len(donor)))) :]


DAMAGES: Final = (
    flip_bits, flip_bits, set_byte, edit_number, edit_number, edit_number, truncate, insert, remove, repeat, splice,
)  # fmt: skip


def damage(random: Random, data: bytearray) -> None:
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        if data:
            random.choice(DAMAGES)(random, data)


def generate(seed: int, index: int) -> bytes:
    """Input `index` of `seed`. Odd ones have right checksums."""
    random = Random(f"batch {seed} {index}")
    seedling = random.choice(seedlings())
    if index % 2 == 0:
        data = bytearray(seedling.data)
        damage(random, data)
        return bytes(data)
    kind = random.random()
    if kind < 0.15:  # the header
        head = bytearray(seedling.data[: HEADER.size])
        damage(random, head)
        return with_header_crc(bytes(head) + seedling.data[HEADER.size :])
    if kind < 0.25:  # the body as stored: of a compressed one, what the codec sees
        stored = bytearray(seedling.data[HEADER.size :])
        damage(random, stored)
        claimed = bytes(random.choice((len(seedling.plain), len(seedling.plain) + random.randrange(-64, 65))))
        return sealed(seedling.header, claimed, stored=bytes(stored))
    plain = bytearray(seedling.plain)
    if kind < 0.65:  # the flatbuffer that describes the columns
        metadata_end = 8 + struct.unpack_from("<i", plain, 4)[0]
        metadata = plain[:metadata_end]
        damage(random, metadata)
        if len(metadata) == metadata_end or random.random() < 0.5:
            plain[:metadata_end] = metadata
    else:
        damage(random, plain)
    return sealed(seedling.header, bytes(plain))


# --- judgement --------------------------------------------------------------------------------------

CLAIMS: Final = (
    (re.compile(r"it says \d+ rows and has (\d+)$"), "rows"),
    (re.compile(r"logical checksum is (0x[0-9a-f]+), "), "logical_crc"),
    (re.compile(r"latest publish time is (-?\d+), "), "max_publish_time"),
)


class Wrong(Exception):
    """`parse` did what it must not do."""


def judge(data: bytes, parse: Parse = batch.parse) -> str:
    """Tries one input. Returns "batch" or the sentence of the refusal; raises whatever is neither."""
    try:
        found = parse(data)
    except InvalidBatch as refusal:
        if not refusal.what or "malloc" in refusal.what or "realloc" in refusal.what:
            raise Wrong(f"it tried to allocate by a length it had not checked: {refusal.what}") from refusal
        sentence = refusal.what
    else:
        look_at(found)
        sentence = "batch"
    allocated = pa.default_memory_pool().max_memory()
    if allocated > ALLOCATED_BYTES_MAX:
        raise Wrong(f"{allocated} bytes were allocated at once")
    return sentence


def look_at(found: batch.Batch) -> None:
    """Does what later readers do with a batch."""
    rows = batch.decode(found)
    rows.validate(full=True)
    if rows.num_rows != found.header.rows or len(rows.to_pylist()) != found.header.rows:
        raise Wrong(f"the header says {found.header.rows} rows, the body has {rows.num_rows}")
    again = batch.load(found.to_bytes())
    if batch.messages(again) != batch.messages(found) or not batch.decode(again).equals(rows):
        raise Wrong("reading it twice gives different rows")
    stamped = batch.stamp(found, base_offset=100, epoch=1, append_time=1)
    for first, end in {(100, 100 + rows.num_rows), (100, 101), (99 + rows.num_rows, 100 + rows.num_rows)}:
        batch.parse(batch.cut(stamped, first, end).to_bytes())


def settled(data: bytes, sentence: str) -> bytes | None:
    """The same body with a header that says about it what `parse` found; None if it complains of something else."""
    for pattern, field in CLAIMS:
        if match := pattern.match(sentence):
            header = Header._make(HEADER.unpack_from(data))
            changed = header._replace(**{field: int(match[1], 0)})
            if field == "rows" and changed.rows == 0:
                return None
            return with_header_crc(HEADER.pack(*changed) + data[HEADER.size :])
    return None


def attempt(seed: int, index: int, parse: Parse = batch.parse) -> str:
    data = generate(seed, index)
    sentence = judge(data, parse)
    if index % 2 == 0:
        return sentence
    for _ in CLAIMS:
        better = settled(data, sentence)
        if better is None:
            break
        data = better
        sentence = judge(data, parse)
    return sentence


# --- children ---------------------------------------------------------------------------------------


class Failure(NamedTuple):
    index: int
    what: str


class Outcome(NamedTuple):
    tried: int
    outcomes: Counter[str]
    failures: list[Failure]


def run_child(seed: int, first: int, end: int, progress: Path) -> None:
    """Tries inputs [first, end) and prints what came of them; `progress` always holds the one being tried."""
    faulthandler.enable()
    outcomes: Counter[str] = Counter()
    failures: list[Failure] = []
    with progress.open("r+b") as file, mmap.mmap(file.fileno(), 8) as place:
        for index in range(first, end):
            place[:] = index.to_bytes(8, "little")
            try:
                sentence = attempt(seed, index)
            except Exception:
                failures.append(Failure(index, traceback.format_exc()))
            else:
                outcomes[kind_of(sentence)] += 1
    json.dump({"outcomes": outcomes, "failures": failures}, sys.stdout)


def kind_of(sentence: str) -> str:
    """The sentence without its numbers, so that equal complaints are counted together."""
    return re.sub(r"0x[0-9a-f]+|-?\d+|b'.*?'|b\".*?\"", "#", sentence)[:90]


def run_chunk(
    seed: int, first: int, end: int, *, hang_seconds: float = HANG_SECONDS, child: Sequence[str] | None = None
) -> Outcome:
    """Tries inputs [first, end) in child processes, as many as are needed."""
    outcomes: Counter[str] = Counter()
    failures: list[Failure] = []
    command = child or (sys.executable, "-m", "tests.fuzz.batch")
    root = Path(__file__).resolve().parents[2]
    start = first
    with tempfile.TemporaryDirectory() as directory:
        progress = Path(directory) / "progress"
        while start < end and len(failures) < FAILURES_MAX:
            progress.write_bytes(start.to_bytes(8, "little"))
            arguments = ["--child", str(progress), "--seed", str(seed), "--first", str(start)]
            process = subprocess.Popen(
                [*command, *arguments, "--count", str(end - start)],
                cwd=root,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            output, errors, hung = wait(process, progress, hang_seconds)
            if process.returncode == 0 and not hung:
                result = json.loads(output)
                outcomes.update(result["outcomes"])
                failures += [Failure(*failure) for failure in result["failures"]]
                break
            stopped_at = int.from_bytes(progress.read_bytes(), "little")
            how = f"it hangs for {hang_seconds} s" if hung else f"the child ended with {process.returncode}"
            failures.append(Failure(stopped_at, f"{how}\n{errors[-2000:]}"))
            # What the dead child had counted is lost; so only the inputs before the bad one run again.
            if stopped_at > start:
                before = run_chunk(seed, start, stopped_at, hang_seconds=hang_seconds, child=child)
                outcomes.update(before.outcomes)
                failures += before.failures
            start = stopped_at + 1
    return Outcome(sum(outcomes.values()) + len(failures), outcomes, failures)


def wait(process: subprocess.Popen[str], progress: Path, hang_seconds: float) -> tuple[str, str, bool]:
    """What the child printed, and whether it had to be killed because it stood still."""
    seen, since = progress.read_bytes(), time.monotonic()
    while True:
        try:
            output, errors = process.communicate(timeout=min(1.0, hang_seconds / 4))
            return output, errors, False
        except subprocess.TimeoutExpired:
            now = progress.read_bytes()
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > hang_seconds:
                process.kill()
                output, errors = process.communicate()
                return output, errors, True


def run(seed: int, first: int, count: int, jobs: int) -> Outcome:
    end = first + count
    chunks = [(start, min(start + CHUNK, end)) for start in range(first, end, CHUNK)]
    with ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(lambda chunk: run_chunk(seed, *chunk), chunks))
    outcomes: Counter[str] = Counter()
    for result in results:
        outcomes.update(result.outcomes)
    failures = [failure for result in results for failure in result.failures]
    return Outcome(sum(result.tried for result in results), outcomes, failures)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.batch", description="Damages batches, parses them.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--verbose", action="store_true", help="print how often each refusal was given")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        run_child(options.seed, options.first, options.first + options.count, options.child)
        return 0
    started = time.monotonic()
    tried, outcomes, failures = run(options.seed, options.first, options.count, options.jobs)
    seconds = time.monotonic() - started
    if options.verbose:
        for kind, times in outcomes.most_common():
            print(f"{times:8}  {kind}")
    for failure in failures:
        print(f"seed {options.seed} input {failure.index}: {failure.what}")
        print(f"again with: python -m tests.fuzz.batch --seed {options.seed} --first {failure.index} --count 1\n")
    accepted = outcomes["batch"]
    print(
        f"seed {options.seed}: {tried} inputs in {seconds:.1f} s ({tried / seconds:.0f}/s), {accepted} batches, "
        f"{sum(outcomes.values()) - accepted} refused in {max(len(outcomes) - 1, 0)} ways, {len(failures)} failures"
    )
    return 1 if failures or tried < options.count else 0


if __name__ == "__main__":
    sys.exit(main())
