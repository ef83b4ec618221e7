"""Routes of the studio. Pictures are made off the event loop, one at a time, and only for who asks."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from replayfleet.edge_client.learning.labels.operators_word import FeedbackRefused, NamedBox
from replayfleet.edge_client.operator.operator_desk import BoxBody
from replayfleet.edge_client.operator.studio.studio import boxes_said
from replayfleet.federation.errors import UNREADABLE, SettingsError
from replayfleet.federation.service import pages as shared_pages
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.service.web.access import Access
from replayfleet.federation.service.web.guard import Guard, Refused, Rules, body_of, is_ours
from replayfleet.federation.service.web.serving import WebServer
from replayfleet.federation.wire.transport.broker_address import is_loopback

MAX_LIVE = 4
"""Live pictures at a time; a further browser is told to wait."""
PICTURES_PER_S = 10.0
AGAIN_S = 1.0
"""A picture without a successor is sent again: Chromium shows each when the next one comes."""
MAX_BODY_BYTES = 64 * 1024
"""Boxes of one picture; a label holds far fewer."""
MAX_CONNECTIONS = 40
_STATIC = Path(__file__).parent / "static"
_KINDS = {"studio.css": "text/css", "studio.js": "text/javascript", "boxes.js": "text/javascript"}
_PART = b"Content-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n"
_BETWEEN = b"--frame\r\n"
"""Sent behind a picture at once, so that browsers know that it is over."""

log = EventLogger("studio")


class Said(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a page posts: which frame, of which start of the client."""

    camera: str
    frame: int
    session: str = ""


class SaidClass(Said, forbid_unknown_fields=True, kw_only=True):
    """And what its object is."""

    class_name: str = msgspec.field(name="class")


class SaidBoxes(Said, forbid_unknown_fields=True, kw_only=True):
    """And all that is to be seen in it; none says that there is nothing."""

    boxes: list[BoxBody]


_Said = TypeVar("_Said", bound=Said)
_decoders: dict[type[Said], msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind) for kind in (Said, SaidClass, SaidBoxes)
}
"""Made at import, for threads: ``children.decoder_of``."""


class Studied(Protocol):
    """What the pages show: a ``Studio``, or one on another machine. All but ``newest`` may wait, and refuse."""

    session: str

    def state(self) -> dict[str, Any]: ...

    def label(self, camera: str, frame_id: int, class_name: str) -> None: ...

    def label_boxes(self, camera: str, frame_id: int, boxes: Sequence[NamedBox]) -> None: ...

    def skip(self, camera: str, frame_id: int) -> None: ...

    def undo(self) -> str: ...

    def frozen(self, camera: str, frame_id: int) -> bytes | None: ...

    def newest(self, camera: str) -> tuple[int, Callable[[], bytes]] | None: ...


class Pages:
    """The studio's routes.

    Args:
        studio: what is shown, and takes labels.
        rules: who may ask.
    """

    def __init__(self, studio: Studied, rules: Rules) -> None:
        self._studio = studio
        self._num_live = 0
        self.app = Starlette(
            routes=[
                Route("/", self._page),
                Route("/static/{name}", self._static),
                Route("/api/state", self._state),
                Route("/frame", self._frame),
                Route("/live", self._live),
                *(
                    Route(f"/api/{act.__name__.strip('_')}", _post(act), methods=["POST"])
                    for act in (self._label, self._boxes, self._skip, self._undo)
                ),
            ],
            middleware=[Middleware(Guard, rules=rules)],
        )

    async def _page(self, request: Request) -> Response:
        return Response((_STATIC / "studio.html").read_bytes(), media_type="text/html")

    async def _static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in _KINDS:
            return PlainTextResponse("nothing is here\n", 404)
        shared = (Path(shared_pages.__file__).parent / "style.css").read_bytes() if name.endswith(".css") else b""
        return Response(shared + (_STATIC / name).read_bytes(), media_type=_KINDS[name])

    async def _state(self, request: Request) -> Response:
        try:
            return JSONResponse(await run_in_threadpool(self._studio.state))
        except FeedbackRefused as refused:
            return JSONResponse({"error": str(refused)}, 503)

    async def _frame(self, request: Request) -> Response:
        camera, number = request.query_params.get("camera", ""), request.query_params.get("frame", "")
        if not (number.isascii() and number.isdecimal() and len(number) < 19):
            return PlainTextResponse("frame: expected a number\n", 422)
        try:
            picture = await run_in_threadpool(self._studio.frozen, camera, int(number))
        except FeedbackRefused as refused:
            return PlainTextResponse(f"{refused}\n", 503)
        if picture is None:
            return PlainTextResponse("this frame doesn't wait any more\n", 404)
        return Response(picture, media_type="image/jpeg")

    async def _live(self, request: Request) -> Response:
        if self._num_live >= MAX_LIVE:
            return PlainTextResponse(
                f"{MAX_LIVE} live pictures are open already; close one, and load this page again\n", 503
            )
        pictures = self._pictures(request.query_params.get("camera", ""))
        await anext(pictures)  # its place is taken now: others may ask before a response begins
        return StreamingResponse(pictures, media_type="multipart/x-mixed-replace; boundary=frame")

    async def _pictures(self, camera: str) -> AsyncIterator[bytes]:
        self._num_live += 1
        last, picture, unsaid_s = -1, b"", 0.0
        try:
            yield b""
            yield _BETWEEN
            while True:
                newest = self._studio.newest(camera)
                if newest is not None and newest[0] != last:
                    last, make = newest
                    with contextlib.suppress(FeedbackRefused):  # a device that is away; the page says so
                        picture, unsaid_s = await run_in_threadpool(make), AGAIN_S
                if picture and unsaid_s >= AGAIN_S:
                    unsaid_s = 0.0
                    yield _PART % len(picture) + picture + b"\r\n" + _BETWEEN
                await asyncio.sleep(1 / PICTURES_PER_S)
                unsaid_s += 1 / PICTURES_PER_S
        finally:
            self._num_live -= 1

    def _said(self, body: bytes, kind: type[_Said]) -> _Said:
        said: _Said = _decoders[kind].decode(body)
        if said.session not in {"", self._studio.session}:
            raise FeedbackRefused("the device was restarted since this frame was shown; nothing was learned of it")
        return said

    def _label(self, body: bytes) -> str:
        said = self._said(body, SaidClass)
        self._studio.label(said.camera, said.frame, said.class_name)
        return f"learned: {said.class_name}"

    def _boxes(self, body: bytes) -> str:
        said = self._said(body, SaidBoxes)
        boxes = [NamedBox(one.class_name, one.box) for one in said.boxes]
        self._studio.label_boxes(said.camera, said.frame, boxes)
        return f"learned: {boxes_said(len(boxes))}"

    def _skip(self, body: bytes) -> str:
        said = self._said(body, Said)
        self._studio.skip(said.camera, said.frame)
        return "skipped"

    def _undo(self, body: bytes) -> str:
        return f"taken back: {self._studio.undo()}"


def _post(act: Callable[[bytes], str]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        if not is_ours(request):
            return JSONResponse({"error": "labels come from the studio's own page"}, 403)
        try:
            return JSONResponse({"said": await run_in_threadpool(act, await body_of(request, MAX_BODY_BYTES))})
        except Refused as refused:
            return JSONResponse({"error": str(refused)}, refused.status)
        except FeedbackRefused as refused:
            return JSONResponse({"error": str(refused)}, 422)
        except UNREADABLE as error:
            return JSONResponse({"error": f"not usable: {str(error).replace('`', '')}"}, 422)

    return endpoint


class StudioServer:
    """The studio's pages on a thread of their own; whatever becomes of them, the client goes on.

    Args:
        studio: what is shown.
        host: loopback, see ``check_studio``.
        port: 0 picks a free one.
    """

    def __init__(self, studio: Studied, host: str, port: int) -> None:
        hosts = frozenset({host.lower(), *(["localhost"] if is_loopback(host) else [])})
        rules = Rules(hosts, Access(None, reading_needs_token=False), elsewhere="the studio has another name")
        self._server = WebServer(Pages(studio, rules).app, host, port, name="studio", max_connections=MAX_CONNECTIONS)
        self._thread = threading.Thread(target=self._run, name="studio", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where the page is; empty until it is there."""
        return self._server.url

    def close(self) -> None:
        """Close the pages. Idempotent."""
        self._server.stop()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        try:
            self._server.run()
        except SettingsError as error:
            log.warning("no studio", reason=error)
        except Exception:  # root of a thread
            log.exception("studio ended")
