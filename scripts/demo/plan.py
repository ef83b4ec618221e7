"""What the demo runs: its folder and its command lines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replayfleet.federation.simulator.settings import SIZES
from replayfleet.federation.streams.stream import client_id
from replayfleet.scripts.launch.folder import note_facts
from replayfleet.scripts.launch.plan import (
    FASHION_MNIST,
    SCENARIO,
    FleetPlan,
    aggregator_command,
    check_sizes,
    client_command,
    stream_source,
)

METHODS = {"pfedgrp": "pFedGRP", "pfedgrp-plus": "pFedGRP-plus"}
"""What a fleet of the demo can learn by -> its name for people; the first unless another is asked for."""

METHOD = next(iter(METHODS))
DOWNLOADED = "downloaded"
"""What clients serve unless another way is asked for."""
BASELINE = "fedavg"
MARKER = "demo.json"
"""Says that a folder belongs to the demo, and what was run there."""

OWN = ("aggregator", "clients", BASELINE, "logs", "report.html")
"""What the demo writes into its folder beside the marker."""

_FLEET = "demo"
_FRAME_RATE_HZ = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A checked demo."""

    out: Path  # where everything goes
    preset: str  # of the method and the stream
    seed: int  # of the stream, the models and the training
    clients: int
    rounds: int
    method: str = METHOD  # of the fleet
    serve: str = DOWNLOADED  # what its clients serve
    data_root: Path | None = None  # the operator's own folder of data sets

    def __post_init__(self) -> None:
        check_sizes(self.preset, clients=self.clients, rounds=self.rounds, seed=self.seed)

    @property
    def logs(self) -> Path:
        return self.out / "logs"

    def fleet(self) -> FleetPlan:
        """Return the method's fleet, and beside it FedAvg in the simulator: same stream, same task model."""
        size = SIZES[self.preset]
        data = [] if self.data_root is None else ["--data-root", str(self.data_root)]
        sizes = {"clients": self.clients, "rounds": self.rounds, "seed": self.seed}
        options = [word for name, number in sizes.items() for word in (f"--{name}", str(number))]
        options += ["--set", f"samples_per_class={size.samples_per_class}"]
        if size.test_samples_per_class is not None:  # 0 is a source's word for what the simulator calls null
            options += ["--set", f"test_samples_per_class={size.test_samples_per_class or 'null'}"]
        baseline = [
            "fleet-sim", BASELINE, "--scenario", SCENARIO, "--dataset", FASHION_MNIST, "--settings", self.preset,
            *options, "--threads", "1", "--workers", "1", "--out", str(self.out / BASELINE), *data,
        ]  # fmt: skip
        clients = {}
        for index in range(self.clients):
            source = stream_source(self.preset, index, **sizes, rate=_FRAME_RATE_HZ)
            folder = self.out / "clients" / client_id(index)
            clients[folder.name] = [*client_command(folder, _FLEET, source), *data]
        task = ("--dataset", FASHION_MNIST)
        data_dir = self.out / "aggregator"
        aggregator = aggregator_command(data_dir, _FLEET, **sizes, method=self.method, task=task, preset=self.preset)
        if self.serve != DOWNLOADED:
            aggregator += ["--serve", self.serve]
        return FleetPlan(
            logs=self.logs, data_dir=data_dir, aggregator=aggregator, clients=clients, beside={BASELINE: baseline}
        )

    def note(self, **facts: Any) -> None:
        """Add facts to the folder's marker."""
        note_facts(self.out / MARKER, {"preset": self.preset, "seed": self.seed, **facts})


def make_plan(
    out: Path,
    preset: str,
    seed: int,
    *,
    clients: int | None,
    rounds: int | None,
    data_root: Path | None,
    method: str = METHOD,
    serve: str = DOWNLOADED,
) -> Plan:
    """Return a plan whose sizes are those of the preset, where nothing else is asked for.

    Raises:
        SettingsError: An unknown preset, or numbers that make no fleet.
    """
    size = SIZES.get(preset, SIZES["demo"])
    own_rounds = size.num_rounds or SIZES["demo"].num_rounds or 1
    return Plan(
        out=out,
        preset=preset,
        seed=seed,
        clients=size.num_clients if clients is None else clients,
        rounds=own_rounds if rounds is None else rounds,
        method=method,
        serve=serve,
        data_root=data_root,
    )
