"""amqtt in a thread: a broker out of pip alone, for demos on machines without mosquitto.

MQTT 3.1.1 only; QoS 1 is not kept over a broken connection, keep-alive is not enforced, and nothing survives a
restart. The transfer protocol lives with all of that, for it is acknowledged end to end.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

from amqtt.adapters import StreamReaderAdapter, StreamWriterAdapter
from amqtt.broker import Broker
from amqtt.contexts import BrokerConfig, ListenerConfig
from amqtt.errors import ProtocolHandlerError

from replayfleet.federation.errors import SettingsError

_START_TIMEOUT_S = 10.0
_MQTT_5 = b"\x00\x04MQTT\x05"
_UNSUPPORTED = b"\x20\x02\x00\x01"


class _QuietBytes(bytes):
    """amqtt formats every payload into a debug line that nobody reads: three quarters of its time."""

    def __repr__(self) -> str:
        return f"<{len(self)} bytes>"


class _Replayed(StreamReaderAdapter):  # type: ignore[misc]  # amqtt's types are not followed
    """A stream whose first bytes have been looked at."""

    def __init__(self, reader: asyncio.StreamReader, head: bytes) -> None:
        super().__init__(reader)
        self._head = head

    async def read(self, n: int = -1) -> bytes:
        if not self._head or n < 0:
            return bytes(await super().read(n))
        taken, self._head = self._head[:n], self._head[n:]
        return taken if len(taken) == n else taken + bytes(await super().read(n - len(taken)))


class _Broker(Broker):  # type: ignore[misc]
    def __init__(self, config: BrokerConfig) -> None:
        super().__init__(config)
        self._writers: set[asyncio.StreamWriter] = set()

    async def shutdown(self) -> None:
        """Accept nobody more, close what clients left open, and stop: from Python 3.12 on it waits for all of them."""
        for server in self._servers.values():
            server.instance.close()
        for writer in self._writers:
            writer.close()
        await super().shutdown()
        await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)

    async def stream_connected(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, listener_name: str
    ) -> None:
        """Refuse MQTT 5 as the standard says: amqtt itself would misread it and wait for bytes that never come."""
        self._writers = {known for known in self._writers if not known.is_closing()} | {writer}
        try:
            head = await _read_head(reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()
            return
        if head.endswith(_MQTT_5):
            writer.write(_UNSUPPORTED)
            writer.close()
            return
        await self._client_connected(listener_name, _Replayed(reader, head), StreamWriterAdapter(writer))

    async def _broadcast_message(self, session: Any, topic: Any, data: Any, *rest: Any, **options: Any) -> None:
        await super()._broadcast_message(session, topic, _QuietBytes(data or b""), *rest, **options)


class EmbeddedBroker:
    """Listens on 127.0.0.1 only.

    Args:
        port: 0 takes any free one.
    """

    def __init__(self, port: int = 0) -> None:
        self._wanted_port = port
        self._port = 0
        self._problem: BaseException | None = None
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="embedded-broker", daemon=True)

    def start(self) -> int:
        """Start and return the port.

        Raises:
            SettingsError: It doesn't start.
        """
        self._thread.start()
        if not self._started.wait(_START_TIMEOUT_S) or self._problem is not None:
            raise SettingsError(f"embedded broker does not start ({self._problem})")
        return self._port

    def stop(self) -> None:
        """Stop and join the thread. Idempotent."""
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        for name in ("amqtt", "asyncio", "transitions"):  # which say of each lost connection what nobody can mend
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            asyncio.run(self._serve())
        except Exception as error:
            self._problem = error
            logging.getLogger(__name__).exception("embedded broker ended")
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_exception_handler(_tell)
        broker = _Broker(
            BrokerConfig(
                listeners={"default": ListenerConfig(bind=f"127.0.0.1:{self._wanted_port}")},
                plugins={"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}},
            )
        )
        await broker.start()
        try:
            # amqtt has no public way to learn which port it got
            self._port = broker._servers["default"].instance.sockets[0].getsockname()[1]
            self._started.set()
            await self._stop.wait()
        finally:
            await broker.shutdown()


def _tell(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    if not isinstance(context.get("exception"), ProtocolHandlerError):  # of a message whose connection is gone
        loop.default_exception_handler(context)


async def _read_head(reader: asyncio.StreamReader) -> bytes:
    """Read a CONNECT up to its protocol level: type, remaining length (1 to 4 bytes), name, level."""
    head = await reader.readexactly(2)
    while head[-1] & 0x80 and len(head) < 5:
        head += await reader.readexactly(1)
    return head + await reader.readexactly(len(_MQTT_5))
