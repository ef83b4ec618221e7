"""One member of a fleet that sends as fast as the loopback takes it: what a quota has to stand.

    python -m support.flood BROKER_URL FLEET CLIENT FOLDER KIND[,KIND...]

It writes packets to a bare socket, without a client's bookkeeping, until its standard input is closed. It prints a line
when it begins and one when it has sent everything once, at the end how many messages and bytes it sent. They are signed
with the key in the member's folder, each once: those of later bursts are repetitions. Kinds: ``ATTACKS``.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

from support.voices import Member

from replayfleet.federation.wire.protocol.codec import encode, is_block
from replayfleet.federation.wire.protocol.messages import BlobEntry, Block, Manifest, Offer, Presence, Verdict
from replayfleet.federation.wire.protocol.topics import topic_of
from replayfleet.federation.wire.transport.seal import Signer

NUM_MADE_UP = 3000


def _offer(fleet: str, client: str, number: int, round_index: int, facts: bytes, num_blobs: int) -> bytes:
    blobs = tuple(BlobEntry(f"made-up/{place}", f"{place:064x}", 4) for place in range(num_blobs))
    manifest = Manifest("up", fleet, client, round_index, number + 1, blobs, facts)
    return encode(Offer("client", f"{number:032x}", manifest, (), 1024, b""))


def large_offers(fleet: str, client: str) -> Iterator[tuple[str, bytes]]:
    """849 KiB each, nearly all of it entries of blobs."""
    for number in range(4):
        yield topic_of(fleet, "up", client), _offer(fleet, client, number, number, bytes(450_000), 4000)


def stale_offers(fleet: str, client: str) -> Iterator[tuple[str, bytes]]:
    for number in range(1000):
        yield topic_of(fleet, "up", client), _offer(fleet, client, number, 10**6 + number, b"", 1)


def made_up_presences(fleet: str, _client: str) -> Iterator[tuple[str, bytes]]:
    for number in range(NUM_MADE_UP):
        name = f"made-up-{number}"
        yield topic_of(fleet, "state", name), encode(Presence(name, "online", "boot", 1, device="\x1b[31m"))


def restarts(fleet: str, client: str) -> Iterator[tuple[str, bytes]]:
    """The same client comes online again and again."""
    for number in range(1000):
        yield topic_of(fleet, "state", client), encode(Presence(client, "online", f"boot-{number}", 1))


def verdicts(fleet: str, client: str) -> Iterator[tuple[str, bytes]]:
    for number in range(1000):
        yield topic_of(fleet, "control", client), encode(Verdict("client", f"{number:032x}", 0, 1, accepted=True))


def blocks(fleet: str, client: str) -> Iterator[tuple[str, bytes]]:
    """Of no transfer."""
    for number in range(16):
        yield topic_of(fleet, "up", client), encode(Block(f"{number:032x}", 0, bytes(256 << 10)))


def garbage(fleet: str, client: str) -> Iterator[tuple[str, bytes]]:
    for number in range(1000):
        yield topic_of(fleet, "up", client), b"\1\1" + number.to_bytes(2, "big") * 100


ATTACKS: dict[str, Callable[[str, str], Iterator[tuple[str, bytes]]]] = {
    "large_offers": large_offers,
    "stale_offers": stale_offers,
    "made_up_presences": made_up_presences,
    "restarts": restarts,
    "verdicts": verdicts,
    "blocks": blocks,
    "garbage": garbage,
}


def flood(
    url: str, fleet: str, client: str, signer: Signer, kinds: list[str], stop: threading.Event
) -> tuple[int, int]:
    """Send until ``stop`` is set; returns messages and bytes."""
    host, _, port = url.removeprefix("mqtt://").partition(":")
    bursts, counts = [], []
    for kind in kinds:
        packets = [
            _packet(topic, frame if is_block(frame) else signer.seal(topic, frame))
            for topic, frame in ATTACKS[kind](fleet, client)
        ]
        bursts.append(b"".join(packets))
        counts.append(len(packets))
    sent = [0, 0]
    with socket.create_connection((host, int(port))) as connection:
        name = f"{client}-flood".encode()
        body = b"\0\4MQTT\4\2\0\0" + struct.pack("!H", len(name)) + name  # MQTT 3.1.1, a clean session, no keep-alive
        connection.sendall(b"\x10" + _length(len(body)) + body)
        assert connection.recv(4)[3:] == b"\0", "refused"
        for number, (burst, count) in enumerate(cycle(zip(bursts, counts, strict=True))):
            if number in {0, len(bursts)}:
                sys.stdout.write("begun\n" if number == 0 else "sent once\n")
                sys.stdout.flush()
            if stop.is_set():
                break
            connection.sendall(burst)
            sent[0], sent[1] = sent[0] + count, sent[1] + len(burst)
    return sent[0], sent[1]


def _packet(topic: str, payload: bytes) -> bytes:
    name = topic.encode()
    body = struct.pack("!H", len(name)) + name + payload
    return b"\x30" + _length(len(body)) + body


def _length(size: int) -> bytes:
    encoded = bytearray()
    while True:
        size, digit = divmod(size, 128)
        encoded.append(digit | (0x80 if size else 0))
        if not size:
            return bytes(encoded)


def main() -> None:
    url, fleet, client, folder, kinds = sys.argv[1:]
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    messages, size = flood(url, fleet, client, Member(Path(folder)).signer, kinds.split(","), stop)
    sys.stdout.write(json.dumps({"messages": messages, "bytes": size}))


if __name__ == "__main__":
    main()
