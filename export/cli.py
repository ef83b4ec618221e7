"""``model-export``: trained parameters to an ONNX or TorchScript file that agrees with the eager model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from federation.errors import ArtefactRejected, ReplayfleetError, SettingsError, nearest
from models.specs import IMAGE_SIZES, STEMS, TaskSpec

if TYPE_CHECKING:
    from export.job import Exported, Request

FORMATS = ("onnx", "torchscript")

_ANY_CLASSES = ("any", "other")
"""A sub-generator's architecture doesn't depend on the task's classes, but a ``TaskSpec`` wants two."""


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


@click.group(cls=_OneLineErrors, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Export a trained model for serving.

    Nothing is written unless the exported model agrees with the eager one to 1e-4 at batch 1, 2 and 64.
    """


def _common(command: Callable[..., None]) -> Callable[..., None]:
    options = [
        click.option("--parameters", required=True, type=click.Path(path_type=Path), help="State dict, safetensors."),
        click.option("--image-size", required=True, type=int, help=f"Side in pixels: {_choices(IMAGE_SIZES)}."),
        click.option("--image-channels", required=True, type=int, help="1 or 3."),
        click.option("--format", "format_", default="onnx", show_default=True, help=f"{_choices(FORMATS)}."),
        click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder, or file to write."),
        click.option("--split", is_flag=True, help="ONNX: graph and parameters in two files, as a fleet sends them."),
        click.option(
            "--threads", default=2, show_default=True, type=click.IntRange(1, 256), help="For comparison and latency."
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def _choices(values: tuple[object, ...]) -> str:
    return ", ".join(str(value) for value in values[:-1]) + f" or {values[-1]}"


@main.command()
@_common
@click.option(
    "--classes", required=True, help="Names in the order of the logits: a,b,c or a file with one on each line."
)
@click.option("--stem", default="cifar", show_default=True, help=f"First convolution: {_choices(STEMS)}.")
def task(classes: str, stem: str, image_size: int, image_channels: int, **options: Any) -> None:
    """Export a task model."""
    from export.files import read_class_names

    if stem not in STEMS:
        raise SettingsError(f"--stem: unknown stem {stem!r}{nearest(stem, STEMS)}")
    _export("task", _spec(image_channels, image_size, read_class_names(classes), stem=stem), **options)


@main.command("sub-generator")
@_common
@click.option("--width", default=16, show_default=True, type=int, help="Channels of the last hidden layer.")
def sub_generator(width: int, image_size: int, image_channels: int, **options: Any) -> None:
    """Export the sub-generator of one class."""
    _export("sub-generator", _spec(image_channels, image_size, _ANY_CLASSES, generator_width=width), **options)


@main.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--parameters", type=click.Path(path_type=Path), help="Of a graph that was exported with --split.")
@click.option("--threads", default=2, show_default=True, type=click.IntRange(1, 256))
def check(model: Path, parameters: Path | None, threads: int) -> None:
    """Load an ONNX file as a device does (without torch), and print its facts and latency."""
    import numpy as np

    from export.facts import own_facts
    from export.files import read_file, read_parameters
    from export.latency import median_latencies_s
    from export.runtime import OnnxModel

    loaded = OnnxModel(
        read_file(model), read_parameters(parameters) if parameters is not None else {}, num_threads=threads
    )
    for key, value in own_facts(loaded.metadata).items():
        click.echo(f"{key:<14} {value}")
    click.echo(f"{'provider':<14} {loaded.active_providers[0]}")
    for batch_size in (1, 64):
        x = np.zeros((batch_size, *loaded.input_shape), dtype=np.float32)
        latency = median_latencies_s({"onnx": functools.partial(loaded.run, x)}, repeats=20)["onnx"]
        click.echo(f"{f'batch {batch_size}':<14} {latency * 1e3:.2f} ms with {threads} threads")


def _spec(image_channels: int, image_size: int, class_names: tuple[str, ...], **rest: Any) -> TaskSpec:
    try:
        return TaskSpec(image_channels, image_size, class_names, **rest)
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _export(kind: str, spec: TaskSpec, *, parameters: Path, format_: str, out: Path, split: bool, threads: int) -> None:
    if format_ not in FORMATS:
        raise SettingsError(f"--format: unknown format {format_!r}{nearest(format_, FORMATS)}")
    if split and format_ != "onnx":
        raise SettingsError("--split: only --format onnx keeps parameters in a file of their own")
    from export.files import read_parameters

    arrays = read_parameters(parameters)  # before torch is imported: a wrong path shouldn't take seconds
    from export.job import Request, run_export

    request = Request(kind, spec, format_, split, out, threads)
    _report(request, run_export(request, arrays))


def _report(request: Request, done: Exported) -> None:
    shape = "x".join(str(side) for side in request.spec.image_shape)
    click.echo(f"model    {request.kind}, {shape}, {done.num_parameters:,} parameters")
    click.echo(f"parity   {done.worst_difference:.1e} from the eager model, at most, over batches 1, 2 and 64")
    times = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in done.latency_s.items())
    click.echo(f"latency  {times} at batch 1 with {request.num_threads} threads")
    for path, size, digest in done.files:
        click.echo(f"wrote    {path}  {size:,} bytes  sha256 {digest}")
    if request.format == "onnx":
        parameters = f" --parameters {done.files[0][0]}" if request.split else ""
        click.echo(f"next     model-export check {request.path}{parameters}")
