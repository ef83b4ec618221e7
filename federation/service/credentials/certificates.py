"""Whose certificates are and how long they hold, read without a cryptography package: a device may have none."""

from __future__ import annotations

import base64
import binascii
import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeVar

from replayfleet.federation.errors import MalformedMessage

LOOK_EVERY_S = 3600.0
T = TypeVar("T")

_BLOCK = re.compile(rb"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.DOTALL)
_SEQUENCE, _VERSION, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18
"""Tags of DER (ITU-T X.690); ``_VERSION`` is the optional first field of a certificate (RFC 5280, section 4.1)."""
_COMMON_NAME = bytes((0x55, 0x04, 0x03))
"""2.5.4.3 (RFC 5280, appendix A.1)."""


@dataclass(frozen=True, slots=True)
class Validity:
    """From when to when a certificate holds; both with their time zone."""

    begins: datetime
    ends: datetime


def validities(pem: bytes) -> tuple[Validity, ...]:
    """Return the validity of every certificate in a PEM file, in its order; none if there is none.

    Raises:
        MalformedMessage: What claims to be a certificate isn't one.
    """
    return _of_each(pem, _validity)


class CertificateTimes:
    """From when to when a certificate file holds; it may be replaced while a service runs.

    Args:
        path: the file; None: there is none.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._looked_at = float("-inf")
        self._valid: tuple[Validity, ...] = ()

    def left_s(self, now: float, wall_s: float) -> float | None:
        """Return how long it still counts.

        Args:
            now: of a clock that never runs backwards; the file is read once an hour.
            wall_s: Unix time.

        Returns:
            Seconds; None where there is no certificate, or it can't be read, which others tell.
        """
        valid = self._read(now)
        return min(each.ends.timestamp() for each in valid) - wall_s if valid else None

    def too_early(self, now: float, wall_s: float) -> str:
        """Return from when it counts and what time it is, in words; empty unless that is still to come."""
        begins = max((each.begins for each in self._read(now)), default=None)
        if begins is None or begins.timestamp() <= wall_s:
            return ""
        clock = shown(datetime.fromtimestamp(wall_s, timezone.utc))
        return f"valid from {shown(begins)}; this device's clock says {clock}"

    def _read(self, now: float) -> tuple[Validity, ...]:
        if self._path is not None and now - self._looked_at >= LOOK_EVERY_S:
            self._looked_at, self._valid = now, ()
            with contextlib.suppress(OSError, MalformedMessage):
                self._valid = validities(self._path.read_bytes())
        return self._valid


def shown(moment: datetime) -> str:
    """Return a time as people read it."""
    return moment.astimezone(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def common_name(pem: bytes) -> str:
    """Return the common name that the first certificate in a PEM file was issued to; empty if it has none.

    Raises:
        MalformedMessage: What claims to be a certificate isn't one.
    """
    return next(iter(_of_each(pem, _common_name)), "")


def _of_each(pem: bytes, read: Callable[[Iterator[tuple[int, bytes]]], T]) -> tuple[T, ...]:
    try:
        blocks = [base64.b64decode(b"".join(block.split()), validate=True) for block in _BLOCK.findall(pem)]
        return tuple(read(_from_validity_on(der)) for der in blocks)
    except (binascii.Error, IndexError, ValueError, RuntimeError) as error:  # RuntimeError: an iterator ended early
        raise MalformedMessage(f"a certificate can't be read ({error})") from error


def _from_validity_on(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the fields of ``Certificate.tbsCertificate`` from the validity on (RFC 5280, section 4.1)."""
    certificate = _only(der, _SEQUENCE)
    tag, to_be_signed = next(_elements(certificate))
    if tag != _SEQUENCE:
        raise ValueError("not a certificate")
    fields = _elements(to_be_signed)
    tag, _ = next(fields)
    for _ in range(3 if tag == _VERSION else 2):  # serial number, signature, issuer
        next(fields)
    yield from fields


def _validity(fields: Iterator[tuple[int, bytes]]) -> Validity:
    tag, validity = next(fields)
    if tag != _SEQUENCE:
        raise ValueError("no validity")
    begins, ends = (_moment(*element) for element in _elements(validity))
    return Validity(begins, ends)


def _common_name(fields: Iterator[tuple[int, bytes]]) -> str:
    next(fields)  # the validity
    _, subject = next(fields)
    for _, names in _elements(subject):
        for _, pair in _elements(names):
            (_, kind), (_, value) = _elements(pair)
            if kind == _COMMON_NAME:
                return value.decode()
    return ""


def _only(der: bytes, tag: int) -> bytes:
    found, content = next(_elements(der))
    if found != tag:
        raise ValueError("not a certificate")
    return content


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (tag, content) of what stands one after the other."""
    at = 0
    while at < len(data):
        tag, length = data[at], data[at + 1]
        at += 2
        if length & 0x80:
            size = length & 0x7F
            length = int.from_bytes(data[at : at + size], "big")
            at += size
        if at + length > len(data):
            raise ValueError("it is cut off")
        yield tag, data[at : at + length]
        at += length


def _moment(tag: int, content: bytes) -> datetime:
    text = content.decode("ascii")
    if tag == _UTC_TIME:  # two digits of the year: 50 to 99 are of the last century (RFC 5280, section 4.1.2.5.1)
        text = ("19" if int(text[:2]) >= 50 else "20") + text
    elif tag != _GENERALIZED_TIME:
        raise ValueError("no time")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=timezone.utc)
