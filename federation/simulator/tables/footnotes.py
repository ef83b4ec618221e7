"""Known errors of a paper as numbered footnotes of a Markdown table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from replayfleet.federation.simulator.tables.paper import Note


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
