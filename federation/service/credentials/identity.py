"""An identity folder: who a member of a fleet is, in files that `aggregator enroll` writes and both programs read.

``ca.crt``, ``member.crt`` and ``member.key`` are for TLS; ``signing.key`` signs what the member says, and on clients
``root.json`` says whose word counts. Keys have mode 0600.
"""

from __future__ import annotations

import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from replayfleet.federation.atomic import clear_place, private_folder, write_atomic
from replayfleet.federation.errors import MalformedMessage, SettingsError
from replayfleet.federation.paths import read_regular
from replayfleet.federation.service.credentials.certificates import common_name, shown, validities
from replayfleet.federation.service.credentials.keys import KEYS, ROOT, SIGNING_KEY
from replayfleet.federation.wire.transport.broker_address import TlsSettings

CA, CERTIFICATE, KEY = "ca.crt", "member.crt", "member.key"
_OF_TLS = (CA, CERTIFICATE, KEY)
PRIVATE = frozenset({KEY, SIGNING_KEY})
SOON_S = 30 * 86_400.0
"""A certificate that ends within this wants a new one."""
_SESSION_KEY = Path(KEYS, "session.key")
_SESSION_KEY_BYTES = 32


def check_identity(folder: Path) -> None:
    """Check that an identity folder has what TLS needs, or nothing of it but keys to sign with and to trust.

    Raises:
        SettingsError: It is no folder, or lacks a file.
    """
    if not folder.is_dir():
        raise SettingsError(f"identity {folder}: no such folder; `aggregator enroll` makes one for each member")
    missing = [name for name in _OF_TLS if not (folder / name).is_file()]
    others = any((folder / name).is_file() for name in (SIGNING_KEY, ROOT))
    if missing and not (others and len(missing) == len(_OF_TLS)):
        raise SettingsError(f"identity {folder}: {missing[0]} is missing; copy all that `aggregator enroll` wrote")


def owner_of(folder: Path) -> str:
    """Return whose the certificate of an identity folder is; empty if there is none that can be read."""
    try:
        return common_name((folder / CERTIFICATE).read_bytes())
    except (OSError, MalformedMessage):
        return ""


def check_owner(folder: Path, member: str) -> None:
    """Check that the certificate of an identity folder is the member's: a broker lets its name write, and no other.

    Raises:
        SettingsError: It is another's. One that can't be read is for TLS to say.
    """
    name = owner_of(folder)
    if name and name != member:
        raise SettingsError(
            f"identity {folder} is of {name!r}, and this is {member!r}; expected the folder that "
            f"`aggregator enroll` wrote for {member}"
        )


def tls_of(folder: Path | None, named: TlsSettings) -> TlsSettings:
    """Return the TLS files of an identity folder, but for those that the operator named."""
    if folder is None or not any((folder / name).is_file() for name in _OF_TLS):
        return named
    certificate, key = named.certificate_file or folder / CERTIFICATE, named.key_file or folder / KEY
    return TlsSettings(named.ca_file or folder / CA, certificate, key)


def concerns(folder: Path, now: float) -> list[str]:
    """Return what an operator should know about an identity folder that can be used: times and permissions.

    None of it ends a service: one whose certificate has expired still serves its cameras.

    Args:
        folder: checked by ``check_identity``.
        now: Unix time.
    """
    found = []
    for name in (CA, CERTIFICATE) if (folder / CERTIFICATE).exists() else ():
        try:
            valid = validities((folder / name).read_bytes())
        except (OSError, MalformedMessage) as error:
            found.append(f"{folder / name} can't be read: {error}")
            continue
        if not valid:
            found.append(f"{folder / name} holds no certificate")
            continue
        begins, ends = max(each.begins for each in valid), min(each.ends for each in valid)
        if now < begins.timestamp():
            found.append(f"{folder / name} isn't valid before {shown(begins)}: this machine's clock is wrong")
        elif now > ends.timestamp():
            found.append(
                f"{folder / name} expired on {shown(ends)}, or this machine's clock is wrong: aggregator renew"
            )
        elif ends.timestamp() - now < SOON_S:
            found.append(f"{folder / name} is valid until {shown(ends)} only: aggregator renew")
    for name in sorted(PRIVATE):
        path = folder / name
        if path.exists() and stat.S_IMODE(path.stat().st_mode) & (stat.S_IRWXG | stat.S_IRWXO):
            found.append(f"{path} can be read by others: chmod 600 {path}")
    return found


def write_identity(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files of an identity folder, keys with mode 0600, each whole or not at all.

    Raises:
        SettingsError: The folder can't be written.
    """
    try:
        private_folder(folder)
        for name, data in files.items():
            write_atomic(folder / name, data, private=name in PRIVATE)
    except OSError as error:
        raise SettingsError(f"{error.filename or folder} can't be written ({error.strerror or error})") from error


def session_secret(data_dir: Path, key_file: Path | None) -> bytes:
    """Return what a member's MQTT ids are derived from; who doesn't know it can't take the member's sessions over.

    It is the private key of its certificate, so that a copy of it elsewhere is noticed; without one, a random key that
    the data dir keeps.

    Raises:
        SettingsError: The key can't be read or kept.
    """
    path = key_file or data_dir / _SESSION_KEY
    try:
        if key_file is None:
            private_folder(path.parent)
            clear_place(path)
            found = read_regular(path) if path.exists() else b""
            if len(found) < _SESSION_KEY_BYTES or not any(found):  # damaged: one that is random can be made again
                write_atomic(path, secrets.token_bytes(_SESSION_KEY_BYTES), private=True)
        found = read_regular(path)
    except OSError as error:
        raise SettingsError(f"{path} can't be used ({error.strerror or error})") from error
    if len(found) < _SESSION_KEY_BYTES:
        raise SettingsError(f"{path} is damaged; it holds no key")
    return found
