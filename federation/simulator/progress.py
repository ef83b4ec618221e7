"""What a terminal shows of a running simulation: one line per round, and on a terminal the client at work."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import click

from replayfleet.federation.methods.kit.records import Parameters
from replayfleet.federation.service.words import duration
from replayfleet.federation.simulator.simulation import RoundOutcome

_MEGABYTE = 1e6
_WIDTH = 79


class Progress:
    """Prints rounds as they end, with the time that the rest will take if it goes on like this."""

    def __init__(
        self,
        num_rounds: int,
        num_clients: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        num_absent: int = 0,
        measure: str = "accuracy",
    ) -> None:
        self._measure = measure
        self._num_rounds = num_rounds
        self._num_clients = num_clients
        self._num_absent = num_absent
        self._clock = clock
        self._started = clock()
        self._num_done = 0
        self._place = 0
        self.diverged: int | None = None
        """The first round that left somebody a model that isn't finite."""

    def client_begins(self, round_index: int, name: str) -> None:
        """Show who trains; only on a terminal, where the line can be taken back."""
        num_clients = self._num_clients - (self._num_absent if round_index else 0)
        self._place += 1
        if sys.stdout.isatty():
            line = f"round {round_index}: {name} trains ({self._place} of {num_clients})"
            click.echo(f"\r{line:<{_WIDTH}}", nl=False)

    def round_done(self, outcome: RoundOutcome) -> None:
        """Print a round's line."""
        self._num_done += 1
        self._place = 0
        if sys.stdout.isatty():
            click.echo(f"\r{'':<{_WIDTH}}\r", nl=False)
        click.echo(self.line(outcome))

    def line(self, outcome: RoundOutcome) -> str:
        """Return a round's line."""
        record = outcome.record
        clients = record.clients.values()
        honest = [client.accuracy for client in clients if not client.hostile]
        parts = [
            f"round {record.round:>{len(str(self._num_rounds - 1))}}",
            f"{self._measure} {100 * record.accuracy:5.1f} % ({100 * min(honest):.1f} to {100 * max(honest):.1f})",
            f"up {sum(c.bytes_up for c in clients) / _MEGABYTE:.1f} MB",
            f"down {sum(c.bytes_down for c in clients) / _MEGABYTE:.1f} MB",
            f"{record.round_s:.1f} s",
        ]
        held = sum(c.num_sub_generators_held for c in clients)
        if held:
            sent = sum(len(c.sub_generators_sent) for c in clients)
            parts.insert(2, f"sub-generators {sent} of {held} sent")
        absent = sum(not c.present for c in clients)
        if absent:
            parts.insert(1, f"{absent} absent")
        models = {name: getattr(download, "task_parameters", {}) for name, download in outcome.downloads.items()}
        finite = {key: _is_finite(model) for key, model in {id(model): model for model in models.values()}.items()}
        diverged = sorted(name for name, model in models.items() if not finite[id(model)])
        if diverged:
            self.diverged = record.round if self.diverged is None else self.diverged
            parts.append(f"DIVERGED: models of {', '.join(diverged)} are not finite")
        left = self._num_rounds - 1 - record.round
        if left:
            parts.append(f"about {duration(left * (self._clock() - self._started) / self._num_done)} left")
        return "  ".join(parts)


def _is_finite(parameters: Parameters) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in parameters.values())
