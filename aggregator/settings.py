"""What an operator can say about an aggregator, in ``aggregator.toml`` or on the command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replayfleet.aggregator.rounds import RoundRules
from replayfleet.federation.errors import MalformedMessage, SettingsError
from replayfleet.federation.service.fleet_spec import make_spec
from replayfleet.federation.service.fleet_task import task_kind
from replayfleet.federation.service.settings import read_toml, settings_from
from replayfleet.federation.service.variants import resolved
from replayfleet.federation.wire.protocol.limits import check_id
from replayfleet.federation.wire.protocol.messages import FleetSpec
from replayfleet.models.specs import AnyTaskSpec


@dataclass(frozen=True, kw_only=True)
class AggregatorSettings:
    """Settings of ``aggregator serve``.

    Attributes:
        data_dir: everything that the aggregator keeps.
        clients: a round closes at once with uploads from this many clients.
        rounds: end after this many; None serves for ever.
        min_clients: at its deadline a round closes with at least this many, else it is extended.
        deadline_s: seconds that a round stays open.
        fleet: fleet name, part of every topic.
        method: a key of ``ALL_METHODS`` or of ``VARIANTS``.
        dataset: names the task, of a data set whose classes are known without reading it.
        task: a TOML file with the fields of ``TaskSpec``, instead of ``dataset``; with ``kind = "detection"`` those of
            ``DetectionSpec``.
        settings: preset of the method's settings.
        set: method settings on top of the preset.
        seed: what all randomness of the run derives from.
        broker: URL; None starts a private broker.
        tls_ca: certificate authority of the broker, PEM; None uses the system's.
        tls_cert: client certificate, PEM.
        tls_key: its key, PEM.
        password_file: user on the first line, password on the second.
        insecure: allow plaintext to a broker that isn't on loopback.
        health_port: port of ``/healthz`` and ``/metrics`` on loopback; 0 picks one, -1 switches them off.
        threads: of one tensor operation, as ``fleet-sim --threads``; results depend on it.
        json_logs: log JSON lines.
    """

    data_dir: Path
    clients: int
    rounds: int | None = None
    min_clients: int = 1
    deadline_s: float = 600.0
    fleet: str = "fleet"
    method: str = "pfedgrp"
    dataset: str = "fashion-mnist"
    task: Path | None = None
    settings: str = "small"
    set: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    broker: str | None = None
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    password_file: Path | None = None
    insecure: bool = False
    health_port: int = 0
    threads: int = 2
    json_logs: bool = False

    def __post_init__(self) -> None:
        try:
            check_id(self.fleet, "fleet")
        except MalformedMessage as error:
            raise SettingsError(str(error)) from error
        if not -1 <= self.health_port <= 65535:
            raise SettingsError(f"health_port is {self.health_port}, expected -1 (off), 0 (any) or a port")
        if not 1 <= self.threads <= 1024:
            raise SettingsError(f"threads is {self.threads}, expected 1 to 1024")
        self.rules()

    def rules(self) -> RoundRules:
        """When rounds close.

        Raises:
            SettingsError: Impossible numbers.
        """
        return RoundRules(
            num_clients=self.clients,
            min_clients=self.min_clients,
            deadline_s=self.deadline_s,
            num_rounds=self.rounds,
        )

    def task_spec(self) -> AnyTaskSpec:
        """The task, from the file or from the data set's name.

        Raises:
            SettingsError: Unknown data set, or an unusable file.
        """
        if self.task is None:
            from replayfleet.federation.streams.datasets import task_for

            return task_for(self.dataset)
        kind, fields = task_kind(read_toml(self.task))
        return settings_from(kind, fields, self.task.name)

    def spec(self) -> FleetSpec:
        """What all members of the fleet agree on; imports torch.

        Raises:
            SettingsError: Unknown method, preset, data set or method setting.
        """
        method, changes = resolved(self.method, self.settings)
        return make_spec(
            self.fleet,
            method,
            self.task_spec(),
            preset=self.settings,
            overrides=changes | self.set,
            run_seed=self.seed,
        )
