"""``model-export``: trained parameters to an ONNX or TorchScript file that agrees with the eager model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from replayfleet.models.specs import (
    DETECTION_STRIDES,
    IMAGE_SIZES,
    STANDARD_WIDTH,
    STEMS,
    AnyTaskSpec,
    DetectionSpec,
    TaskSpec,
)

if TYPE_CHECKING:
    from replayfleet.export.calibration import Rounding

_ANY_CLASSES = ("any", "other")
"""A sub-generator's architecture doesn't depend on the task's classes, but a ``TaskSpec`` wants two."""

_MAX_STEPS = 1000
"""Of a sampler: as many as its denoiser was trained with."""


class _OneLineErrors(click.Group):
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


@click.group(cls=_OneLineErrors, context_settings={"help_option_names": ["-h", "--help"]}, help=_formats_help())
@click.version_option(package_name="replayfleet")
def main() -> None:
    """Export a trained model for serving; the help is made from the table of formats."""


_TABLE_OPTIONS: dict[str, dict[str, Any]] = {
    "split": {"is_flag": True},
    "calibration": {"multiple": True, "metavar": "FILE or CLASS=FILE"},
    "samples": {"type": click.IntRange(1, 100_000), "metavar": f"N, {DEFAULT_SAMPLES} if not given"},
    "seed": {"type": click.IntRange(0, 2**32 - 1), "metavar": f"N, {DEFAULT_SEED} if not given"},
    "held": {"type": click.Path(path_type=Path)},
    "max-loss": {"type": click.FloatRange(0, 100), "metavar": "POINTS"},
}
"""How click reads the options of ``export.formats.OPTIONS``, which says what they are."""


def _exports(kind: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator with the options of a command that exports this kind."""
    kept = [row.name for row in FORMATS if kind in row.kinds]
    options = [
        click.option("--parameters", required=True, type=click.Path(path_type=Path), help="State dict, safetensors."),
        click.option("--format", "format_", help=f"{_choices(kept)}.  [default: {DEFAULT_FORMAT}]"),
        click.option("--device", help="In place of --format: what serves quickest on this board; as of edge-client."),
        click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder, or file to write."),
        click.option(
            "--threads", default=2, show_default=True, type=click.IntRange(1, 256), help="For comparison and latency."
        ),
    ]
    for option in OPTIONS:
        # Those that the kind has no use for are read nevertheless: the table says why better than click does.
        hidden = kind not in option.kinds
        reading = _TABLE_OPTIONS[option.name]
        options.append(click.option(f"--{option.name}", help=option_help(option.name), hidden=hidden, **reading))

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _image(command: Callable[..., None]) -> Callable[..., None]:
    command = click.option("--image-channels", required=True, type=int, help="1 or 3.")(command)
    return click.option("--image-size", required=True, type=int, help=f"Side in pixels: {_choices(IMAGE_SIZES)}.")(
        command
    )


def _choices(values: Any) -> str:
    *most, last = [str(value) for value in values]
    return f"{', '.join(most)} or {last}"


_CLASSES = click.option(
    "--classes", required=True, help="Names in the order of the model's answers: a,b,c or a file with one on each line."
)


@main.command()
@_image
@_CLASSES
@click.option("--stem", default="cifar", show_default=True, help=f"First convolution: {_choices(STEMS)}.")
@_exports("task")
def task(classes: str, stem: str, image_size: int, image_channels: int, **options: Any) -> None:
    """Export a task model."""
    from replayfleet.export.files import read_class_names

    if stem not in STEMS:
        raise SettingsError(f"--stem: unknown stem {stem!r}{nearest(stem, STEMS)}")
    names = read_class_names(classes)
    _export("task", _made(lambda: TaskSpec(image_channels, image_size, names, stem=stem)), **options)


@main.command("sub-generator")
@_image
@click.option("--width", default=16, show_default=True, type=int, help="Channels of the last hidden layer.")
@_exports("sub-generator")
def sub_generator(width: int, image_size: int, image_channels: int, **options: Any) -> None:
    """Export the sub-generator of one class."""
    spec = _made(lambda: TaskSpec(image_channels, image_size, _ANY_CLASSES, generator_width=width))
    _export("sub-generator", spec, **options)


@main.command()
@click.option("--picture-size", required=True, metavar="WIDTHxHEIGHT", help="In pixels, multiples of the stride.")
@click.option("--image-channels", default=3, show_default=True, type=int, help="1 or 3.")
@_CLASSES
@click.option(
    "--anchors",
    required=True,
    help="Typical boxes in shares of the picture: 0.05x0.1,0.2x0.2 or a file with one on each line.",
)
@click.option("--width", default=STANDARD_WIDTH, show_default=True, type=int, help="Channels of the first convolution.")
@click.option(
    "--stride", default=32, show_default=True, type=int, help=f"Pixels per cell: {_choices(DETECTION_STRIDES)}."
)
@_exports("detector")
def detector(
    picture_size: str, image_channels: int, classes: str, anchors: str, width: int, stride: int, **options: Any
) -> None:
    """Export a detector; decoding and suppression stay outside (replayfleet.export.running.detections)."""
    from replayfleet.export.files import read_class_names, read_pairs

    names = read_class_names(classes, at_least=1)
    sizes = read_pairs("--anchors", anchors)
    ((picture_width, picture_height),) = read_pairs("--picture-size", picture_size, count=1)
    spec = _made(
        lambda: DetectionSpec(
            image_channels, int(picture_height), int(picture_width), names, sizes, width=width, stride=stride
        )
    )
    _export("detector", spec, **options)


@main.command()
@_image
@click.option("--width", default=128, show_default=True, type=int, help="Channels of the denoiser at full resolution.")
@click.option(
    "--steps",
    default=20,
    show_default=True,
    type=click.IntRange(1, _MAX_STEPS),
    help="Calls of the denoiser per image.",
)
@_exports("sampler")
def sampler(width: int, steps: int, image_size: int, image_channels: int, **options: Any) -> None:
    """Export a diffusion model with all its steps: noise in, images out."""
    if not (1 <= width <= 32 or (width <= 512 and width % 32 == 0)):
        raise SettingsError(f"--width: {width}, expected 1 to 32, or a multiple of 32 up to 512")
    spec = _made(lambda: TaskSpec(image_channels, image_size, _ANY_CLASSES))
    _export("sampler", spec, sampler=(width, steps), **options)


@main.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--parameters", type=click.Path(path_type=Path), help="Of a graph that was exported with --split.")
@click.option("--sha256", help="Which file it must be; a TorchScript file is code, and needs it.")
@click.option("--threads", default=2, show_default=True, type=click.IntRange(1, 256))
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


def _made(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _export(
    kind: str,
    spec: AnyTaskSpec,
    *,
    parameters: Path,
    out: Path,
    threads: int,
    sampler: tuple[int, int] = (0, 0),
    **chosen: Any,
) -> None:
    row = chosen_format(chosen["format_"], chosen["device"])
    check_combination(kind, row, [name for name in _TABLE_OPTIONS if _was_given(chosen[name.replace("-", "_")])])
    from replayfleet.export.files import read_parameters

    arrays = read_parameters(parameters)  # before torch is imported: a wrong path shouldn't take seconds
    rounding = _rounding(row, spec, chosen)
    from replayfleet.export.job import Request, run_export
    from replayfleet.export.report import lines
    from replayfleet.export.subject import Architecture

    architecture = Architecture(kind, spec, *sampler)
    request = Request(architecture, row, out, threads, split=chosen["split"], rounding=rounding)
    for line in lines(request, run_export(request, arrays)):
        click.echo(line)


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
