from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FAULTS = """
import ctypes, resource
from replayfleet.devices.memory import give_memory_back, keep_memory

def num_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):  # as one that arrives: encoded, unfolded, decoded
        pieces = [bytearray(b"1") * (3 << 20) for _ in range(3)]
        del pieces
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

usually = num_faults()
keep_memory()
num_faults()
kept = num_faults()
give_memory_back()
print(usually, kept, num_faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps what it likes")
def test_what_was_freed_is_asked_of_the_system_again_only_after_it_was_given_back() -> None:
    said = subprocess.run([sys.executable, "-c", FAULTS], stdout=subprocess.PIPE, check=True, text=True).stdout
    usually, kept, again = map(int, said.split())
    pages = 3 * (3 << 20) // 4096
    assert usually > 5 * pages
    assert kept < pages / 10
    assert pages <= again < 2 * pages
