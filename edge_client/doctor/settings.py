"""What an operator can say to ``edge-client doctor``: the part of ``edge.toml`` that it looks at."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replayfleet.devices.profiles import AUTO, check_device, required_provider
from replayfleet.edge_client.cameras.uri import CameraUri, parse_sources
from replayfleet.edge_client.settings import ClientSettings
from replayfleet.federation.errors import MalformedMessage, SettingsError, nearest
from replayfleet.federation.service.settings import read_toml, settings_from
from replayfleet.federation.wire.protocol.limits import check_id
from replayfleet.federation.wire.transport.broker_address import BrokerAddress

_ONLY_HERE = frozenset({"ntp"})


@dataclass(frozen=True, kw_only=True)
class DoctorSettings:
    """Settings of ``edge-client doctor``; those of the same name mean what they mean to ``edge-client start``.

    Attributes:
        device: a key of ``devices.profiles.PROFILES``, or ``auto``.
        require_provider: ``tensorrt``, ``cuda`` or ``cpu``: not having it is a failure.
        broker: URL; empty: no broker is asked.
        client_id: this client's name; empty: the broker's user, else ``doctor``.
        fleet: fleet name.
        source: cameras to look at.
        data_dir: the disk to look at.
        tls_ca: certificate authority of the broker, PEM.
        tls_cert: client certificate, PEM.
        tls_key: its key, PEM.
        password_file: user on the first line, password on the second.
        insecure: allow plaintext to a broker that isn't on loopback.
        ntp: ``HOST`` or ``HOST:PORT`` of a time server to compare clocks with; empty: the broker's host is asked.
    """

    device: str = AUTO
    require_provider: str = ""
    broker: str = ""
    client_id: str = ""
    fleet: str = "fleet"
    source: tuple[str, ...] | str = ()
    data_dir: Path | None = None
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    password_file: Path | None = None
    insecure: bool = False
    ntp: str = ""

    def __post_init__(self) -> None:
        try:
            check_id(self.fleet, "fleet")
            if self.client_id:
                check_id(self.client_id, "client id")
        except MalformedMessage as error:
            raise SettingsError(str(error)) from error
        check_device(self.device)
        if self.require_provider:
            required_provider(self.require_provider)
        if self.broker:
            BrokerAddress.parse(self.broker, insecure=self.insecure)
        if self.ntp:
            self.time_server()
        self.cameras()

    def cameras(self) -> tuple[CameraUri, ...]:
        """Return the cameras among the sources.

        Raises:
            SettingsError: A source that can't be one.
        """
        texts = (self.source,) if isinstance(self.source, str) else self.source
        return tuple(uri for uri in parse_sources(texts) if isinstance(uri, CameraUri)) if texts else ()

    def time_server(self) -> tuple[str, int] | None:
        """Return (host, port) of who may know the time; None if nobody was named.

        Raises:
            SettingsError: ``ntp`` is no address.
        """
        if not self.ntp:
            return (BrokerAddress.parse(self.broker, insecure=self.insecure).host, 123) if self.broker else None
        host, _, port = self.ntp.rpartition(":") if self.ntp.count(":") == 1 else (self.ntp, "", "123")
        if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise SettingsError(f"ntp is {self.ntp!r}, expected HOST or HOST:PORT")
        return host, int(port)


def read_doctor_settings(path: Path | None, overrides: Mapping[str, Any]) -> DoctorSettings:
    """Return the settings of a client's ``edge.toml`` with ``overrides`` on top.

    Args:
        path: the file; what only ``edge-client start`` needs of it is left out.
        overrides: values by field name; None means "not given".

    Raises:
        SettingsError: The file can't be read, has a key that ``edge-client start`` doesn't know, or a wrong value.
    """
    known = {field.name for field in dataclasses.fields(DoctorSettings)}
    values = {} if path is None else read_toml(path)
    for key in values:
        allowed = {field.name for field in dataclasses.fields(ClientSettings)}
        if key not in allowed:
            raise SettingsError(f"{path}: unknown key {key!r}{nearest(key, allowed)}")
    given = {key: value for key, value in overrides.items() if value is not None}
    mine = {key: value for key, value in values.items() if key in known - _ONLY_HERE}
    origin = "command line" if path is None else f"{path.name} and command line"
    return settings_from(DoctorSettings, {**mine, **given}, origin)
