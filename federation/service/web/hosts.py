"""Which host a request means: a page of somebody else's can make its own name lead to an address of ours."""

from __future__ import annotations

from replayfleet.federation.wire.transport.broker_address import is_loopback


def host_of(header: str) -> str:
    """Return the name of a ``Host`` header without its port; of IPv6 without brackets."""
    if header.startswith("["):
        return header[1:].split("]", 1)[0].lower()
    return header.rsplit(":", 1)[0].lower() if ":" in header else header.lower()


def means_this_machine(header: str) -> bool:
    """Whether a ``Host`` header names this machine; so does one that is missing, which no browser sends."""
    return not header or is_loopback(host_of(header))
