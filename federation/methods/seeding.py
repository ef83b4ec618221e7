"""One source of randomness: every generator is derived from (run seed, round, who), never from a clock."""

from __future__ import annotations

import hashlib

import torch


def seeded_generator(run_seed: int, round_index: int, who: str) -> torch.Generator:
    """Return a CPU generator seeded with a digest of its three arguments.

    The simulator and the deployed services call this with equal arguments, which is why they agree to the bit.
    ``who`` is a client id, or ``"aggregator"``, or ``"initial"`` for the models that round 0 starts from.
    """
    digest = hashlib.sha256(f"{run_seed}/{round_index}/{who}".encode()).digest()
    generator = torch.Generator()
    generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return generator
