"""From settings to a running service; imports torch, so the command line imports it late."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace

from replayfleet.aggregator.admission import Caps
from replayfleet.aggregator.console.beside import ConsoleBeside
from replayfleet.aggregator.control.growing import grow
from replayfleet.aggregator.founding import Fleet
from replayfleet.aggregator.members.broker_files import AGGREGATOR
from replayfleet.aggregator.operator.journal import Listener
from replayfleet.aggregator.operator.metrics import Metrics
from replayfleet.aggregator.operator.traces import Traces, exporter_to
from replayfleet.aggregator.service import AggregatorService
from replayfleet.aggregator.serving import OnnxExporter
from replayfleet.aggregator.settings import AggregatorSettings
from replayfleet.aggregator.store import added_classes
from replayfleet.devices.memory import keep_memory
from replayfleet.export.first_model import initial_parameters
from replayfleet.federation.methods.kit.placement import proved_device
from replayfleet.federation.methods.steps.memory import sampler_of
from replayfleet.federation.service.cluster.engine import engine
from replayfleet.federation.service.credentials.identity import session_secret
from replayfleet.federation.service.data_dir import claim_data_dir
from replayfleet.federation.service.fleet.growth import grown_spec
from replayfleet.federation.service.fleet.spec import method_of
from replayfleet.federation.service.fleet.task import task_of
from replayfleet.federation.service.jobs import Jobs
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.service.signals import stopped_by_signals
from replayfleet.federation.service.systemd import ServiceManager
from replayfleet.federation.service.torch_setup import prepare_torch
from replayfleet.federation.wire.transport.broker import PrivateBroker

_log = EventLogger("aggregator")


def serve(settings: AggregatorSettings) -> bool:
    """Serve until the last round is done (True) or a signal comes (False).

    Raises:
        SettingsError: Something that the operator wrote can't be used; checked before anything is written.
        ReplayfleetError: The run can't go on; what was accepted is kept.
    """
    _open_many_files()
    keep_memory()
    manager = ServiceManager.from_environment()
    manager.begin("building the fleet's models")
    device, why_not = proved_device(settings.torch_device)
    fleet = _fleet(settings, str(device))
    connector = settings.connector(AGGREGATOR)
    # a private broker is met here, in plaintext
    connector.check("mqtt://localhost" if settings.broker is None else settings.broker)
    metrics, stop, broker = Metrics(), threading.Event(), PrivateBroker(whose="aggregator")
    with contextlib.ExitStack() as stack:
        health, public = settings.health_servers(metrics.registry)
        stack.callback(health.stop)
        stack.callback(public.stop)
        data_dir = stack.enter_context(claim_data_dir(settings.data_dir, fleet=settings.fleet, role="aggregator"))
        url = settings.broker or stack.enter_context(broker).url
        listeners: list[Listener] = []
        if settings.traces is not None:
            traces = Traces(settings.fleet, exporter_to(settings.traces))
            stack.callback(traces.close)
            listeners.append(traces.told)
        elsewhere = stack.enter_context(engine(settings.engine, settings.threads))
        if (claims := settings.claims(settings.data_dir)) is not None:
            stack.callback(claims.close)

        def opened(fleet: Fleet) -> AggregatorService:
            service = AggregatorService(
                replace(fleet, spread=None if elsewhere is None else elsewhere.map),
                data_dir.path,
                connector.to(url, session_secret(data_dir.path, settings.tls().key_file)),
                metrics=metrics,
                listeners=listeners,
                jobs=lambda deliver: Jobs(deliver, lambda: prepare_torch(settings.threads), stop_timeout_s=2.0),
                certificate=settings.tls().certificate_file,
                claims=claims,
                lock=data_dir.lock,
                broker=broker,
            )
            health.answer(service.health)
            public.answer(service.health)
            return service

        service = opened(fleet)
        if (console := settings.console_settings()) is not None:
            stack.enter_context(ConsoleBeside(console.arguments))
        stack.enter_context(stopped_by_signals(stop))
        if why_not:
            _log.debug("aggregating on the CPU", reason=why_not)
        _log.info(
            "serving", fleet=settings.fleet, method=settings.method, broker=url, health=health.url, computes_on=device
        )
        finished = service.run(stop, manager)
        while service.growth is not None and not stop.is_set():
            with manager.busy("the fleet learns more classes"):
                service = opened(_grown(settings, str(device), *service.growth))
            finished = service.run(stop, manager)
        return finished


def _fleet(settings: AggregatorSettings, torch_device: str) -> Fleet:
    """Return what is served, with the classes that the data dir's fleet learned since it was founded."""
    spec = grown_spec(settings.spec(), added_classes(settings.data_dir))
    method, task = method_of(spec), task_of(spec)
    fleet = Fleet(
        spec,
        method,
        sampler_of(method),
        OnnxExporter(method, task),
        settings.rules(),
        caps=Caps(max_clients=settings.max_clients),
        max_transfers=settings.max_transfers,
        max_change=settings.max_change,
        claim=settings.claim(),
        torch_device=torch_device,
        initial=None if settings.initial is None else initial_parameters(settings.initial, method, spec.run_seed),
        precision=settings.precision_rules(),
    )
    if fleet.initial is not None:
        fleet.exporter.probe(fleet.initial)
    return fleet


def _grown(settings: AggregatorSettings, torch_device: str, names: tuple[str, ...], who: str) -> Fleet:
    """Let the fleet learn more classes, between two services; if that fails, it is what it was."""
    try:
        grow(settings.data_dir, names, who, time.time())
    except Exception as error:  # a full disk, a damaged blob
        _log.exception("classes not added", reason=error, next="the fleet goes on with those that it has")
    return _fleet(settings, torch_device)


def _open_many_files() -> None:
    """Take as many file descriptors as the system gives: each upload that is looked at holds one."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
