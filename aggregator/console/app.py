"""Routes of the console: pages, what is static, and the live channel. Rendering is off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from replayfleet.aggregator.console import views
from replayfleet.aggregator.console.charts import Charts
from replayfleet.aggregator.console.facts import Fleet
from replayfleet.aggregator.console.operating import Operating
from replayfleet.aggregator.console.samples import Samples
from replayfleet.aggregator.console.story import Story
from replayfleet.aggregator.console.views import Asked, Facts, Pages
from replayfleet.aggregator.console.watch import LOOK_EVERY_S, Watch
from replayfleet.aggregator.operator.thumbnails import pictures_of
from replayfleet.federation.errors import ReplayfleetError
from replayfleet.federation.service import pages as shared_pages
from replayfleet.federation.service.web.guard import Guard, Rules, who_asks

MAX_LIVE = 256
"""Pages that are told of changes at a time; others are as they were when they were loaded."""
MAX_KEPT = 256
MAX_FIELD = 200
KEEP_ALIVE_S = 15.0
_STATIC = Path(__file__).parent / "static"
_ADDRESSES = ("/", "/round", "/methods", "/journal")

Page = Callable[[Fleet, Story, Asked], "Facts | None"]


class Console:
    """The console of one aggregator.

    Args:
        watch: what is known.
        rules: who may ask.
        secure: whether browsers reach it over TLS.
    """

    def __init__(self, watch: Watch, rules: Rules, *, secure: bool = False) -> None:
        self._watch = watch
        self._access = rules.access
        self._pages = Pages(Charts(watch.changed))
        self._samples = Samples(watch.folder, watch.changed)
        self._operating = Operating(watch, rules.access, self._pages, secure=secure)
        self._kept: dict[str, tuple[int, str]] = {}
        self._num_live = 0
        self.app = Starlette(
            routes=[
                self._page("/", "fleet.html", views.fleet_page),
                self._page("/round", "round.html", views.round_page),
                self._page("/clients/{client}", "client.html", views.client_page),
                self._page("/methods", "methods.html", views.methods_page),
                self._page("/journal", "journal.html", views.journal_page),
                Route("/samples/{client}/{class_id}.png", self._sample),
                Route("/pictures/{client}/{name}.jpg", self._picture),
                Route("/live", self._live),
                Route("/static/{name}", self._static),
                *self._operating.routes,
            ],
            middleware=[Middleware(Guard, rules=rules)],
            exception_handlers={
                404: self._missing,
                ReplayfleetError: self._trouble,
                OSError: self._trouble,
                **self._operating.handlers,
            },
        )

    def _page(self, path: str, template: str, page: Page) -> Route:
        def endpoint(request: Request) -> Response:
            somebody = who_asks(request).somebody
            given = (*request.query_params.items(), *request.path_params.items())
            asked = {key: value[:MAX_FIELD] for key, value in given}
            # It is said once, to whoever comes, and not to another window that renews what it shows.
            comes = request.headers.get("sec-fetch-dest", "document") == "document"
            said = self._operating.take_said(somebody) if comes else ("", "")
            common = {"asked": asked, "here": path, "addresses": _ADDRESSES, "somebody": somebody,
                      "has_tokens": self._access.has_tokens, "kept": self._samples.kept,
                      "said": said}  # fmt: skip

            def text(fleet: Fleet, story: Story, number: int) -> str | None:
                known = fleet.member(asked.get("client", "")) if "client" in request.path_params else None
                pictures = [] if known is None else pictures_of(self._watch.folder, known.client)
                # What is the same for all who look is made once; a form has its session's secret.
                newest = [(one.name, one.at) for one in pictures]
                key = None if somebody.secret else f"{path} {somebody.may_operate} {sorted(asked.items())} {newest}"
                kept = self._kept.get(key or "")
                if kept is not None and kept[0] == number:
                    return kept[1]
                facts = page(fleet, story, asked)
                if facts is None:
                    return None
                made = self._pages.render(template, {"fleet": fleet, "pictures": pictures, **common, **facts})
                if key is not None:
                    if len(self._kept) >= MAX_KEPT:
                        self._kept.clear()
                    self._kept[key] = number, made
                return made

            made = self._watch.read(text)
            return HTMLResponse(made) if made is not None else self._missing(request, None)

        return Route(path, endpoint)

    async def _live(self, request: Request) -> Response:
        if self._num_live >= MAX_LIVE:
            return PlainTextResponse("too many pages are open; this one isn't told of changes\n", 503)
        numbers = self._numbers()
        await anext(numbers)  # its place is taken now: others may ask before a response begins
        return StreamingResponse(numbers, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    async def _numbers(self) -> AsyncIterator[str]:
        self._num_live += 1
        try:
            yield ""
            last, quiet_s = None, 0.0
            while True:
                number = await run_in_threadpool(self._number)
                quiet_s += LOOK_EVERY_S
                if number != last or quiet_s >= KEEP_ALIVE_S:
                    yield f"data: {number}\n\n"
                    last, quiet_s = number, 0.0
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            self._num_live -= 1

    def _number(self) -> int:
        """The facts' number; another one while they can't be read, of which the page that asks is told."""
        try:
            return self._watch.number()
        except (ReplayfleetError, OSError):
            return -1

    async def _sample(self, request: Request) -> Response:
        client, class_id = request.path_params["client"], request.path_params["class_id"]
        known = await run_in_threadpool(self._watch.read, lambda fleet, story, number: fleet.held)
        found = {str(number): one for number, one in (await self._samples.of(client, known)).items()}.get(class_id)
        return self._missing(request, None) if found is None else Response(found.png, media_type="image/png")

    async def _picture(self, request: Request) -> Response:
        client, name = request.path_params["client"], request.path_params["name"]
        known = await run_in_threadpool(self._watch.read, lambda fleet, *_: {one.client for one in fleet.members})
        pictures = await run_in_threadpool(pictures_of, self._watch.folder, client) if client in known else []
        found = next((one for one in pictures if one.name == name), None)
        return self._missing(request, None) if found is None else Response(found.jpeg, media_type="image/jpeg")

    async def _static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name == "console.css":
            style = Path(shared_pages.__file__).parent / "style.css"
            return Response(style.read_bytes() + (_STATIC / name).read_bytes(), media_type="text/css")
        kind = {"live.js": "text/javascript", "icon.svg": "image/svg+xml"}.get(name)
        return Response((_STATIC / name).read_bytes(), media_type=kind) if kind else self._missing(request, None)

    def _missing(self, request: Request, error: Exception | None) -> Response:
        facts = {"title": "Nothing is here", "text": f"There is no page {request.url.path[:MAX_FIELD]}."}
        return HTMLResponse(self._pages.render("problem.html", facts), 404)

    def _trouble(self, request: Request, error: Exception) -> Response:
        again = {"back": request.url.path, "back_name": "Load it again"}
        facts = {"title": "The fleet can't be read", "text": str(error), **again}
        return HTMLResponse(self._pages.render("problem.html", facts), 503)
