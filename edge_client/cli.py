"""``edge-client``: run one device of a fleet, and look at it.

Neither torch nor ONNX Runtime is imported before a client starts, so that ``--help`` and mistakes are answered at once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from replayfleet.edge_client.bench.command import bench
from replayfleet.edge_client.doctor.command import doctor
from replayfleet.federation.service.command import run_command

_PATH = click.Path(path_type=Path)
_HELP = {"help_option_names": ["-h", "--help"]}


@click.group(context_settings=_HELP)
@click.version_option(package_name="replayfleet")
def cli() -> None:
    """Serve a camera with a model that keeps learning."""


@cli.command()
@click.option("--device", help="cpu, arm-cpu, cuda, jetson, jetson-orin-nano, ..., or auto: look.  [default: cpu]")
@click.option("--broker", metavar="URL", help="mqtts://host:port, or mqtt:// on this machine. Required.")
@click.option("--client-id", help="This client's name in the fleet. Required.")
@click.option(
    "--source",
    metavar="URI",
    multiple=True,
    help="dataset://NAME?..., folder://PATH?..., or cameras (repeatable, NAME=URI names one): camera://0, csi://0, "
    "rtsp://..., video:///FILE, images:///FOLDER, carla-replay:///FOLDER, carla://HOST:PORT, synthetic://. Required.",
)
@click.option("--data-dir", type=_PATH, help="Everything the client keeps; a restart continues from it. Required.")
@click.option("--config", type=_PATH, help="edge.toml; options on the command line win.")
@click.option("--fleet", help="Fleet name, part of every topic.  [default: fleet]")
@click.option("--threads", type=int, help="Of training; results depend on it.  [default: half of the cores]")
@click.option(
    "--training-memory-mb", type=int, help="Training may hold.  [default: the device's, or half of its memory]"
)
@click.option("--max-temperature-c", type=float, help="Above it training is slowed.  [default: the device's]")
@click.option("--max-power-w", type=float, help="Of the board; above it training is slowed.  [default: the device's]")
@click.option("--sampler", help="How replay is drawn: onnx, eager.  [default: onnx]")
@click.option("--data-root", type=_PATH, help="Where data sets lie.  [default: $REPLAYFLEET_DATA, then the system's]")
@click.option("--view", help="What of a camera's picture is classified: auto, whole, crops.  [default: auto]")
@click.option("--teacher", type=_PATH, help="ONNX model that labels cameras' pictures.")
@click.option("--teacher-confidence", type=float, help="Below it the teacher isn't believed.  [default: 0.9]")
@click.option("--keep-frames-s", type=float, help="How long a frame can be labelled by an operator.  [default: 60]")
@click.option("--min-samples", type=int, help="Labelled samples that a camera's round needs.  [default: 50]")
@click.option("--min-pictures", type=int, help="Pictures that these must come from.  [default: 1]")
@click.option("--max-samples", type=int, help="Labelled samples that a camera's round takes.  [default: 2000]")
@click.option("--hold-out", type=int, help="Keep every so many labelled pictures for testing.  [default: 0, none]")
@click.option("--show", is_flag=True, default=None, help="Draw the stream in a window.")
@click.option("--record", type=_PATH, help="Write the drawn stream to this .webm film.")
@click.option("--require-provider", metavar="NAME", help="tensorrt, cuda or cpu: don't start unless it computes.")
@click.option("--stay", is_flag=True, default=None, help="Go on serving after the run is finished.")
@click.option("--tls-ca", type=_PATH, help="Certificate authority of the broker.  [default: the system's]")
@click.option("--tls-cert", type=_PATH, help="Client certificate.")
@click.option("--tls-key", type=_PATH, help="Its private key.")
@click.option("--password-file", type=_PATH, help="User on the first line, password on the second.")
@click.option("--insecure", is_flag=True, default=None, help="Allow plaintext to another machine.")
@click.option("--health-port", type=int, help="/healthz and /metrics on loopback; -1: off.  [default: 0, a free port]")
@click.option("--json-logs", is_flag=True, default=None, help="Log JSON lines.")
def start(config: Path | None, **options: Any) -> None:
    """Run one device; it exits 0 when the run is finished and its last model was served."""
    from replayfleet.edge_client.settings import ClientSettings
    from replayfleet.federation.service.logs import configure_logging
    from replayfleet.federation.service.settings import read_settings

    options["source"] = options["source"] or None
    settings = read_settings(ClientSettings, config, options)
    configure_logging(as_json=settings.json_logs)
    from replayfleet.edge_client.start import start as run

    if not run(settings):
        click.echo("edge-client: stopped before the run was finished; the same command goes on where it was", err=True)


@cli.command()
@click.option("--data-dir", type=_PATH, required=True, help="The data dir of `edge-client start`.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(data_dir: Path, as_json: bool) -> None:
    """Show what a client does, also while it runs."""
    from replayfleet.edge_client.operator.status import lines, read_status

    found = read_status(data_dir)
    click.echo(json.dumps(found, indent=1) if as_json else "\n".join(lines(found)))


cli.add_command(doctor)
cli.add_command(bench)


def main() -> None:
    """Run the command; every expected error is one line on stderr: exit code 2 for settings, 1 for the rest."""
    run_command(cli, "edge-client")
