"""What may happen to bytes on their way: each function changes `data` in place, by chance from a seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Final

Damage = Callable[[Random, bytearray], None]

# Values to fear in a length, a count or an offset.
NUMBERS: Final = (
    0, 1, -1, 2, 7, 8, 64, 127, 128, 255, 256, 2**15, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40,
    2**62, 2**63 - 1, -(2**31), -(2**63), 2**26, 2**26 + 1,
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


def damage_with(damages: Sequence[Damage], random: Random, data: bytearray) -> None:
    """Mostly one of them, sometimes two or three."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        if data:
            random.choice(damages)(random, data)
