"""What an operator can say to ``edge-client doctor``: the part of ``edge.toml`` that it looks at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from replayfleet.devices.profiles import AUTO
from replayfleet.edge_client.settings import DEVICE, Broker, ClientId, DeviceName, RequiredProvider, Sources
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.help_groups import ADVANCED
from replayfleet.federation.service.member_settings import ConnectionSettings
from replayfleet.federation.service.settings import Option, check_settings
from replayfleet.federation.wire.transport.broker_address import BrokerAddress

if TYPE_CHECKING:
    from replayfleet.edge_client.cameras.uri import CameraUri


@dataclass(frozen=True, kw_only=True)
class DoctorSettings(ConnectionSettings):
    """Settings of ``edge-client doctor``; those of the same name mean what they mean to ``edge-client start``."""

    device: DeviceName = AUTO
    require_provider: RequiredProvider = ""
    broker: Broker = ""
    client_id: ClientId = ""
    source: Sources = ()
    data_dir: Annotated[Path | None, Option("The client's data dir, whose disk is looked at.", DEVICE)] = None
    ntp: Annotated[
        str,
        Option(
            "Time server, HOST or HOST:PORT, to compare the clock with.",
            ADVANCED,
            metavar="HOST",
            unset="the broker's host",
        ),
    ] = ""

    def __post_init__(self) -> None:
        check_settings(self)
        if self.broker:
            BrokerAddress.parse(self.broker, insecure=self.insecure)
        self.time_server()

    def cameras(self) -> tuple[CameraUri, ...]:
        from replayfleet.edge_client.cameras.uri import CameraUri, parse_sources

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
