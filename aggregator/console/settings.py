"""What an operator says of the console: where it answers, and to whom."""

from __future__ import annotations

import importlib.util
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.help_groups import ADVANCED
from replayfleet.federation.paths import check_folder
from replayfleet.federation.service.member_settings import check_address
from replayfleet.federation.service.settings import Option, check_settings
from replayfleet.federation.service.web.hosts import host_of
from replayfleet.federation.wire.transport.broker_address import is_loopback

CONSOLE = "Console"
_PACKAGES = ("starlette", "uvicorn", "jinja2", "matplotlib")


def check_packages() -> None:
    """Raise a SettingsError where the console's packages aren't installed."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise SettingsError(f"the console needs {' and '.join(missing)}: pip install 'replayfleet[console]'")


def _check_names(names: tuple[str, ...]) -> None:
    for name in names:
        if not name or host_of(name) != name.lower() or "/" in name:
            raise SettingsError(f"console name {name!r}: expected a name or an address, without a port")


@dataclass(frozen=True, kw_only=True)
class ConsoleSettings:
    """Settings of ``aggregator console``."""

    data_dir: Annotated[
        Path,
        Option("The data dir of `aggregator serve`, running or not.", CONSOLE, metavar="DIR", check=check_folder),
    ]
    listen: Annotated[
        str, Option("Where the pages are; port 0 picks a free one.", CONSOLE, metavar="HOST:PORT", check=check_address)
    ] = "127.0.0.1:8080"
    names: Annotated[
        tuple[str, ...],
        Option(
            "A name under which browsers reach the console, beside the host of --listen.",
            CONSOLE,
            metavar="NAME",
            check=_check_names,
            flags="--name",
        ),
    ] = ()

    tokens: Annotated[
        Path | None,
        Option(
            "File with the tokens of those who may operate or look, as `aggregator token` writes it.",
            CONSOLE,
            metavar="FILE",
            unset="pages are read-only, and all who reach them may look",
        ),
    ] = None
    tls_cert: Annotated[
        Path | None, Option("The console's certificate, PEM; needed where other machines reach it.", CONSOLE)
    ] = None
    tls_key: Annotated[Path | None, Option("The private key of --tls-cert, PEM.", CONSOLE)] = None
    json_logs: Annotated[bool, Option("Log JSON, an object a line.", ADVANCED)] = False

    def __post_init__(self) -> None:
        check_settings(self)
        check_packages()
        if (self.tls_cert is None) != (self.tls_key is None):
            raise SettingsError("of the console's certificate and key one is missing; expected both or none")
        if not self.is_private and (self.tls_cert is None or self.tokens is None):
            raise SettingsError(
                f"other machines reach the console at {self.listen}: expected a certificate, its key and a file of "
                "tokens with it, or an address on loopback"
            )
        self._check_tls()

    @property
    def is_private(self) -> bool:
        """Whether only this machine reaches it; then all who do may look."""
        return is_loopback(self.address[0])

    def _check_tls(self) -> None:
        if self.tls_cert is None:
            return
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                self.tls_cert, self.tls_key, password=""
            )
        except (OSError, ValueError) as error:
            raise SettingsError(f"the console's certificate {self.tls_cert} and key {self.tls_key}: {error}") from error

    @property
    def arguments(self) -> tuple[str, ...]:
        """As a command line."""
        named = (word for name in self.names for word in ("--name", name))
        files = (("--tokens", self.tokens), ("--tls-cert", self.tls_cert), ("--tls-key", self.tls_key))
        given = (word for option, path in files if path is not None for word in (option, str(path)))
        logs = ("--json-logs",) if self.json_logs else ()
        return ("--data-dir", str(self.data_dir), "--listen", self.listen, *named, *given, *logs)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        return check_address(self.listen)

    @property
    def hosts(self) -> frozenset[str]:
        """Names that the console answers to."""
        host, _ = self.address
        return frozenset(
            {host.lower(), *(name.lower() for name in self.names), *({"localhost"} if is_loopback(host) else ())}
        )
