from __future__ import annotations

from replayfleet.federation.wire.transport.refusals import certificate_refused


def test_a_certificate_that_cant_be_verified_may_be_the_brokers_clock() -> None:
    """OpenSSL answers so to one that isn't valid yet; another identity helps nobody then."""
    said = certificate_refused("[SSL: SSLV3_ALERT_BAD_CERTIFICATE] sslv3 alert bad certificate (_ssl.c:2580)")
    assert "can't verify it, or the broker's clock is wrong; look at that, else enrol" in said
    assert certificate_refused("timed out") == ""
