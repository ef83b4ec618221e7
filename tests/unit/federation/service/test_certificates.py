from __future__ import annotations

import base64
from pathlib import Path

import pytest
from cryptography import x509
from support.authority import Authority

from replayfleet.federation.errors import MalformedMessage
from replayfleet.federation.service.credentials.certificates import CertificateTimes, Validity, common_name, validities


@pytest.mark.parametrize("days", [1, 9000])  # the second ends after 2049, where the encoding of time changes
def test_validity_is_what_a_cryptography_package_reads(days: int, tmp_path: Path) -> None:
    certificate, _ = Authority(tmp_path).issue("cam", days=days, begins=-300)
    expected = x509.load_pem_x509_certificate(certificate.read_bytes())
    assert validities(certificate.read_bytes()) == (
        Validity(expected.not_valid_before_utc, expected.not_valid_after_utc),
    )


def test_a_chain_has_one_validity_for_each_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    chain = authority.issue("cam", days=5)[0].read_bytes() + authority.ca.read_bytes()
    assert len(validities(chain)) == 2
    assert validities(b"no certificate here") == ()


def test_a_clock_before_the_beginning_is_told_with_both_times(tmp_path: Path) -> None:
    certificate, _ = Authority(tmp_path).issue("cam", days=5)
    begins = validities(certificate.read_bytes())[0].begins
    times = CertificateTimes(certificate)
    assert times.too_early(0.0, 60.0) == (
        f"valid from {begins:%Y-%m-%d %H:%M} UTC; this device's clock says 1970-01-01 00:01 UTC"
    )
    assert times.too_early(1.0, begins.timestamp()) == ""
    assert times.left_s(1.0, begins.timestamp()) == pytest.approx(6 * 86400)
    assert CertificateTimes(None).too_early(0.0, 0.0) == CertificateTimes(tmp_path).too_early(0.0, 0.0) == ""


def test_the_name_is_that_of_the_first_certificate_not_of_who_issued_it(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    chain = authority.issue("cam-ä", days=5)[0].read_bytes() + authority.ca.read_bytes()
    assert common_name(chain) == "cam-ä"
    assert common_name(authority.ca.read_bytes()) == "test authority"
    assert common_name(b"no certificate here") == ""


def test_a_certificate_that_is_cut_off_anywhere_is_malformed(tmp_path: Path) -> None:
    pem = Authority(tmp_path).ca.read_bytes()
    der = base64.b64decode(b"".join(pem.splitlines()[1:-1]))
    for length in range(0, len(der), 7):
        short = b"-----BEGIN CERTIFICATE-----\n" + base64.b64encode(der[:length]) + b"A===\n-----END CERTIFICATE-----\n"
        with pytest.raises(MalformedMessage, match="can't be read"):
            validities(short)
        with pytest.raises(MalformedMessage, match="can't be read"):
            common_name(short)
        cut = b"-----BEGIN CERTIFICATE-----\n" + base64.b64encode(der[:length]) + b"\n-----END CERTIFICATE-----\n"
        with pytest.raises(MalformedMessage, match="can't be read"):
            validities(cut)
