from __future__ import annotations

import hashlib
import random
import statistics
import time
from argparse import Namespace

import pytest
import zstandard

from benchmarks.deployed_round import measure

ROUNDS, REST_S = 6, 0.03
MOST = 32.0
"""Times ``yardstick_s``. Idle members took about 10 on a busy host, 16 of it without rests on quiet cores."""


def yardstick_s() -> float:
    """Return CPU seconds of what a round is made of, as much on every machine: hashing, packing, Python's own work.

    In pieces with rests between, as a round's are: where others empty the caches meanwhile, both cost several times as
    much, and work in one go doesn't.
    """
    data = random.Random(0).randbytes(2_800_000)
    packer, began = zstandard.ZstdCompressor(level=3), time.process_time()
    for _ in range(4):
        time.sleep(REST_S)
        hashlib.sha256(data).digest()
        time.sleep(REST_S)
        zstandard.decompress(packer.compress(data))
    for _ in range(10):
        time.sleep(REST_S)
        words = [f"word-{place % 997}" for place in range(6_000)]
        sorted({word: len(word) for word in words}.items(), key=lambda pair: pair[1])
    return time.process_time() - began


@pytest.mark.timeout(900)  # training gets what other tests leave, and for a while that may be nothing
def test_a_round_of_members_that_do_not_train_costs_little_cpu() -> None:
    found = measure(Namespace(clients=[2], rounds=ROUNDS, repeats=1, rival_python=None))["2"]["ours"]
    yardstick = statistics.median(yardstick_s() for _ in range(5))
    assert found["cpu_s"] / yardstick < MOST, (found["parts"], yardstick)
