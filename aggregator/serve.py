"""From settings to a running service; imports torch, so the command line imports it late."""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from aggregator.founding import Fleet
from aggregator.jobs import ThreadJobs
from aggregator.metrics import Metrics
from aggregator.service import AggregatorService, Connect
from aggregator.serving import OnnxExporter
from aggregator.settings import AggregatorSettings
from federation.methods.steps.replay import eager_sampler
from federation.service.data_dir import claim_data_dir
from federation.service.fleet_spec import method_of, task_of
from federation.service.health import HealthServer
from federation.service.logs import EventLogger
from federation.service.torch_setup import prepare_torch
from federation.transport.broker import open_broker
from federation.transport.broker_address import BrokerAddress, Credentials, TlsSettings
from federation.transport.interfaces import OnMessage, Session, Will
from federation.transport.mqtt import MqttSession

CONTROL_KEEPALIVE_S = 15
DATA_KEEPALIVE_S = 45

_log = EventLogger("aggregator")


def serve(settings: AggregatorSettings) -> bool:
    """Serve until the last round is done (True) or a signal comes (False).

    Raises:
        SettingsError: Something that the operator wrote can't be used; checked before anything is written.
        ReplayfleetError: The run can't go on; what was accepted is kept.
    """
    fleet = _fleet(settings)
    tls = TlsSettings(settings.tls_ca, settings.tls_cert, settings.tls_key)
    tls.context()
    credentials = Credentials.load(settings.password_file)
    if settings.broker is not None:
        BrokerAddress.parse(settings.broker, insecure=settings.insecure)
    metrics, stop = Metrics(), threading.Event()
    view: dict[str, AggregatorService] = {}
    with contextlib.ExitStack() as stack:
        health = HealthServer(lambda: _health(view), metrics.registry, port=settings.health_port)
        stack.callback(health.stop)
        data_dir = stack.enter_context(claim_data_dir(settings.data_dir, fleet=settings.fleet, role="aggregator"))
        broker = open_broker(settings.broker, log=logging.getLogger("aggregator"), insecure=settings.insecure)
        url = stack.enter_context(broker).url
        service = AggregatorService(
            fleet,
            data_dir.path,
            _mqtt(settings, url, tls, credentials),
            metrics=metrics,
            jobs=functools.partial(ThreadJobs, prepare=functools.partial(prepare_torch, settings.threads)),
        )
        view["service"] = service
        stack.enter_context(_stopped_by_signals(stop))
        _log.info("serving", fleet=settings.fleet, method=settings.method, broker=url, health=health.url)
        return service.run(stop)


def _fleet(settings: AggregatorSettings) -> Fleet:
    spec = settings.spec()
    method, task = method_of(spec), task_of(spec)
    return Fleet(spec, method, eager_sampler(task), OnnxExporter(method, task), settings.rules())


def _mqtt(settings: AggregatorSettings, url: str, tls: TlsSettings, credentials: Credentials | None) -> Connect:
    def connect(client_id: str, on_message: OnMessage, will: Will | None) -> Session:
        return MqttSession(
            url,
            client_id,
            on_message=on_message,
            will=will,
            tls=tls if tls.given else None,
            credentials=credentials,
            keepalive_s=CONTROL_KEEPALIVE_S if will is not None else DATA_KEEPALIVE_S,
            clean=will is None,
            insecure=settings.insecure,
        )

    return connect


def _health(view: Mapping[str, AggregatorService]) -> Mapping[str, Any]:
    service = view.get("service")
    return service.health() if service is not None else {"healthy": False, "phase": "starting"}


@contextlib.contextmanager
def _stopped_by_signals(stop: threading.Event) -> Iterator[None]:
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
