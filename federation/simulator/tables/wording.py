"""Words and lines that all tables share: numbers with their nouns, heads, footnotes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from replayfleet.federation.service.words import count_of
from replayfleet.federation.simulator.tables.paper import Note


def range_of(numbers: Sequence[int], noun: str) -> str:
    """Return the same for what varies: ``"5 to 10 clients"``."""
    lowest, highest = min(numbers), max(numbers)
    return count_of(lowest, noun) if lowest == highest else f"{lowest} to {highest} {noun}s"


def seeds_named(seeds: Sequence[int]) -> str:
    """Return ``"seed 0"`` or ``"seeds 0, 2"``."""
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"


def head(names: Sequence[str]) -> list[str]:
    """Return the first lines of a Markdown table."""
    return [f"| {' | '.join(names)} |", f"|---|{'--:|' * (len(names) - 1)}"]


class Footnotes:
    """Numbers notes in the order in which cells need them."""

    def __init__(self, notes: Sequence[Note]) -> None:
        """Take a table's notes; those on the whole table are left out."""
        self._notes = notes
        self._texts: list[str] = []

    def marks(self, label: str, column: int) -> str:
        """Return what stands behind a number, for example ``" [1]"``; column counts from 0."""
        return self.marks_of(note for note in self._notes if note.concerns(label, column))

    def marks_of(self, notes: Iterable[Note]) -> str:
        """Return what stands behind a number that these notes concern, wherever they are from."""
        marks = ""
        for note in notes:
            if note.text not in self._texts:
                self._texts.append(note.text)
            marks += f" [{self._texts.index(note.text) + 1}]"
        return marks

    def lines(self) -> list[str]:
        """Return the footnotes as a numbered list, with an empty line before it."""
        return ["", *(f"{place}. {text}" for place, text in enumerate(self._texts, start=1))] if self._texts else []
