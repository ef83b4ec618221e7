"""What a broker's address, certificates and logins may be together, and ids that nobody guesses."""

from __future__ import annotations

from pathlib import Path

import pytest

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.wire.transport.broker_address import Credentials, TlsSettings
from replayfleet.federation.wire.transport.connecting import Connector, secret_id

MEMBER = TlsSettings(Path("ca"), Path("crt"), Path("key"))
NOBODY, LOGIN = TlsSettings(Path("ca")), Credentials("cam-1", "secret")


@pytest.mark.parametrize("url", ["broker.example", "mqtts://192.0.2.7:8883"])
def test_on_another_machine_a_member_says_who_it_is(url: str) -> None:
    assert Connector(MEMBER, None, insecure=False).check(url).encrypted
    assert Connector(NOBODY, LOGIN, insecure=False).check(url).encrypted
    assert Connector(NOBODY, None, insecure=True).check(url).encrypted
    with pytest.raises(SettingsError, match="nothing says who we are: give --identity"):
        Connector(NOBODY, None, insecure=False).check(url)


def test_on_this_machine_nobody_is_asked() -> None:
    assert not Connector(TlsSettings(), None, insecure=False).check("localhost").encrypted
    assert Connector(NOBODY, None, insecure=False).check("mqtts://127.0.0.1").encrypted


def test_files_that_somebody_named_for_tls_never_go_unused() -> None:
    with pytest.raises(SettingsError, match="is not encrypted; use mqtts://"):
        Connector(MEMBER, None, insecure=False, insist_on_tls=True).check("mqtt://localhost")
    assert not Connector(MEMBER, None, insecure=False).check("mqtt://localhost").encrypted, "an identity folder's may"


def test_an_id_needs_the_secret_and_says_whose_it_is() -> None:
    assert secret_id("fleet-cam-1-data", b"a") == secret_id("fleet-cam-1-data", b"a")
    assert len({secret_id(name, key) for name in ("x", "y") for key in (b"a", b"b")}) == 4
    assert secret_id("fleet-cam-1-data", b"a").startswith("fleet-cam-1-data-")
