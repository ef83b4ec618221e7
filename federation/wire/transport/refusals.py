"""Why a broker doesn't want us, in words, with what to do about it."""

from __future__ import annotations

import re
import ssl

UNSAID, UNSUPPORTED_VERSION, BAD_LOGIN, NOT_AUTHORIZED, TAKEN_OVER = 0x80, 0x84, 0x86, 0x87, 0x8E
"""Reason codes (MQTT 5, section 2.4), also for MQTT 3.1.1. Neither that nor mosquitto 2.0.11 says the last."""
TOO_LARGE = frozenset({0x82, 0x95})
"""A packet too large. mosquitto with ``message_size_limit`` says it where MQTT doesn't allow it: a protocol error."""

SESSION_TAKEN = (
    "session taken over: another process connected as this very member, with a copy of its key or data dir; stop one "
    "of the two, or revoke the member and enrol it again"
)
PERHAPS_TAKEN = (
    "connection lost again and again, right after it was accepted: a bad line, a proxy that ends what rests for "
    "seconds, a message larger than the broker takes or that its rules forbid (`edge-client doctor` tries one), or the "
    "session is taken over by another process with a copy of our key or data dir; this broker doesn't say which"
)
OF_ACCEPTED = ("session taken over", "connection lost")
"""What a broker has against those whom it accepts begins so: being accepted again is no answer to it."""
UNKNOWN_MEMBER = (
    "not authorized: the broker doesn't know this member; enrol it (aggregator enroll), give the broker the rules that "
    "were written then, and reload it; or user and password are wrong"
)
_ENROL = "enrol this member again (aggregator enroll), and bring it its new identity folder"
_OF_CERTIFICATES = {
    "certificate revoked": f"it was revoked: {_ENROL}; or renewed, and this is the former one: bring it the newer one",
    "certificate expired": "it has expired; renew it (aggregator renew), and look at the broker's clock",
    "unknown ca": f"another authority signed it than the broker's; {_ENROL}",
    "bad certificate": f"the broker can't verify it, or the broker's clock is wrong; look at that, else {_ENROL}",
    "certificate required": "there is none; name one with --identity, or with --tls-cert and --tls-key",
}
_CLOSED_UNANSWERED = "it closed the connection before it answered"
_NO_CERTIFICATE = " (does it ask for a client certificate, or refuse ours: revoked, expired, of another authority?)"
"""What may be said where TLS is spoken; the alert that would tell is lost where the broker closes too quickly."""
_NO_MQTT = " (does it speak TLS there, mqtts://, or websockets? or take no more connections?)"
NO_TLS = "TLS failure: it doesn't speak TLS there; name the port where it does"
_ALERT = re.compile(r"alert ([a-z ]+)")


def closed_unanswered(*, encrypted: bool) -> str:
    """Return what a broker that closes a connection at once may have against it."""
    return f"{_CLOSED_UNANSWERED}{_NO_CERTIFICATE if encrypted else _NO_MQTT}"


def entry_refused(code: int, text: str) -> str:
    """Return why a broker answered CONNECT with no."""
    return UNKNOWN_MEMBER if code in {BAD_LOGIN, NOT_AUTHORIZED} else f"broker refuses: {text}"


def connection_ended(code: int, text: str) -> str:
    """Return why a connection that the broker had accepted ended."""
    if code == UNSAID:  # paho's code too for a socket that was closed
        return "connection lost: the broker, or a proxy on the way there, ended it without a word"
    hint = "; a message of ours may be larger than the broker takes: `edge-client doctor` tries one"
    return f"connection lost: {text}{hint if code in TOO_LARGE else ''}"


def topic_refused(code: int, text: str, topics: str, *, to_hear: bool) -> str:
    """Return why a broker refuses a subscription or a message. MQTT 3.1.1 gives no reason; then it is a guess."""
    verb = "subscribe to" if to_hear else "publish on"
    if code in {NOT_AUTHORIZED, UNSAID}:
        return (
            f"not authorized to {verb} {topics}: the broker's access rules know nobody of this name who may: it was "
            "revoked, or the name in certificate or login isn't the client id, or the rules are of another fleet, or "
            "lack this topic"
        )
    return f"broker refuses to let us {verb} {topics}: {text}"


def certificate_refused(error: Exception | str) -> str:
    """Return why the broker refused our certificate, from the alert that TLS sends; empty if it sent none."""
    text = (error.reason or "").replace("_", " ").lower() if isinstance(error, ssl.SSLError) else error
    found = _ALERT.search(text) if isinstance(text, str) else None
    if found is None:
        return ""
    why = next((words for alert, words in _OF_CERTIFICATES.items() if found[1].startswith(alert)), found[1].strip())
    return f"the broker refuses our client certificate: {why}"
