"""What a mosquitto needs to serve a fleet: configuration, access rules, revocations, made from the table of members.

Only who is a member is named, so whoever was revoked may say and hear nothing as soon as the broker has read the rules
again, also on a connection that it has already. The list of revocations is asked at handshakes alone: where the name is
enrolled again, a connection made with a revoked certificate would be that member's again until the broker restarts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509

from replayfleet.federation.atomic import write_atomic
from replayfleet.federation.paths import read_regular
from replayfleet.federation.wire.protocol.topics import ROOT, topic_of

AGGREGATOR, OPERATOR = "aggregator", "operator"
CA, CERTIFICATE, KEY, REVOKED, RULES = "ca.crt", "broker.crt", "broker.key", "revoked.crl", "rules.acl"
CONFIG, CONFIG_2_1 = "replayfleet.conf", "replayfleet-2.1.conf"
PLACE = "/etc/mosquitto/replayfleet"
"""Where the folder lies on the broker's machine."""

_CONFIG = """\
# {place}/{name}, made by `aggregator enroll`: what is changed here is lost with the next member.
# For mosquitto {versions}; reasons for the numbers: docs/deploy.md.

# TLS alone; no other port is opened.
listener 8883
# Whom members' certificates must come from, who the broker is, and whose certificates count no more.
cafile {place}/ca.crt
certfile {place}/broker.crt
keyfile {place}/broker.key
crlfile {place}/revoked.crl

# A member's certificate is its name: the common name becomes the user of the access rules.
allow_anonymous false
require_certificate true
use_identity_as_username true
# Who may say and hear what.
{rules}

# Without it a small request and its reply take 80 ms instead of one.
set_tcp_nodelay true
# Blocks of a transfer fit into it; larger ones are an error or an attack.
max_packet_size 1048576
# A client that is gone is noticed within a minute and a half.
max_keepalive 60
# What is kept for a client that is away: messages, and bytes of them.
max_queued_messages 10000
max_queued_bytes 268435456
# What is on its way to one slow client: 5 MB of blocks.
max_inflight_messages 20
# A client that stays away for a day is forgotten. Where mosquitto keeps its state (`persistence true`, as Debian's own
# file has it; the fleet doesn't need it) it is on disk every five seconds.
autosave_interval 5
persistent_client_expiration 1d
"""
_STYLES = {
    CONFIG: ("2.0, and 2.1, which warns that acl_file will go", "acl_file {place}/rules.acl"),
    CONFIG_2_1: (
        "2.1 and newer; the plugin's folder differs from system to system",
        "global_plugin /usr/lib/mosquitto_acl_file.so\nplugin_opt_acl_file {place}/rules.acl",
    ),
}


def config(name: str, place: str) -> str:
    """Return the configuration for one style of mosquitto, whose files lie in ``place``."""
    versions, rules = _STYLES[name]
    return _CONFIG.format(place=place, name=name, versions=versions, rules=rules.format(place=place))


def place_in(path: Path) -> str | None:
    """Return where a configuration says that its files lie; None if there is none."""
    try:
        found = re.search(r"(?m)^cafile (.+)/ca\.crt$", path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None
    return found[1] if found else None


def rules(fleet: str, members: Iterable[str]) -> str:
    """Return who may say and hear what; who isn't named, nothing."""
    blocks = [f"# Access rules of fleet {fleet}, made by `aggregator enroll`; the user is a certificate's common name."]
    for member in sorted(members):
        lines = "\n".join(f"topic {may} {topic}" for may, topic in _topics(fleet, member))
        blocks.append(f"user {member}\n{lines}")
    return "\n\n".join(blocks) + "\n"


def _topics(fleet: str, member: str) -> list[tuple[str, str]]:
    if member == AGGREGATOR:
        return [("readwrite", f"{ROOT}/{fleet}/#")]
    if member == OPERATOR:  # labels pictures by hand
        return [("write", f"{ROOT}/{fleet}/clients/+/feedback"), ("read", f"{ROOT}/{fleet}/clients/+/studio")]
    own = {
        "down": "read", "up": "write", "state": "write", "control": "readwrite", "feedback": "read", "studio": "write",
        "thumbnail": "write",
    }  # fmt: skip
    return [
        ("read", topic_of(fleet, "round")),
        ("read", topic_of(fleet, "down")),
        *((may, topic_of(fleet, channel, member)) for channel, may in own.items()),
        ("readwrite", topic_of(fleet, "doctor", member)),  # `edge-client doctor` talks to itself through the broker
    ]


def revoked_in(path: Path, authority: x509.Certificate) -> set[int] | None:
    """Return the serial numbers in an authority's list of revocations; None if there is none of this certificate's."""
    try:
        found = x509.load_pem_x509_crl(read_regular(path))
        is_ours = found.is_signature_valid(authority.public_key())  # type: ignore[arg-type]  # it is one that signs
        is_ours = is_ours and found.last_update_utc == authority.not_valid_before_utc
    except (OSError, ValueError):
        return None
    return {entry.serial_number for entry in found} if is_ours else None


def write_if_new(path: Path, data: bytes, *, private: bool = False) -> bool:
    """Write a file that isn't there or holds something else; returns whether it did."""
    if path.is_file() and path.read_bytes() == data:
        return False
    write_atomic(path, data, private=private)
    return True
