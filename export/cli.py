"""``model-export``: trained parameters to an ONNX or TorchScript file that agrees with the eager model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from replayfleet.export.formats import (
    DEFAULT_FORMAT,
    DEFAULT_SAMPLES,
    DEFAULT_SEED,
    FORMATS,
    OPTIONS,
    Format,
    check_combination,
    chosen_format,
    option_help,
)
from replayfleet.federation.errors import ArtefactRejected, ReplayfleetError, SettingsError, nearest
from replayfleet.federation.help_groups import ADVANCED, HELP, OptionOfGroup, Program, joined
from replayfleet.federation.imports import without_collections
from replayfleet.federation.paths import ANY_PATH, PLACE
from replayfleet.models.specs import (
    ARCHITECTURES,
    DETECTION_STRIDES,
    DETECTORS,
    IMAGE_SIZES,
    STANDARD_WIDTH,
    STEMS,
    AnyTaskSpec,
    DetectionSpec,
    TaskSpec,
)

if TYPE_CHECKING:
    from replayfleet.export.calibration import Rounding
    from replayfleet.export.parameters import Model
    from replayfleet.export.running.artefact import Array

OpenStored: TypeAlias = "Callable[[Path, str | None, str, str | None], Model]"
"""(run's folder or data dir, client, kind, class) -> model. The program hands it in (``replayfleet.cli``): who stores
runs is above the export, which may not know them."""

_of_model = functools.partial(click.option, cls=OptionOfGroup, group="Model")
_of_file = functools.partial(click.option, cls=OptionOfGroup, group="File")
_of_precision = functools.partial(click.option, cls=OptionOfGroup, group="Precision")
_advanced = functools.partial(click.option, cls=OptionOfGroup, group=ADVANCED)

_ANY_CLASSES = ("any", "other")
"""A sub-generator's architecture doesn't depend on the task's classes, but a ``TaskSpec`` wants two."""

_MAX_STEPS = 1000
"""Of a sampler: as many as its denoiser was trained with."""


class _OneLineErrors(Program):
    """Ends with one line and exit code 2 where the operator can help."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None:
            raise SettingsError(f"unknown command {args[0]!r}{nearest(args[0], self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ArtefactRejected as error:
            click.echo(f"model-export: {error.detail} ({error.reason.value})", err=True)
        except ReplayfleetError as error:
            click.echo(f"model-export: {error}", err=True)
        except OSError as error:
            if error.filename is None:  # what is printed goes nowhere: a pipe that nobody reads any more, a full disk
                raise
            click.echo(f"model-export: {error.filename}: can't be written ({error.strerror})", err=True)
        except ImportError as error:
            click.echo(f"model-export: {error}; install replayfleet[cpu] or replayfleet[cuda]", err=True)
        raise click.exceptions.Exit(2)


def _formats_help() -> str:
    rows = "\n".join(f"  {row.name:<12} {row.holds}" for row in FORMATS)
    return (
        "Export a trained model for serving.\n\nNothing is written unless the exported model agrees with the eager "
        f"one, and in a rounded format unless it is about as accurate.\n\n\b\nFormats:\n{rows}"
    )


@click.group(cls=_OneLineErrors, context_settings=HELP, help=_formats_help())
@click.version_option(package_name="replayfleet")
def main() -> None:
    """Export a trained model for serving; the help is made from the table of formats."""


_TABLE_OPTIONS: dict[str, dict[str, Any]] = {
    "split": {"is_flag": True},
    "calibration": {"multiple": True, "metavar": "FILE or CLASS=FILE"},
    "samples": {"type": click.IntRange(1, 100_000), "metavar": "N"},
    "seed": {"type": click.IntRange(0, 2**32 - 1), "metavar": "N"},
    "held": {"type": ANY_PATH},
    "max-loss": {"type": click.FloatRange(0, 100), "metavar": "POINTS"},
}
"""How click reads the options of ``export.formats.OPTIONS``, which says what they are."""


def _exports(kind: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator with the options of a command that exports this kind."""
    kept = [row.name for row in FORMATS if kind in row.kinds]
    stored = [
        _of_model(
            "--from",
            "run",
            type=ANY_PATH,
            help="Take the model from a simulation's folder or the data dir of an aggregator or a client, in place of "
            "--parameters. What describes the model is read there too.",
        ),
        _of_model(
            "--client", help="Client whose model of --from it is, by name or number; needed if there are several."
        ),
    ]
    options = [
        *(stored if kind != "sampler" else []),
        _of_model("--parameters", type=ANY_PATH, help="File with the parameters: safetensors."),
        _of_file("--format", "format_", help=f"Format of the file: {joined(kept)}.  [default: {DEFAULT_FORMAT}]"),
        _of_file(
            "--device",
            help="Board that the file is for, as of edge-client: the format that serves quickest there is taken.",
        ),
        _of_file("--out", required=True, type=PLACE, help="Folder or file to write."),
        _advanced(
            "--threads",
            default=2,
            show_default=True,
            type=click.IntRange(1, 256),
            help="Threads with which models are compared and timed.",
        ),
    ]
    for option in OPTIONS:
        # Those that the kind has no use for are read nevertheless: the table says why better than click does.
        hidden = kind not in option.kinds
        reading = _TABLE_OPTIONS[option.name]
        default = {"samples": DEFAULT_SAMPLES, "seed": DEFAULT_SEED}.get(option.name)
        otherwise = "" if default is None else f"  [default: {default}]"
        group = _of_file if option.name == "split" else _of_precision
        options.append(group(f"--{option.name}", help=option_help(option.name) + otherwise, hidden=hidden, **reading))

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _image(command: Callable[..., None]) -> Callable[..., None]:
    command = _of_model("--image-channels", type=int, help=f"Channels of an image: 1 or 3.{_STORED}")(command)
    return _of_model("--image-size", type=int, help=f"Side of an image, pixels: {_choices(IMAGE_SIZES)}.{_STORED}")(
        command
    )


def _choices(values: Iterable[object]) -> str:
    return joined([str(value) for value in values])


def _architecture(known: Sequence[str]) -> Callable[..., Any]:
    return _of_model("--architecture", help=f"The network: {_choices(known)}.  [default: the model's, else {known[0]}]")


_STORED = "  [of the model where it says it]"

_CLASSES = _of_model(
    "--classes", help=f"Classes in the order of the model's answers: a,b,c or a file with one on each line.{_STORED}"
)


@main.command()
@_image
@_CLASSES
@_architecture(ARCHITECTURES)
@_of_model("--stem", help=f"First convolution of the network: {_choices(STEMS)}.  [default: the model's, else cifar]")
@_exports("task")
def task(classes: str | None, architecture: str | None, stem: str | None, **options: Any) -> None:
    """Export a task model."""
    from replayfleet.export.files import read_class_names

    if stem is not None and stem not in STEMS:
        raise SettingsError(f"--stem: unknown stem {stem!r}{nearest(stem, STEMS)}")
    names = None if classes is None else read_class_names(classes)
    given = {"class_names": names, "architecture": architecture, "stem": stem}
    _export("task", TaskSpec, given, {"stem": "cifar"}, **options)


@main.command("sub-generator")
@_image
@_of_model(
    "--class",
    "class_",
    help="Class whose sub-generator of --from it is, by name or number; all: the one of pfedgrp-as3.",
)
@_of_model("--width", type=int, help="Channels of the last hidden layer.  [default: the model's, else 16]")
@_exports("sub-generator")
def sub_generator(width: int | None, **options: Any) -> None:
    """Export the sub-generator of one class."""
    otherwise = {"class_names": _ANY_CLASSES, "generator_width": 16}
    _export("sub-generator", TaskSpec, {"generator_width": width}, otherwise, **options)


@main.command()
@_of_model("--picture-size", metavar="WIDTHxHEIGHT", help=f"Size of a picture, multiples of the stride.{_STORED}")
@_of_model("--image-channels", type=int, help="Channels of a picture: 1 or 3.  [default: the model's, else 3]")
@_CLASSES
@_of_model(
    "--anchors",
    help=f"Typical boxes in shares of the picture: 0.05x0.1,0.2x0.2 or a file with one on each line.{_STORED}",
)
@_architecture(DETECTORS)
@_of_model(
    "--width", type=int, help=f"Channels of the first convolution.  [default: the model's, else {STANDARD_WIDTH}]"
)
@_of_model(
    "--stride", type=int, help=f"Pixels per cell: {_choices(DETECTION_STRIDES)}.  [default: the model's, else 32]"
)
@_exports("detector")
def detector(
    picture_size: str | None,
    classes: str | None,
    anchors: str | None,
    architecture: str | None,
    width: int | None,
    stride: int | None,
    **options: Any,
) -> None:
    """Export a detector; decoding and suppression stay outside (replayfleet.export.running.detections)."""
    from replayfleet.export.files import read_class_names, read_pairs

    given: dict[str, Any] = {"architecture": architecture, "width": width, "stride": stride, "anchors": None}
    if classes is not None:
        given["class_names"] = read_class_names(classes, at_least=1)
    if anchors is not None:
        given["anchors"] = read_pairs("--anchors", anchors)
    sides: Any = (None, None)
    if picture_size is not None:
        (pair,) = read_pairs("--picture-size", picture_size, count=1, example="64x32")
        if not all(side.is_integer() for side in pair):
            raise SettingsError(f"--picture-size {picture_size}: expected whole numbers of pixels, as 64x32")
        sides = [int(side) for side in pair]
    given["image_width"], given["image_height"] = sides
    otherwise = {"image_channels": 3, "width": STANDARD_WIDTH, "stride": 32}
    _export("detector", DetectionSpec, given, otherwise, **options)


@main.command()
@_image
@_of_model("--width", default=128, show_default=True, type=int, help="Channels of the denoiser at full resolution.")
@_of_model(
    "--steps",
    default=20,
    show_default=True,
    type=click.IntRange(1, _MAX_STEPS),
    help="Calls of the denoiser per image.",
)
@_exports("sampler")
def sampler(width: int, steps: int, **options: Any) -> None:
    """Export a diffusion model with all its steps: noise in, images out."""
    if not (1 <= width <= 32 or (width <= 512 and width % 32 == 0)):
        raise SettingsError(f"--width: {width}, expected 1 to 32, or a multiple of 32 up to 512")
    _export("sampler", TaskSpec, {}, {"class_names": _ANY_CLASSES}, sampler=(width, steps), **options)


@main.command()
@click.argument("model", type=ANY_PATH)
@click.option("--parameters", type=ANY_PATH, help="Those of a graph that was exported with --split.")
@click.option(
    "--sha256",
    callback=lambda context, option, digest: digest and digest.lower(),  # PowerShell writes it in capitals
    help="Digest that the file must have; a TorchScript file is code, and needs it.",
)
@click.option(
    "--threads", default=2, show_default=True, type=click.IntRange(1, 256), help="Threads with which the model runs."
)
def check(model: Path, parameters: Path | None, sha256: str | None, threads: int) -> None:
    """Load an exported file as a device does, and print its facts and latency."""
    from replayfleet.export.checking import check_onnx, check_torchscript

    if model.suffix == ".pt":
        if sha256 is None:
            raise SettingsError(f"{model}: a TorchScript file is code; give --sha256, as the export printed it")
        if parameters is not None:
            raise SettingsError("--parameters: a TorchScript file holds its own")
        found = check_torchscript(model, sha256, threads)
    else:
        found = check_onnx(model, parameters, sha256, threads)
    for line in found:
        click.echo(line)


_NAMES = {"class_names": "--classes", "generator_width": "--width"}
"""Field of a spec -> option, where its name is another."""


def _export(
    kind: str,
    spec_type: type[AnyTaskSpec],
    given: dict[str, Any],
    otherwise: dict[str, Any],
    *,
    out: Path,
    threads: int,
    sampler: tuple[int, int] = (0, 0),
    **chosen: Any,
) -> None:
    """Export what the options say.

    Args:
        kind: of the model.
        spec_type: what describes it.
        given: fields of the spec as the operator wrote them, None where nothing was written; shared ones are added.
        otherwise: what they are where neither the operator nor the model says.
        out: where to.
        threads: of the comparison.
        sampler: width and steps of a sampler.
        chosen: all other options.
    """
    row = chosen_format(chosen["format_"], chosen["device"])
    check_combination(kind, row, [name for name in _TABLE_OPTIONS if _was_given(chosen[name.replace("-", "_")])])
    given |= {name: chosen[name] for name in ("image_size", "image_channels") if name in chosen}
    # Before torch is imported: a wrong path shouldn't take seconds.
    stored, arrays, where = _stored(kind, chosen)
    given = {field: value for field, value in given.items() if value is not None}
    spec = _typed(spec_type, {**otherwise, **given}, where) if stored is None else _agreed(stored, kind, given, where)
    rounding = _rounding(row, spec, chosen)
    with without_collections():
        from replayfleet.export.job import Request, run_export
        from replayfleet.export.report import lines
        from replayfleet.export.subject import Architecture

    architecture = Architecture(kind, spec, *sampler)
    request = Request(architecture, row, out, threads, split=chosen["split"], rounding=rounding)
    for line in lines(request, run_export(request, arrays)):
        click.echo(line)


def _stored(kind: str, chosen: dict[str, Any]) -> tuple[Model | None, Mapping[str, Array], Path]:
    """Return (what a run, or a file that says it, holds; its tensors; where it is)."""
    from replayfleet.export.parameters import read_parameter_file

    parameters, run = chosen["parameters"], chosen.get("run")
    if (parameters is None) == (run is None):
        raise SettingsError("give --parameters FILE" if kind == "sampler" else "give --parameters FILE or --from RUN")
    if run is not None:
        open_stored: OpenStored = click.get_current_context().obj
        model = open_stored(run, chosen["client"], kind, chosen.get("class_"))
        return model, model.parameters, run
    for name in ("client", "class_"):
        if chosen.get(name) is not None:
            raise SettingsError(f"--{name.strip('_')}: is for --from; --parameters names one file of one model")
    file = read_parameter_file(parameters)
    return file.model, file.parameters, parameters


def _typed(spec_type: type[AnyTaskSpec], fields: dict[str, Any], where: Path) -> AnyTaskSpec:
    for field in dataclasses.fields(spec_type):
        if field.default is dataclasses.MISSING and field.name not in fields:
            raise SettingsError(f"{_option(field.name)}: is missing, and {where} doesn't say it")
    try:
        return spec_type(**fields)
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _agreed(model: Model, kind: str, given: dict[str, Any], where: Path) -> AnyTaskSpec:
    if model.kind != kind:
        raise SettingsError(f"{where} holds a {model.kind}, not a {kind}; use model-export {model.kind}")
    for field, value in given.items():
        known = getattr(model.spec, field)
        if value != known:
            raise SettingsError(f"{_option(field)}: {value!r} is asked for, {where} says {known!r}; leave it out")
    return model.spec


def _option(field: str) -> str:
    side = "--picture-size" if field in {"image_width", "image_height"} else f"--{field.replace('_', '-')}"
    return _NAMES.get(field, side)


def _was_given(value: object) -> bool:
    return value is not None and value is not False and value != ()


def _rounding(row: Format, spec: AnyTaskSpec, chosen: dict[str, Any]) -> Rounding | None:
    if row.max_loss_points is None:
        return None
    from replayfleet.export.calibration import Rounding
    from replayfleet.export.samples import parse_source

    def given(name: str, otherwise: Any) -> Any:
        return otherwise if chosen[name] is None else chosen[name]

    return Rounding(
        max_loss_points=given("max_loss", row.max_loss_points),
        sources=tuple(parse_source(text, spec) for text in chosen["calibration"]),
        num_samples=given("samples", DEFAULT_SAMPLES),
        seed=given("seed", DEFAULT_SEED),
        held=chosen["held"],
    )
