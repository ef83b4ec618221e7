"""What checks found, and how it is shown: a table for people, JSON for scripts."""

from __future__ import annotations

import enum
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from replayfleet.federation.service.words import visible

FORMAT_VERSION = 1
"""Of the JSON. Keys are added without a new one; what is there keeps its meaning."""

MIN_TEXT_WIDTH = 40


class Status(str, enum.Enum):
    """How much a finding matters."""

    OK = "ok"
    SKIPPED = "skipped"
    WARNING = "warning"
    FAILURE = "failure"


_RANK = (Status.SKIPPED, Status.OK, Status.WARNING, Status.FAILURE)


class Finding(msgspec.Struct, frozen=True):
    """One row.

    Attributes:
        check: its name, ``group.what``; the same on every board.
        status: ``failure`` makes the exit code 1.
        found: what was found, without what to do.
        advice: what to do; empty: nothing.
        facts: the same for scripts: plain values by name.
    """

    check: str
    status: Status
    found: str
    advice: str = ""
    facts: dict[str, Any] = {}


def ok(check: str, found: str, advice: str = "", /, **facts: Any) -> Finding:
    """Return a finding that is fine."""
    return Finding(check, Status.OK, found, advice, facts)


def skipped(check: str, found: str, advice: str = "", /, **facts: Any) -> Finding:
    """Return what was not looked at, or is not needed here."""
    return Finding(check, Status.SKIPPED, found, advice, facts)


def warning(check: str, found: str, advice: str = "", /, **facts: Any) -> Finding:
    """Return what works, but less well than it could."""
    return Finding(check, Status.WARNING, found, advice, facts)


def failure(check: str, found: str, advice: str = "", /, **facts: Any) -> Finding:
    """Return what keeps a client from doing what it was asked for."""
    return Finding(check, Status.FAILURE, found, advice, facts)


@dataclass(frozen=True, slots=True)
class Report:
    """All findings, in the order of the checks."""

    findings: tuple[Finding, ...]

    @property
    def status(self) -> Status:
        return max((finding.status for finding in self.findings), key=_RANK.index, default=Status.OK)

    @property
    def exit_code(self) -> int:
        return 1 if self.status == Status.FAILURE else 0

    def as_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT_VERSION,
            "status": self.status.value,
            "checks": msgspec.to_builtins(self.findings),
        }

    def lines(self, width: int) -> list[str]:
        """Return a table for people: check, status, what was found, and below it what to do.

        Args:
            width: columns of the terminal.
        """
        names = max((len(finding.check) for finding in self.findings), default=0)
        statuses = max(len(status.value) for status in Status)
        margin = names + statuses + 4
        text_width = max(MIN_TEXT_WIDTH, width - margin)
        lines = []
        for finding in self.findings:
            text = textwrap.wrap(finding.found, text_width, break_on_hyphens=False) or [""]
            text += textwrap.wrap(
                finding.advice, text_width, initial_indent="-> ", subsequent_indent="   ", break_on_hyphens=False
            )
            head = f"{finding.check.ljust(names)}  {finding.status.value.ljust(statuses)}  "
            lines += [(head if number == 0 else " " * margin) + line for number, line in enumerate(text)]
        return [*map(visible, lines), "", self.summary()]

    def summary(self) -> str:
        counts = {status: sum(finding.status == status for finding in self.findings) for status in reversed(Status)}
        told = [f"{number} {status.value}" for status, number in counts.items() if number]
        return f"{self.status.value}: {', '.join(told)}" if told else self.status.value


def joined(words: Sequence[str], nothing: str = "none") -> str:
    """Return ``a, b`` or what stands for nothing."""
    return ", ".join(words) or nothing
