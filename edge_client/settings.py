"""What an operator can say about a client, in ``edge.toml``, in the environment or on the command line."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from replayfleet.devices.budget import TrainingAllowance
from replayfleet.devices.profiles import check_device, required_provider
from replayfleet.edge_client.learning.settings import LearningSettings
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.help_groups import ADVANCED, CONNECTION
from replayfleet.federation.service.data_dir import check_data_dir
from replayfleet.federation.service.member_settings import ConnectionSettings, WatchSettings, check_address
from replayfleet.federation.service.settings import CAMERA, TRAINING, Option
from replayfleet.federation.wire.protocol.limits import check_id
from replayfleet.federation.wire.transport.broker_address import is_loopback

DEVICE = "Device"
ANSWERS = "Answers"


def _check_sources(texts: Any) -> None:
    from replayfleet.edge_client.cameras.uri import parse_sources

    parse_sources((texts,) if isinstance(texts, str) else texts)


def check_studio(text: Any) -> None:
    """Raise a SettingsError unless this is no studio, or an address that only this machine reaches."""
    if text and not is_loopback(check_address(text)[0]):
        raise SettingsError(
            f"studio {text}: other machines would see this device's pictures; expected an address on loopback, which "
            "`ssh -L 8090:127.0.0.1:8090 DEVICE` brings to yours"
        )


def check_operator(text: Any) -> None:
    """Raise a SettingsError unless this names an operator's key, or nobody."""
    if text:
        from replayfleet.edge_client.operator.studio.sharing import operator_key

        operator_key(text)


def check_answers(text: Any) -> None:
    """Raise a SettingsError unless answers could be published there, or nowhere."""
    if text:
        from replayfleet.edge_client.operator.answers import Place

        Place.parse(text)


DeviceName = Annotated[
    str,
    Option(
        "Profile of the board: cpu, arm-cpu, cuda, jetson, jetson-orin-nano, ..., or auto, which looks at the board.",
        DEVICE,
        check=check_device,
    ),
]
RequiredProvider = Annotated[
    str,
    Option(
        "Refuse to start unless this computes: tensorrt, cuda or cpu.",
        DEVICE,
        unset="take what works",
        check=required_provider,
    ),
]
Broker = Annotated[
    str,
    Option(
        "The broker's address, mqtts://host:port; mqtt:// is for a broker on this machine.", CONNECTION, metavar="URL"
    ),
]
ClientId = Annotated[
    str,
    Option(
        "This client's name in the fleet, which is part of its topics.",
        CONNECTION,
        check=partial(check_id, what="client id"),
    ),
]
Sources = Annotated[
    tuple[str, ...] | str,
    Option(
        "Where pictures and labelled samples come from: dataset://NAME?..., folder://PATH?..., or cameras, of which "
        "there can be several (NAME=URI names one): camera://0, csi://0, rtsp://..., video:///FILE, images:///FOLDER, "
        "carla-replay:///FOLDER, carla://HOST:PORT, synthetic://.",
        CAMERA,
        metavar="URI",
        check=_check_sources,
    ),
]


@dataclass(frozen=True, kw_only=True)
class ClientSettings(WatchSettings, LearningSettings, ConnectionSettings):
    """Settings of ``edge-client start``."""

    broker: Broker
    client_id: ClientId
    source: Sources
    data_dir: Annotated[
        Path,
        Option(
            "Everything that the client keeps; after a restart it goes on from there.",
            DEVICE,
            metavar="DIR",
            check=check_data_dir,
        ),
    ]
    device: DeviceName = "cpu"
    require_provider: RequiredProvider = ""
    precision: Annotated[
        Literal["auto", "fp32", "fp16", "int8"],
        Option(
            "What the served model computes in, where the fleet's aggregator makes such a one and it is accurate "
            "enough: auto is what serves quickest on the device, fp16 on GPUs. Training computes in float32.",
            DEVICE,
        ),
    ] = "auto"
    stay: Annotated[bool, Option("Go on serving frames after the run is finished.", DEVICE)] = False
    data_root: Annotated[
        Path | None,
        Option(
            "Folder in which dataset:// sources look for their data set.",
            CAMERA,
            metavar="DIR",
            unset="$REPLAYFLEET_DATA, else where Debian puts them",
        ),
    ] = None
    show: Annotated[bool, Option("Draw cameras' pictures with their answers in windows.", CAMERA)] = False
    studio: Annotated[
        str,
        Option(
            "Show the live picture in a browser here, with the least certain frames, which wait for a label by click "
            "or key; loopback only.",
            CAMERA,
            metavar="HOST:PORT",
            unset="no studio",
            check=check_studio,
        ),
    ] = ""
    thumbnails: Annotated[
        bool,
        Option(
            "Send each camera's newest picture every 5 s, at most 240 pixels wide, to the fleet's aggregator, for its "
            "console. Pictures then leave the device.",
            CAMERA,
        ),
    ] = False
    remote_operator: Annotated[
        str,
        Option(
            "Let whoever signs with this key look at this device's pictures and label them with `edge-client studio`, "
            "which shows the key. Pictures then leave the device, over the fleet's broker.",
            CAMERA,
            metavar="KEY|FILE",
            unset="nobody; pictures stay here",
            check=check_operator,
        ),
    ] = ""
    record: Annotated[
        Path | None,
        Option(
            "Write the drawn pictures to this film, .webm; several cameras make several films.", CAMERA, metavar="FILE"
        ),
    ] = None
    answers: Annotated[
        str,
        Option(
            "Publish what the cameras see as JSON below this MQTT topic, mqtts://HOST:PORT/TOPIC; no pictures.",
            ANSWERS,
            metavar="URL",
            unset="nowhere",
            check=check_answers,
        ),
    ] = ""
    answers_ca: Annotated[
        Path | None,
        Option(
            "Certificate authority that signed that broker's certificate, PEM.",
            ANSWERS,
            unset="the system's",
            needs="answers",
        ),
    ] = None
    answers_password_file: Annotated[
        Path | None,
        Option(
            "File with the user on its first line and the password on its second, for that broker.",
            ANSWERS,
            needs="answers",
        ),
    ] = None
    answers_insecure: Annotated[
        bool, Option("Let others on the way read and forge the answers.", ANSWERS, needs="answers")
    ] = False
    home_assistant: Annotated[
        bool,
        Option("Announce every camera to Home Assistant, which listens at that broker.", ANSWERS, needs="answers"),
    ] = False
    train: Annotated[
        bool,
        Option(
            "Take part in training. Without it, or where torch isn't installed, the device only serves, and no round "
            "waits for it.",
            TRAINING,
        ),
    ] = True
    threads: Annotated[
        int,
        Meta(ge=0, le=1024),
        Option(
            "Threads that training uses; its results depend on their number.",
            TRAINING,
            unset="0, for what the device allows: half of the cores",
        ),
    ] = 0
    training_device: Annotated[
        str,
        Option(
            "Where training computes: cpu, cuda, cuda:1, ..., or auto, a GPU that computes what the CPU does. A GPU's "
            "results differ from the CPU's in rounding, and it may serve the cameras too.",
            TRAINING,
        ),
    ] = "cpu"
    training_memory_mb: Annotated[
        int,
        Meta(ge=0, lt=10**9),
        Option(
            "Memory that the training process may hold.",
            TRAINING,
            unit="MiB",
            unset="0, for what the device allows, or half of its memory",
        ),
    ] = 0
    max_temperature_c: Annotated[
        float,
        Meta(ge=0, lt=1e9),
        Option("Temperature above which training is slowed.", TRAINING, unit="°C", unset="0, for the device's"),
    ] = 0.0
    max_power_w: Annotated[
        float,
        Meta(ge=0, lt=1e9),
        Option(
            "Power of the whole board above which training is slowed.",
            TRAINING,
            unit="W",
            unset="0, for the device's",
        ),
    ] = 0.0
    sampler: Annotated[
        Literal["onnx", "eager"],
        Option("What draws replay from sub-generators: their exported graph, or PyTorch.", ADVANCED),
    ] = "onnx"

    @property
    def sources(self) -> tuple[str, ...]:
        """All of them, also where only one is written."""
        return (self.source,) if isinstance(self.source, str) else self.source

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
