"""Certificates, private keys and passwords: readable by us and by nobody else, and still valid."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

from replayfleet.edge_client.doctor.findings import Finding, Status, failure, ok, skipped, warning
from replayfleet.edge_client.sync.trust import is_no_root
from replayfleet.federation.errors import MalformedMessage, SettingsError
from replayfleet.federation.service.credentials.certificates import validities
from replayfleet.federation.service.credentials.keys import read_key
from replayfleet.federation.wire.transport.broker_address import Credentials, TlsSettings

SOON_S = 30 * 86_400.0
"""A certificate that ends within this wants a new one."""


def look_at_keys(
    tls: TlsSettings,
    password_file: Path | None,
    now: Callable[[], float] = time.time,
    *,
    signing_key: Path | None = None,
    root: Path | None = None,
) -> list[Finding]:
    """Return one finding for each file, and one for certificate and key together."""
    findings = []
    if tls.ca_file is not None:
        findings.append(_certificate("keys.tls-ca", tls.ca_file, now()))
    if tls.certificate_file is not None:
        findings.append(_certificate("keys.tls-cert", tls.certificate_file, now()))
    if tls.key_file is not None:
        findings.append(_secret("keys.tls-key", tls.key_file))
    if signing_key is not None:
        advice = "no client starts with it: put the key back, or enrol this device anew"
        findings.append(_secret("keys.signing-key", signing_key, read_key, advice))
    if root is not None:
        findings.append(_root(root))
    if password_file is not None:
        advice = "write the user on the first line, the password on the second"
        findings.append(_secret("keys.password-file", password_file, Credentials.load, advice))
    if tls.given and all(finding.status != Status.FAILURE for finding in findings):
        findings.append(_together(tls))
    return findings or [skipped("keys", "no files named: --identity, --tls-ca, --tls-cert, --tls-key, --password-file")]


def expiry(check: str, what: str, begins: float | None, ends: float, now: float) -> Finding:
    """Return whether a certificate is valid now, and for long.

    Args:
        check: name of the finding.
        what: begins the sentence.
        begins: Unix time from which it is valid; None: not known.
        ends: Unix time until which it is valid.
        now: Unix time.
    """
    shown = datetime.fromtimestamp(ends, tz=timezone.utc).strftime("%Y-%m-%d")
    facts = {"ends": shown, "days_left": round((ends - now) / 86_400, 1)}
    if begins is not None and now < begins:
        first = datetime.fromtimestamp(begins, tz=timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        return failure(check, f"{what}: not valid before {first}", "check this machine's clock first", **facts)
    if now > ends:
        return failure(check, f"{what}: expired on {shown}", "issue a new one, or check this machine's clock", **facts)
    if ends - now < SOON_S:
        return warning(check, f"{what}: valid until {shown}", "issue a new one soon", **facts)
    return ok(check, f"{what}: valid until {shown}", **facts)


def _certificate(check: str, path: Path, now: float) -> Finding:
    try:
        found = validities(path.read_bytes())
    except (OSError, MalformedMessage) as error:
        return failure(check, f"{path} can't be read: {_reason(error)}", "name a readable PEM file")
    if not found:
        return failure(check, f"{path} holds no certificate", "name a PEM file: -----BEGIN CERTIFICATE-----")
    first = min(found, key=lambda validity: validity.ends)
    return expiry(check, str(path), max(v.begins for v in found).timestamp(), first.ends.timestamp(), now)


def _secret(check: str, path: Path, load: Callable[[Path], object] | None = None, if_damaged: str = "") -> Finding:
    try:
        with path.open("rb") as file:
            file.read(1)
        if load is not None:
            load(path)
        mode = stat.S_IMODE(path.stat().st_mode)
        owner = path.stat().st_uid
    except OSError as error:
        return failure(check, f"{path} can't be read: {_reason(error)}", "name a file that this user may read")
    except SettingsError as error:
        return failure(check, str(error), if_damaged)
    facts = {"mode": f"{mode:04o}"}
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        return warning(check, f"{path} has mode {mode:04o}: others may read it", f"chmod 600 {path}", **facts)
    if owner not in {os.geteuid(), 0}:
        return warning(
            check, f"{path} belongs to another user", f"chown it to the user of the service: {path}", **facts
        )
    return ok(check, f"{path}, mode {mode:04o}", **facts)


def _root(path: Path) -> Finding:
    check, advice = "keys.root", "put the fleet's there, as `aggregator enroll` wrote it"
    try:
        useless = is_no_root(path.read_bytes())
    except FileNotFoundError:
        found = f"{path} is missing: the first aggregator that announces itself is trusted, unless one was before"
        return warning(check, found, advice)
    except OSError as error:
        return failure(check, f"{path} can't be read: {_reason(error)}", advice)
    return failure(check, f"{path} is no root", advice) if useless else ok(check, str(path))


def _together(tls: TlsSettings) -> Finding:
    try:
        tls.context()
    except SettingsError as error:
        return failure(
            "keys.tls", str(error), "issue certificate and key together, plain PEM, the key without a password"
        )
    return ok("keys.tls", "they fit together" if tls.key_file is not None else "the authority can be used")


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
