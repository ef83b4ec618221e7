from __future__ import annotations

from pathlib import Path

import pytest

from replayfleet.aggregator.console.settings import ConsoleSettings
from replayfleet.federation.errors import SettingsError


@pytest.mark.parametrize("listen", ["0.0.0.0:8443", "[::]:8443", "fleet.example.org:8443"])
def test_off_loopback_a_certificate_and_tokens_are_demanded(tmp_path: Path, listen: str) -> None:
    with pytest.raises(SettingsError, match="expected a certificate, its key and a file of tokens"):
        ConsoleSettings(data_dir=tmp_path, listen=listen)
    with pytest.raises(SettingsError, match="expected a certificate"):
        ConsoleSettings(data_dir=tmp_path, listen=listen, tokens=tmp_path / "tokens.toml")


@pytest.mark.parametrize("listen", ["127.0.0.1:8080", "[::1]:0", "localhost:1"])
def test_on_loopback_nothing_is(tmp_path: Path, listen: str) -> None:
    assert ConsoleSettings(data_dir=tmp_path, listen=listen).is_private


@pytest.mark.parametrize("listen", ["8080", ":8080", "::1:80", "127.0.0.1:x", "127.0.0.1:70000", ""])
def test_what_is_no_address_is_one_clear_line(tmp_path: Path, listen: str) -> None:
    with pytest.raises(SettingsError, match="expected HOST:PORT"):
        ConsoleSettings(data_dir=tmp_path, listen=listen)


@pytest.mark.parametrize("name", ["fleet.example.org:8443", "https://fleet.example.org", "[fd00::1]", ""])
def test_a_name_that_no_browser_would_ask_for_is_refused(tmp_path: Path, name: str) -> None:
    assert ConsoleSettings(data_dir=tmp_path, names=("Fleet.example.org", "fd00::1")).hosts > {"fleet.example.org"}
    with pytest.raises(SettingsError, match="expected a name or an address, without a port"):
        ConsoleSettings(data_dir=tmp_path, names=(name,))


def test_half_a_certificate_and_a_damaged_one_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.pem").write_text("nothing")
    with pytest.raises(SettingsError, match="one is missing"):
        ConsoleSettings(data_dir=tmp_path, tls_cert=tmp_path / "a.pem")
    with pytest.raises(SettingsError, match="certificate"):
        ConsoleSettings(data_dir=tmp_path, tls_cert=tmp_path / "a.pem", tls_key=tmp_path / "a.pem")


def test_the_command_line_says_the_same(tmp_path: Path) -> None:
    settings = ConsoleSettings(data_dir=tmp_path, names=("a", "b"), tokens=tmp_path / "t", json_logs=True)
    assert settings.arguments == (
        *("--data-dir", str(tmp_path), "--listen", "127.0.0.1:8080", "--name", "a", "--name", "b"),
        *("--tokens", str(tmp_path / "t"), "--json-logs"),
    )
