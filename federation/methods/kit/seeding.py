"""One source of randomness: every generator is derived from (run seed, round, who), never from a clock."""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch

NUM_ENTROPY_BYTES = 624 * 4
"""Of ``entropy_generator``: the whole state of a Mersenne Twister."""

_STATE_AT = 24
"""Where that begins in what ``torch.Generator.get_state`` returns: 624 words, each in eight bytes."""


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


def entropy_generator(entropy: bytes) -> torch.Generator:
    """Return a CPU generator whose state is ``entropy``, of ``NUM_ENTROPY_BYTES``.

    ``manual_seed`` keeps 32 bits of a seed, as many as somebody can try who wants to know what was drawn.
    """
    words = struct.unpack(f"<{NUM_ENTROPY_BYTES // 4}I", entropy)
    generator = torch.Generator()
    generator.manual_seed(0)
    state = generator.get_state()
    packed = bytearray(struct.pack(f"<{len(words)}Q", *words))
    state[_STATE_AT : _STATE_AT + len(packed)] = torch.frombuffer(packed, dtype=torch.uint8)
    generator.set_state(state)
    return generator


_NOISE: ContextVar[Callable[[torch.Generator], torch.Generator]] = ContextVar("noise", default=lambda rng: rng)


def noise_generator(rng: torch.Generator) -> torch.Generator:
    """Return what DP-SGD draws from: ``rng`` in a simulation; on a device, what ``noise_by`` says.

    A round's ``rng`` follows from the fleet's seed, which the aggregator knows: noise from it would hide nothing.
    """
    return _NOISE.get()(rng)


@contextlib.contextmanager
def noise_by(source: Callable[[], torch.Generator]) -> Iterator[None]:
    """Let ``source`` make what the calling thread's DP-SGD draws from."""
    token = _NOISE.set(lambda _rng: source())
    try:
        yield
    finally:
        _NOISE.reset(token)
