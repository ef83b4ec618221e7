"""One run, as an operator asks for it: a value that command line, tables and scripts share.

Every option of ``fleet-sim METHOD`` is a field, with its help; the command line is made from the fields and a command
that does the same is made from a value. Between processes it travels as JSON. Imports neither torch nor NumPy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.help_groups import ADVANCED
from replayfleet.federation.paths import check_folder
from replayfleet.federation.service.cluster.engine import HERE, check_engine
from replayfleet.federation.service.command import SettingOption
from replayfleet.federation.service.settings import TRAINING, Option, check_settings, settings_of, split_overrides
from replayfleet.models.specs import check_architecture

FROM_STDIN = "_run"
"""The only argument of ``fleet-sim`` between our own processes: the run stands in JSON on stdin."""

MAX_SEED = 2**63 - 1

STREAM = "Stream"
RESULTS = "Results"
HOSTILE = "Hostile clients"

_ALWAYS_NAMED = ("scenario", "dataset", "preset", "seed", "threads")
"""What a written command says even where it is the default, which may change."""

_OPTIONS_FOR = {
    "num_clients": "clients",
    "num_rounds": "rounds",
    "overlap": "overlap",
    "num_absent": "absent",
    "serve": "serve",
}
"""Settings that have an option of their own."""

_OF_SETTINGS = "of the settings"


def _check_model(name: Any) -> None:
    try:
        check_architecture(name)
    except ValueError as error:
        raise SettingsError(str(error)) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """What an operator asked for, unchecked. None is "of the preset"."""

    method: str
    scenario: Annotated[
        str,
        Option(
            "What comes when: gradual, circulating, extreme or driving; rotated, permuted, sequential or few-shot, "
            "whose tasks last for several rounds.",
            STREAM,
        ),
    ] = "circulating"
    dataset: Annotated[
        str,
        Option(
            "Data set: fashion-mnist, fashion-mnist-turned, mnist, emnist-byclass, cifar-10, cifar-100, imagenet-10, "
            "tinyimagenet-100, carla-crops, carla-boxes (with --scenario driving), features, or folder.",
            STREAM,
        ),
    ] = "fashion-mnist"
    preset: Annotated[
        str,
        Option(
            "Preset of stream and method: paper, medium, small, demo or tiny.",
            STREAM,
            flags="--settings",
        ),
    ] = "small"
    model: Annotated[
        str,
        Option(
            "Task model: resnet20 (pFedGRP's), cnn (McMahan's), lenet (FedGP's code), resnet18 or resnet20-he (He et "
            "al.'s), the ResNets also with a cosine head (resnet20-cosine), linear, or one that an installed package "
            "adds. fedcil and affcl have networks of their own, whatever stands here.",
            TRAINING,
            check=_check_model,
        ),
    ] = "resnet20"
    clients: Annotated[
        Annotated[int, Meta(ge=1, le=100_000)] | None, Option("Number of clients.", STREAM, unset=_OF_SETTINGS)
    ] = None
    rounds: Annotated[Annotated[int, Meta(ge=1)] | None, Option("Number of rounds.", STREAM, unset=_OF_SETTINGS)] = None
    overlap: Annotated[int | None, Option("Classes that adjacent task types of a client share.", STREAM, unset="0")] = (
        None
    )
    absent: Annotated[
        int | None,
        Option("Clients that miss a round; they are drawn anew for each but the first.", STREAM, unset="0"),
    ] = None
    seed: Annotated[
        int, Meta(ge=0, le=MAX_SEED), Option("What stream, models and training derive their randomness from.", STREAM)
    ] = 0
    out: Annotated[Path, Option("Folder for the results.", RESULTS, metavar="DIR", check=check_folder)]
    data_root: Annotated[
        Path | None,
        Option(
            "Folder of data sets.",
            STREAM,
            metavar="DIR",
            unset="$REPLAYFLEET_DATA, else where Debian and earlier downloads put them",
        ),
    ] = None
    download: Annotated[bool, Option("Let torchvision fetch a data set that is not found.", STREAM)] = False
    image_size: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Option("Side of an image: 32 or 64 with --dataset folder, 28, 32 or 64 with features.", STREAM, unit="pixels"),
    ] = None
    overrides: Annotated[
        tuple[str, ...],
        Option("Changes one setting of the stream or the method.", STREAM, metavar="KEY=VALUE", flags="--set"),
    ] = ()
    serve: Annotated[
        Literal["downloaded", "best"] | None,
        Option(
            "What clients serve: what they download, or what proves best on their own evidence (docs/serving.md).",
            TRAINING,
            unset=_OF_SETTINGS,
        ),
    ] = None
    threads: Annotated[
        int, Meta(ge=1, le=256), Option("Threads of one operation; results depend on their number.", TRAINING)
    ] = 1
    workers: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Option(
            "Clients that train at the same time; results don't depend on it.",
            TRAINING,
            unset="cores / threads, 1 on a GPU",
        ),
    ] = None
    engine: Annotated[
        str,
        Option(
            "Where clients train and are mixed for: here, in this process; ray, on a Ray cluster of this machine; or "
            "ray://HOST:PORT, one that runs. Results don't depend on it. Needs replayfleet[ray].",
            TRAINING,
            check=check_engine,
        ),
    ] = HERE
    torch_device: Annotated[str, Option("Where methods compute: cpu, cuda, cuda:1, ...", TRAINING)] = "cpu"
    in_step: Annotated[
        bool | None,
        Option(
            "Train what clients ask for at the same time as one network.",
            TRAINING,
            unset="in step on a GPU only",
            flags="--in-step/--one-by-one",
        ),
    ] = None
    attack: Annotated[
        Literal["sign-flip", "tenfold", "label-flip", "random"] | None,
        Option("What hostile clients do in every round (docs/robust.md).", HOSTILE, unset="nobody is hostile"),
    ] = None
    hostile: Annotated[
        int, Meta(ge=1), Option("Clients that do it, the last ones; accuracies are the others'.", HOSTILE)
    ] = 1
    quarantine: Annotated[
        bool,
        Option("Screen uploads as a fleet's aggregator does, and leave out those that no training makes.", HOSTILE),
    ] = False
    minutes: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Option("Begin no round, after the first, that would end later; --resume goes on.", RESULTS, unit="min"),
    ] = None
    initial: Annotated[
        Path | None,
        Option(
            "A trained model that everybody begins with, as `model-export task --split`, or `model-export detector "
            "--split`, writes it; a classifier may know fewer classes.",
            TRAINING,
            metavar="FILE",
            unset="random weights",
        ),
    ] = None
    perturb_weights: Annotated[
        float,
        Meta(ge=0, le=0.01),
        Option(
            "Scale all initial weights by 1 + this, 1e-7 for example: how far the same run then ends up elsewhere is "
            "how much a difference must be to mean anything.",
            ADVANCED,
        ),
    ] = 0.0
    sampler: Annotated[
        Literal["eager", "onnx"],
        Option("What runs sub-generators: PyTorch, or their exported graph as on a device.", ADVANCED),
    ] = "eager"
    compare: Annotated[
        tuple[Path, ...],
        Option(
            "Folder or result.json of another run on the same stream, for the chart; centralized's gives the regret.",
            RESULTS,
            metavar="PATH",
        ),
    ] = ()
    resume: Annotated[bool, Option("Continue an interrupted run in --out.", RESULTS)] = False
    overwrite: Annotated[bool, Option("Replace an earlier run in --out.", RESULTS)] = False

    def check(self) -> None:
        """Raise SettingsError for what is wrong whatever the method, the data set and the machine are."""
        check_settings(self)
        if self.resume and self.overwrite:
            raise SettingsError("--resume and --overwrite exclude each other")
        if self.attack is None and self.hostile != 1:
            raise SettingsError("--hostile says how many attack; --attack must say how")
        self.check_overrides()

    def check_overrides(self) -> None:
        """Raise SettingsError for a setting that is given twice, by an option of its own too."""
        for key, value in split_overrides(self.overrides).items():
            option = _OPTIONS_FOR.get(key)
            if option is not None and getattr(self, option) is not None:
                raise SettingsError(f"--{option} and --set {key}={value} are about the same; leave one of them out")

    def changes(self) -> dict[str, str]:
        """Return the settings of stream and method that differ from the preset's.

        Raises:
            SettingsError: A text of ``overrides`` has no ``=``, or a key comes twice.
        """
        return split_overrides(self.overrides) | ({} if self.serve is None else {"serve": self.serve})

    def command(self) -> list[str]:
        """Return the words of a command that does the same."""
        words = ["fleet-sim", self.method]
        for name, setting in settings_of(RunSpec).items():
            value = getattr(self, name)
            if setting.option is None or (value == setting.default and name not in _ALWAYS_NAMED):
                continue
            flag, opposite = setting.flag, setting.option.flags.partition("/")[2] or f"--no-{setting.flag[2:]}"
            if isinstance(value, bool):
                words.append(flag if value else opposite)
            else:
                several = value if isinstance(value, tuple) else (value,)
                words += [word for single in several for word in (flag, str(single))]
        return words

    def encode(self) -> bytes:
        """Return it as JSON, for another process."""
        return msgspec.json.encode(self, enc_hook=str)

    @classmethod
    def decode(cls, data: bytes) -> RunSpec:
        """Return what ``encode`` was given."""
        return msgspec.json.decode(data, type=cls, dec_hook=lambda kind, text: kind(text))


def options_like(names: Sequence[str], **helps: str) -> list[SettingOption]:
    """Return the options of these fields for another command; ``helps`` says what some mean there."""
    found = []
    for name in names:
        setting = settings_of(RunSpec)[name]
        assert setting.option is not None
        option = dataclasses.replace(setting.option, help=helps.get(name, setting.option.help))
        found.append(SettingOption(dataclasses.replace(setting, option=option), setting.default))
    return found
