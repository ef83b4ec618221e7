"""``python -m replayfleet.scripts.fleet.tcp_link``: a bad line to a broker: slow, late, and cut now and then.

What is lost on a real line TCP sends again, so that programs only see delays and broken connections: these two are made
here, and a loss is a chunk that comes a timeout of TCP's later, or several. Listens on this machine only and prints the
port.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass

import click

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.command import run_command

_CHUNK_BYTES = 16 * 1024
_RETRANSMITTED_AFTER_S = 0.2
"""Linux's least, which doubles."""


@dataclass(frozen=True, slots=True)
class LineQuality:
    """How bad a line is; each direction of each connection has it."""

    delay_s: float = 0.0  # every chunk draws between half of it and one and a half
    rate_bytes_s: float = 0.0  # 0: as fast as it goes
    cut_every_s: float = 0.0  # mean lifetime of a connection, exponentially distributed; 0: never cut
    loss: float = 0.0  # share of chunks that are lost, and of those that are sent again

    def __post_init__(self) -> None:
        if not 0 <= self.loss < 1:
            raise ValueError(f"loss is {self.loss}, expected 0 or more and below 1")
        for name in ("delay_s", "rate_bytes_s", "cut_every_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 0 or more")


@dataclass(frozen=True, slots=True)
class TcpLink:
    """Passes connections on to another port of this machine."""

    target: int  # that port
    quality: LineQuality  # of every connection
    rng: random.Random  # for delays and cuts
    told: Callable[[str], None]  # called with every connection that was cut

    async def serve(self, port: int, ready: Callable[[int], None]) -> None:
        """Listen until cancelled; ``ready`` gets the port."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", port)
        ready(int(server.sockets[0].getsockname()[1]))
        async with server:
            await server.serve_forever()

    async def _connected(self, near: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        try:
            far, far_out = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:  # the broker is away: so is the line
            near_out.transport.abort()
            return
        ways = [asyncio.create_task(self._pass(near, far_out)), asyncio.create_task(self._pass(far, near_out))]
        lifetime_s = self.rng.expovariate(1 / self.quality.cut_every_s) if self.quality.cut_every_s else None
        done, running = await asyncio.wait(ways, timeout=lifetime_s, return_when=asyncio.FIRST_EXCEPTION)
        if running and not any(way.exception() for way in done):
            self.told("cut a connection")
        for way in running:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        for out in (near_out, far_out):
            out.transport.abort()

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """Pass one direction on; chunks keep their order, and what waits is bounded by the delay."""
        late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=256)
        reading = asyncio.create_task(self._read(source, late))
        loop = asyncio.get_running_loop()
        try:
            while True:
                due, data = await late.get()
                await asyncio.sleep(max(0.0, due - loop.time()))
                if not data:
                    sink.write_eof()  # the other direction may go on
                    return
                sink.write(data)
                await sink.drain()
        finally:
            reading.cancel()

    async def _read(self, source: asyncio.StreamReader, late: asyncio.Queue[tuple[float, bytes]]) -> None:
        loop = asyncio.get_running_loop()
        quality = self.quality
        data = b"?"
        while data:
            data = b""
            with contextlib.suppress(OSError):
                data = await source.read(_CHUNK_BYTES)
            delay_s, timeout_s = quality.delay_s * self.rng.uniform(0.5, 1.5), _RETRANSMITTED_AFTER_S
            while self.rng.random() < quality.loss:
                delay_s, timeout_s = delay_s + timeout_s, 2 * timeout_s
            await late.put((loop.time() + delay_s, data))
            if quality.rate_bytes_s:
                await asyncio.sleep(len(data) / quality.rate_bytes_s)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option(
    "--to", "target", type=click.IntRange(1, 65535), required=True, help="Port of the broker on this machine."
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="To listen on; 0: any free one.")
@click.option("--delay-ms", type=float, default=30.0, help="One way, on average.")
@click.option("--rate-kb", type=float, default=2000.0, help="Kilobytes a second, each way; 0: no limit.")
@click.option("--cut-every-s", type=float, default=20.0, help="Mean lifetime of a connection; 0: never cut.")
@click.option("--seed", type=int, default=0, help="Of delays and cuts.")
def tcp_link(target: int, port: int, delay_ms: float, rate_kb: float, cut_every_s: float, seed: int) -> None:
    """Be a bad line to a broker until stopped."""
    try:
        quality = LineQuality(delay_ms / 1000, rate_kb * 1000, cut_every_s)
    except ValueError as error:
        raise SettingsError(str(error)) from error
    link = TcpLink(target, quality, random.Random(seed), _say)  # noqa: S311 - not a secret
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(link.serve(port, lambda found: _say(f"port {found}")))


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    """Run the command; every expected error is one line on stderr."""
    run_command(tcp_link, "tcp-link")


if __name__ == "__main__":
    main()
