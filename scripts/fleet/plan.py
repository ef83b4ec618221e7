"""What ``python -m replayfleet.scripts.fleet`` runs: its folder and its command lines."""

from __future__ import annotations

import json
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

from replayfleet.federation.errors import SettingsError, nearest
from replayfleet.federation.simulator.settings import SIZES, unknown_settings
from replayfleet.federation.streams.stream import client_id
from replayfleet.federation.streams.street.street import Street
from replayfleet.scripts.demo.folder import clear_folder

DATASET = "dataset"
SYNTHETIC = "synthetic"
SOURCES = (DATASET, SYNTHETIC)
SET = "fashion-mnist"
FLEET = "yard"
MARKER = "fleet.json"
_TASK_FILE = "task.toml"
_OWN = ("aggregator", "clients", "logs", _TASK_FILE)
_CROP_SIZE = 32
_MIN_SAMPLES = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetPlan:
    """A checked simulated fleet.

    Attributes:
        out: where everything goes.
        clients: number of client processes.
        rounds: number of rounds.
        source: ``dataset`` (each client's share of Fashion-MNIST) or ``synthetic`` (a street of its own).
        method: a method that can be deployed.
        preset: of the method and of the stream.
        rate: pictures a second of every client.
        deadline_s: seconds that a round stays open.
        seed: of the streams, the models, the training and the faults.
        data_root: the operator's own folder of data sets.
    """

    out: Path
    clients: int
    rounds: int
    source: str
    method: str
    preset: str
    rate: float
    deadline_s: float
    seed: int
    data_root: Path | None = None

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise SettingsError(f"unknown source {self.source!r}{nearest(self.source, SOURCES)}")
        if self.preset not in SIZES:
            raise unknown_settings(self.preset)
        for name in ("clients", "rounds"):
            if getattr(self, name) < 1:
                raise SettingsError(f"--{name} is {getattr(self, name)}, expected at least 1")
        if self.seed < 0:
            raise SettingsError(f"--seed is {self.seed}, expected 0 or more")

    @property
    def names(self) -> list[str]:
        """Client ids."""
        return [client_id(index) for index in range(self.clients)]

    @property
    def logs(self) -> Path:
        """One log per process."""
        return self.out / "logs"

    @property
    def journal(self) -> Path:
        """The aggregator's events."""
        return self.out / "aggregator" / "events.jsonl"

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
            names = json.dumps(list(Street.class_names))
            text = f"image_channels = 3\nimage_size = {_CROP_SIZE}\nclass_names = {names}\n"
            (self.out / _TASK_FILE).write_text(text, encoding="utf-8")

    def aggregator(self, broker: str) -> list[str]:
        """The aggregator's command line."""
        task = ["--dataset", SET] if self.source == DATASET else ["--task", str(self.out / _TASK_FILE)]
        return [
            "aggregator", "serve", "--broker", broker, "--fleet", FLEET, "--data-dir", str(self.out / "aggregator"),
            "--clients", str(self.clients), "--rounds", str(self.rounds), "--deadline-s", f"{self.deadline_s:g}",
            "--method", self.method, *task, "--settings", self.preset, "--seed", str(self.seed), "--threads", "1",
        ]  # fmt: skip

    def client(self, name: str, broker: str) -> list[str]:
        """The command line of one client."""
        data = ["--data-root", str(self.data_root)] if self.data_root is not None else []
        return [
            "edge-client", "start", "--device", "cpu", "--broker", broker, "--fleet", FLEET, "--client-id", name,
            "--source", self._source(self.names.index(name)), "--data-dir", str(self.data_dir(name)),
            "--threads", "1", "--min-samples", str(_MIN_SAMPLES), *data,
        ]  # fmt: skip

    def _source(self, index: int) -> str:
        if self.source == SYNTHETIC:
            towns = ("sunny", "night", "rain", "highway")
            query: dict[str, object] = {"town": towns[index % len(towns)], "seed": self.seed + index, "rate": self.rate}
            return f"synthetic://street?{urllib.parse.urlencode(query)}"
        size = SIZES[self.preset]
        query = {
            "scenario": "circulating",
            "clients": self.clients,
            "client": index,
            "rounds": self.rounds,
            "samples": size.samples_per_class,
            "test": size.test_samples_per_class or 0,
            "seed": self.seed,
            "rate": self.rate,
        }
        return f"dataset://{SET}?{urllib.parse.urlencode(query)}"
