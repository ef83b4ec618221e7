"""From what an operator wrote about a broker to the sessions of a service."""

from __future__ import annotations

import hmac

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.wire.transport.broker_address import BrokerAddress, Credentials, TlsSettings
from replayfleet.federation.wire.transport.interfaces import Connect, OnMessage, Session, Will

CONTROL_KEEPALIVE_S = 15
"""The connection that has a will: presence, announcements, progress and verdicts."""

DATA_KEEPALIVE_S = 45
"""The connection for blocks; a fresh session every time, for transfers resume by themselves."""


class Connector:
    """Certificates and credentials, ready for any broker.

    Args:
        tls: CA and client certificate.
        credentials: user and password, if any.
        insecure: allow plaintext to other machines, and to be nobody there.
        insist_on_tls: the operator named TLS files for this very connection, so it has to be encrypted.
    """

    def __init__(
        self, tls: TlsSettings, credentials: Credentials | None, insecure: bool, *, insist_on_tls: bool = False
    ) -> None:
        self._tls = tls
        self._credentials = credentials
        self._insecure = insecure
        self._insist_on_tls = insist_on_tls

    def check(self, url: str) -> BrokerAddress:
        """Return the broker's address, without connecting.

        Raises:
            SettingsError: The URL can't be used, TLS files would go unused, or nothing says to another machine who we
                are.
        """
        address = BrokerAddress.parse(url, insecure=self._insecure)
        if self._insist_on_tls and not address.encrypted:
            raise SettingsError(f"TLS files are given but {address} is not encrypted; use mqtts://")
        known = self._tls.certificate_file is not None or self._credentials is not None
        if not known and not address.on_this_machine and not self._insecure:
            raise SettingsError(
                f"broker {address} is on another machine, and nothing says who we are: give --identity, the folder "
                "that `aggregator enroll` writes, or --tls-cert and --tls-key, or --password-file; or --insecure where "
                "everybody may pose as everybody"
            )
        return address

    def to(self, url: str, secret: bytes) -> Connect:
        """Return a function that makes sessions with the broker at ``url``; nothing connects yet.

        A broker gives a session to whoever asks for its MQTT id, so nobody else may know that: it ends with a part that
        is derived from ``secret``. The same secret finds its sessions again after a restart.

        Args:
            url: as the operator wrote it.
            secret: known to this member alone.
        """
        from replayfleet.federation.wire.transport.mqtt import MqttSession

        address = self.check(url)

        def connect(client_id: str, on_message: OnMessage, will: Will | None) -> Session:
            return MqttSession(
                str(address),
                secret_id(client_id, secret),
                on_message=on_message,
                will=will,
                tls=self._tls if address.encrypted else None,
                credentials=self._credentials,
                keepalive_s=CONTROL_KEEPALIVE_S if will is not None else DATA_KEEPALIVE_S,
                clean=will is None,
                insecure=self._insecure,
            )

        return connect


def secret_id(name: str, secret: bytes) -> str:
    """Return an MQTT id that begins with ``name`` and can't be guessed."""
    return f"{name}-{hmac.new(secret, name.encode(), 'sha256').hexdigest()[:32]}"
