"""Changes inputs: bytes by themselves, and documents (trees of dicts, lists and values) in their structure.

Whoever flips bits of a frame is refused by its first check. So a target's inputs are taken apart, changed where a
hostile member would change them, and put together again; now and then bytes are changed after that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

NUMBERS = (
    *(
        sign * (1 << bits) + near
        for bits in (0, 7, 8, 15, 16, 20, 31, 32, 53, 62)
        for near in (-1, 0)
        for sign in (1, -1)
    ),
    2**63 - 1,
    2**64 - 1,
    -(2**63),
)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 5e-324, 1e-300, 1e300, 3.5e38, 1.7e308, math.nan, math.inf, -math.inf)
TEXTS = (
    "",
    " ",
    "\x00",
    "\x1b[2J\r\n",
    "0",
    "-1",
    "1" * 5000,
    "1_000",
    "٣",
    "nan",
    "1e999",
    "../../etc/passwd",
    "~nouser/x",
    "/dev/null",
    "/proc/self/mem",
    "é" * 300,
    "a" * 1025,
    "\ud7ff\U0010ffff\u202e",
    "*",
    "[::1",
    "{}",
    "${HOME}",
    "true",
)
BYTES = (b"", b"\x00" * 64, b"\xff" * 64, b"\x80", b"\x81" * 40)

Tree = Any
Place = tuple[Any, Any]
"""A dict and a key in it, or a list and an index."""


class Unfit(Exception):
    """Bytes that a target can't make an input of; they don't count as one."""


@dataclass(frozen=True)
class Form:
    """How a kind of input is taken apart and put together.

    Attributes:
        parse: bytes -> tree; raises an exception where they aren't of this form.
        unparse: tree -> bytes; raises an exception for a tree that has no such form.
    """

    parse: Callable[[bytes], Tree]
    unparse: Callable[[Tree], bytes]


def mutated(data: bytes, rng: Random, corpus: Sequence[bytes], form: Form | None) -> bytes:
    """Return an input made from ``data`` and now and then another one of the corpus."""
    if form is not None and rng.random() < 0.85:
        try:
            tree = form.parse(data)
            for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
                tree = _changed(tree, rng, lambda: form.parse(rng.choice(corpus)))
            data = form.unparse(tree)
        except Exception:  # not of this form any more: its bytes are changed
            return changed_bytes(data, rng, corpus)
        if rng.random() < 0.85:
            return data
    return changed_bytes(data, rng, corpus)


def changed_bytes(data: bytes, rng: Random, corpus: Sequence[bytes]) -> bytes:
    """Return ``data`` with one to six changes: bits, numbers of any width, pieces gone, doubled or of another input."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        place = rng.randrange(len(found) + 1)
        length = rng.choice((1, 2, 4, 8, rng.randrange(1, 64)))
        match rng.randrange(7):
            case 0 if place < len(found):
                found[place] ^= 1 << rng.randrange(8)
            case 1:
                found[place : place + length] = rng.randbytes(length)
            case 2:
                width = rng.choice((1, 2, 4, 8))
                number = rng.choice(NUMBERS) & ((1 << 8 * width) - 1)
                found[place : place + width] = number.to_bytes(width, rng.choice(("little", "big")))
            case 3:
                del found[place : place + length]
            case 4:
                found[place:place] = found[place : place + length] * rng.choice((1, 2, 50))
            case 5:
                other = rng.choice(corpus)
                start = rng.randrange(len(other) + 1)
                found[place : place + length] = other[start : start + rng.choice((length, 4 * length))]
            case _:
                text = rng.choice(TEXTS).encode()
                found[place : place + rng.choice((0, length))] = text
    return bytes(found)


def _changed(tree: Tree, rng: Random, other: Callable[[], Tree]) -> Tree:  # noqa: C901  # one case for each change
    """Change one place of a tree."""
    places = list(_places(tree))
    if not places:
        return _value(tree, rng)
    within, key = rng.choice(places)
    old = within[key]
    match rng.randrange(10):
        case 0 | 1 | 2 | 3:
            within[key] = _value(old, rng)
        case 4:
            within[key] = _value(rng.choice(("", 0, 0.0, b"", True, None, [], {})), rng)
        case 5:
            del within[key]
        case 6 if isinstance(within, list):
            within[key:key] = [old] * rng.choice((1, 1, 2, 20))
        case 6:
            within[rng.choice((*TEXTS, f"{key}s", 0))] = old
        case 7:  # the same place elsewhere, or any other value
            others = list(_places(other()))
            same = [found for found in others if found[1] == key] or others
            if same:
                source, where = rng.choice(same)
                within[key] = source[where]
        case 8:
            source, where = rng.choice(places)
            if not isinstance(old, (dict, list)) and not isinstance(source[where], (dict, list)):
                within[key], source[where] = source[where], old
        case _:
            for _ in range(rng.choice((1, 3, 20))):
                old = [old] if rng.random() < 0.5 else {"": old}
            within[key] = old
    return tree


def _value(old: Any, rng: Random) -> Any:  # noqa: PLR0911  # one for each type
    """Return another value of the same kind."""
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return rng.choice(
            (old + 1, old - 1, old * 2, -old, rng.choice(NUMBERS), rng.choice(NUMBERS), rng.randrange(1 << 16))
        )
    if isinstance(old, float):
        return rng.choice((old * 2, -old, rng.choice(FLOATS), rng.choice(FLOATS), rng.random()))
    if isinstance(old, bytes):
        return rng.choice(BYTES) if rng.random() < 0.2 else changed_bytes(old, rng, (old,))
    if isinstance(old, str):
        return _text(old, rng)
    if isinstance(old, list):
        return rng.choice(([], old[:1], old[::-1], old * 2, [*old, None]))
    if isinstance(old, dict):
        return rng.choice(({}, dict(list(old.items())[1:]), {**old, "": None}))
    return rng.choice((0, "", b"", 0.0, False, [], {}))


def _text(old: str, rng: Random) -> str:
    place = rng.randrange(len(old) + 1)
    match rng.randrange(6):
        case 0 | 1:
            return rng.choice(TEXTS)
        case 2:
            return old[:place] + rng.choice(TEXTS) + old[place:]
        case 3:
            return old[:place] + old[place + 1 :]
        case 4:
            return old[:place] + chr(rng.choice((rng.randrange(1, 128), rng.randrange(128, 0xD800)))) + old[place + 1 :]
    return old * 2


def _places(tree: Tree, depth: int = 0) -> Iterator[Place]:
    keys = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in list(keys) if depth < 40 else ():
        yield tree, key
        yield from _places(tree[key], depth + 1)
