"""The page that a demo ends with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console

from replayfleet.federation.service.words import clock
from replayfleet.scripts.launch.fleet import Limit


@dataclass(frozen=True, slots=True)
class Report:
    """A written page, and the run in a few lines for a terminal."""

    path: Path
    summary: list[str]

    def show(self, console: Console, limit: Limit) -> None:
        """End a demo's output with it."""
        for line in [*self.summary, f"\nreport: {self.path.resolve()}", f"elapsed: {clock(limit.elapsed_s)} minutes"]:
            console.print(line, soft_wrap=True)


def write_again(write: Callable[[], Report]) -> None:
    """Write the page of a run that is over, as a command."""
    written = write()
    click.echo("\n".join([*written.summary, str(written.path)]))
