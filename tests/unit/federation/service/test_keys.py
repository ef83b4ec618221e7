from __future__ import annotations

import os
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from replayfleet.aggregator.members.authority import read_request
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.credentials.keys import read_key

SHORT = """-----BEGIN PRIVATE KEY-----
MC4CAQAwBQYDK2VvBCIEIIr4mh6lu/wBlPoiQdoYTQeLgQT6HoBG1KLrl0DfTG5M
-----END PRIVATE KEY-----
"""
"""Names X448 and has 32 bytes, which the library takes for an error of its own."""

VERSION_3 = """-----BEGIN CERTIFICATE REQUEST-----
MIHKMHICAQIwEDEOMAwGA1UEAwwFY2FtLTEwWTATBgcqhkjOPQIBBggqhkjOPQMB
BwNCAATyVGVFp6fIBQsZQT3KX33z89gLeZtvFm+zMmdrRtMCq5NT0i3C1PdCy1EV
+ScQ3jgbuDeWXEhbOPpIGuBO4K7GoAAwCgYIKoZIzj0EAwIDSAAwRQIgeZMYvQKh
uF0J8o2cntBslOKv0UC36iTFlDhEkul56r0CIQCQi4FfPhP+Ns5bNlCTkXEb4IwV
/oq7CXRYvR3B8j+q2g==
-----END CERTIFICATE REQUEST-----
"""


@pytest.mark.parametrize("text", [SHORT, VERSION_3, "", "-----BEGIN PRIVATE KEY-----"])
def test_a_file_that_is_no_key_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "signing.key"
    path.write_text(text)
    with pytest.raises(SettingsError, match="expected an unencrypted Ed25519 private key in PEM") as refused:
        read_key(path)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("text", [SHORT, VERSION_3, ""])
def test_a_file_that_is_no_request_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "cam-1.csr"
    path.write_text(text)
    with pytest.raises(SettingsError, match="expected a certificate signing request in PEM"):
        read_request(path, "cam-1")


@pytest.mark.parametrize(
    ("bits", "asked", "says"),
    [
        (1024, "cam-1", "expected a key on an elliptic curve, or RSA of 2048 bits"),
        (2048, "cam-2", "isn't signed with its own key"),
        (2048, "cam-1", ""),
    ],
)
def test_a_request_counts_only_from_who_has_its_key_and_a_strong_one(
    bits: int, asked: str, says: str, tmp_path: Path
) -> None:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, asked)])
    key = rsa.generate_private_key(65537, bits)
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    changed = request.public_bytes(Encoding.DER).replace(asked.encode(), b"cam-1")
    path = tmp_path / "cam-1.csr"
    path.write_bytes(x509.load_der_x509_csr(changed).public_bytes(Encoding.PEM))
    with pytest.raises(SettingsError, match=says) if says else nullcontext():
        assert read_request(path, "cam-1") == key.public_key()


def test_a_key_may_come_through_a_pipe_from_who_decrypts_it(tmp_path: Path) -> None:
    written = Ed25519PrivateKey.generate()
    pem = written.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    os.mkfifo(tmp_path / "root.key")
    writer = threading.Thread(target=(tmp_path / "root.key").write_bytes, args=(pem,), daemon=True)
    writer.start()
    assert read_key(tmp_path / "root.key").private_bytes_raw() == written.private_bytes_raw()
    writer.join()
