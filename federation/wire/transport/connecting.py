"""From what an operator wrote about a broker to the sessions of a service."""

from __future__ import annotations

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
        insecure: allow plaintext to other machines.
    """

    def __init__(self, tls: TlsSettings, credentials: Credentials | None, insecure: bool) -> None:
        self._tls = tls
        self._credentials = credentials
        self._insecure = insecure

    def check(self, url: str) -> None:
        """Raise SettingsError if the URL can't be used, without connecting."""
        BrokerAddress.parse(url, insecure=self._insecure)

    def to(self, url: str) -> Connect:
        """Return a function that makes sessions with the broker at ``url``; nothing connects yet."""
        from replayfleet.federation.wire.transport.mqtt import MqttSession

        def connect(client_id: str, on_message: OnMessage, will: Will | None) -> Session:
            return MqttSession(
                url,
                client_id,
                on_message=on_message,
                will=will,
                tls=self._tls if self._tls.given else None,
                credentials=self._credentials,
                keepalive_s=CONTROL_KEEPALIVE_S if will is not None else DATA_KEEPALIVE_S,
                clean=will is None,
                insecure=self._insecure,
            )

        return connect
