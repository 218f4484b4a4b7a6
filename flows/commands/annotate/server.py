"""The web server of `leash annotate`. Every request needs a token; without one it gets 403 and nothing else."""

import hashlib
import secrets
import sqlite3
import sys
import time
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Body, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup
from pydantic import BaseModel, ConfigDict, Field

from flows.commands.annotate.labels import statistics
from flows.commands.annotate.store import AlreadyJudged, Store, UnknownTask, View
from tasks.page import page as report_page

LARGEST_BODY = 4096
"""Bytes of a request; a ranking of a few answers needs far fewer."""
NOTHING = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
"""Content security policy of every response; the page adds its own script and style, and its own server."""
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": NOTHING,
}
MARKDOWN = MarkdownIt("js-default", {"breaks": True, "html": False}).disable(
    ["image", "link", "autolink", "reference", "html_inline", "html_block"]
)


class Choice(BaseModel):
    """A judgement as the page sends it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    task: Annotated[str, Field(max_length=16)]
    action: Literal["rank", "tie", "skip", "flag"]
    ranking: Annotated[list[int], Field(max_length=26)] = []
    """Shown places from 0, the best first."""


def build_app(store: Store, guidelines: str | None, shared: bool, hosts: Collection[str] | None) -> FastAPI:
    """The application. `guidelines`: Markdown; `shared`: annotators do not see each other's figures; `hosts`: the
    accepted values of the header Host, None accepts all."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    folders = [Path(__file__).parent, Path(report_page.__file__).parent]
    environment = Environment(loader=FileSystemLoader(folders), autoescape=True, undefined=StrictUndefined)
    template, guide = environment.get_template("page.html.j2"), Markup(to_html(guidelines or ""))

    @app.middleware("http")
    async def guard(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        """Refuse a request without a token, from another site, for another host, or with a large body. Only the page
        takes the token from the address; a form or link of another site cannot send the header that everything else
        needs."""
        headers, length = request.headers, request.headers.get("content-length", "0")
        host = headers.get("host", "")
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            is_page = request.url.path == "/" and request.method == "GET"
            token = request.query_params.get("token", "") if is_page else ""
        annotator = dict(store.tokens(time.time())).get(hash_token(token))
        is_foreign = headers.get("origin", f"http://{host}") != f"http://{host}"
        response: Response
        if annotator is None or is_foreign or (hosts is not None and host not in hosts):
            response = PlainTextResponse("Forbidden\n", 403)
        elif "transfer-encoding" in headers or not length.isdecimal() or int(length) > LARGEST_BODY:
            response = PlainTextResponse("Too large\n", 413)
        else:
            request.state.annotator = annotator
            response = await answer(request)
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    @app.get("/")
    def page(request: Request) -> HTMLResponse:
        nonce = secrets.token_urlsafe(16)
        allowed = f"script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; img-src 'none'"
        content = template.render(nonce=nonce, annotator=request.state.annotator, guidelines=guide)
        return HTMLResponse(content, headers={"Content-Security-Policy": f"{NOTHING}; {allowed}"})

    @app.get("/api/view")
    def view(request: Request) -> dict[str, Any]:
        return as_json(store.view(request.state.annotator, time.time()))

    @app.post("/api/judge")
    def judge(request: Request, choice: Choice) -> dict[str, Any]:
        name = request.state.annotator
        return as_json(store.judge(name, choice.task, choice.action, choice.ranking, time.time()))

    @app.post("/api/undo")
    def undo(request: Request, task: Annotated[str, Body(embed=True, max_length=16)]) -> dict[str, Any]:
        return as_json(store.undo(request.state.annotator, task, time.time()))

    @app.get("/api/statistics")
    def figures(request: Request) -> dict[str, Any]:
        found = statistics(store)
        people = [one for one in found["people"] if not shared or one["name"] == request.state.annotator]
        return {**found, "people": people}

    @app.exception_handler(AlreadyJudged)
    def already_judged(request: Request, error: AlreadyJudged) -> JSONResponse:
        return JSONResponse(view(request), 409)

    @app.exception_handler(UnknownTask)
    def unknown_task(request: Request, error: UnknownTask) -> PlainTextResponse:
        return PlainTextResponse("no such task, or not a ranking of its answers\n", 422)

    @app.exception_handler(RequestValidationError)
    def not_understood(request: Request, error: RequestValidationError) -> PlainTextResponse:
        return PlainTextResponse("not a request of the page\n", 422)  # without the body: JSON may not hold its values

    @app.exception_handler(sqlite3.Error)
    def not_saved(request: Request, error: sqlite3.Error) -> PlainTextResponse:
        print(f"not saved: {store.path}: {error}; the page tries again", file=sys.stderr, flush=True)
        return PlainTextResponse("not saved\n", 503)

    return app


def hash_token(token: str) -> str:
    """SHA-256 in hexadecimal digits; tokens are random, so no salt is needed, and a look-up by the hash reveals nothing
    about them."""
    return hashlib.sha256(token.encode()).hexdigest()


def as_json(view: View) -> dict[str, Any]:
    """A view for the page: texts as they are and as HTML. Whether a task is a gold question is not in it."""
    content = {name: getattr(view, name) for name in ("done", "left", "last", "seconds", "per_hour")}
    if view.task is None:
        return {"task": None, **content}
    prompt = [{"role": turn["role"], **_both(turn["content"])} for turn in view.task.prompt]
    answers = [{**_both(view.task.answers[i]), "ended": view.task.ended[i]} for i in view.shown]
    return {"task": {"id": view.task.id, "prompt": prompt, "answers": answers}, **content}


def _both(text: str) -> dict[str, str]:
    return {"text": text, "html": to_html(text)}


def to_html(text: str) -> str:
    """Markdown as HTML without links, images and raw HTML: these stay text."""
    return str(MARKDOWN.render(text))
