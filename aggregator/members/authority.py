"""A fleet's certificate authority: two files in the aggregator's data dir."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from replayfleet.federation.atomic import private_folder, write_atomic
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.paths import read_regular
from replayfleet.federation.service.credentials.keys import NOT_PEM

CA_KEY, CA_CERTIFICATE = "ca.key", "ca.crt"
CA_DAYS = 7300
BACKDATED = timedelta(days=1)
"""Certificates are valid from yesterday on, for devices whose clock is late."""
MAX_REQUEST_BYTES = 64 << 10
MIN_RSA_BITS = 2048


class Authority:
    """Signs certificates; made at first use. A folder that lost its certificate gets another one for the same key.

    Args:
        folder: holds ``ca.key`` and ``ca.crt``.
        fleet: fleet name.
        now: with its time zone.

    Raises:
        SettingsError: The files can't be read, made or used together, or the clock is before the certificate's begin.
    """

    def __init__(self, folder: Path, fleet: str, now: datetime) -> None:
        self._now = now
        try:
            private_folder(folder)
            if not (folder / CA_KEY).exists():
                if (folder / CA_CERTIFICATE).exists():
                    raise SettingsError(f"{folder}: {CA_KEY} is missing; bring it back from a copy")
                write_atomic(folder / CA_KEY, private_pem(new_key()), private=True)
            key = serialization.load_pem_private_key(read_regular(folder / CA_KEY), None)
            if not isinstance(key, ec.EllipticCurvePrivateKey):
                raise SettingsError(f"{folder / CA_KEY}: expected a key on an elliptic curve")
            self._key = key
            if not (folder / CA_CERTIFICATE).exists():
                write_atomic(folder / CA_CERTIFICATE, pem_of(self._own_certificate(fleet)))
            self.certificate = x509.load_pem_x509_certificate(read_regular(folder / CA_CERTIFICATE))
        except OSError as error:
            raise SettingsError(f"{error.filename or folder} can't be used ({error.strerror or error})") from error
        except NOT_PEM as error:
            raise SettingsError(f"{folder}: {CA_KEY} or {CA_CERTIFICATE} is damaged ({error})") from error
        if self.certificate.public_key() != key.public_key():
            raise SettingsError(f"{folder}: {CA_KEY} and {CA_CERTIFICATE} don't belong together")
        if not self.certificate.not_valid_before_utc <= now < self.certificate.not_valid_after_utc:
            raise SettingsError(
                f"it is {now:%Y-%m-%d %H:%M}, and the fleet's authority is valid from "
                f"{self.certificate.not_valid_before_utc:%Y-%m-%d} to {self.certificate.not_valid_after_utc:%Y-%m-%d}: "
                "set this machine's clock. If it is right, and wasn't when the authority was made, move "
                f"{folder / CA_CERTIFICATE} away: `aggregator renew aggregator` makes another one for the same key, "
                "and each member has to be renewed"
            )

    @property
    def pem(self) -> bytes:
        """The authority's certificate."""
        return pem_of(self.certificate)

    def sign(self, key: CertificatePublicKeyTypes, name: str, days: int, hosts: Sequence[str] = ()) -> x509.Certificate:
        """Return a certificate: of a member, or with ``hosts`` of the broker that is reached by these names.

        Args:
            key: whose it is.
            name: common name, which the broker's rules know.
            days: from now on; never beyond the authority's own end.
            hosts: names and addresses.
        """
        usage = ExtendedKeyUsageOID.SERVER_AUTH if hosts else ExtendedKeyUsageOID.CLIENT_AUTH
        builder = self._builder(_name(name), key, days).add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
        own = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(own, critical=False)
        if hosts:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False
            )
        return builder.sign(self._key, hashes.SHA256())

    def signed(self, certificate: x509.Certificate) -> bool:
        """Whether a certificate is this authority's."""
        try:
            certificate.verify_directly_issued_by(self.certificate)
        except NOT_PEM:
            return False
        return True

    def revocations(self, serials: Iterable[int]) -> bytes:
        """Return the list of certificates that count no more, PEM."""
        builder = x509.CertificateRevocationListBuilder().issuer_name(self.certificate.subject)
        # One that has expired would shut everybody out; one that a clock ahead of time dates, until that time.
        begins, ends = self.certificate.not_valid_before_utc, self.certificate.not_valid_after_utc
        builder = builder.last_update(begins).next_update(ends)
        own = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(own, critical=False)
        for serial in sorted(serials):
            entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(self._now)
            builder = builder.add_revoked_certificate(entry.build())
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def _own_certificate(self, fleet: str) -> x509.Certificate:
        name = _name(f"Replayfleet {fleet}")
        builder = self._builder(name, self._key.public_key(), CA_DAYS, issuer=name)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        return builder.add_extension(_usage(signs_certificates=True), critical=True).sign(self._key, hashes.SHA256())

    def _builder(
        self, subject: x509.Name, key: CertificatePublicKeyTypes, days: int, issuer: x509.Name | None = None
    ) -> x509.CertificateBuilder:
        ends = self._now + timedelta(days=days)
        if issuer is None:
            issuer, ends = self.certificate.subject, min(ends, self.certificate.not_valid_after_utc)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._now - BACKDATED)
            .not_valid_after(ends)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        )


def new_key() -> ec.EllipticCurvePrivateKey:
    """Return a new key for TLS."""
    return ec.generate_private_key(ec.SECP256R1())


def private_pem(key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey) -> bytes:
    """Return a private key as PEM (PKCS 8), not encrypted."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def pem_of(certificate: x509.Certificate) -> bytes:
    """Return a certificate as PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def read_request(path: Path, name: str) -> CertificatePublicKeyTypes:
    """Return the public key that a certificate signing request asks a certificate for.

    Raises:
        SettingsError: It can't be read, isn't signed with its own key, is for another name, or its key is too weak.
    """
    try:
        with path.open("rb") as file:
            request = x509.load_pem_x509_csr(file.read(MAX_REQUEST_BYTES))
        names = [str(found.value) for found in request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        key, is_signed = request.public_key(), request.is_signature_valid
    except (OSError, *NOT_PEM) as error:
        raise SettingsError(f"request {path}: expected a certificate signing request in PEM ({error})") from error
    if not is_signed:
        raise SettingsError(f"request {path}: isn't signed with its own key")
    if names != [name]:
        raise SettingsError(f"request {path}: is for {', '.join(map(repr, names)) or 'nobody'}, expected CN={name}")
    if not isinstance(key, (ec.EllipticCurvePublicKey, ed25519.Ed25519PublicKey, rsa.RSAPublicKey)) or (
        isinstance(key, rsa.RSAPublicKey) and key.key_size < MIN_RSA_BITS
    ):
        raise SettingsError(f"request {path}: expected a key on an elliptic curve, or RSA of {MIN_RSA_BITS} bits")
    return key


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
