"""What an operator can say about a client, in ``edge.toml`` or on the command line."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from replayfleet.devices.budget import TrainingAllowance
from replayfleet.devices.profiles import check_device, required_provider
from replayfleet.edge_client.cameras.uri import parse_sources
from replayfleet.edge_client.learning.collector import CollectorSettings
from replayfleet.edge_client.learning.training.job import SAMPLERS
from replayfleet.edge_client.sources import LearningSettings
from replayfleet.federation.errors import MalformedMessage, SettingsError, nearest
from replayfleet.federation.wire.protocol.limits import check_id


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """Settings of ``edge-client start``.

    Attributes:
        broker: URL, ``mqtts://host:port``, or ``mqtt://`` on this machine.
        client_id: this client's name in the fleet, part of every topic.
        source: where pictures and labelled samples come from: a URI, or several of cameras.
        data_dir: everything that the client keeps.
        device: a key of ``devices.profiles.PROFILES``, or ``auto``.
        fleet: fleet name, part of every topic.
        threads: of training; results depend on it. 0 is what the device allows: half of the cores.
        training_memory_mb: that the training process may hold; 0 is what the device allows, or half of its memory.
        max_temperature_c: above which training is slowed; 0 is the device's limit.
        max_power_w: of the whole board, above which training is slowed; 0 is the device's limit.
        sampler: ``onnx`` or ``eager``: how replay is drawn.
        data_root: where ``dataset://`` sources lie; None looks where the environment and Debian put them.
        view: ``auto``, ``whole`` or ``crops``: what of a camera's picture is classified.
        teacher: an ONNX model that labels cameras' pictures.
        teacher_confidence: softmax probability below which the teacher isn't believed.
        keep_frames_s: seconds that an operator has to label a camera's frame.
        min_samples: labelled samples that a camera's round needs.
        min_pictures: pictures that these must come from, cameras together.
        max_samples: labelled samples that a camera's round takes at most, the newest.
        hold_out: every so many labelled pictures of a camera, one is kept in memory for testing; 0: none.
        show: draw cameras' streams in windows.
        record: write cameras' drawn streams to this film, ``.webm``; several cameras make several films.
        require_provider: refuse to start unless it computes: ``tensorrt``, ``cuda`` or ``cpu``; empty: take what works.
        stay: go on serving frames after the run is finished.
        tls_ca: certificate authority of the broker, PEM; None uses the system's.
        tls_cert: client certificate, PEM.
        tls_key: its key, PEM.
        password_file: user on the first line, password on the second.
        insecure: allow plaintext to a broker that isn't on loopback.
        health_port: port of ``/healthz`` and ``/metrics`` on loopback; 0 picks one, -1 switches them off.
        json_logs: log JSON lines.
    """

    broker: str
    client_id: str
    source: tuple[str, ...] | str
    data_dir: Path
    device: str = "cpu"
    fleet: str = "fleet"
    threads: int = 0
    training_memory_mb: int = 0
    max_temperature_c: float = 0.0
    max_power_w: float = 0.0
    sampler: str = "onnx"
    data_root: Path | None = None
    view: str = "auto"
    teacher: Path | None = None
    teacher_confidence: float = 0.9
    keep_frames_s: float = 60.0
    min_samples: int = 50
    min_pictures: int = 1
    max_samples: int = 2000
    hold_out: int = 0
    show: bool = False
    record: Path | None = None
    require_provider: str = ""
    stay: bool = False
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    password_file: Path | None = None
    insecure: bool = False
    health_port: int = 0
    json_logs: bool = False

    def __post_init__(self) -> None:
        try:
            check_id(self.fleet, "fleet")
            check_id(self.client_id, "client id")
        except MalformedMessage as error:
            raise SettingsError(str(error)) from error
        check_device(self.device)
        if self.require_provider:
            required_provider(self.require_provider)
        if self.sampler not in SAMPLERS:
            raise SettingsError(f"unknown sampler {self.sampler!r}{nearest(self.sampler, SAMPLERS)}")
        if not 0 <= self.threads <= 1024:
            raise SettingsError(f"threads is {self.threads}, expected 0 to 1024")
        for name in ("training_memory_mb", "max_temperature_c", "max_power_w"):
            if not 0 <= getattr(self, name) < 1e9:
                raise SettingsError(f"{name} is {getattr(self, name)}, expected more than 0, or 0 for the device's")
        if not -1 <= self.health_port <= 65535:
            raise SettingsError(f"health_port is {self.health_port}, expected -1 (off), 0 (any) or a port")
        parse_sources(self.sources)
        self.learning()

    @property
    def sources(self) -> tuple[str, ...]:
        """All of them, also where only one is written."""
        return (self.source,) if isinstance(self.source, str) else self.source

    def learning(self) -> LearningSettings:
        """What becomes of cameras' pictures.

        Raises:
            SettingsError: Impossible numbers.
        """
        try:
            collector = CollectorSettings(
                min_samples=self.min_samples,
                max_samples=self.max_samples,
                hold_out=self.hold_out,
                min_pictures=self.min_pictures,
            )
        except ValueError as error:
            raise SettingsError(str(error)) from error
        return LearningSettings(
            view=self.view,
            teacher=self.teacher,
            teacher_confidence=self.teacher_confidence,
            keep_frames_s=self.keep_frames_s,
            collector=collector,
        )

    def allowance(self, allowed: TrainingAllowance, memory_bytes: int) -> TrainingAllowance:
        """Return what training may spend on this board.

        Args:
            allowed: by the device's profile; what the operator wrote wins.
            memory_bytes: of the board; 0 if unknown, then memory is unbounded unless somebody says otherwise.
        """
        return replace(
            allowed,
            memory_bytes=(self.training_memory_mb << 20) or allowed.memory_bytes or memory_bytes // 2 or None,
            max_temperature_c=self.max_temperature_c or allowed.max_temperature_c,
            max_power_w=self.max_power_w or allowed.max_power_w,
        )
