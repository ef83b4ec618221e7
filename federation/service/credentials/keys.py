"""Files of Ed25519 keys: private ones in PEM (PKCS 8), which only their user may read."""

from __future__ import annotations

from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InternalError, InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from replayfleet.federation.atomic import private_folder, write_atomic
from replayfleet.federation.errors import ReplayfleetError, SettingsError

KEYS = "keys"
"""The folder of a data dir where keys lie that weren't given."""
SIGNING_KEY = "signing.key"
ROOT = "root.json"
"""Beside a device's key: whose word it takes."""
MAX_KEY_BYTES = 4096
NOT_PEM = (ValueError, TypeError, UnsupportedAlgorithm, InternalError, InvalidSignature, x509.InvalidVersion)
"""What the library raises for files that hold no key, certificate or request."""


def signing_key(folder: Path, name: str = SIGNING_KEY) -> Ed25519PrivateKey:
    """Return the key of a folder, which is made at first use.

    Raises:
        SettingsError: The file is there and is no such key.
        ReplayfleetError: The disk doesn't take it.
    """
    path = folder / name
    try:
        if not path.exists():
            private_folder(folder)
            write_key(path, Ed25519PrivateKey.generate())
        return read_key(path)
    except OSError as error:
        raise ReplayfleetError(f"key {path}: {error.strerror or error}") from error


def read_key(path: Path) -> Ed25519PrivateKey:
    """Return the key of a file.

    Raises:
        SettingsError: There is none, or it is no such key.
    """
    try:
        with path.open("rb") as file:  # which may be a pipe, from who decrypts it
            key = serialization.load_pem_private_key(file.read(MAX_KEY_BYTES), password=None)
    except OSError as error:
        raise SettingsError(f"key {path} can't be read ({error.strerror or error})") from error
    except NOT_PEM as error:
        detail = " ".join(str(error).split())[:200]
        raise SettingsError(f"key {path}: expected an unencrypted Ed25519 private key in PEM ({detail})") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise SettingsError(f"key {path}: expected an Ed25519 private key")
    return key


def write_key(path: Path, key: Ed25519PrivateKey) -> None:
    """Write a private key; raises OSError."""
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    write_atomic(path, pem, private=True)
