"""How long certificates are valid, read without a cryptography package: a device may have none."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone

from federation.errors import MalformedMessage

_BLOCK = re.compile(rb"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.DOTALL)
_SEQUENCE, _VERSION, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18
"""Tags of DER (ITU-T X.690); ``_VERSION`` is the optional first field of a certificate (RFC 5280, section 4.1)."""


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
    try:
        return tuple(
            _validity(base64.b64decode(b"".join(block.split()), validate=True)) for block in _BLOCK.findall(pem)
        )
    except (binascii.Error, IndexError, ValueError, RuntimeError) as error:  # RuntimeError: an iterator ended early
        raise MalformedMessage(f"a certificate can't be read ({error})") from error


def _validity(der: bytes) -> Validity:
    """Walk to ``Certificate.tbsCertificate.validity`` (RFC 5280, section 4.1)."""
    certificate = _only(der, _SEQUENCE)
    tag, to_be_signed = next(_elements(certificate))
    if tag != _SEQUENCE:
        raise ValueError("not a certificate")
    fields = _elements(to_be_signed)
    tag, _ = next(fields)
    for _ in range(3 if tag == _VERSION else 2):  # serial number, signature, issuer
        next(fields)
    tag, validity = next(fields)
    if tag != _SEQUENCE:
        raise ValueError("no validity")
    begins, ends = (_moment(*element) for element in _elements(validity))
    return Validity(begins, ends)


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
