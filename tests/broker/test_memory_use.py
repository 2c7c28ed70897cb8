"""How the broker's process treats its memory and its threads: set once, for a process of its own."""

import platform
import subprocess
import sys

SETTLED = """
import gc, sys
import pyarrow as pa
from pydanube.api.memory import give_back_large_blocks, keep_collections_short

give_back_large_blocks()
keep_collections_short()
print(pa.default_memory_pool().backend_name, gc.get_threshold(), gc.get_freeze_count() > 10_000)
"""


def test_a_broker_gives_large_blocks_back_and_does_not_search_what_stays() -> None:
    printed = subprocess.run([sys.executable, "-c", SETTLED], capture_output=True, text=True, check=True).stdout
    assert printed.split(maxsplit=1)[1].strip() == "(100000, 50, 100) True"
    assert printed.split()[0] in ("jemalloc", "mimalloc", "system")


def test_a_block_of_a_megabyte_that_is_needed_again_and_again_is_not_asked_of_the_system_each_time() -> None:
    turns, pages = 100, 256
    again = f"""
import resource
from pydanube.api.memory import give_back_large_blocks

give_back_large_blocks()
bytearray(b"x") * {pages * 4096}
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({turns}):
    bytearray(b"x") * {pages * 4096}
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    printed = subprocess.run([sys.executable, "-c", again], capture_output=True, text=True, check=True).stdout
    if platform.libc_ver()[0] == "glibc":
        assert int(printed) < turns * pages / 4


def test_a_broker_inside_a_program_leaves_the_programs_memory_alone() -> None:
    inside = """
import gc, sys
import pydanube.testing

before = gc.get_threshold(), sys.getswitchinterval()
with pydanube.testing.broker():
    print((gc.get_threshold(), sys.getswitchinterval()) == before, gc.get_freeze_count())
"""
    printed = subprocess.run([sys.executable, "-c", inside], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["True", "0"]
