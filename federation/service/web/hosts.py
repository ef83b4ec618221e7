"""Which host a request means: a page of somebody else's can make its own name lead to an address of ours."""

from __future__ import annotations

import re

from replayfleet.federation.wire.transport.broker_address import is_loopback

_HOST = re.compile(r"(?:\[([^][]+)\]|([^][:]+))(?::[0-9]*)?")
"""RFC 9110, section 7.2: a name or an address, perhaps a port."""


def host_of(header: str) -> str:
    """Return the name of a ``Host`` header without its port, of IPv6 without brackets; all of it if it is none."""
    found = _HOST.fullmatch(header)
    return header.lower() if found is None else (found[1] or found[2]).lower()


def means_this_machine(header: str) -> bool:
    """Whether a ``Host`` header names this machine; so does one that is missing, which no browser sends."""
    return not header or is_loopback(host_of(header))
