"""Who belongs to a fleet: enrolled, renewed, revoked, listed; whole or not at all, beside a running aggregator."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import sqlite3
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import NameOID

from replayfleet.aggregator.cli import cli
from replayfleet.aggregator.control import listing
from replayfleet.aggregator.members import authority, broker_files, enrolment, table
from replayfleet.aggregator.members.enrolment import Broker, Terms, opened
from replayfleet.aggregator.records.roll import Standing
from replayfleet.aggregator.store import DATABASE, AggregatorStore
from replayfleet.aggregator.trust.release import Releases
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service import data_dir
from replayfleet.federation.service.credentials import identity
from replayfleet.federation.wire.protocol.messages import FleetSpec, Manifest
from replayfleet.federation.wire.transport.broker_address import TlsSettings

NOW = datetime(2026, 11, 23, 12, tzinfo=timezone.utc)


def run(*words: object) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words])


def enrolled(folder: Path, *clients: str, now: datetime = NOW) -> None:
    for client in clients:
        with opened(folder, new=True, now=now) as registry:
            registry.enrol(client, Terms())


def certificate(folder: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / "member.crt").read_bytes())


def revoked(folder: Path) -> set[int] | None:
    ca = x509.load_pem_x509_certificate((folder / "members" / "ca.crt").read_bytes())
    return broker_files.revoked_in(folder / "broker" / "revoked.crl", ca)


def named_in_rules(folder: Path) -> set[str]:
    lines = (folder / "broker" / "rules.acl").read_text().splitlines()
    return {line.removeprefix("user ") for line in lines if line.startswith("user ")}


def request(folder: Path, name: str = "cam-1", key: ec.EllipticCurvePrivateKey | None = None) -> Path:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)] if name else [])
    made = x509.CertificateSigningRequestBuilder().subject_name(subject)
    signed = made.sign(key or ec.generate_private_key(ec.SECP256R1()), hashes.SHA256())
    path = folder / "cam-1.csr"
    path.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    return path


def test_who_is_enrolled_gets_a_folder_that_can_be_used_and_is_told_what_to_copy(tmp_path: Path) -> None:
    out = tmp_path / "cam-1"
    done = run("enroll", "cam-1", "--data-dir", tmp_path / "agg", "--out", out, "--host", "broker.example")
    assert done.exit_code == 0, done.output
    identity.check_identity(out)
    identity.tls_of(out, TlsSettings()).context()
    assert {path.name for path in out.iterdir()} == {"ca.crt", "member.crt", "member.key", "root.json", "signing.key"}
    assert (out / "root.json").read_bytes() == (tmp_path / "agg" / "keys" / "1.root.json").read_bytes()
    assert {path.stat().st_mode & 0o777 for path in out.glob("*.key")} == {0o600}
    told = (f"copy {out}/*", f"copy {tmp_path}/agg/broker/* to", "reload", f"--identity {tmp_path}/agg/identity")
    for text in told:
        assert text in done.output
    identity.check_identity(tmp_path / "agg" / "identity")
    assert named_in_rules(tmp_path / "agg") == {"aggregator", "cam-1"}
    signs = serialization.load_pem_private_key((out / "signing.key").read_bytes(), None)
    assert isinstance(signs, ed25519.Ed25519PrivateKey)
    assert AggregatorStore(tmp_path / "agg").signing_key("cam-1") == signs.public_key().public_bytes_raw()


def test_a_request_is_signed_and_the_key_stays_where_it_was_made(tmp_path: Path) -> None:
    key, signs = ec.generate_private_key(ec.SECP256R1()), ed25519.Ed25519PrivateKey.generate()
    public = signs.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    (tmp_path / "signing.pub").write_bytes(public)
    options = ("--request", request(tmp_path, key=key), "--signing-key", tmp_path / "signing.pub")
    done = run("enroll", "cam-1", "--data-dir", tmp_path / "agg", *options)
    assert done.exit_code == 0, done.output
    out = tmp_path / "agg" / "members" / "cam-1"
    assert {path.name for path in out.iterdir()} == {"ca.crt", "member.crt", "root.json"}
    assert certificate(out).public_key() == key.public_key()
    assert AggregatorStore(tmp_path / "agg").signing_key("cam-1") == signs.public_key().public_bytes_raw()
    former = (out / "member.crt").read_bytes()
    refused = run("renew", "cam-1", "--data-dir", tmp_path / "agg")
    assert "cam-1 made its own key, which stays there; let it make a request" in str(refused.exception)
    assert {path.name for path in out.iterdir()} == {"ca.crt", "member.crt", "root.json"}
    assert (out / "member.crt").read_bytes() == former
    assert run("renew", "cam-1", "--data-dir", tmp_path / "agg", *options[:2]).exit_code == 0
    assert (out / "member.crt").read_bytes() != former
    assert certificate(out).public_key() == key.public_key()


@pytest.mark.parametrize(
    ("name", "says"), [("cam-2", "is for 'cam-2', expected CN=cam-1"), ("", "is for nobody, expected CN=cam-1")]
)
def test_a_request_for_another_name_is_refused(name: str, says: str, tmp_path: Path) -> None:
    refused = run("enroll", "cam-1", "--data-dir", tmp_path / "agg", "--request", request(tmp_path, name))
    assert says in str(refused.exception)
    refused = run("enroll", "cam-1", "--data-dir", tmp_path / "agg", "--request", request(tmp_path))
    assert "--request needs --signing-key" in str(refused.exception)
    (tmp_path / "cam-1.csr").write_text("nothing")
    refused = run("enroll", "cam-1", "--data-dir", tmp_path / "agg", "--request", tmp_path / "cam-1.csr")
    assert "expected a certificate signing request" in str(refused.exception)
    assert not (tmp_path / "agg").exists()


def test_a_renewed_member_has_two_certificates_for_a_while(tmp_path: Path) -> None:
    enrolled(tmp_path, "cam-1")
    former, signs = certificate(tmp_path / "members" / "cam-1"), AggregatorStore(tmp_path).signing_key("cam-1")
    with opened(tmp_path, now=NOW + timedelta(days=800)) as registry:
        done = registry.renew("cam-1", Terms(), overlap_days=14)
    assert len(done.member.certificates) == 2
    newer = certificate(tmp_path / "members" / "cam-1")
    assert newer.serial_number != former.serial_number
    assert newer.not_valid_after_utc > former.not_valid_after_utc
    assert AggregatorStore(tmp_path).signing_key("cam-1") == signs, "it signs as before"
    assert revoked(tmp_path) == set()
    with opened(tmp_path, now=NOW + timedelta(days=815)):
        pass
    assert revoked(tmp_path) == {former.serial_number}
    with opened(tmp_path, now=NOW + timedelta(days=826)):
        pass
    assert revoked(tmp_path) == set(), "what has expired need not be listed"


def test_a_large_fleet_s_table_is_read_with_no_more_questions_than_a_small_one_s(tmp_path: Path) -> None:
    """Each member asked for the certificates of all: one renewal took 13 s in a fleet of 2000."""
    enrolled(tmp_path, "cam-1", "cam-2", "cam-3", "cam-4")
    asked: list[str] = []
    members = table.Members(tmp_path)
    members._db.set_trace_callback(asked.append)
    assert len(members.all()) == 5
    assert len(asked) == 2
    members.close()


def test_a_revoked_member_is_in_no_rule_and_its_signature_counts_no_more(tmp_path: Path) -> None:
    enrolled(tmp_path, "cam-1", "cam-2")
    signs = AggregatorStore(tmp_path).signing_key("cam-1")
    done = run("revoke", "cam-1", "--data-dir", tmp_path, "--yes")
    assert "cam-1 is revoked" in done.output
    assert "kill -HUP" in done.output
    assert named_in_rules(tmp_path) == {"aggregator", "cam-2"}
    assert revoked(tmp_path) == {certificate(tmp_path / "members" / "cam-1").serial_number}
    store = AggregatorStore(tmp_path)
    assert store.signing_key("cam-1") not in {signs, None}
    assert store.is_enrolled("cam-1"), "nobody else takes its name"


@pytest.mark.parametrize("ahead", [timedelta(days=3), timedelta(days=90)])
def test_who_was_revoked_while_the_clock_was_ahead_stays_revoked_and_nobody_else_is(
    ahead: timedelta, tmp_path: Path
) -> None:
    enrolled(tmp_path, "cam-1", "cam-2")
    shut_out = {certificate(tmp_path / "members" / "cam-1").serial_number}
    with opened(tmp_path, now=NOW + ahead) as registry:
        registry.revoke("cam-1")
    for later in (ahead, timedelta(), timedelta(days=1)):
        with opened(tmp_path, now=NOW + later):
            pass
        assert revoked(tmp_path) == shut_out
        crl = x509.load_pem_x509_crl((tmp_path / "broker" / "revoked.crl").read_bytes())
        assert crl.last_update_utc <= NOW, "a list from the future lets nobody in"
    with opened(tmp_path, new=True, now=NOW + timedelta(days=2)) as registry:
        registry.enrol("cam-1", Terms())
    assert revoked(tmp_path) == shut_out


def test_a_renewed_member_that_is_revoked_has_no_certificate_that_counts(tmp_path: Path) -> None:
    run("enroll", "cam-1", "--data-dir", tmp_path)
    assert "the former one counts until" in run("renew", "cam-1", "--data-dir", tmp_path).output
    assert "counts until" not in run("revoke", "cam-1", "--data-dir", tmp_path, "--yes").output


def test_a_revoked_member_can_come_back_with_other_keys(tmp_path: Path) -> None:
    enrolled(tmp_path, "cam-1")
    first = certificate(tmp_path / "members" / "cam-1").serial_number
    store = AggregatorStore(tmp_path)
    store.found(FleetSpec("street", "fedavg", {}, {}, 0), 0.0)
    assert store.accept_upload(Manifest("up", "street", "cam-1", 0, 1, ()), 7, 0)
    assert "kill -HUP" in run("revoke", "cam-1", "--data-dir", tmp_path, "--yes").output
    again = run("enroll", "cam-1", "--data-dir", tmp_path)
    assert again.exit_code == 0
    assert "RESTART it" in again.output, "a reload leaves a connection that was made with the revoked certificate"
    assert "kill -HUP" not in again.output
    assert named_in_rules(tmp_path) == {"aggregator", "cam-1"}
    assert revoked(tmp_path) == {first}
    assert store.uploads(0) == {}, "what its former key signed"
    assert "RESTART" not in run("enroll", "cam-2", "--data-dir", tmp_path).output


def test_a_certificate_that_ended_counts_no_more_whatever_its_member_gets_since(tmp_path: Path) -> None:
    """Else the next renewal lets whoever has a copy of a revoked one in again, for as long as the former one counts."""
    enrolled(tmp_path, "cam-1")
    ended = {certificate(tmp_path / "members" / "cam-1").serial_number}
    with opened(tmp_path, now=NOW) as registry:
        registry.renew("cam-1", Terms(), 0)
        ended.add(certificate(tmp_path / "members" / "cam-1").serial_number)
        registry.revoke("cam-1")
        registry.enrol("cam-1", Terms())
        assert revoked(tmp_path) == ended
        registry.renew("cam-1", Terms(), 14)
    assert revoked(tmp_path) == ended


def test_a_member_vouches_for_nobody_and_counts_no_longer_than_the_authority(tmp_path: Path) -> None:
    with opened(tmp_path, new=True, now=NOW) as registry:
        registry.enrol("cam-1", Terms(days=2 * authority.CA_DAYS))
    ca = x509.load_pem_x509_certificate((tmp_path / "members" / "ca.crt").read_bytes())
    member = certificate(tmp_path / "members" / "cam-1")
    constraints = [one.extensions.get_extension_for_class(x509.BasicConstraints).value for one in (ca, member)]
    assert [(one.ca, one.path_length) for one in constraints] == [(True, 0), (False, None)]
    usages = [one.extensions.get_extension_for_class(x509.KeyUsage).value for one in (ca, member)]
    assert [one.key_cert_sign for one in usages] == [True, False]
    assert member.not_valid_after_utc == ca.not_valid_after_utc


def terms(tls: ec.EllipticCurvePrivateKey, signs: ed25519.Ed25519PrivateKey) -> Terms:
    return Terms(key=tls.public_key(), signing_key=signs.public_key().public_bytes_raw())


@pytest.mark.parametrize("is_old", [False, True])
def test_keys_that_were_revoked_or_are_another_member_s_are_refused_and_those_of_a_renewal_are_not(
    is_old: bool, tmp_path: Path
) -> None:
    tls = [ec.generate_private_key(ec.SECP256R1()) for _ in range(3)]
    signs = [ed25519.Ed25519PrivateKey.generate() for _ in range(3)]
    with opened(tmp_path, new=True, now=NOW) as registry:
        registry.enrol("cam-2", terms(tls[0], signs[0]))
        registry.enrol("cam-3", terms(tls[1], signs[1]))
        registry.renew("cam-2", terms(tls[0], signs[0]), 14)
    if is_old:  # the data dir of a version that kept no keys
        with sqlite3.connect(tmp_path / DATABASE) as database:
            database.execute("DROP TABLE keys")
    with opened(tmp_path, now=NOW) as registry:
        registry.revoke("cam-3")
        for client, brought, says in (
            ("cam-3", terms(tls[1], signs[2]), "cam-3's TLS key was revoked with cam-3; nothing was changed: make new"),
            ("cam-3", terms(tls[2], signs[1]), "cam-3's signing key was revoked with cam-3"),
            ("cam-4", terms(tls[2], signs[1]), "cam-4's signing key was revoked with cam-3"),
            ("cam-4", terms(tls[0], signs[2]), "cam-4's TLS key is also cam-2's, and each could speak as the other"),
            ("cam-4", terms(tls[2], signs[0]), "cam-4's signing key is also cam-2's"),
        ):
            with pytest.raises(SettingsError, match=says):
                registry.enrol(client, brought)
        assert {member.client for member in registry.members()} == {"aggregator", "cam-2", "cam-3"}
        assert not (tmp_path / "members" / "cam-4").exists()
        registry.enrol("cam-3", terms(tls[2], signs[2]))
        registry.renew("cam-2", terms(tls[0], signs[0]), 14)


def test_who_is_enrolled_again_and_still_excluded_is_told_so(tmp_path: Path) -> None:
    enrolled(tmp_path, "cam-1")
    assert run("exclude", "cam-1", "--data-dir", tmp_path, "--yes").exit_code == 0
    assert run("revoke", "cam-1", "--data-dir", tmp_path, "--yes").exit_code == 0
    again = "it is still excluded; `aggregator readmit cam-1`"
    assert again in run("enroll", "cam-1", "--data-dir", tmp_path).output
    assert again not in run("enroll", "cam-2", "--data-dir", tmp_path).output


def test_the_list_says_who_is_what(tmp_path: Path) -> None:
    enrolled(tmp_path, "cam-1", "cam-2", "cam-3")
    run("renew", "cam-2", "--data-dir", tmp_path)
    run("revoke", "cam-3", "--data-dir", tmp_path, "--yes")
    AggregatorStore(tmp_path).hold("cam-9", set())
    rows = json.loads(run("clients", "--data-dir", tmp_path, "--json").stdout)
    states = {row["client"]: row["state"] for row in rows}
    assert states == {
        "aggregator": "member",
        "cam-1": "member",
        "cam-2": "member",
        "cam-3": "revoked",
        "cam-9": "not enrolled",
    }
    assert [row["client"] for row in rows if "former certificate" in row["note"]] == ["cam-2"]
    text = run("clients", "--data-dir", tmp_path).output
    assert text.splitlines()[0].split() == ["client", "state", "seen", "version", "until", "note"]


def test_who_looks_is_told_when_the_broker_gets_something_new(tmp_path: Path) -> None:
    soon_over = datetime.now(timezone.utc) - timedelta(days=enrolment.BROKER_DAYS - 20)
    enrolled(tmp_path, "cam-1", now=soon_over)
    first, second = (run("clients", "--data-dir", tmp_path, "--json") for _ in range(2))
    new = f"broker: what it gets is new: copy {tmp_path / 'broker'}/* to /etc/mosquitto/replayfleet/ there"
    assert new in first.output
    assert new not in second.output
    assert json.loads(first.stdout) == json.loads(second.stdout)


def test_a_broker_that_other_machines_can_t_reach_is_told(tmp_path: Path) -> None:
    alone = "for this machine alone; enroll with --host NAME"
    assert alone in run("enroll", "cam-1", "--data-dir", tmp_path).output
    assert alone not in run("enroll", "cam-2", "--data-dir", tmp_path, "--host", "broker.example").output
    assert alone not in run("renew", "cam-1", "--data-dir", tmp_path).output, "its names stay"


def test_who_enrols_the_operator_is_told_to_start_the_studio_and_no_device(tmp_path: Path) -> None:
    told = run("enroll", "operator", "--data-dir", tmp_path).output
    assert f"operator:   copy {tmp_path / 'members' / 'operator'}/*" in told
    assert "start `edge-client studio` with --identity" in told
    assert "edge-client start" not in told
    assert "start `edge-client start` with --identity" in run("enroll", "cam-1", "--data-dir", tmp_path).output


def test_keys_made_here_before_are_not_copied_over_those_that_a_device_made_since(tmp_path: Path) -> None:
    def there() -> set[str]:
        return {path.name for path in folder.iterdir()}

    folder, tls = tmp_path / "members" / "cam-1", ec.generate_private_key(ec.SECP256R1())
    whole = {"ca.crt", "member.crt", "member.key", "signing.key", "root.json"}
    with opened(tmp_path, new=True, now=NOW) as registry:
        registry.enrol("cam-1", Terms())
        registry.renew("cam-1", Terms(), 14)
        assert there() == whole
        registry.renew("cam-1", Terms(key=tls.public_key()), 14)
        assert there() == whole - {"member.key"}, "it goes on to sign with the key that it was given"
        (folder / "member.key").write_bytes(authority.private_pem(tls))
        registry.renew("cam-1", Terms(key=tls.public_key()), 14)
        assert there() == whole, "a request that was made in this folder"
        registry.revoke("cam-1")
        made = ec.generate_private_key(ec.SECP256R1()), ed25519.Ed25519PrivateKey.generate()
        registry.enrol("cam-1", terms(*made))
    assert there() == whole - {"member.key", "signing.key"}


def test_keys_made_here_stay_where_the_certificate_for_newer_ones_can_not_be_written(tmp_path: Path) -> None:
    folder, tls = tmp_path / "members" / "cam-1", ec.generate_private_key(ec.SECP256R1())
    with opened(tmp_path, new=True, now=NOW) as registry:
        registry.enrol("cam-1", Terms())
        key = (folder / "member.key").read_bytes()
        (folder / "member.crt").unlink()
        (folder / "member.crt" / "in its place").mkdir(parents=True)
        with pytest.raises(SettingsError, match="can't be written"):
            registry.renew("cam-1", Terms(key=tls.public_key()), 14)
    assert (folder / "member.key").read_bytes() == key


def test_the_keys_of_another_member_are_not_written_over(tmp_path: Path) -> None:
    agg, out = tmp_path / "agg", tmp_path / "stick"
    assert run("enroll", "cam-1", "--data-dir", agg, "--out", out).exit_code == 0
    before = {path.name: path.read_bytes() for path in [*out.iterdir(), *(agg / "identity").iterdir()]}
    for command, folder, owner in (("enroll", out, "cam-1"), ("enroll", agg / "identity", "aggregator")):
        refused = run(command, "cam-2", "--data-dir", agg, "--out", folder)
        assert f"--out {folder} holds the keys of '{owner}'" in str(refused.exception)
    assert run("enroll", "cam-2", "--data-dir", agg).exit_code == 0, "nobody was taken in"
    assert run("renew", "cam-2", "--data-dir", agg, "--out", out).exit_code != 0
    assert {path.name: path.read_bytes() for path in [*out.iterdir(), *(agg / "identity").iterdir()]} == before
    assert run("renew", "cam-1", "--data-dir", agg, "--out", out).exit_code == 0


def test_who_names_a_broker_s_hosts_anew_is_told_which_it_has_no_longer(tmp_path: Path) -> None:
    def enrols(client: str, *hosts: str) -> str:
        named = [f"--host={host}" for host in hosts]
        return run("enroll", client, "--data-dir", tmp_path, *named).output

    lost = "its certificate is no longer for"
    assert lost not in enrols("cam-1", "broker.example", "192.0.2.7")
    assert lost not in enrols("cam-2")
    assert lost not in enrols("cam-3", "broker.example", "192.0.2.7", "192.0.2.8")
    assert f"{lost} 192.0.2.7, 192.0.2.8, by which" in enrols("cam-4", "broker.example")
    assert lost not in enrols("cam-5", "broker.example")


def test_who_founds_a_fleet_is_told_so_first_and_nobody_else(tmp_path: Path) -> None:
    def first_line(folder: Path, client: str) -> str:
        return run("enroll", client, "--data-dir", folder).output.splitlines()[0]

    wrong = first_line(tmp_path / "mistyped", "cam-1")
    assert wrong.startswith(f"a new fleet begins in {tmp_path / 'mistyped'}")
    assert "wrong --data-dir" in wrong
    assert first_line(tmp_path / "mistyped", "cam-2").startswith("cam-2 is a member")
    AggregatorStore(tmp_path).found(FleetSpec("fleet", "fedavg", {}, {}, 0), 0.0)
    Releases(tmp_path / "keys")
    assert first_line(tmp_path, "cam-1").startswith("cam-1 is a member"), "an aggregator has run there"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("enroll", "cam-1"), "is a member already"),
        (("enroll", "a/b"), "client id"),
        (("enroll", "broker"), "is taken"),
        (("enroll", "cam-2", "--host", "a b"), "expected a name or an address"),
        (("enroll", "cam-2", "--host", "10.0.0.5:8883"), "expected a name or an address, without a port"),
        (("enroll", "cam-2", "--host", "cafe:8883"), "expected a name or an address, without a port"),
        (("enroll", "cam-2", "--host", "10.0.0.256"), "expected a name or an address"),
        (("enroll", "cam-2", "--host", "fe80::1%eth0"), "expected a name or an address"),
        (("enroll", "cam-2", "--fleet", "other"), "belongs to fleet 'yard'"),
        (("enroll", "cam-2", "--signing-key", "nowhere"), "expected a public key"),
        (("renew", "cam-2"), "is no member of fleet yard"),
        (("revoke", "cam-2", "--dry-run"), "is no member of fleet yard"),
        (("revoke", "cam-1"), "nobody is here to say yes"),
    ],
)
def test_what_can_t_be_is_one_line_and_changes_nothing(words: tuple[str, ...], says: str, tmp_path: Path) -> None:
    assert run("enroll", "cam-1", "--data-dir", tmp_path, "--fleet", "yard").exit_code == 0
    before = json.loads(run("clients", "--data-dir", tmp_path, "--json").output)
    refused = run(*words, "--data-dir", tmp_path)
    assert isinstance(refused.exception, SettingsError)
    assert says in str(refused.exception)
    assert json.loads(run("clients", "--data-dir", tmp_path, "--json").output) == before


def test_who_is_to_be_revoked_is_asked_about_and_a_dry_run_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enrolled(tmp_path, "cam-1")
    assert "cam-1 is shut out: its certificates" in run("revoke", "cam-1", "--data-dir", tmp_path, "--dry-run").output
    its_own = run("revoke", "aggregator", "--data-dir", tmp_path, "--dry-run").output
    assert "no round goes on until then" in its_own
    assert "upload" not in its_own
    monkeypatch.setattr("replayfleet.federation.service.command.sys", SimpleNamespace(stdin=Terminal()))
    assert CliRunner().invoke(cli, ["revoke", "cam-1", "--data-dir", str(tmp_path)], input="n\n").exit_code == 1
    assert members(tmp_path) == {"aggregator", "cam-1"}
    done = CliRunner().invoke(cli, ["revoke", "cam-1", "--data-dir", str(tmp_path)], input="y\n")
    assert "cam-1 is revoked" in done.output
    assert members(tmp_path) == {"aggregator"}


class Terminal:
    @staticmethod
    def isatty() -> bool:
        return True


@pytest.mark.parametrize("command", [("renew", "cam-1"), ("revoke", "cam-1"), ("clients",)])
def test_where_nobody_was_enrolled_nothing_is_made(command: tuple[str, ...], tmp_path: Path) -> None:
    refused = run(*command, "--data-dir", tmp_path / "agg")
    assert "nobody was enrolled here" in str(refused.exception)
    assert list(tmp_path.iterdir()) == []


def test_a_data_dir_is_that_fleets_from_then_on(tmp_path: Path) -> None:
    assert run("enroll", "cam-1", "--data-dir", tmp_path, "--fleet", "yard").exit_code == 0
    with data_dir.claim_data_dir(tmp_path, fleet="yard", role="aggregator"):
        assert run("enroll", "cam-2", "--data-dir", tmp_path).exit_code == 0, "beside a running aggregator"
    with pytest.raises(SettingsError, match="belongs to fleet 'yard'"):
        data_dir.claim_data_dir(tmp_path, fleet="fleet", role="aggregator")
    assert "replayfleet/v1/yard/clients/cam-2/up" in (tmp_path / "broker" / "rules.acl").read_text()


def test_a_client_s_folder_is_no_aggregator_s(tmp_path: Path) -> None:
    data_dir.claim_data_dir(tmp_path, fleet="fleet", role="client", owner="cam-1").close()
    before = sorted(tmp_path.iterdir())
    assert "belongs to role 'client'" in str(run("enroll", "cam-2", "--data-dir", tmp_path).exception)
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_whose_lock_can_t_be_made_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(enrolment.os, "open", full)
    with pytest.raises(SettingsError, match="No space left"), opened(tmp_path, new=True):
        pass
    assert list(tmp_path.iterdir()) == []


def test_the_brokers_certificate_follows_its_names_and_is_renewed_in_time(tmp_path: Path) -> None:
    def serial() -> int:
        pem = (tmp_path / "broker" / "broker.crt").read_bytes()
        return x509.load_pem_x509_certificate(pem).serial_number

    def at(days: int, *hosts: str) -> int:
        with opened(tmp_path, None, Broker(hosts), new=True, now=NOW + timedelta(days=days)):
            return serial()

    first = at(0, "broker.example", "192.0.2.7")
    assert at(1) == at(2, "broker.example", "192.0.2.7") == first
    second = at(3, "other.example")
    assert second != first
    assert at(700) == second
    assert (ahead := at(800)) != second
    assert (right := at(4)) != ahead, "one from the future is no use to anybody"
    assert at(5) == right
    assert at(800) != right
    (tmp_path / "broker" / "broker.key").unlink()
    third = at(801)
    made = x509.load_pem_x509_certificate((tmp_path / "broker" / "broker.crt").read_bytes())
    assert enrolment._hosts_in(made) == ("other.example",), "of a command that was killed between the two, too"
    assert at(802) == third == made.serial_number


def test_a_certificate_of_somebody_else_in_the_brokers_place_is_replaced(tmp_path: Path) -> None:
    """One without names ended every command about members with a traceback."""
    with opened(tmp_path, new=True, now=NOW):
        pass
    (tmp_path / "broker" / "broker.crt").write_bytes((tmp_path / "members" / "ca.crt").read_bytes())
    with opened(tmp_path, now=NOW):
        pass
    made = x509.load_pem_x509_certificate((tmp_path / "broker" / "broker.crt").read_bytes())
    assert enrolment._hosts_in(made) == enrolment.LOCAL


def test_a_member_has_the_days_of_its_newest_certificate_though_a_former_one_counts_longer(tmp_path: Path) -> None:
    enrolled(tmp_path, "cam-1")
    with opened(tmp_path, now=NOW + timedelta(seconds=1)) as registry:
        registry.renew("cam-1", Terms(days=5), overlap_days=14)
        row = listing._row(Standing("cam-1"), registry.member("cam-1"), None, NOW.timestamp())
    newest, former = (NOW + timedelta(days=days, seconds=1) for days in (5, 14))
    assert (row["until"], row["note"]) == (
        f"{newest:%Y-%m-%d}",
        f"a former certificate counts until {former:%Y-%m-%d}",
    )
    assert table.expiries(tmp_path)["cam-1"] == pytest.approx(newest.timestamp(), abs=1)


def test_a_member_that_was_enrolled_while_the_clock_was_ahead_has_the_days_of_the_certificate_that_it_got_since(
    tmp_path: Path,
) -> None:
    enrolled(tmp_path, "cam-0")
    enrolled(tmp_path, "cam-1", "cam-2", now=NOW + timedelta(days=1800))
    for days, client, renews in ((0, "cam-1", True), (1, "cam-2", False)):
        with opened(tmp_path, now=NOW + timedelta(days=days)) as registry:
            if renews:
                done = registry.renew(client, Terms(days=100), overlap_days=14)
            else:
                registry.revoke(client)
                done = registry.enrol(client, Terms(days=100))
        ends = (NOW + timedelta(days=days + 100)).timestamp()
        assert done.member.certificates[0].ends_at == pytest.approx(ends, abs=1)
        assert table.expiries(tmp_path)[client] == pytest.approx(ends, abs=1)


def test_where_the_broker_has_its_files_is_remembered(tmp_path: Path) -> None:
    def named() -> str | None:
        return broker_files.place_in(tmp_path / "broker" / "replayfleet.conf")

    enrolled(tmp_path, "cam-1")
    assert named() == "/etc/mosquitto/replayfleet"
    assert run("enroll", "cam-2", "--data-dir", tmp_path, "--broker-dir", "/srv/broker files").exit_code == 0
    enrolled(tmp_path, "cam-3")
    assert named() == "/srv/broker files"
    refused = run("enroll", "cam-4", "--data-dir", tmp_path, "--broker-dir", "/srv\nallow_anonymous true")
    assert "a configuration can't name that" in str(refused.exception)


def test_lost_files_are_made_again_but_never_another_authority(tmp_path: Path) -> None:
    enrolled(tmp_path, "cam-1")
    (tmp_path / "members" / "ca.crt").unlink()
    for path in (tmp_path / "broker").iterdir():
        path.unlink()
    enrolled(tmp_path, "cam-2")
    old, new = tmp_path / "members" / "cam-1", tmp_path / "members" / "cam-2"
    ca = x509.load_pem_x509_certificate((new / "ca.crt").read_bytes())
    certificate(old).verify_directly_issued_by(ca)
    assert len(list((tmp_path / "broker").iterdir())) == 7
    (tmp_path / "members" / "ca.key").unlink()
    with pytest.raises(SettingsError, match=r"ca\.key is missing"):
        enrolled(tmp_path, "cam-3")


def test_a_fleet_whose_keys_are_gone_takes_nobody_in_under_others(tmp_path: Path) -> None:
    enrolled(tmp_path, "operator")  # holds no root
    enrolled(tmp_path, "cam-1")
    (tmp_path / "keys").rename(tmp_path / "lost")
    with pytest.raises(SettingsError, match=r"holds no root,.*serve --take-over"):
        enrolled(tmp_path, "cam-2")
    assert not (tmp_path / "keys").exists()
    assert members(tmp_path) == {"aggregator", "operator", "cam-1"}
    (tmp_path / "lost").rename(tmp_path / "keys")
    enrolled(tmp_path, "cam-2")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["broker/broker.crt", "broker/broker.key", "broker/revoked.crl", "members/ca.crt"])
def test_nobody_waits_for_who_writes_into_a_pipe_that_a_damaged_disk_left(name: str, tmp_path: Path) -> None:
    enrolled(tmp_path, "cam-1")
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    done = run("enroll", "cam-2", "--data-dir", tmp_path)
    if name == "members/ca.crt":
        assert "it is no file" in str(done.exception)
    else:
        assert named_in_rules(tmp_path) >= {"cam-1", "cam-2"}, "made again"


@pytest.mark.parametrize("lost", ["gone", "emptied"])
def test_a_database_that_was_lost_shuts_no_member_out_and_lets_no_revoked_one_in(lost: str, tmp_path: Path) -> None:
    """The next to be enrolled was the only one whom the broker's files named, and nobody was revoked in them."""
    enrolled(tmp_path, "cam-1", "cam-2")
    with opened(tmp_path, now=NOW) as registry:
        registry.revoke("cam-2")
    before, revocations = named_in_rules(tmp_path), revoked(tmp_path)
    assert revocations
    for path in tmp_path.glob(f"{DATABASE}*"):
        path.unlink()
    if lost == "emptied":
        (tmp_path / DATABASE).touch()
    for words in (("enroll", "cam-3"), ("renew", "cam-1"), ("clients",), ("enroll", "cam-3")):
        done = run(*words, "--data-dir", tmp_path)
        assert isinstance(done.exception, SettingsError)
        assert "was lost: it knows nobody, and " in str(done.exception)
    assert (named_in_rules(tmp_path), revoked(tmp_path)) == (before, revocations)


def test_another_authority_makes_all_that_the_broker_has_anew(tmp_path: Path) -> None:
    enrolled(tmp_path, "cam-1")
    for name in ("ca.key", "ca.crt"):
        (tmp_path / "members" / name).unlink()
    assert run("enroll", "cam-2", "--data-dir", tmp_path).exit_code == 0
    ca = x509.load_pem_x509_certificate((tmp_path / "broker" / "ca.crt").read_bytes())
    x509.load_pem_x509_certificate((tmp_path / "broker" / "broker.crt").read_bytes()).verify_directly_issued_by(ca)
    assert revoked(tmp_path) == set()


def test_an_authority_of_two_halves_issues_nothing(tmp_path: Path) -> None:
    for name in ("yard", "harbour"):
        enrolled(tmp_path / name, "cam-1")
    (tmp_path / "yard/members/ca.crt").write_bytes((tmp_path / "harbour/members/ca.crt").read_bytes())
    with pytest.raises(SettingsError, match=r"ca\.key and ca\.crt don't belong together"):
        enrolled(tmp_path / "yard", "cam-2")


def test_one_command_at_a_time_has_the_members(tmp_path: Path) -> None:
    with (
        opened(tmp_path, new=True, now=NOW),
        (tmp_path / "members/lock").open("rb") as lock,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_wrong_clock_issues_nothing(tmp_path: Path) -> None:
    enrolled(tmp_path, "cam-1")
    with pytest.raises(SettingsError, match="set this machine's clock"):
        enrolled(tmp_path, "cam-2", now=NOW - timedelta(days=400))


def test_a_fleet_that_a_clock_ahead_of_time_founded_goes_on_once_it_is_right(tmp_path: Path) -> None:
    enrolled(tmp_path, "cam-1", now=NOW + timedelta(days=1800))
    with pytest.raises(SettingsError, match=r"If it is right.*members/ca\.crt away: `aggregator renew aggregator`"):
        enrolled(tmp_path, "cam-2")
    (tmp_path / "members" / "ca.crt").unlink()
    for client in ("aggregator", "cam-1"):
        with opened(tmp_path, now=NOW) as registry:
            folder = registry.renew(client, Terms(), overlap_days=14).folder
        assert folder is not None
        made = [x509.load_pem_x509_certificate((folder / name).read_bytes()) for name in ("member.crt", "ca.crt")]
        made[0].verify_directly_issued_by(made[1])
        assert all(each.not_valid_before_utc <= NOW for each in made)
    crl = x509.load_pem_x509_crl((tmp_path / "broker" / "revoked.crl").read_bytes())
    assert crl.last_update_utc <= NOW, "a list from the future lets nobody in"


WITHOUT, WITH = {"aggregator", "cam-0"}, {"aggregator", "cam-0", "cam-1"}
POSSIBLE = {"enroll": (WITHOUT, WITH), "renew": (WITH,), "revoke": (WITHOUT, WITH)}


@pytest.mark.parametrize("command", ["enroll", "renew", "revoke"])
def test_a_command_that_is_killed_at_any_step_has_happened_or_hasn_t(command: str, tmp_path: Path) -> None:
    for step in range(40):
        folder = tmp_path / str(step)
        enrolled(folder, "cam-0", *(["cam-1"] if command != "enroll" else []))
        killed = in_a_child_that_dies(folder, command, step)
        assert members(folder) in POSSIBLE[command]
        again = run(command, "cam-1", "--data-dir", folder, *(["--yes"] if command == "revoke" else []))
        assert again.exit_code == 0 or "already" in str(again.exception) or "is no member" in str(again.exception)
        assert named_in_rules(folder) == members(folder)
        assert members(folder) == (WITHOUT if command == "revoke" else WITH)
        if command != "revoke":
            shown = certificate(folder / "members" / "cam-1")
            ca = x509.load_pem_x509_certificate((folder / "broker" / "ca.crt").read_bytes())
            shown.verify_directly_issued_by(ca)
            assert shown.serial_number not in (revoked(folder) or set())
        if not killed:
            return
    raise AssertionError("it never ended")


def members(folder: Path) -> set[str]:
    if not (folder / "members" / "ca.crt").is_file():
        return set()
    store = AggregatorStore(folder)
    found = table.Members(folder)
    try:
        return {member.client for member in found.all() if member.revoked_at is None}
    finally:
        found.close()
        store.close()


def in_a_child_that_dies(folder: Path, command: str, step: int) -> bool:
    """Run a command in a child that is gone at its n-th step towards the disk; returns whether it was."""
    child = os.fork()
    if child == 0:
        left = [step]

        def dying(work: Callable[..., Any]) -> Callable[..., Any]:
            def done(*words: Any, **more: Any) -> Any:
                if left[0] == 0:
                    os._exit(9)
                left[0] -= 1
                return work(*words, **more)

            return done

        for room in (authority, broker_files, identity, data_dir):
            room.write_atomic = dying(room.write_atomic)  # type: ignore[attr-defined]
        enrolment.AggregatorStore.pin = dying(AggregatorStore.pin)  # type: ignore[method-assign]
        table.Members._change = dying(table.Members._change)  # type: ignore[method-assign]
        words = [command, "cam-1", "--data-dir", str(folder), *(["--yes"] if command == "revoke" else [])]
        code = 7
        try:
            cli.main(words, standalone_mode=False)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in {0, 9}
    return os.waitstatus_to_exitcode(status) == 9
