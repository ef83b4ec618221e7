"""One source of randomness: every generator is derived from (run seed, round, who), never from a clock."""

from __future__ import annotations

import hashlib

import torch


def seeded_generator(run_seed: int, round_index: int, who: str) -> torch.Generator:
    """Return a CPU generator seeded with a digest of its three arguments.

    The simulator and the deployed services call this with equal arguments, which is why they agree to the bit.
    ``who`` is a client id, or ``"aggregator"``, or ``"initial"`` for the models that round 0 starts from.
    """
    return digest_generator(f"{run_seed}/{round_index}/{who}".encode())


def digest_generator(data: bytes) -> torch.Generator:
    """Return a CPU generator seeded with the SHA-256 of ``data``."""
    generator = torch.Generator()
    generator.manual_seed(int.from_bytes(hashlib.sha256(data).digest()[:8], "big") >> 1)
    return generator


def split_generator(rng: torch.Generator) -> torch.Generator:
    """Return a new generator seeded from the next number of ``rng``.

    Steps that draw a varying amount get one each, so what one step draws never shifts another's numbers.
    """
    child = torch.Generator()
    child.manual_seed(int(torch.randint(2**62, (1,), generator=rng)))
    return child


def forked_generator(rng: torch.Generator, purpose: str) -> torch.Generator:
    """Return a new generator, seeded from ``purpose`` and what ``rng`` would draw next, which it then still draws.

    For a step that another method lacks: what both have in common draws the same numbers with and without it.
    """
    ahead = torch.Generator()
    ahead.set_state(rng.get_state())
    return digest_generator(f"{int(torch.randint(2**62, (1,), generator=ahead))}/{purpose}".encode())
