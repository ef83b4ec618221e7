"""What an operator says to every member of a fleet, client or aggregator: where the broker is, how it is watched."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from replayfleet.federation.help_groups import ADVANCED, CONNECTION
from replayfleet.federation.service.identity import check_identity, concerns, tls_of
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.service.settings import Option
from replayfleet.federation.wire.protocol.limits import check_id
from replayfleet.federation.wire.transport.broker_address import Credentials, TlsSettings

if TYPE_CHECKING:
    from replayfleet.federation.wire.transport.connecting import Connector

log = EventLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ConnectionSettings:
    """How to reach the broker and prove who we are. The password has no option: command lines can be read by all."""

    fleet: Annotated[
        str,
        Option("The fleet's name, which is part of every topic.", CONNECTION, check=partial(check_id, what="fleet")),
    ] = "fleet"
    identity: Annotated[
        Path | None,
        Option(
            "Folder with this member's certificate and keys, as `aggregator enroll` writes it; of its TLS files those "
            "count that no --tls option names.",
            CONNECTION,
            metavar="DIR",
            check=check_identity,
        ),
    ] = None
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
        from replayfleet.federation.wire.transport.connecting import Connector

        tls = self.tls()
        tls.context()
        for concern in concerns(self.identity, time.time()) if self.identity is not None else ():
            log.warning(concern)
        named = any((self.tls_ca, self.tls_cert, self.tls_key))
        return Connector(tls, Credentials.load(self.password_file), self.insecure, insist_on_tls=named)

    def tls(self) -> TlsSettings:
        """The TLS files that count: those that were named, and else those of the identity folder."""
        return tls_of(self.identity, TlsSettings(self.tls_ca, self.tls_cert, self.tls_key))


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
