from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.authority import Authority

from replayfleet.aggregator.trust.release import Releases
from replayfleet.edge_client.doctor.doctor import checks
from replayfleet.edge_client.doctor.findings import Finding, Status
from replayfleet.edge_client.doctor.keys import look_at_keys
from replayfleet.edge_client.doctor.settings import DoctorSettings
from replayfleet.federation.service.credentials.keys import KEYS, ROOT, SIGNING_KEY, signing_key
from replayfleet.federation.wire.transport.broker_address import TlsSettings


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def by_check(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


def test_good_files_are_fine_and_say_until_when(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue("cam-1", days=200)
    password = tmp_path / "credentials"
    password.write_text("cam-1\nsecret\n")
    for private in (key, password):
        private.chmod(0o600)
    found = by_check(look_at_keys(TlsSettings(None, certificate, key), password))
    assert {name: finding.status for name, finding in found.items()} == {
        "keys.tls-cert": Status.OK,
        "keys.tls-key": Status.OK,
        "keys.password-file": Status.OK,
        "keys.tls": Status.OK,
    }
    assert found["keys.tls-cert"].facts["days_left"] == pytest.approx(200, abs=0.2)
    assert "secret" not in str(found)


@pytest.mark.parametrize(
    ("days", "begins", "status", "text"),
    [
        (10, -1, Status.WARNING, "valid until"),
        (-1, -10, Status.FAILURE, "expired on"),
        (300, 5, Status.FAILURE, "not valid before"),
    ],
)
def test_a_certificate_that_is_or_soon_is_invalid(
    days: float, begins: float, status: Status, text: str, authority: Authority
) -> None:
    certificate, key = authority.issue("cam-1", days=days, begins=begins)
    key.chmod(0o600)
    found = by_check(look_at_keys(TlsSettings(None, certificate, key), None))["keys.tls-cert"]
    assert found.status == status
    assert text in found.found


def test_a_key_that_others_may_read_is_a_warning_that_says_what_to_do(authority: Authority) -> None:
    certificate, key = authority.issue("cam-1", days=200)
    key.chmod(0o644)
    found = by_check(look_at_keys(TlsSettings(None, certificate, key), None))["keys.tls-key"]
    assert (found.status, found.advice) == (Status.WARNING, f"chmod 600 {key}")


def test_missing_damaged_and_foreign_files_are_failures_each(authority: Authority, tmp_path: Path) -> None:
    certificate, _ = authority.issue("cam-1", days=200)
    _, other_key = authority.issue("cam-2", days=200)
    other_key.chmod(0o600)
    text = tmp_path / "text.pem"
    text.write_text("not a certificate")
    damaged = tmp_path / "damaged.pem"
    damaged.write_text("-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n")
    one_line = tmp_path / "one-line"
    one_line.write_text("cam-1\n")
    one_line.chmod(0o600)
    found = by_check(look_at_keys(TlsSettings(text, damaged, tmp_path / "nowhere.key"), one_line))
    assert {finding.status for finding in found.values()} == {Status.FAILURE}
    assert set(found) == {"keys.tls-ca", "keys.tls-cert", "keys.tls-key", "keys.password-file"}
    assert "holds no certificate" in found["keys.tls-ca"].found
    mixed = by_check(look_at_keys(TlsSettings(None, certificate, other_key), None))
    assert mixed["keys.tls"].status == Status.FAILURE
    assert "don't fit" in mixed["keys.tls"].found


@pytest.mark.parametrize("named", [True, False], ids=["in the identity folder", "in the data dir"])
def test_a_damaged_signing_key_is_a_failure_that_names_it(named: bool, tmp_path: Path) -> None:
    signing_key(tmp_path / KEYS)
    settings = DoctorSettings(identity=tmp_path / KEYS) if named else DoctorSettings(data_dir=tmp_path)
    (looking,) = (check.look for check in checks(settings) if check.name == "keys")
    sound = by_check(list(looking()))
    (tmp_path / KEYS / SIGNING_KEY).write_bytes(bytes(119))  # as a power cut leaves it
    damaged = by_check(list(looking()))["keys.signing-key"]
    assert (sound["keys.signing-key"].status, damaged.status) == (Status.OK, Status.FAILURE)
    assert str(tmp_path / KEYS / SIGNING_KEY) in damaged.found


def test_a_root_with_which_no_client_starts_is_a_failure_and_a_missing_one_a_warning(tmp_path: Path) -> None:
    aggregator, identity = tmp_path / "aggregator", tmp_path / "identity"
    root = Releases(aggregator).roots[-1]
    signing_key(identity)
    (looking,) = (check.look for check in checks(DoctorSettings(identity=identity)) if check.name == "keys")

    def look(data: bytes) -> Status:
        (identity / ROOT).write_bytes(data)
        return by_check(list(looking()))["keys.root"].status

    assert by_check(list(looking()))["keys.root"].status == Status.WARNING
    assert (look(root), look(root[:-9]), look(b"")) == (Status.OK, Status.FAILURE, Status.FAILURE)


def test_no_files_are_nothing_to_look_at() -> None:
    (found,) = look_at_keys(TlsSettings(), None, now=time.time)
    assert found.status == Status.SKIPPED
