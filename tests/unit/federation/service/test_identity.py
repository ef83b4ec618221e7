"""Identity folders, and what MQTT ids are derived from."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.authority import Authority

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.credentials.identity import (
    check_identity,
    concerns,
    session_secret,
    tls_of,
    write_identity,
)
from replayfleet.federation.service.member_settings import ConnectionSettings, read_token
from replayfleet.federation.wire.transport.broker_address import TlsSettings

DAY_S = 86_400.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("cam-1", days=90)
    made = tmp_path / "cam-1"
    files = {"ca.crt": authority.ca, "member.crt": certificate, "member.key": key}
    write_identity(made, {name: path.read_bytes() for name, path in files.items()})
    return made


def test_a_folder_gives_the_tls_files_that_nobody_named(folder: Path) -> None:
    check_identity(folder)
    own = tls_of(folder, TlsSettings())
    assert own == TlsSettings(folder / "ca.crt", folder / "member.crt", folder / "member.key")
    own.context()
    other = Path("x.crt"), Path("x.key")
    assert tls_of(folder, TlsSettings(None, *other)) == TlsSettings(folder / "ca.crt", *other)
    assert tls_of(folder, TlsSettings(None, None, other[1])) == TlsSettings(
        folder / "ca.crt", own.certificate_file, other[1]
    )
    assert tls_of(folder, TlsSettings(Path("ca"))).ca_file == Path("ca")
    assert tls_of(None, TlsSettings()) == TlsSettings()


def test_keys_are_the_owners_alone(folder: Path) -> None:
    assert (folder / "member.key").stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


def test_what_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    (folder / "member.key").unlink()
    with pytest.raises(SettingsError, match=r"member\.key is missing"):
        check_identity(folder)
    with pytest.raises(SettingsError, match="no such folder"):
        check_identity(tmp_path / "nowhere")


def test_times_and_permissions_are_concerns(folder: Path) -> None:
    now = (folder / "member.crt").stat().st_mtime
    found = concerns(folder, now)
    assert len(found) == 1
    assert "ca.crt is valid until" in found[0]
    later = concerns(folder, now + 100 * DAY_S)
    assert any("member.crt expired on" in text and "aggregator renew" in text for text in later)
    assert all("clock is wrong" in text for text in concerns(folder, 0.0))
    (folder / "member.key").chmod(0o644)
    assert any("chmod 600" in text for text in concerns(folder, now))
    (folder / "member.crt").write_text("nothing")
    assert any("holds no certificate" in text for text in concerns(folder, now))


def test_a_member_with_a_folder_is_somebody_on_another_machine(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    connector = ConnectionSettings(identity=folder).connector()
    assert connector.check("broker.example").encrypted
    assert not connector.check("mqtt://localhost").encrypted, "a folder may be for signing alone"
    assert "ca.crt is valid until" in caplog.text
    with pytest.raises(SettingsError, match="nothing says who we are"):
        ConnectionSettings(tls_ca=folder / "ca.crt").connector().check("broker.example")


def test_a_secret_is_the_certificates_key_or_one_that_the_data_dir_keeps(folder: Path, tmp_path: Path) -> None:
    assert session_secret(tmp_path, folder / "member.key") == (folder / "member.key").read_bytes()
    made = session_secret(tmp_path, None)
    assert session_secret(tmp_path, None) == made
    assert len(made) == 32
    assert (tmp_path / "keys" / "session.key").stat().st_mode & 0o777 == 0o600
    (folder / "member.key").write_bytes(b"")
    with pytest.raises(SettingsError, match="is damaged"):
        session_secret(tmp_path, folder / "member.key")


def test_a_random_secret_that_the_disk_damaged_is_made_again(tmp_path: Path) -> None:
    """A device didn't start until somebody came and removed it; zeros were taken for a secret."""
    path, secrets = tmp_path / "keys" / "session.key", {session_secret(tmp_path, None)}
    for damaged in (b"", bytes(32), b"x" * 31):
        path.write_bytes(damaged)
        secrets.add(session_secret(tmp_path, None))
    path.unlink()
    path.mkdir()
    secrets.add(session_secret(tmp_path, None))
    assert {len(secret) for secret in secrets} == {32}
    assert len(secrets) == 5
    assert path.stat().st_mode & 0o777 == 0o600


def test_anothers_folder_is_refused_before_a_broker_is_asked(folder: Path) -> None:
    settings = ConnectionSettings(identity=folder)
    settings.connector("cam-1")
    with pytest.raises(SettingsError, match=r"is of 'cam-1', and this is 'cam-2'; expected the folder"):
        settings.connector("cam-2")
    own = folder / "member.crt", folder / "member.key"
    ConnectionSettings(identity=folder, tls_cert=own[0], tls_key=own[1]).connector("cam-2")


def test_without_tls_a_folder_may_hold_keys_alone(tmp_path: Path) -> None:
    (tmp_path / "root.json").write_bytes(b"{}")
    check_identity(tmp_path)
    assert tls_of(tmp_path, TlsSettings()) == TlsSettings()
    assert concerns(tmp_path, 0.0) == []
    (tmp_path / "ca.crt").touch()
    with pytest.raises(SettingsError, match=r"member\.crt is missing"):
        check_identity(tmp_path)


def test_a_token_may_be_written_with_notepad(tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(b"\xef\xbb\xbfa-token-of-20-letters\r\n")
    assert read_token(tmp_path / "token") == "a-token-of-20-letters"
