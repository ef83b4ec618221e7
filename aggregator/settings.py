"""What an operator can say about an aggregator, in ``aggregator.toml``, in the environment or on the command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from replayfleet.aggregator.console.settings import CONSOLE, ConsoleSettings
from replayfleet.aggregator.leading import Claim
from replayfleet.aggregator.operator.traces import check_traces
from replayfleet.aggregator.precision.rules import PrecisionRules, allowed_of, check_precisions
from replayfleet.aggregator.rounds.machine import MAX_LATE_ROUNDS, RoundRules
from replayfleet.aggregator.rounds.opening import parse_opening
from replayfleet.devices.profiles import FP16, INT8
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.help_groups import ADVANCED, CONNECTION, joined
from replayfleet.federation.service.cluster.engine import HERE, check_engine
from replayfleet.federation.service.data_dir import check_data_dir
from replayfleet.federation.service.fleet.presets import MAX_CHANGE, SETTINGS, STORES_DATA, TASKS
from replayfleet.federation.service.fleet.spec import make_spec
from replayfleet.federation.service.fleet.task import task_kind
from replayfleet.federation.service.fleet.variants import resolved
from replayfleet.federation.service.member_settings import ConnectionSettings, WatchSettings, check_address
from replayfleet.federation.service.settings import TRAINING, Option, check_settings, read_toml, settings_from
from replayfleet.federation.wire.protocol.messages import FleetSpec
from replayfleet.models.specs import AnyTaskSpec

ROUNDS, PRECISION = "Rounds", "Precision"


@dataclass(frozen=True, kw_only=True)
class AggregatorSettings(WatchSettings, ConnectionSettings):
    """Settings of ``aggregator serve``."""

    broker: Annotated[
        str | None,
        Option(
            "The broker's address, mqtts://host:port; mqtt:// is for a broker on this machine.",
            CONNECTION,
            metavar="URL",
            unset="a private broker is started",
        ),
    ] = None
    data_dir: Annotated[
        Path,
        Option(
            "Everything that the aggregator keeps; after a restart it goes on there.",
            ROUNDS,
            metavar="DIR",
            check=check_data_dir,
        ),
    ]
    clients: Annotated[
        int | None,
        Meta(ge=1, le=100_000),
        Option(
            "A round closes at once with uploads from this many clients, fewer where members are excluded or only "
            "serve.",
            ROUNDS,
            unset="all members that train: those who were enrolled, or took part",
        ),
    ] = None
    min_clients: Annotated[
        int,
        Meta(ge=1, le=100_000),
        Option("At its deadline a round closes with at least this many uploads; with fewer it is extended.", ROUNDS),
    ] = 1
    deadline_s: Annotated[
        float, Meta(gt=0, le=30 * 86400), Option("How long a round stays open.", ROUNDS, unit="s")
    ] = 600.0
    round_interval_s: Annotated[
        float,
        Meta(ge=0, le=30 * 86400),
        Option(
            "From the beginning of a round to that of the next, at least; clients serve, and train when it is due.",
            ROUNDS,
            unit="s",
            unset="back to back",
        ),
    ] = 0.0
    open_rounds: Annotated[
        str | None,
        Option(
            "What a round waits for before it begins: by-hand, for `aggregator round open`; samples=500, for so many "
            "labelled samples at the members; accuracy=80, for a member whose model answers less than 80 % of its "
            "labels rightly; or 02:00,14:00, for the next of these times, UTC. Until then clients serve. The verb "
            "opens a round in any case.",
            ROUNDS,
            metavar="WHEN",
            unset="for nothing but the interval",
            check=parse_opening,
        ),
    ] = None
    late_rounds: Annotated[
        int,
        Meta(ge=0, le=MAX_LATE_ROUNDS),
        Option(
            "An upload that comes after its round was closed counts in one of so many rounds after it, the less the "
            "later: of a model that is t rounds late 1 / sqrt(1 + t) counts, the rest is the client's newest one.",
            ROUNDS,
            unset="none: it is refused, and what it was trained on is lost to the fleet",
        ),
    ] = 0
    max_change: Annotated[
        float,
        Meta(gt=0, le=1000),
        Option(
            "An upload is left out of its round if its model moved by more than this, in the norm of the model that it "
            "was trained from. Honest training moves one by 0.04 to 0.3.",
            ROUNDS,
        ),
    ] = MAX_CHANGE
    max_clients: Annotated[
        int,
        Meta(ge=1, le=100_000),
        Option("The fleet takes so many clients, revoked ones not counted; a stranger beyond is refused.", ADVANCED),
    ] = 1024
    max_transfers: Annotated[
        int,
        Meta(ge=1, le=16_384),
        Option("Uploads that are received at a time; others wait for their turn and send nothing before.", ADVANCED),
    ] = 64
    rounds: Annotated[
        int | None,
        Meta(ge=1, le=10_000_000),
        Option("The run ends after this many rounds.", ROUNDS, unset="it serves for ever"),
    ] = None
    method: Annotated[
        str,
        Option(
            "Method that the fleet runs: pfedgrp, fedavg, fedgp, der-fedgp, ...; `fleet-sim --list` shows all. With "
            f"{joined(sorted(STORES_DATA))} clients keep real samples.",
            TRAINING,
        ),
    ] = "pfedgrp"
    settings: Annotated[str, Option(f"Preset of the method's settings: {joined(list(SETTINGS))}.", TRAINING)] = "small"
    set: Annotated[
        dict[str, Any], Option("Changes one setting of the method's preset.", TRAINING, metavar="KEY=VALUE")
    ] = field(default_factory=dict)
    serve: Annotated[
        Literal["downloaded", "best"] | None,
        Option(
            "What devices serve: what they download, or what proves best on their own evidence (docs/serving.md).",
            TRAINING,
            unset="of the settings",
        ),
    ] = None
    dataset: Annotated[str, Option(f"The task by its data set: {joined(list(TASKS))}.", TRAINING)] = "fashion-mnist"
    task: Annotated[
        Path | None,
        Option(
            # With kind = "detection" the fields are DetectionSpec's.
            "The task from a TOML file with the fields of TaskSpec, in place of --dataset.",
            TRAINING,
            metavar="FILE",
        ),
    ] = None
    initial: Annotated[
        Path | None,
        Option(
            "A trained model that a new fleet begins with, as `model-export task --split`, or `model-export detector "
            "--split`, writes it from a run of fleet-sim or another fleet; a classifier may know fewer classes.",
            TRAINING,
            metavar="FILE",
            unset="random weights",
        ),
    ] = None
    seed: Annotated[int, Option("What all randomness of the run derives from.", TRAINING)] = 0
    take_over: Annotated[
        bool,
        Option(
            "Lead at once, though another aggregator of this fleet leads; that one stands by from then on. Also with "
            "new keys, if those of a data dir that was used are gone.",
            ADVANCED,
        ),
    ] = False
    precisions: Annotated[
        tuple[str, ...],
        Option(
            "What clients that ask for it may be served beside float32: fp16, int8, several of them, or none.",
            PRECISION,
            metavar="NAME",
            flags="--precision",
            check=check_precisions,
        ),
    ] = (FP16, INT8)
    calibration: Annotated[
        Path | None,
        Option(
            "Images (.npz or .safetensors, as for `model-export`) that rounded models are calibrated with and judged "
            "on.",
            PRECISION,
            metavar="FILE",
            unset="replay, drawn from the fleet's sub-generators",
        ),
    ] = None
    max_loss: Annotated[
        float | None,
        Meta(ge=0, le=100),
        Option(
            "Points of agreement with the float32 model that a rounded one may lose; one that loses more isn't served.",
            PRECISION,
            unset="0.1 for fp16, 1 for int8",
        ),
    ] = None
    threads: Annotated[
        int,
        Meta(ge=1, le=1024),
        Option("Threads of one tensor operation, as of fleet-sim; results depend on their number.", TRAINING),
    ] = 2
    engine: Annotated[
        str,
        Option(
            "Where a round's work for each client is done: here, in this process; ray, on a Ray cluster of this "
            "machine; or ray://HOST:PORT, one that runs. Needs replayfleet[ray].",
            TRAINING,
            check=check_engine,
        ),
    ] = HERE
    torch_device: Annotated[
        str,
        Option(
            "Where the method computes: cpu, cuda, cuda:1, ..., or auto, a GPU that computes what the CPU does. Its "
            "results differ from the CPU's in rounding.",
            TRAINING,
        ),
    ] = "auto"
    traces: Annotated[
        str | None,
        Option(
            "OpenTelemetry collector that gets a trace of each round, OTLP over HTTP; needs replayfleet[traces].",
            ADVANCED,
            metavar="URL",
            unset="no traces",
            check=check_traces,
        ),
    ] = None
    console: Annotated[
        str | None,
        Option(
            "Pages that show the fleet in a browser, in a process beside this one; needs replayfleet[console].",
            CONSOLE,
            metavar="HOST:PORT",
            unset="no pages",
            check=check_address,
        ),
    ] = None
    console_names: Annotated[
        tuple[str, ...],
        Option(
            "A name under which browsers reach the console, beside its host.",
            CONSOLE,
            metavar="NAME",
            flags="--console-name",
            needs="console",
        ),
    ] = ()

    console_tokens: Annotated[
        Path | None,
        Option(
            "File with the tokens of those who may operate or look, as `aggregator token` writes it.",
            CONSOLE,
            metavar="FILE",
            unset="pages are read-only",
            needs="console",
        ),
    ] = None
    console_tls_cert: Annotated[
        Path | None,
        Option("The console's certificate, PEM; needed where other machines reach it.", CONSOLE, needs="console"),
    ] = None
    console_tls_key: Annotated[
        Path | None, Option("The private key of --console-tls-cert, PEM.", CONSOLE, needs="console")
    ] = None

    def __post_init__(self) -> None:
        check_settings(self)
        if self.serve is not None and "serve" in self.set:
            asked = self.set["serve"]
            raise SettingsError(f"--serve and --set serve={asked} are about the same; leave one of them out")
        self.rules()
        self.console_settings()

    def console_settings(self) -> ConsoleSettings | None:
        """The console to start, if any.

        Raises:
            SettingsError: Its address can't be used, or its packages aren't installed.
        """
        if self.console is None:
            return None
        return ConsoleSettings(
            data_dir=self.data_dir,
            listen=self.console,
            names=self.console_names,
            tokens=self.console_tokens,
            tls_cert=self.console_tls_cert,
            tls_key=self.console_tls_key,
            json_logs=self.json_logs,
        )

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
            interval_s=self.round_interval_s,
            opening=None if self.open_rounds is None else parse_opening(self.open_rounds),
            late_rounds=self.late_rounds,
        )

    def precision_rules(self) -> PrecisionRules:
        """How models are rounded for clients that want it; imports numpy.

        Raises:
            SettingsError: The images can't be used for the fleet's task.
        """
        images = None
        if self.calibration is not None:
            from replayfleet.export.samples import read_images

            images = read_images(self.calibration, self.task_spec())
        return PrecisionRules(allowed_of(self.precisions), self.max_loss, images)

    def claim(self) -> Claim:
        """How this aggregator comes to lead its fleet: nobody else reaches a private broker."""
        if self.take_over:
            return Claim.TAKE_OVER
        return Claim.SOLE if self.broker is None else Claim.ASK

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
            overrides=changes | self.set | ({} if self.serve is None else {"serve": self.serve}),
            run_seed=self.seed,
        )
