"""What ``python -m replayfleet.scripts.fleet`` runs: its folder and its command lines."""

from __future__ import annotations

import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from replayfleet.edge_client.flow import MAX_FRAME_RATE_HZ
from replayfleet.federation.children import child_command
from replayfleet.federation.errors import SettingsError, nearest
from replayfleet.federation.service.fleet.variants import resolved
from replayfleet.federation.streams.stream import client_id
from replayfleet.federation.streams.street.looks import TOWNS
from replayfleet.federation.streams.street.street import Street
from replayfleet.scripts.fleet.faults import BAD_LINE
from replayfleet.scripts.launch.folder import clear_folder
from replayfleet.scripts.launch.plan import (
    FASHION_MNIST,
    FleetPlan,
    aggregator_command,
    check_sizes,
    client_command,
    stream_source,
    write_task,
)

DATASET = "dataset"
SYNTHETIC = "synthetic"
SOURCES = (DATASET, SYNTHETIC)
MARKER = "yard.json"
_FLEET = "yard"
_TASK_FILE = "task.toml"
_OWN = ("aggregator", "clients", "logs", _TASK_FILE)
_CROP_SIZE = 32
_MIN_SAMPLES = 20
_LEAVE_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Yard:
    """A checked simulated fleet."""

    out: Path  # where everything goes
    clients: int
    rounds: int
    source: str  # ``dataset`` (each client's share of Fashion-MNIST) or ``synthetic`` (a street of its own)
    method: str
    preset: str  # of the method and of the stream
    rate: float  # pictures a second of every client
    deadline_s: float  # that a round stays open
    seed: int  # of the streams, the models, the training and the faults
    data_root: Path | None = None  # the operator's own folder of data sets

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise SettingsError(f"unknown source {self.source!r}{nearest(self.source, SOURCES)}")
        check_sizes(self.preset, clients=self.clients, rounds=self.rounds, seed=self.seed)
        method, _ = resolved(self.method, self.preset)
        from replayfleet.federation.methods import ALL_METHODS  # with torch, which other mistakes don't wait for

        ALL_METHODS.named(method)
        if not 0 < self.rate <= MAX_FRAME_RATE_HZ:
            raise SettingsError(f"rate is {self.rate:g}, expected more than 0 and at most {MAX_FRAME_RATE_HZ:g}")

    @property
    def names(self) -> list[str]:
        """Client ids."""
        return [client_id(index) for index in range(self.clients)]

    @property
    def logs(self) -> Path:
        return self.out / "logs"

    def data_dir(self, name: str) -> Path:
        """One client's."""
        return self.out / "clients" / name

    def prepare(self) -> None:
        """Make the folder, without what an earlier fleet left there.

        Raises:
            SettingsError: It holds something else, or can't be written.
        """
        clear_folder(self.out, MARKER, _OWN, ("logs", "clients"))
        if self.source == SYNTHETIC:
            path = self.out / _TASK_FILE
            write_task(path, image_channels=3, image_size=_CROP_SIZE, class_names=Street.class_names)

    def fleet(self, faults: Sequence[str] = ()) -> FleetPlan:
        """Return the fleet, with a bad line to its broker if the faults have one."""
        data_dir = self.out / "aggregator"
        task = ["--dataset", FASHION_MNIST] if self.source == DATASET else ["--task", str(self.out / _TASK_FILE)]
        sizes = {"clients": self.clients, "rounds": self.rounds, "seed": self.seed}
        aggregator = aggregator_command(data_dir, _FLEET, **sizes, method=self.method, task=task, preset=self.preset)
        data = [] if self.data_root is None else ["--data-root", str(self.data_root)]
        clients = {}
        for index, name in enumerate(self.names):
            source, rules = stream_source(self.preset, index, **sizes, rate=self.rate), data
            if self.source == SYNTHETIC:
                rules = ["--min-samples", str(_MIN_SAMPLES)]
                town = list(TOWNS)[index % len(TOWNS)]
                query = urllib.parse.urlencode({"town": town, "seed": self.seed + index, "rate": self.rate})
                source = f"synthetic://street?{query}"
            clients[name] = [*client_command(self.data_dir(name), _FLEET, source), *rules]
        line = child_command("replayfleet.scripts.fleet.tcp_link", "--seed", str(self.seed), program="bad-line")
        return FleetPlan(
            logs=self.logs,
            data_dir=data_dir,
            aggregator=[*aggregator, "--deadline-s", f"{self.deadline_s:g}"],
            clients=clients,
            line=line if BAD_LINE in faults else (),
            leave_s=_LEAVE_S,
        )
