"""Which checks there are, in which order, and how long each may take."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from replayfleet.devices.probing import chosen, probe
from replayfleet.devices.profiles import REQUIRABLE
from replayfleet.edge_client.doctor import board as boards
from replayfleet.edge_client.doctor import broker, cameras, clock, disk, keys
from replayfleet.edge_client.doctor.findings import Finding, Report
from replayfleet.edge_client.doctor.running import Check, run_check
from replayfleet.edge_client.doctor.settings import DoctorSettings
from replayfleet.federation.errors import MalformedMessage, SettingsError
from replayfleet.federation.service.credentials.certificates import common_name
from replayfleet.federation.service.credentials.keys import KEYS, ROOT, SIGNING_KEY
from replayfleet.federation.wire.transport.broker_address import Credentials, TlsSettings

PROVIDER_S = {"tensorrt": 180.0, "cuda": 90.0, "cpu": 30.0}
"""TensorRT builds an engine even for the smallest model, and a Jetson reads a gigabyte of libraries first."""


def examine(settings: DoctorSettings, told: Callable[[Check], None] = lambda check: None) -> Report:
    """Run all checks, one after the other.

    Args:
        settings: what the operator wrote.
        told: called before each check.
    """
    findings: list[Finding] = []
    for check in checks(settings):
        told(check)
        findings += run_check(check)
    return Report(tuple(findings))


def checks(settings: DoctorSettings) -> list[Check]:
    """Return the checks; none has looked at anything but the board yet."""
    board = probe()
    profile, note = chosen(settings.device, board)
    tls = settings.tls()
    return [
        Check("board", lambda: boards.look_at_board(board, profile, note)),
        Check("python", boards.look_at_python),
        Check("packages", lambda: boards.look_at_packages(board), 60.0),
        *(
            Check(
                f"provider.{name}",
                partial(boards.look_at_provider, name, provider, profile, board, settings.require_provider),
                PROVIDER_S[name],
            )
            for name, provider in REQUIRABLE.items()
        ),
        Check("cameras.devices", cameras.look_at_devices),
        Check("cameras.backends", lambda: cameras.look_at_backends(profile), 60.0),
        Check("cameras.elements", lambda: cameras.look_at_elements(profile), 60.0),
        *(
            Check(f"source.{camera.name}", partial(cameras.look_at_source, camera, profile), 60.0)
            for camera in settings.cameras()
        ),
        Check(
            "keys",
            lambda: keys.look_at_keys(
                tls,
                settings.password_file,
                signing_key=_signing_key(settings),
                root=settings.identity and settings.identity / ROOT,
            ),
        ),
        Check("broker", lambda: broker.look_at_broker(_target(settings, tls)), 150.0),
        Check("broker.session", lambda: broker.look_at_session(settings.data_dir)),
        Check("clock.synchronised", clock.look_at_synchronisation),
        Check("clock.skew", lambda: clock.look_at_skew(settings.time_server(), named=bool(settings.ntp))),
        Check("disk", lambda: disk.look_at_disk(settings.data_dir), 60.0),
    ]


def _target(settings: DoctorSettings, tls: TlsSettings) -> broker.BrokerTarget | None:
    if not settings.broker:
        return None
    try:
        credentials = Credentials.load(settings.password_file)
    except SettingsError:
        credentials = None  # there is a finding about the file; the broker says what it thinks of nobody
    return broker.BrokerTarget(
        settings.broker,
        settings.fleet,
        settings.client_id,
        tls,
        credentials,
        insecure=settings.insecure,
        insist_on_tls=any((settings.tls_ca, settings.tls_cert, settings.tls_key)),
        certificate_name=_name_in(tls.certificate_file),
    )


def _signing_key(settings: DoctorSettings) -> Path | None:
    if settings.identity is not None:
        return settings.identity / SIGNING_KEY
    made = settings.data_dir and settings.data_dir / KEYS / SIGNING_KEY  # when a client first starts
    return made if made and made.exists() else None


def _name_in(certificate: Path | None) -> str:
    try:
        return "" if certificate is None else common_name(certificate.read_bytes())
    except (OSError, MalformedMessage):
        return ""  # there is a finding about the file
