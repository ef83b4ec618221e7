"""The formats that a model can be exported to, and what each takes: one table for help, errors and docs.

What the table has no place for is refused, with the nearest thing that works; nothing is changed silently.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from replayfleet.devices.probing import fitting, probe
from replayfleet.devices.profiles import AUTO, profile
from replayfleet.federation.errors import SettingsError, nearest

KINDS = ("task", "sub-generator", "detector", "sampler")
"""What can be exported. A sampler is a diffusion model with all the steps that draw from it."""


@dataclass(frozen=True, slots=True)
class Format:
    """One row.

    Attributes:
        name: what ``--format`` says.
        suffix: of the file's name.
        holds: what is in the file, for people.
        kinds: which of ``KINDS`` it can hold.
        instead: the nearest format for the other kinds; empty if there are none.
        options: names of ``OPTIONS`` that it takes.
        max_loss_points: what the gate lets it lose if the operator doesn't say; None if it has no gate, for its parity
            says enough.
        max_spreads: how far it may be off the eager model on real inputs, in standard deviations of the eager model's
            answers; None if its parity is absolute. It catches a broken graph; how much rounding costs, the gate says.
        calibrated: its ranges are measured on samples.
    """

    name: str
    suffix: str
    holds: str
    kinds: tuple[str, ...]
    instead: str = ""
    options: tuple[str, ...] = ()
    max_loss_points: float | None = None
    max_spreads: float | None = None
    calibrated: bool = False

    @property
    def gated(self) -> bool:
        """Whether its accuracy is measured before it is written."""
        return self.max_loss_points is not None

    def file_name(self, kind: str) -> str:
        """Return the name of a model's file in a folder."""
        return kind + self.name.removeprefix("onnx").removeprefix("torchscript") + self.suffix


@dataclass(frozen=True, slots=True)
class Option:
    """One option that not every export takes.

    Attributes:
        name: without its dashes.
        kinds: which of ``KINDS`` it is for.
        help: one line.
        why_not: why the other kinds don't take it; empty if all do.
    """

    name: str
    kinds: tuple[str, ...]
    help: str
    why_not: str = ""


_DRAWN = "a sub-generator and a sampler draw their own inputs from --seed"
_GATE = ("calibration", "held", "seed", "max-loss")

FORMATS: tuple[Format, ...] = (
    Format("onnx", ".onnx", "float32 as trained", KINDS, options=("split",)),
    Format(
        "onnx-fp16",
        ".onnx",
        "float16 inside, float32 at both ends; BatchNorm folded",
        KINDS,
        options=_GATE,
        max_loss_points=0.1,
        max_spreads=0.1,
    ),
    Format(
        "onnx-int8",
        ".onnx",
        "QuantizeLinear and DequantizeLinear with fixed ranges, weights per channel; BatchNorm folded",
        ("task", "sub-generator", "detector"),
        instead="onnx-fp16",
        options=("samples", *_GATE),
        max_loss_points=1.0,
        max_spreads=2.0,
        calibrated=True,
    ),
    Format(
        "torchscript",
        ".pt",
        "float32 as trained, for runtimes that take nothing else",
        ("task", "sub-generator", "detector"),
        instead="onnx",
    ),
)

OPTIONS: tuple[Option, ...] = (
    Option(
        "split",
        ("task", "sub-generator", "detector"),
        "Write graph and parameters to two files, as a fleet sends them.",
        "a sampler's parameters are computed into its graph",
    ),
    Option(
        "calibration",
        ("task", "detector"),
        "Samples to calibrate with: a file of images (.npz or .safetensors), or CLASS=FILE, a class's sub-generator. "
        "Can be given several times.",
        _DRAWN,
    ),
    Option("samples", KINDS, "Number of samples to calibrate with."),
    Option("seed", KINDS, "Seed of replay, of latents and of the choice of samples."),
    Option(
        "held",
        ("task", "detector"),
        "File of images and labels, never trained on, that the gate measures accuracy with.",
        _DRAWN,
    ),
    Option("max-loss", KINDS, "Points of accuracy that the gate lets the format lose."),
)

_OF_PRECISION = {"fp32": "onnx", "fp16": "onnx-fp16", "int8": "onnx-int8"}
"""``devices.profiles.DeviceProfile.precision`` -> format."""

DEFAULT_FORMAT = "onnx"
DEFAULT_SAMPLES = 512
DEFAULT_SEED = 0


def chosen_format(name: str | None, device: str | None) -> Format:
    """Return the format that an operator means.

    Args:
        name: of a format; None if none was given.
        device: board that the file is for, as ``edge-client --device`` takes it: the format that serves quickest there.

    Raises:
        SettingsError: Both are given, or one is unknown.
    """
    if device is None:
        return find_format(DEFAULT_FORMAT if name is None else name)
    if name is not None:
        raise SettingsError("--format and --device are both given, and a device says the format; expected one of them")
    found = fitting(probe()) if device == AUTO else profile(device)
    return find_format(_OF_PRECISION[found.precision])


def format_of(precision: str) -> Format | None:
    """Return the ONNX format that computes in this precision, ``devices.profiles.PRECISIONS``; None if it is none."""
    return find_format(_OF_PRECISION[precision]) if precision in _OF_PRECISION else None


def find_format(name: str) -> Format:
    """Return the format of this name.

    Raises:
        SettingsError: There is none; names the nearest.
    """
    for row in FORMATS:
        if row.name == name:
            return row
    raise SettingsError(f"--format: unknown format {name!r}{nearest(name.lower(), [row.name for row in FORMATS])}")


def check_combination(kind: str, row: Format, given: Collection[str]) -> None:
    """Refuse what the table has no place for.

    Args:
        kind: one of ``KINDS``.
        row: the format.
        given: names of the options that the operator wrote.

    Raises:
        SettingsError: Says what to write instead.
    """
    if kind not in row.kinds:
        raise SettingsError(f"--format: {row.name} can't hold a {kind}; did you mean {row.instead!r}?")
    for option in OPTIONS:
        if option.name not in given:
            continue
        if option.name not in row.options:
            takers = [other.name for other in FORMATS if option.name in other.options and kind in other.kinds]
            raise SettingsError(
                f"--{option.name}: --format {row.name} doesn't take it; did you mean --format {' or '.join(takers)}?"
            )
        if kind not in option.kinds:
            raise SettingsError(f"--{option.name}: {option.why_not}; leave it out for a {kind}")


def option_help(name: str) -> str:
    """Return an option's help: its line, then the formats and kinds that take it."""
    option = next(option for option in OPTIONS if option.name == name)
    takers = [row.name for row in FORMATS if name in row.options]
    kinds = "" if option.kinds == KINDS else f"; for {' and '.join(option.kinds)}"
    return f"{option.help} [{', '.join(takers)}{kinds}]"
