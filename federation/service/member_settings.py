"""What an operator says to every member of a fleet, client or aggregator: where the broker is, how it is watched."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.help_groups import ADVANCED, CONNECTION
from replayfleet.federation.service.credentials.identity import check_identity, check_owner, concerns, tls_of
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.service.settings import Option
from replayfleet.federation.wire.protocol.limits import check_id
from replayfleet.federation.wire.transport.broker_address import Credentials, TlsSettings, is_loopback
from replayfleet.federation.wire.transport.claims import ClaimStore, check_store

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from replayfleet.federation.service.health import HealthServer
    from replayfleet.federation.wire.transport.connecting import Connector

MIN_TOKEN = 16


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
    blob_store: Annotated[
        str | None,
        Option(
            "Folder in a store through which large transfers go, s3://BUCKET/FOLDER, file:///DIR or what else fsspec "
            "knows; they go over MQTT where the other end doesn't reach it. Needs replayfleet[store].",
            CONNECTION,
            metavar="URL",
            unset="all over MQTT",
            check=check_store,
        ),
    ] = None

    def claims(self, data_dir: Path) -> ClaimStore | None:
        """Return the store, if there is one; ``data_dir`` keeps on which mount it was.

        Raises:
            SettingsError: It can't be opened.
        """
        return None if self.blob_store is None else ClaimStore(self.blob_store, self.fleet, data_dir / "blob-store")

    def connector(self, member: str = "") -> Connector:
        """Return what makes sessions for a broker's URL; certificates and credentials are read here.

        Args:
            member: whose identity folder it has to be; empty: anybody's.

        Raises:
            SettingsError: A file is missing or unusable, or the identity is another member's.
        """
        from replayfleet.federation.wire.transport.connecting import Connector

        tls = self.tls()
        tls.context()
        if self.identity is not None:
            if member and self.tls_cert is None:
                check_owner(self.identity, member)
            for concern in concerns(self.identity, time.time()):
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
    metrics: Annotated[
        str | None,
        Option(
            "Where /metrics and /healthz answer besides, for Prometheus on another machine; off loopback a token is "
            "demanded.",
            ADVANCED,
            metavar="HOST:PORT",
            unset="nowhere",
        ),
    ] = None
    metrics_token_file: Annotated[
        Path | None,
        Option("File with the token that is to be shown at --metrics, on its first line.", ADVANCED, needs="metrics"),
    ] = None
    json_logs: Annotated[bool, Option("Log JSON, an object a line.", ADVANCED)] = False

    def health_servers(self, registry: CollectorRegistry) -> tuple[HealthServer, HealthServer]:
        """Start what answers on loopback, and what Prometheus is given; the second may be off.

        Raises:
            SettingsError: An address or the token can't be used.
        """
        from replayfleet.federation.service.health import OFF, HealthServer

        host, port = ("", OFF) if self.metrics is None else check_address(self.metrics)
        token = "" if self.metrics_token_file is None else read_token(self.metrics_token_file)
        if port != OFF and not (token or is_loopback(host)):
            raise SettingsError(f"--metrics {self.metrics}: others reach it; expected --metrics-token-file with it")
        public = HealthServer(registry, port=port, host=host, token=token)
        try:
            return HealthServer(registry, port=self.health_port), public
        except SettingsError:
            public.stop()
            raise


def check_address(text: str) -> tuple[str, int]:
    """Return ``HOST:PORT`` as both; of IPv6 the host stands in brackets.

    Raises:
        SettingsError: It is none.
    """
    host, colon, port = text.rpartition(":")
    name = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not name or (":" in name and name == host) or not port.isdecimal() or int(port) > 65535:
        raise SettingsError(f"{text!r} is no address; expected HOST:PORT, for example 127.0.0.1:8080")
    return name, int(port)


def read_token(path: Path) -> str:
    """Return the first line of a file.

    Raises:
        SettingsError: It can't be read, or holds no printable word.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            token = file.readline(1024).strip()
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if len(token) < MIN_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise SettingsError(f"{path}: expected a word of at least {MIN_TOKEN} printable characters on its first line")
    return token
