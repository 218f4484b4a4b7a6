"""The requests of the page: who gets in, what a page may do, what is answered. A real browser is in test_browser.py."""

import json
import re
import time
from collections.abc import Callable
from html import unescape

import pytest
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from flows.commands.annotate.server import LARGEST_BODY, build_app, hash_token, to_html
from flows.commands.annotate.store import Store
from flows.commands.annotate.tasks import Task
from tests.flows.commands.annotate.conftest import task
from tests.security.test_page import ATTACKS, Seen

Make = Callable[..., Store]
HOST = "127.0.0.1:8765"
TOKENS = {"anna": "token-of-anna", "ben": "token-of-ben"}
PATHS = ("/", "/api/view", "/api/statistics", "/api/judge", "/api/undo", "/nowhere", "/docs", "/openapi.json")
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE")


def client_of(store: Store, *, shared: bool = False, guidelines: str | None = None) -> TestClient:
    store.add_tokens({name: hash_token(token) for name, token in TOKENS.items()}, time.time())
    app = build_app(store, guidelines, shared, None if shared else (HOST, "localhost:8765"))
    return TestClient(app, base_url=f"http://{HOST}", follow_redirects=False)


def bearer(name: str = "anna") -> dict[str, str]:
    return {"Authorization": f"Bearer {TOKENS[name]}"}


@pytest.mark.parametrize("path", PATHS)
def test_without_a_token_every_request_gets_403_and_nothing_else(make_store: Make, path: str) -> None:
    client = client_of(make_store([task(0)]))
    bodies = set()
    for method in METHODS:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer "}, {"Cookie": "token=x"}):
            answer = client.request(method, path, headers=headers, content=b"x" * 10_000)
            assert answer.status_code == 403
            assert not {"allow", "location", "set-cookie", "access-control-allow-origin"} & set(answer.headers)
            bodies.add(answer.content)
    assert bodies <= {b"Forbidden\n", b""}
    assert client.get(f"{path}?token=wrong").status_code == 403


def test_the_token_in_the_address_opens_the_page_and_nothing_else(make_store: Make) -> None:
    client = client_of(make_store([task(0)]))
    address = {"token": TOKENS["anna"]}
    assert client.get("/", params=address).status_code == 200
    for path in PATHS[1:]:
        assert client.get(path, params=address).status_code == 403
        assert client.post(path, params=address, json={}).status_code == 403
    assert client.head("/", params=address).status_code == 403
    assert client.get("/api/view", headers=bearer()).status_code == 200
    assert client.get("/nowhere", headers=bearer()).status_code == 404


def test_only_hashes_of_tokens_are_stored(make_store: Make) -> None:
    store = make_store([task(0)])
    client_of(store)
    assert {name for _, name in store.tokens(time.time())} == set(TOKENS)
    stored = b"".join(path.read_bytes() for path in store.path.parent.glob("labels.db*"))
    assert not any(token.encode() in stored for token in TOKENS.values())


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8765", "127.0.0.1", "127.0.0.1:80", "0.0.0.0:8765"])
def test_another_host_name_is_refused(make_store: Make, host: str) -> None:
    """DNS rebinding: another site's name that points to this machine."""
    client = client_of(make_store([task(0)]))
    assert client.get("/api/view", headers=bearer() | {"Host": host}).status_code == 403
    assert client.get("/", params={"token": TOKENS["anna"]}, headers={"Host": host}).status_code == 403
    assert client.get("/api/view", headers=bearer() | {"Host": "localhost:8765"}).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1:8765", "http://127.0.0.1:8766"])
@pytest.mark.parametrize("shared", [False, True])
def test_another_site_is_refused_even_with_the_token(make_store: Make, origin: str, shared: bool) -> None:
    store = make_store([task(0)])
    client = client_of(store, shared=shared)
    choice = {"task": task(0).id, "action": "tie"}
    foreign = bearer() | {"Origin": origin}
    assert client.post("/api/judge", headers=foreign, json=choice).status_code == 403
    assert client.options("/api/judge", headers=foreign).status_code == 403
    assert store.judgements() == []
    own = bearer() | {"Origin": f"http://{HOST}"}
    assert client.post("/api/judge", headers=own, json=choice).status_code == 200


def test_a_form_of_another_site_cannot_judge(make_store: Make) -> None:
    """A form sends no header of its own, and its content is no JSON."""
    store = make_store([task(0)])
    client = client_of(store)
    choice = {"task": task(0).id, "action": "tie"}
    assert client.post("/api/judge", data=choice).status_code == 403
    assert client.post("/api/judge", params={"token": TOKENS["anna"]}, data=choice).status_code == 403
    text = bearer() | {"Content-Type": "text/plain"}
    assert client.post("/api/judge", headers=text, content=json.dumps(choice)).status_code == 422
    assert store.judgements() == []


def test_a_large_body_is_refused_unread(make_store: Make) -> None:
    client = client_of(make_store([task(0)]))
    assert client.post("/api/judge", headers=bearer(), content=b"x" * (LARGEST_BODY + 1)).status_code == 413
    parts = client.post("/api/judge", headers=bearer(), content=iter([b"x", b"y"]))
    assert parts.request.headers["transfer-encoding"] == "chunked"
    assert parts.status_code == 413


def test_a_websocket_is_refused(make_store: Make) -> None:
    client = client_of(make_store([task(0)]))
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/", headers=bearer()):
        pass


@pytest.mark.parametrize(
    "choice",
    [
        {},
        {"task": "x" * 17, "action": "tie"},
        {"task": "unknown", "action": "tie"},
        {"task": "TASK", "action": "delete"},
        {"task": "TASK", "action": "rank", "ranking": [0]},
        {"task": "TASK", "action": "rank", "ranking": ["0", "1"]},
        {"task": "TASK", "action": "tie", "annotator": "ben"},
        ["TASK"],
    ],
)
def test_what_the_page_would_never_send_is_refused(make_store: Make, choice: object) -> None:
    store = make_store([task(0)])
    client = client_of(store)
    body = json.dumps(choice).replace("TASK", task(0).id)
    headers = bearer() | {"Content-Type": "application/json"}
    assert client.post("/api/judge", headers=headers, content=body).status_code == 422
    assert store.judgements() == []


@pytest.mark.parametrize(
    "body",
    [b'{"task": NaN, "action": "tie"}', b'{"task": "\\ud800", "action": "tie"}', b'{"\\udfff": 1}', b"[" * 4000, b"{"],
    ids=["NaN", "surrogate", "surrogate in a key", "nested lists", "cut off"],
)
def test_a_body_that_json_cannot_repeat_is_refused_in_plain_text(make_store: Make, body: bytes) -> None:
    headers = bearer() | {"Content-Type": "application/json"}
    answer = client_of(make_store([task(0)])).post("/api/judge", headers=headers, content=body)
    assert answer.status_code in {400, 422}
    assert len(answer.content) < 100
    assert (answer.status_code, answer.text) == (422, "not a request of the page\n") or body == b"[" * 4000


def test_every_answer_forbids_caching_sniffing_referrers_and_foreign_content(make_store: Make) -> None:
    client = client_of(make_store([task(0)]))
    page = client.get("/", params={"token": TOKENS["anna"]})
    for answer in (page, client.get("/"), client.get("/api/view", headers=bearer())):
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["x-content-type-options"] == "nosniff"
        policy = answer.headers["content-security-policy"].split("; ")
        assert {"default-src 'none'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"} <= set(policy)
        assert not {"set-cookie", "server"} & set(answer.headers)
    policy = page.headers["content-security-policy"]
    nonces = set(re.findall(r"'nonce-([\w-]+)'", policy))
    assert len(nonces) == 1
    assert "img-src 'none'" in policy
    assert "unsafe" not in policy
    assert set(re.findall(r"<(?:script|style)([^>]*)>", page.text)) == {f' nonce="{nonces.pop()}"'}
    again = client.get("/", params={"token": TOKENS["anna"]})
    assert again.headers["content-security-policy"] != policy, "a nonce is used once"


def test_the_page_has_no_inline_handlers_links_or_tokens(make_store: Make) -> None:
    text = client_of(make_store([task(0)])).get("/", params={"token": TOKENS["anna"]}).text
    seen = Seen(text)
    assert not [name for name, _ in seen.attributes if name.startswith("on") or name in {"style", "src", "action"}]
    assert [value for name, value in seen.attributes if name == "href"] == ["#answers"]
    assert TOKENS["anna"] not in text


@pytest.mark.parametrize(
    "attack", [*ATTACKS, "[x](javascript:alert(1))", "![x](http://evil.example/x.png)", "&lt;b&gt;"]
)
def test_markdown_of_others_is_text(attack: str) -> None:
    seen = Seen(to_html(attack))
    assert seen.tags <= {"p", "br", "em", "code", "pre"}
    assert seen.attributes == []
    assert seen.text.strip() == unescape(attack) if "&" in attack else seen.text.strip() == attack.replace("\\", "")


def test_markdown_is_shown() -> None:
    html = to_html(
        "# Title\n**bold** and `code`\nnext line\n\n- one\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```py\nx < 1\n```\n"
    )
    for part in ("<h1>Title</h1>", "<strong>bold</strong>", "<code>code</code><br>", "<li>one</li>", "<td>1</td>"):
        assert part in html
    assert "x &lt; 1" in html


def test_names_and_guidelines_cannot_run_code(make_store: Make) -> None:
    store = make_store([task(0)])
    name = "</title><script>document.title='owned'</script>"
    store.add_tokens({name: hash_token("secret")}, time.time())
    app = build_app(store, "\n\n".join(ATTACKS), False, (HOST,))
    text = TestClient(app, base_url=f"http://{HOST}").get("/", params={"token": "secret"}).text
    assert len(re.findall("<script", text)) == 1
    assert name in Seen(text).text


def test_the_page_shows_the_answers_in_the_order_of_the_judgement_and_hides_which_is_gold(make_store: Make) -> None:
    store = make_store([task(0), task(1, right=0), task(2)], gold_every=1)
    client = client_of(store)
    answers: list[dict[str, object]] = [client.get("/api/view", headers=bearer()).json()]
    while (one := answers[-1]["task"]) is not None:
        choice = {"task": one["id"], "action": "rank", "ranking": [1, 0]}  # type: ignore[index]
        answers.append(client.post("/api/judge", headers=bearer(), json=choice).json())
    keys = {tuple(found["task"]) for found in answers if found["task"]}  # type: ignore[arg-type]
    assert keys == {("id", "prompt", "answers")}
    assert len(answers) == 4
    for judgement, found in zip(store.judgements(), answers, strict=False):
        texts = store.tasks[judgement.task].answers
        shown = [answer["html"] for answer in found["task"]["answers"]]  # type: ignore[index]
        assert shown == [f"<p>{texts[place]}</p>\n" for place in judgement.shown]
        assert [answer["text"] for answer in found["task"]["answers"]] == [texts[place] for place in judgement.shown]  # type: ignore[index]
        assert judgement.ranking == judgement.shown[::-1]


def test_a_second_choice_and_a_second_undo_get_409_with_the_present_view(make_store: Make) -> None:
    store = make_store([task(0), task(1)])
    client = client_of(store)
    first = client.get("/api/view", headers=bearer()).json()["task"]["id"]
    choice = {"task": first, "action": "tie"}
    second = client.post("/api/judge", headers=bearer(), json=choice).json()
    again = client.post("/api/judge", headers=bearer(), json=choice)
    assert (again.status_code, again.json()["task"]["id"]) == (409, second["task"]["id"])
    assert client.post("/api/undo", headers=bearer(), json={"task": first}).json()["task"]["id"] == first
    undone = client.post("/api/undo", headers=bearer(), json={"task": first})
    assert (undone.status_code, undone.json()["task"]["id"]) == (409, first)
    assert client.post("/api/undo", headers=bearer("ben"), json={"task": first}).status_code == 409


@pytest.mark.parametrize("shared", [False, True])
def test_annotators_see_the_names_of_others_on_the_owners_machine_only(make_store: Make, shared: bool) -> None:
    store = make_store([task(0)], overlap=2)
    client = client_of(store, shared=shared)
    for name in TOKENS:
        client.post("/api/judge", headers=bearer(name), json={"task": task(0).id, "action": "rank", "ranking": [0, 1]})
    found = client.get("/api/statistics", headers=bearer("ben")).json()
    assert [one["name"] for one in found["people"]] == (["ben"] if shared else ["anna", "ben"])
    assert found["done"] == 2
    assert ("anna" in json.dumps(found)) is not shared


def test_a_full_disk_is_answered_with_503_and_the_same_request_works_later(
    make_store: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    store = make_store([Task(task(0).prompt, ("a", "b"), (True, True))] + [task(i) for i in range(1, 400)])
    client = client_of(store)
    (pages,) = store._base.execute("PRAGMA page_count").fetchone()
    store._base.execute(f"PRAGMA max_page_count = {pages}")
    codes = []
    while 503 not in codes:
        one = client.get("/api/view", headers=bearer()).json()["task"]
        choice = {"task": one["id"], "action": "tie"}
        codes.append(client.post("/api/judge", headers=bearer(), json=choice).status_code)
    assert "not saved: " in capsys.readouterr().err
    assert len(store.judgements()) == len(codes) - 1
    store._base.execute("PRAGMA max_page_count = 1000000")
    assert client.post("/api/judge", headers=bearer(), json=choice).status_code == 200
    assert store.judgements()[-1].task == one["id"]
