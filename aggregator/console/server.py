"""Runs the console."""

from __future__ import annotations

from replayfleet.aggregator.console.app import Console
from replayfleet.aggregator.console.settings import ConsoleSettings
from replayfleet.aggregator.console.watch import Watch
from replayfleet.federation.service.web.access import Access
from replayfleet.federation.service.web.guard import Rules
from replayfleet.federation.service.web.serving import WebServer


def run(settings: ConsoleSettings) -> None:
    """Answer browsers until a signal comes.

    Raises:
        SettingsError: The data dir can't be read, or the address can't be ours.
    """
    watch = Watch(settings.data_dir)
    watch.number()
    access = Access(settings.tokens, reading_needs_token=not settings.is_private)
    secure = settings.tls_cert is not None
    console = Console(watch, Rules(settings.hosts, access), secure=secure)
    WebServer(console.app, *settings.address, name="console", tls=(settings.tls_cert, settings.tls_key)).run()
