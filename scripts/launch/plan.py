"""What is started: a value. A demo makes it from its own settings, ``RunningFleet`` runs it."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replayfleet.federation.atomic import write_atomic
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.simulator.run_spec import MAX_SEED
from replayfleet.federation.simulator.settings import SIZES, unknown_settings
from replayfleet.federation.streams.datasets import Dataset, load_dataset

Command = Sequence[str]
"""The name of a console script, or the path of a program, and its arguments."""

FASHION_MNIST = "fashion-mnist"
SCENARIO = "circulating"


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetPlan:
    """The processes of one fleet; aggregator and clients are told the broker when they are started.

    Attributes:
        logs: folder for one log per process.
        data_dir: the aggregator's, which keeps the journal.
        aggregator: its command.
        clients: name -> command.
        beside: name -> command of what else runs; it steps back for the others.
        line: what stands between clients and broker: told the broker's port with ``--to``, it prints ``port N``.
        prefix: of the logs' names.
        leave_s: clients leave by themselves within this time after the aggregator did.
    """

    logs: Path
    data_dir: Path
    aggregator: Command
    clients: Mapping[str, Command]
    beside: Mapping[str, Command] = field(default_factory=dict)
    line: Command = ()
    prefix: str = ""
    leave_s: float = 30.0


def aggregator_command(
    data_dir: Path, fleet: str, *, clients: int, rounds: int, method: str, task: Command, preset: str, seed: int
) -> list[str]:
    """Return the command of an aggregator that computes with one thread; ``task`` are the options that name it."""
    return [
        "aggregator", "serve", "--fleet", fleet, "--data-dir", str(data_dir), "--clients", str(clients),
        "--rounds", str(rounds), "--method", method, *task, "--settings", preset, "--seed", str(seed), "--threads", "1",
    ]  # fmt: skip


def client_command(data_dir: Path, fleet: str, source: str) -> list[str]:
    """Return the command of a client that is called as its folder and computes with one thread."""
    return [
        "edge-client", "start", "--device", "cpu", "--fleet", fleet, "--client-id", data_dir.name,
        "--source", source, "--data-dir", str(data_dir), "--threads", "1",
    ]  # fmt: skip


def write_task(path: Path, **fields: Any) -> None:
    """Write a file for ``aggregator serve --task``; JSON's values are TOML's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "".join(f"{name} = {json.dumps(value)}\n" for name, value in fields.items()).encode())


def stream_source(
    preset: str, index: int, *, clients: int, rounds: int, seed: int, rate: float, test: int | None = None
) -> str:
    """Return a client's share of Fashion-MNIST as a stream, as large as a preset has it but for ``test``."""
    size = SIZES[preset]
    query = {
        "scenario": SCENARIO,
        "clients": clients,
        "client": index,
        "rounds": rounds,
        "samples": size.samples_per_class,
        "test": (size.test_samples_per_class or 0) if test is None else test,
        "seed": seed,
        "rate": rate,
    }
    return f"dataset://{FASHION_MNIST}?{urllib.parse.urlencode(query)}"


def check_sizes(preset: str, *, clients: int, rounds: int, seed: int) -> None:
    """Refuse a preset that isn't one, and numbers that make no fleet.

    Raises:
        SettingsError: Says which, and what was expected.
    """
    if preset not in SIZES:
        raise unknown_settings(preset)
    for name, value, least in (("clients", clients, 1), ("rounds", rounds, 1), ("seed", seed, 0)):
        if value < least:
            more = "at least 1" if least else "0 or more"
            raise SettingsError(f"--{name} is {value}, expected {more}")
    if seed > MAX_SEED:
        raise SettingsError(f"--seed is {seed}, expected 0 to {MAX_SEED}")


def find_data(data_root: Path | None, say: Callable[[str], None]) -> Dataset:
    """Return the data set, downloaded by torchvision where it isn't found.

    Raises:
        SettingsError: It can't be found and can't be fetched; says how to get it.
    """
    try:
        return load_dataset(FASHION_MNIST, data_root=data_root)
    except SettingsError as missing:
        if "not found" not in str(missing):
            raise
        say("Fashion-MNIST is not on this machine: torchvision downloads it now, once, about 30 MB.")
        say("  `sudo apt install dataset-fashion-mnist` gets Debian's copy, --data-root names a folder of your own.")
        return load_dataset(FASHION_MNIST, data_root=data_root, download=True)
