"""What an operator says to every member of a fleet, client or aggregator: where the broker is, how it is watched."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from replayfleet.federation.help_groups import ADVANCED, CONNECTION
from replayfleet.federation.service.settings import Option
from replayfleet.federation.wire.protocol.limits import check_id

if TYPE_CHECKING:
    from replayfleet.federation.wire.transport.connecting import Connector


@dataclass(frozen=True, kw_only=True)
class ConnectionSettings:
    """How to reach the broker and prove who we are. The password has no option: command lines can be read by all."""

    fleet: Annotated[
        str,
        Option("The fleet's name, which is part of every topic.", CONNECTION, check=partial(check_id, what="fleet")),
    ] = "fleet"
    tls_ca: Annotated[
        Path | None,
        Option("Certificate authority that signed the broker's certificate, PEM.", CONNECTION, unset="the system's"),
    ] = None
    tls_cert: Annotated[Path | None, Option("Our certificate, PEM, for a broker that asks for one.", CONNECTION)] = None
    tls_key: Annotated[Path | None, Option("The private key of --tls-cert, PEM.", CONNECTION)] = None
    password_file: Annotated[
        Path | None,
        Option(
            "File with the user on its first line and the password on its second. Without it the variables "
            "REPLAYFLEET_MQTT_USER and REPLAYFLEET_MQTT_PASSWORD are used, if they are set.",
            CONNECTION,
        ),
    ] = None
    insecure: Annotated[bool, Option("Allow plaintext to a broker on another machine.", CONNECTION)] = False

    def connector(self) -> Connector:
        """Return what makes sessions for a broker's URL; certificates and credentials are read here.

        Raises:
            SettingsError: A file is missing or unusable.
        """
        from replayfleet.federation.wire.transport.broker_address import Credentials, TlsSettings
        from replayfleet.federation.wire.transport.connecting import Connector

        tls = TlsSettings(self.tls_ca, self.tls_cert, self.tls_key)
        tls.context()
        return Connector(tls, Credentials.load(self.password_file), self.insecure)


@dataclass(frozen=True, kw_only=True)
class WatchSettings:
    """How a service is watched."""

    health_port: Annotated[
        int,
        Meta(ge=-1, le=65535),
        Option(
            "Port on loopback that answers /healthz and /metrics; -1 switches them off.", ADVANCED, unset="a free port"
        ),
    ] = 0
    json_logs: Annotated[bool, Option("Log JSON, an object a line.", ADVANCED)] = False
