from __future__ import annotations

from replayfleet.federation.wire.transport.refusals import OF_ACCEPTED, certificate_refused, connection_ended


def test_a_certificate_that_cant_be_verified_may_be_the_brokers_clock() -> None:
    """OpenSSL answers so to one that isn't valid yet; another identity helps nobody then."""
    said = certificate_refused("[SSL: SSLV3_ALERT_BAD_CERTIFICATE] sslv3 alert bad certificate (_ssl.c:2580)")
    assert "can't verify it, or the broker's clock is wrong; look at that, else enrol" in said
    assert certificate_refused("timed out") == ""


def test_a_connection_that_was_closed_without_a_word_is_told_as_that() -> None:
    """paho calls it an unspecified error, as a broker may too."""
    said = connection_ended(0x80, "Unspecified error")
    assert said == "connection lost: the broker, or a proxy on the way there, ended it without a word"
    assert said.startswith(OF_ACCEPTED)
    assert connection_ended(0x8B, "Server shutting down") == "connection lost: Server shutting down"


def test_a_former_certificate_that_was_renewed_is_told_apart_from_one_to_enrol_again_for() -> None:
    said = certificate_refused("[SSL: SSLV3_ALERT_CERTIFICATE_REVOKED] sslv3 alert certificate revoked (_ssl.c:2580)")
    assert "it was revoked: enrol this member again" in said
    assert "or renewed, and this is the former one" in said
