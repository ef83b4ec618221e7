"""Where the broker is and how to prove who we are: URLs, TLS files, user and password."""

from __future__ import annotations

import ipaddress
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from replayfleet.federation.errors import SettingsError

USER_VARIABLE = "REPLAYFLEET_MQTT_USER"
PASSWORD_VARIABLE = "REPLAYFLEET_MQTT_PASSWORD"  # noqa: S105  # the variable's name, not a password
_PORTS = {"mqtt": 1883, "mqtts": 8883}


def redacted(url: str) -> str:
    """Return a URL that may stand in a log: without user and password."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "", url
    return scheme + separator + rest.rpartition("@")[2]  # a password may hold a slash


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """A checked broker URL.

    Attributes:
        host: name or address.
        port: 1 to 65535.
        encrypted: ``mqtts://``.
    """

    host: str
    port: int
    encrypted: bool

    @classmethod
    def parse(cls, url: str, *, insecure: bool = False) -> BrokerAddress:
        """Return the address in ``mqtt[s]://host[:port]``; without a scheme it is encrypted unless on this machine.

        Args:
            url: what the operator wrote.
            insecure: allow plaintext to other machines.

        Raises:
            SettingsError: Another scheme, no host, a bad port, a path, credentials in the URL, or plaintext to another
                machine without ``insecure``.
        """
        shown = redacted(url)
        if shown != url:
            raise SettingsError(
                f"broker {shown!r}: credentials don't belong into a URL, where logs and process lists show them; "
                f"use a credentials file or {USER_VARIABLE} and {PASSWORD_VARIABLE}"
            )
        try:
            parts = urlsplit(url if "://" in url else f"//{url}", scheme="" if "://" in url else _scheme_for(url))
            port = parts.port
        except ValueError as error:
            raise SettingsError(
                f"broker {shown!r} is not a URL ({error}); expected mqtts://host:port, IPv6 as [::1]"
            ) from None
        _check_shape(parts, shown)
        host, encrypted = parts.hostname or "", parts.scheme == "mqtts"
        if not encrypted and not insecure and not is_loopback(host):
            raise SettingsError(
                f"broker {shown!r} is on another machine and not encrypted; use mqtts://, or --insecure on a network "
                "where everybody may read and write the models"
            )
        return cls(host, _PORTS[parts.scheme] if port is None else port, encrypted)

    @property
    def on_this_machine(self) -> bool:
        return is_loopback(self.host)

    @property
    def place(self) -> str:
        """Host and port, an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{'mqtts' if self.encrypted else 'mqtt'}://{self.place}"


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """Files in PEM form.

    Attributes:
        ca_file: who must have signed the broker's certificate; None trusts the system's authorities.
        certificate_file: our certificate, for brokers that ask for one.
        key_file: its private key.
    """

    ca_file: Path | None = None
    certificate_file: Path | None = None
    key_file: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Return a context that verifies the broker and its host name.

        Raises:
            SettingsError: A file is missing or is not what it should be; says which.
        """
        if (self.certificate_file is None) != (self.key_file is None):
            raise SettingsError("a client certificate needs its key file, and the key file its certificate")
        for file in (self.ca_file, self.certificate_file, self.key_file):
            if file is not None and not file.is_file():
                raise SettingsError(f"TLS file {str(file)!r} does not exist")
            if file is not None and not os.access(file, os.R_OK):
                raise SettingsError(f"TLS file {str(file)!r} can't be read: permission denied")
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except ssl.SSLError as error:
            raise SettingsError(f"CA file {str(self.ca_file)!r} holds no PEM certificate ({error.reason})") from error
        if self.certificate_file is not None:
            try:
                context.load_cert_chain(self.certificate_file, self.key_file, password="")
            except (ssl.SSLError, ValueError) as error:
                raise SettingsError(
                    f"client certificate {str(self.certificate_file)!r} and key {str(self.key_file)!r} don't fit or "
                    f"aren't plain PEM ({error})"
                ) from error
        return context

    @property
    def given(self) -> bool:
        """Whether the operator named any file."""
        return any((self.ca_file, self.certificate_file, self.key_file))


@dataclass(frozen=True, slots=True)
class Credentials:
    """User and password for the broker; the password never shows in a repr."""

    user: str
    password: str = field(repr=False)

    @classmethod
    def load(cls, file: Path | None = None, environment: Mapping[str, str] | None = None) -> Credentials | None:
        """Return the credentials of a file (user on the first line, password on the second), else of the environment.

        Raises:
            SettingsError: The file can't be read or has no two lines, or only one of the two variables is set.
        """
        if file is not None:
            try:
                lines = file.read_text(encoding="utf-8-sig").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise SettingsError(f"credentials file {str(file)!r} can't be read ({error})") from error
            if len(lines) < 2 or not lines[0] or not lines[1]:
                raise SettingsError(
                    f"credentials file {str(file)!r}: expected the user on its first line, the password on its second"
                )
            return cls(lines[0], lines[1])
        found = os.environ if environment is None else environment
        user, password = found.get(USER_VARIABLE, ""), found.get(PASSWORD_VARIABLE, "")
        if bool(user) != bool(password):
            raise SettingsError(f"set both {USER_VARIABLE} and {PASSWORD_VARIABLE}, or neither")
        return cls(user, password) if user else None


def _check_shape(parts: SplitResult, shown: str) -> None:
    if parts.scheme not in _PORTS:
        raise SettingsError(
            f"broker {shown!r} has scheme {parts.scheme!r}; expected mqtts://host:port or mqtt://host:port"
        )
    if not parts.hostname or parts.port == 0:
        raise SettingsError(f"broker {shown!r} names no host and port; expected mqtts://host:port")
    if parts.path not in {"", "/"} or parts.query or parts.fragment:
        raise SettingsError(f"broker {shown!r} has more than host and port; expected mqtts://host:port")


def _scheme_for(place: str) -> str:
    return "mqtt" if is_loopback(urlsplit(f"//{place}").hostname or "") else "mqtts"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
