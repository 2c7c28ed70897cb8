"""What is given to the process that makes objects, and what it makes of it."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from random import Random

import pytest

from pydanube.log.batch import Batch, Envelope, encode_messages, stamp
from pydanube.log.making import BATCHES_AT_ONCE, LARGE_BYTES, make_object, make_packed, pack
from pydanube.stores.apart import dumped

CHANCE = Random(7)


def batch_of(size: int, offset: int) -> Batch:
    batch = encode_messages([Envelope(CHANCE.randbytes(size))], topic="/default/t")
    return stamp(batch, base_offset=offset, epoch=1, append_time=1)


@pytest.fixture(scope="module")
def batches() -> list[Batch]:
    """Small and large ones, in any order, and more than are packed at once."""
    sizes = [CHANCE.choice([10, 2_000, LARGE_BYTES + 1, 100_000]) for _ in range(3 * BATCHES_AT_ONCE + 1)]
    return [batch_of(size, offset) for offset, size in enumerate(sizes)]


def test_packed_batches_make_the_same_object(batches: list[Batch]) -> None:
    packed = [piece for some in pack(batches) for piece in some]
    assert b"".join(packed) == b"".join(each.to_bytes() for each in batches)
    one, other = make_object("/default/t", 1, batches), make_packed("/default/t", 1, packed)
    assert (one.start_offset, one.end, one.footer_crc) == (other.start_offset, other.end, other.footer_crc)
    assert one.data == other.data


def test_no_message_is_in_what_is_pickled_and_no_large_one_is_copied(batches: list[Batch]) -> None:
    packed = [piece for some in pack(batches) for piece in some]
    pickled, *views = dumped(partial(make_packed, "/default/t", 1, packed))
    assert pickled.nbytes < 50 * len(packed) + 500
    large = [each.body for each in batches if len(each.body) >= LARGE_BYTES]
    assert len([view for view in views if any(view.obj is memoryview(body).obj for body in large)]) == len(large) > 10


def test_others_have_their_turn_after_few_batches(batches: list[Batch]) -> None:
    for some in pack([batch_of(LARGE_BYTES - 2_000, offset) for offset in range(100)]):
        assert sum(piece.nbytes for piece in some) <= 1 << 20
    assert len(list(pack(batches))) == 4


CANCELLING = """
import asyncio
from functools import partial
from pydanube.log.batch import Envelope, encode_messages, stamp
from pydanube.log.making import make_packed, pack
from pydanube.stores.apart import Apart

def batch_of(offset):
    batch = encode_messages([Envelope(bytes(50_000)) for _ in range(10)], topic="/default/t")
    return stamp(batch, base_offset=10 * offset, epoch=1, append_time=1)

async def main():
    batches = [batch_of(offset) for offset in range(60)]
    beside = Apart(1)
    await beside.call(int)
    for _ in range(5):
        packed = partial(make_packed, "/default/t", 1, [piece for some in pack(batches) for piece in some])
        task = asyncio.create_task(beside.call(packed))
        del packed
        await asyncio.sleep(0.01)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            pass
        del task
        [[] for _ in range(200_000)]  # the collector comes by itself
    beside.close()

asyncio.run(main())
"""


def test_a_broker_survives_that_its_uploads_are_cancelled() -> None:
    """Before Python 3.13 the interpreter dies if it collects views of certain buffers."""
    done = subprocess.run([sys.executable, "-c", CANCELLING], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
