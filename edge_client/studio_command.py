"""``edge-client studio``: the label studio of a device that is elsewhere, in a browser here."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from replayfleet.edge_client.settings import Broker, ClientId, check_studio
from replayfleet.federation.claimed import claimed
from replayfleet.federation.help_groups import GroupedCommand
from replayfleet.federation.paths import check_folder
from replayfleet.federation.service.command import with_settings
from replayfleet.federation.service.member_settings import ConnectionSettings, check_address
from replayfleet.federation.service.settings import CAMERA, Option

if TYPE_CHECKING:
    from replayfleet.federation.wire.transport.seal import Signer

DEVICES = "devices"


@dataclass(frozen=True, kw_only=True)
class StudioSettings(ConnectionSettings):
    """Settings of ``edge-client studio``."""

    broker: Broker
    client_id: ClientId
    data_dir: Annotated[
        Path,
        Option(
            "The operator's own: devices' keys, and what signs labels where no --identity has a signing.key.",
            CAMERA,
            metavar="DIR",
            check=check_folder,
        ),
    ]
    studio: Annotated[
        str,
        Option("Show the studio in a browser here; loopback only.", CAMERA, metavar="HOST:PORT", check=check_studio),
    ] = "127.0.0.1:8090"


@click.command(cls=GroupedCommand)
@with_settings(StudioSettings)
def studio(settings: StudioSettings) -> None:
    """Look at a device's pictures from afar, and label them.

    The device is started with --remote-operator and the key that this command prints; nobody else is answered.
    """
    from replayfleet.edge_client.start import check_installed
    from replayfleet.federation.service.logs import configure_logging

    check_installed("starlette", "uvicorn")
    connector = settings.connector()
    connector.check(settings.broker)
    own = _signer(settings)
    click.echo(f"this operator's key, for the device's --remote-operator: {own.public_key.hex()}")
    configure_logging(as_json=False)
    from replayfleet.edge_client.operator.studio.app import StudioServer
    from replayfleet.edge_client.operator.studio.remote import RemoteStudio
    from replayfleet.federation.service.credentials.identity import session_secret
    from replayfleet.federation.service.signals import stopped_by_signals

    stop = threading.Event()
    with contextlib.ExitStack() as stack:
        # A second one would take the first one's session at the broker, and lose it again.
        stack.enter_context(claimed(settings.data_dir / DEVICES / settings.client_id, "--data-dir"))
        connect = connector.to(settings.broker, session_secret(settings.data_dir, settings.tls().key_file))
        there = RemoteStudio(settings.fleet, settings.client_id, connect, own, settings.data_dir / DEVICES)
        stack.callback(there.close)
        server = StudioServer(there, *check_address(settings.studio))
        stack.callback(server.close)
        stack.enter_context(stopped_by_signals(stop))
        stop.wait()


def _signer(settings: StudioSettings) -> Signer:
    """Return what signs labels: the identity's key, or one of the data dir's, made at first use."""
    from replayfleet.federation.service.credentials.keys import KEYS, SIGNING_KEY, signing_key
    from replayfleet.federation.wire.transport.seal import Signer

    given = settings.identity
    folder = given if given is not None and (given / SIGNING_KEY).is_file() else settings.data_dir / KEYS
    return Signer(signing_key(folder), folder / "signed-until")
