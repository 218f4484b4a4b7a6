"""The web server of `leash annotate`. Every request needs a token; without one it gets 403 and nothing else."""

import hashlib
import hmac
import secrets
import sqlite3
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flows.commands.annotate.statistics import statistics
from flows.commands.annotate.store import AlreadyJudged, Store, UnknownTask, View
from tasks.page import page as report_page

LARGEST_BODY = 4096
"""Bytes of a request; a ranking of a few answers needs far fewer."""
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
NOTHING = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
"""Content security policy of every response; the page adds its own script and style, and its own server."""


class Choice(BaseModel):
    """A judgement as the page sends it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    task: Annotated[str, Field(max_length=16)]
    action: Literal["rank", "tie", "skip", "flag"]
    ranking: Annotated[list[int], Field(max_length=26)] = []
    """Shown places from 0, the best first."""


class Undo(BaseModel):
    """The judgement to take back."""

    model_config = ConfigDict(extra="forbid", strict=True)

    task: Annotated[str, Field(max_length=16)]


class Guard:
    """Middleware that refuses a request without a token, from another site, for another host, or with a large body.
    The annotator is then in the request's state."""

    def __init__(self, app: ASGIApp, store: Store, hosts: Iterable[str] | None) -> None:
        """`hosts`: the accepted values of the header Host; None accepts all."""
        self.app, self.store = app, store
        self.hosts = None if hosts is None else set(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 403 or 413, or hand the request on."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # a WebSocket is refused before it opens
            await send({"type": "websocket.close", "code": 1008})
            return

        async def secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update({name: value for name, value in HEADERS.items() if name not in headers})
                headers.setdefault("Content-Security-Policy", NOTHING)
            await send(message)

        headers = Headers(scope=scope)
        annotator = self._annotator(scope, headers)
        if annotator is None:
            await PlainTextResponse("Forbidden\n", 403)(scope, receive, secured)
        elif _body_is_large(headers):
            await PlainTextResponse("Too large\n", 413)(scope, receive, secured)
        else:
            scope.setdefault("state", {})["annotator"] = annotator
            await self.app(scope, receive, secured)

    def _annotator(self, scope: Scope, headers: Headers) -> str | None:
        """Whose token the request has. Only the page takes it from the address; a form or link of another site cannot
        send the header that everything else needs."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if (self.hosts is not None and host not in self.hosts) or origin not in (None, f"http://{host}"):
            return None
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            in_address = scope["path"] == "/" and scope["method"] == "GET"
            token = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0] if in_address else ""
        given, found = hash_token(token), None
        for known, annotator in self.store.tokens(time.time()):
            if hmac.compare_digest(known, given):
                found = annotator
        return found


def hash_token(token: str) -> str:
    """SHA-256 in hexadecimal digits; tokens are random, so no salt is needed."""
    return hashlib.sha256(token.encode()).hexdigest()


def build_app(store: Store, guidelines: str | None, shared: bool, hosts: Iterable[str] | None) -> Guard:
    """The application. `guidelines`: Markdown; `shared`: annotators do not see each other's figures."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    text = to_html(guidelines) if guidelines else ""

    @app.get("/")
    def page(request: Request) -> HTMLResponse:
        nonce = secrets.token_urlsafe(16)
        allowed = f"script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; img-src 'none'"
        content = render_page(nonce, request.state.annotator, text)
        return HTMLResponse(content, headers={"Content-Security-Policy": f"{NOTHING}; {allowed}"})

    @app.exception_handler(sqlite3.Error)
    def not_saved(request: Request, error: sqlite3.Error) -> PlainTextResponse:
        print(f"not saved: {store.path}: {error}; the page tries again", file=sys.stderr, flush=True)
        return PlainTextResponse("not saved\n", 503)

    @app.exception_handler(RequestValidationError)
    def not_understood(request: Request, error: RequestValidationError) -> PlainTextResponse:
        return PlainTextResponse("not a request of the page\n", 422)  # without the body: JSON may not hold its values

    app.include_router(api(store, shared), prefix="/api")
    return Guard(app, store, hosts)


def api(store: Store, shared: bool) -> APIRouter:
    """What the page calls. The annotator is in the state of each request."""
    router = APIRouter()

    @router.get("/view")
    def view(request: Request) -> dict[str, Any]:
        return shown(store.view(request.state.annotator, time.time()), store, request.state.annotator)

    @router.post("/judge")
    def judge(request: Request, choice: Choice) -> Any:
        name = request.state.annotator
        try:
            found = store.judge(name, choice.task, choice.action, choice.ranking, time.time())
        except AlreadyJudged:
            return JSONResponse(shown(store.view(name, time.time()), store, name), 409)
        except UnknownTask:
            return PlainTextResponse("no such task, or not a ranking of its answers\n", 422)
        return shown(found, store, name)

    @router.post("/undo")
    def undo(request: Request, which: Undo) -> Any:
        name = request.state.annotator
        try:
            return shown(store.undo(name, which.task, time.time()), store, name)
        except AlreadyJudged:
            return JSONResponse(shown(store.view(name, time.time()), store, name), 409)

    @router.get("/statistics")
    def figures(request: Request) -> dict[str, Any]:
        found = statistics(store)
        visible = [one for one in found.people if not shared or one.name == request.state.annotator]
        return {**asdict(found), "people": [asdict(one) for one in visible]}

    return router


def shown(view: View, store: Store, annotator: str) -> dict[str, Any]:
    """A view as JSON: texts as they are, for programs, and as HTML, for the page. Whether a task is a gold question is
    not in it."""
    seconds = store.seconds(annotator)
    task = None
    if view.task is not None:
        answers = [(view.task.answers[place], view.task.ended[place]) for place in view.shown]
        task = {
            "id": view.task.id,
            "prompt": [{"role": turn["role"], **_both(turn["content"])} for turn in view.task.prompt],
            "answers": [{**_both(text), "ended": ended} for text, ended in answers],
        }
    return {
        "task": task,
        "done": view.done,
        "left": view.left,
        "last": view.last,
        "seconds": median(seconds) if seconds else None,
        "per_hour": 3600 / fmean(seconds) if seconds else None,
    }


def _both(text: str) -> dict[str, str]:
    return {"text": text, "html": to_html(text)}


@cache
def _markdown() -> MarkdownIt:
    found = MarkdownIt("js-default", {"breaks": True, "html": False})
    return found.disable(["image", "link", "autolink", "reference", "html_inline", "html_block"])


def to_html(text: str) -> str:
    """Markdown as HTML without links, images and raw HTML: these stay text."""
    return str(_markdown().render(text))


def render_page(nonce: str, annotator: str, guidelines: str) -> str:
    """The page; `guidelines` is HTML of `to_html`."""
    folders = [Path(__file__).parent, Path(report_page.__file__).parent]
    environment = Environment(loader=FileSystemLoader(folders), autoescape=True, undefined=StrictUndefined)
    template = environment.get_template("page.html.j2")
    return template.render(nonce=nonce, annotator=annotator, guidelines=Markup(guidelines))


def _body_is_large(headers: Headers) -> bool:
    length = headers.get("content-length", "0")
    return "transfer-encoding" in headers or not length.isdecimal() or int(length) > LARGEST_BODY
