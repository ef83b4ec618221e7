from __future__ import annotations

import platform
import subprocess
import sys

import pytest

GIVEN_BACK = """
import re
from replayfleet.devices.memory import give_memory_back, keep_memory

def resident():  # pages are counted: statm's number lags behind, and faults are fewer where pages are huge
    return int(re.search(r"^Rss: +([0-9]+) kB", open("/proc/self/smaps_rollup").read(), re.M)[1]) << 10

def freed():
    pieces = [bytearray(b"1") * (3 << 20) for _ in range(3)]  # as one that arrives: encoded, unfolded, decoded
    before = resident()
    del pieces
    return before - resident()

usually = freed()
keep_memory()
kept, before = freed(), resident()
give_memory_back()
print(usually, kept, before - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps what it likes")
def test_what_was_freed_is_kept_until_it_is_given_back() -> None:
    said = subprocess.run([sys.executable, "-c", GIVEN_BACK], stdout=subprocess.PIPE, check=True, text=True).stdout
    usually, kept, at_last = map(int, said.split())
    assert usually > 8 << 20
    assert kept < 1 << 20
    assert at_last > 8 << 20
