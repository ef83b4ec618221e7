"""What the demo runs: its folder, its command lines, and the data that it needs."""

from __future__ import annotations

import dataclasses
import os
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.simulator.settings import SIZES, unknown_settings
from replayfleet.federation.streams.datasets import Dataset, load_dataset
from replayfleet.federation.streams.stream import client_id
from replayfleet.scripts.demo.folder import clear_folder, note_facts

DATASET = "fashion-mnist"
SCENARIO = "circulating"
METHOD = "pfedgrp"
BASELINE = "fedavg"
MARKER = "demo.json"
"""Says that a folder belongs to the demo, and what was run there."""
FLEET = "demo"
_FRAME_RATE_HZ = 10
_OWN = ("aggregator", "clients", BASELINE, "logs", "report.html")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A checked demo.

    Attributes:
        out: where everything goes.
        preset: of the method and the stream.
        clients: number of clients.
        rounds: number of rounds.
        samples: training samples per class and round.
        test_samples: test samples per class that join the test set with them; None divides the test part evenly.
        seed: of the stream, the models and the training.
        data_root: the operator's own folder of data sets.
    """

    out: Path
    preset: str
    clients: int
    rounds: int
    samples: int
    test_samples: int | None
    seed: int
    data_root: Path | None = None

    @property
    def names(self) -> list[str]:
        """Client ids."""
        return [client_id(index) for index in range(self.clients)]

    @property
    def aggregator_dir(self) -> Path:
        """The aggregator's data dir."""
        return self.out / "aggregator"

    @property
    def logs(self) -> Path:
        """One log per process."""
        return self.out / "logs"

    def aggregator(self, broker: str) -> list[str]:
        """The aggregator's command line."""
        return [
            "aggregator", "serve", "--broker", broker, "--fleet", FLEET, "--data-dir", str(self.aggregator_dir),
            "--clients", str(self.clients), "--rounds", str(self.rounds), "--method", METHOD, "--dataset", DATASET,
            "--settings", self.preset, "--seed", str(self.seed), "--threads", "1",
        ]  # fmt: skip

    def client(self, index: int, broker: str) -> list[str]:
        """The command line of one client."""
        query = {
            "scenario": SCENARIO,
            "clients": self.clients,
            "client": index,
            "rounds": self.rounds,
            "samples": self.samples,
            "test": self.test_samples or 0,
            "seed": self.seed,
            "rate": _FRAME_RATE_HZ,
        }
        name = client_id(index)
        return [
            "edge-client", "start", "--device", "cpu", "--broker", broker, "--fleet", FLEET, "--client-id", name,
            "--source", f"dataset://{DATASET}?{urllib.parse.urlencode(query)}",
            "--data-dir", str(self.out / "clients" / name), "--threads", "1", *self._data(),
        ]  # fmt: skip

    def baseline(self) -> list[str]:
        """The command line of FedAvg on the same stream, with the same task-model settings."""
        return [
            "fleet-sim", BASELINE, "--scenario", SCENARIO, "--dataset", DATASET, "--settings", self.preset,
            "--clients", str(self.clients), "--rounds", str(self.rounds), "--seed", str(self.seed),
            "--set", f"samples_per_class={self.samples}", *self._test_part(), "--threads", "1", "--workers", "1",
            "--out", str(self.out / BASELINE), *self._data(),
        ]  # fmt: skip

    def note(self, **facts: Any) -> None:
        """Add facts to the folder's marker."""
        plan = {name: _plain(value) for name, value in dataclasses.asdict(self).items()}
        note_facts(self.out / MARKER, {**plan, **facts})

    def _test_part(self) -> list[str]:
        return [] if self.test_samples is None else ["--set", f"test_samples_per_class={self.test_samples}"]

    def _data(self) -> list[str]:
        return ["--data-root", str(self.data_root)] if self.data_root is not None else []


def make_plan(
    out: Path, preset: str, seed: int, *, clients: int | None, rounds: int | None, data_root: Path | None
) -> Plan:
    """Return a plan whose sizes are those of the preset, where nothing else is asked for.

    Raises:
        SettingsError: An unknown preset, or numbers that make no fleet.
    """
    if preset not in SIZES:
        raise unknown_settings(preset)
    size = SIZES[preset]
    found = Plan(
        out=out,
        preset=preset,
        clients=size.num_clients if clients is None else clients,
        rounds=rounds if rounds is not None else size.num_rounds or SIZES["demo"].num_rounds or 1,
        samples=size.samples_per_class,
        test_samples=size.test_samples_per_class,
        seed=seed,
        data_root=data_root,
    )
    for name in ("clients", "rounds"):
        if getattr(found, name) < 1:
            raise SettingsError(f"--{name} is {getattr(found, name)}, expected at least 1")
    if seed < 0:
        raise SettingsError(f"--seed is {seed}, expected 0 or more")
    return found


def clear(out: Path) -> None:
    """Make the demo's folder, and remove what an earlier demo left there.

    Raises:
        SettingsError: It holds something else, which is not ours to remove, or it can't be written.
    """
    clear_folder(out, MARKER, _OWN, ("logs", "clients"))


def find_data(data_root: Path | None, say: Callable[[str], None]) -> Dataset:
    """Return the data set, downloaded by torchvision where it isn't found.

    Raises:
        SettingsError: It can't be found and can't be fetched; says how to get it.
    """
    try:
        return load_dataset(DATASET, data_root=data_root)
    except SettingsError as missing:
        if "not found" not in str(missing):
            raise
        say("Fashion-MNIST is not on this machine: torchvision downloads it now, once, about 30 MB.")
        say("  `sudo apt install dataset-fashion-mnist` gets Debian's copy, --data-root names a folder of your own.")
        return load_dataset(DATASET, data_root=data_root, download=True)


def _plain(value: object) -> object:
    return os.fspath(value) if isinstance(value, Path) else value
