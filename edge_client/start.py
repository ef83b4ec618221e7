"""From settings to a running client. Imports neither torch nor onnx: a device that only serves needs neither."""

from __future__ import annotations

import contextlib
import importlib.util
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from replayfleet.devices.memory import keep_memory
from replayfleet.devices.probing import Board, chosen, probe
from replayfleet.devices.profiles import AUTO, CPU, FP32, TENSORRT, DeviceProfile
from replayfleet.devices.providers import ProviderProof, prove_provider, try_apart
from replayfleet.edge_client.learning.local_training import TRAINER_COMMAND, TrainerProcess
from replayfleet.edge_client.learning.training.job import JSON_LOGS
from replayfleet.edge_client.operator.metrics import Metrics
from replayfleet.edge_client.operator.studio.sharing import SharedStudio, operator_key
from replayfleet.edge_client.operator.studio.studio import Studio
from replayfleet.edge_client.service import ClientService, Identity
from replayfleet.edge_client.serving.engine_desk import no_engines, open_desk
from replayfleet.edge_client.settings import ClientSettings
from replayfleet.edge_client.sources import source_opener
from replayfleet.edge_client.sync.parts import Compute
from replayfleet.export.running.provider_options import without_engines
from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.credentials.identity import session_secret
from replayfleet.federation.service.credentials.keys import ROOT, SIGNING_KEY
from replayfleet.federation.service.data_dir import claim_data_dir
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.service.member_settings import check_address
from replayfleet.federation.service.signals import stopped_by_signals
from replayfleet.federation.service.systemd import ServiceManager

if TYPE_CHECKING:
    from replayfleet.edge_client.operator.answers import AnswerTopic
    from replayfleet.edge_client.operator.display.recorder import Recorder
    from replayfleet.edge_client.operator.display.window import Window
    from replayfleet.edge_client.operator.studio.app import StudioServer
    from replayfleet.edge_client.operator.thumbnails import Thumbnails
    from replayfleet.federation.wire.transport.connecting import Connector

log = EventLogger(__name__)


def start(settings: ClientSettings) -> bool:
    """Serve until the run is finished or a signal comes; returns whether it is finished.

    Raises:
        SettingsError: Something that the operator wrote can't be used; checked before anything is written.
        ReplayfleetError: The client can't go on; what was committed is kept.
    """
    connector = settings.connector(settings.client_id)
    _check_identity(settings)
    address = connector.check(settings.broker)
    open_source = source_opener(settings.sources, settings.data_dir, settings.data_root, settings)
    _check_files_and_displays(settings)
    manager = ServiceManager.from_environment()
    manager.begin("proving the execution provider")
    board = probe()
    profile, proof = _proved(settings, board)
    trainer = (*TRAINER_COMMAND, *([JSON_LOGS] if settings.json_logs else []))
    stop = threading.Event()
    metrics = Metrics(profile.name, proof.provider)
    with contextlib.ExitStack() as stack:
        health, public = settings.health_servers(metrics.registry)
        stack.callback(health.stop)
        stack.callback(public.stop)
        data_dir = stack.enter_context(
            claim_data_dir(settings.data_dir, fleet=settings.fleet, role="client", owner=settings.client_id)
        )
        claims = settings.claims(settings.data_dir)
        if claims is not None:
            stack.callback(claims.close)
        identity = _identity(settings, profile, proof, board)
        if identity.compute.trains:  # else nothing gives it back: that comes with the training process's end
            keep_memory()
        service = ClientService(
            identity,
            data_dir.path,
            connector.to(settings.broker, session_secret(data_dir.path, settings.tls().key_file)),
            open_source,
            metrics=metrics,
            spawn=partial(TrainerProcess, command=trainer),
            keys=settings.identity,
            certificate=settings.tls().certificate_file,
            claims=claims,
            lock=data_dir.lock,
        )
        desk = service.desk
        public.answer(service.status)
        health.answer(service.status, get={"/predictions": desk.predictions}, post={"/feedback": desk.feedback})
        for display in displays(settings, service):
            stack.callback(display.close)
            service.watchers.append(display.watch)
        for shown in studios(settings, service):
            stack.callback(shown.close)
        stack.enter_context(stopped_by_signals(stop))
        log.info(
            "client started",
            fleet=settings.fleet,
            client=settings.client_id,
            device=profile.name,
            provider=proof.provider,
            broker=address,
            health=health.url,
        )
        return service.run(stop, stay=settings.stay, manager=manager)


def _check_identity(settings: ClientSettings) -> None:
    if settings.identity is not None and not (settings.identity / ROOT).is_file():
        log.warning(
            "no root in the identity folder",
            expected=settings.identity / ROOT,
            next="the first aggregator that announces itself is trusted, unless one was before",
        )
    if settings.identity is not None and not (settings.identity / SIGNING_KEY).exists():
        log.warning(
            "no signing key in the identity folder",
            expected=settings.identity / SIGNING_KEY,
            next="one is made; if this device was enrolled with another, put that back: no aggregator answers it else",
        )


def _has_torch() -> bool:
    """Whether this device can train; torch itself isn't imported here."""
    if importlib.util.find_spec("torch") is not None:
        return True
    log.warning("serving only", reason="torch isn't installed", next="no round waits for this device")
    return False


def _proved(settings: ClientSettings, board: Board) -> tuple[DeviceProfile, ProviderProof]:
    profile, note = chosen(settings.device, board)
    if note:
        log.warning(note)
    proof = prove_provider(profile, board, settings.require_provider, try_apart)
    warning = proof.warning(profile, board)
    if warning:
        log.warning(warning)
    return profile, proof


def _identity(settings: ClientSettings, profile: DeviceProfile, proof: ProviderProof, board: Board) -> Identity:
    allowance = settings.allowance(profile.allowance, board.memory_bytes)
    on_gpu = proof.provider != CPU
    compute = Compute(
        providers=without_engines((proof.provider, CPU)),
        inference_threads=profile.inference_threads,
        training_threads=settings.threads or allowance.threads(board.num_cores),
        training_device=settings.training_device,
        sampler=settings.sampler,
        allowance=allowance,
        precision=_precision(settings, profile, proof),
        trains=settings.train and _has_torch(),
        open_engines=open_desk if proof.provider == TENSORRT or (profile.tensorrt and on_gpu) else no_engines,
    )
    return Identity(settings.fleet, settings.client_id, profile.name, compute)


def _precision(settings: ClientSettings, profile: DeviceProfile, proof: ProviderProof) -> str:
    """Return what the operator wants, or what the profile says of its first provider, should that be what serves."""
    if settings.precision != AUTO:
        return settings.precision
    return profile.precision if proof.provider in {profile.execution_providers[0], TENSORRT} else FP32


def studios(settings: ClientSettings, service: ClientService) -> list[StudioServer | SharedStudio]:
    """Open the label studio, here and to an operator elsewhere; both show the same frames."""
    opened: list[StudioServer | SharedStudio] = []
    if not (settings.studio or settings.remote_operator):
        return opened
    studio = Studio(service.known, service.learn, settings.keep_frames_s, time.monotonic)
    service.watchers.append(studio.watch)
    if settings.studio:
        from replayfleet.edge_client.operator.studio.app import StudioServer

        opened.append(StudioServer(studio, *check_address(settings.studio)))
    if settings.remote_operator:
        key = operator_key(settings.remote_operator)
        log.warning("pictures leave this device", to=f"the operator with key {key.hex()[:16]}...", over="the broker")
        opened.append(service.share(studio, key))
    return opened


def displays(settings: ClientSettings, service: ClientService) -> list[Recorder | Window | AnswerTopic | Thumbnails]:
    """Open what the operator wants to look at."""
    opened: list[Recorder | Window | AnswerTopic | Thumbnails] = []
    if settings.record is not None:
        from replayfleet.edge_client.operator.display.recorder import Recorder

        opened.append(Recorder(settings.record, service.legend, num_cameras=len(settings.sources)))
    if settings.show:
        from replayfleet.edge_client.operator.display.window import Window

        opened.append(Window(service.legend))
    if settings.thumbnails:
        from replayfleet.edge_client.operator.thumbnails import Thumbnails

        log.warning("pictures leave this device", to="the fleet's aggregator", over="the broker")
        opened.append(Thumbnails(service.say_thumbnail))
    if settings.answers:
        from replayfleet.edge_client.operator.answers import AnswerTopic, Place

        place = Place.parse(settings.answers)
        secret = session_secret(settings.data_dir, None)
        connect = _answers_connector(settings).to(place.broker, secret)
        names, client = (lambda: service.known().class_names), f"{settings.fleet}-{settings.client_id}"
        opened.append(AnswerTopic(place, connect, client, names, home_assistant=settings.home_assistant))
    return opened


def _answers_connector(settings: ClientSettings) -> Connector:
    """Return what connects to the broker that gets answers.

    Raises:
        SettingsError: It can't be used.
    """
    from replayfleet.edge_client.operator.answers import Place

    place = Place.parse(settings.answers)
    return place.connector(settings.answers_ca, settings.answers_password_file, insecure=settings.answers_insecure)


def check_installed(*modules: str) -> None:
    """Raise a SettingsError unless what the studio needs is installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise SettingsError(f"the studio needs {' and '.join(missing)}: pip install 'replayfleet[cameras,console]'")


def _check_files_and_displays(settings: ClientSettings) -> None:
    with contextlib.suppress(PermissionError):  # who reads it says so
        if settings.teacher is not None and not settings.teacher.is_file():
            raise SettingsError(f"--teacher {settings.teacher}: there is no such file")
    if settings.answers:
        _answers_connector(settings)
    if settings.record is not None:
        from replayfleet.edge_client.operator.display.recorder import check_film

        check_film(settings.record)
    if settings.show:
        from replayfleet.edge_client.operator.display.window import check_display

        check_display()
    if settings.studio:
        check_installed("starlette", "uvicorn", "cv2")
    elif settings.remote_operator or settings.thumbnails:
        check_installed("cv2")
