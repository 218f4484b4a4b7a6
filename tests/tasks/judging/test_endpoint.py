"""A judge behind an endpoint, against a server that fails in every way: what is read, repeated, counted and saved."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rlhf_core.errors import UserError
from rlhf_core.evaluation.judge_model import QUESTION
from rlhf_core.evaluation.pair_judges import both_orders
from tasks.judging.endpoint import EndpointJudge
from tasks.params.judge import JudgeParams
from tasks.params.runtime import ApiParams, RuntimeParams
from tasks.stage.stage import Stage

if TYPE_CHECKING:
    from tests.tasks.judging.conftest import Reply, Server

KEY = "sk-very-secret-0123456789"
PROMPTS: Any = [[{"role": "user", "content": f"question {number}"}] for number in range(6)]
GOOD, BAD = [f"good {number}" for number in range(6)], [f"bad {number}" for number in range(6)]


@pytest.fixture
def make_judge(make_stage: Callable[..., Stage[Any]], server: "Server", monkeypatch: pytest.MonkeyPatch) -> Any:
    """make_judge(max_requests=…) -> the judge of a stage; another call has the same state folder, as after a kill."""
    monkeypatch.setenv("JUDGE_KEY", KEY)

    def make(question: str = QUESTION, **settings: Any) -> EndpointJudge:
        stage = make_stage("preferences", None, [])
        api = ApiParams(**{"retries": 3, "timeout_seconds": 5.0, **settings})
        stage.common = stage.common.model_copy(update={"runtime": RuntimeParams(tracking=False, api=api)})
        params = JudgeParams(kind="api", model="m", base_url=server.url, key_variable="JUDGE_KEY")
        return EndpointJudge(stage, params, question)

    return make


def test_both_orders_are_sent_once_with_the_key(
    make_judge: Any, server: "Server", monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, "of-another-server")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "x-foo: of-another-server")
    judge = make_judge()
    assert [f"m at {server.url}" in why for why in judge.stage.exemptions] == [True], "verdicts may differ another time"
    found = both_orders(judge, PROMPTS, BAD, GOOD)
    assert found.preference == [1.0] * 6
    assert both_orders(judge, PROMPTS, BAD, GOOD) == found
    assert set(server.questions().values()) == {1}
    assert len(server.bodies) == 12
    assert set(server.keys) == {f"Bearer {KEY}"}
    assert not any("of-another-server" in headers for headers in server.headers)
    assert server.most_at_once <= 8


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        (("B", {"A": -0.1, "B": -2.0}), 1.0),  # the probabilities decide
        (("A", {" A": -1.2, "A": -3.0, "B": -1.3, " B": -1.3}), 0.0),  # over all spellings
        (("A", {"A": -0.69, "B": -0.69}), 0.5),
        (("the", {"The": -0.1, "B": -4.0}), None),  # hardly a letter: the text
        (("B", {"<think>": -0.1, "A": -4.0}), 0.0),
        (("A", {"The": -0.1, "x": -4.0}), 1.0),  # no letter among them: the text
        ((" (B).\n",), 0.0),
        (("**A**",), 1.0),
        (("Both are good",), None),
        (("A or B",), None),
        (("AB",), None),
        (("a",), None),
        (("",), None),
        ((None,), None),
        (("I choose A",), None),
    ],
)
def test_what_is_read(make_judge: Any, server: "Server", reply: tuple[Any, ...], verdict: float | None) -> None:
    server.answer = lambda _: server.completion(*reply)
    (found,) = make_judge().prefer(PROMPTS[:1], ["x"], ["y"])
    assert found == verdict or (verdict is None and math.isnan(found))


def test_what_cannot_be_read_is_counted_and_is_no_verdict(make_judge: Any, server: "Server") -> None:
    server.answer = lambda body: (
        server.completion("Sorry.") if "question 2" in body["messages"][0]["content"] else server.prefers_good(body)
    )
    found = both_orders(make_judge(), PROMPTS, GOOD, BAD)
    assert found.preference == [0.0, 0.0, 0.5, 0.0, 0.0, 0.0]
    assert found.unread == [False, False, True, False, False, False]
    assert (found.position_bias, found.self_agreement) == (0.0, 1.0)


@pytest.mark.parametrize("failure", [(429, {}), (500, {}), (503, b"<html>down</html>"), (200, None)])
def test_what_may_pass_is_tried_again(
    make_judge: Any, server: "Server", monkeypatch: pytest.MonkeyPatch, failure: "Reply"
) -> None:
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.02)
    server.failures = [failure] * 3
    assert make_judge(concurrency=1).prefer(PROMPTS, GOOD, BAD) == [1.0] * 6
    assert len(server.bodies) == 15


def test_a_server_that_is_too_slow(make_judge: Any, server: "Server") -> None:
    """The first request waits for longer than the time-out; it is sent again."""
    slow = [True]

    def answer(body: dict[str, Any]) -> "Reply":
        if slow and slow.pop():
            time.sleep(1.5)
        return server.prefers_good(body)

    server.answer = answer
    assert make_judge(timeout_seconds=0.7).prefer(PROMPTS[:1], GOOD[:1], BAD[:1]) == [1.0]
    assert len(server.bodies) == 3


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        ((401, {"error": {"message": f"Incorrect API key provided: {KEY}"}}), r"Incorrect API key provided: \(key\)"),
        ((404, {"error": {"message": "no model m"}}), "no model m"),
        ((400, {"error": {"message": "the question is too long"}}), "too long"),
        ((500, {"error": {"message": "out of memory"}}), "out of memory"),
        ((200, b"<html>hello</html>"), "no chat completion"),
        ((200, {"object": "chat.completion"}), "no chat completion"),
        ((200, {"choices": []}), "no chat completion"),
        ((429, {"error": {"message": "quota"}}), "quota"),
    ],
)
def test_what_does_not_pass_is_one_line_and_keeps_the_verdicts(
    make_judge: Any, server: "Server", failure: "Reply", text: str
) -> None:
    server.answer = lambda body: (
        failure if "question 4" in body["messages"][0]["content"] else server.prefers_good(body)
    )
    with pytest.raises(UserError, match=text) as raised:
        make_judge(concurrency=1, retries=1).prefer(PROMPTS, GOOD, BAD)
    assert "4 verdicts are saved" in str(raised.value)
    assert KEY not in str(raised.value)
    assert "\n" not in str(raised.value)
    server.answer, server.bodies = server.prefers_good, []
    assert make_judge().prefer(PROMPTS, GOOD, BAD) == [1.0] * 6
    assert len(server.bodies) == 8


def test_a_server_that_is_away(make_judge: Any, server: "Server") -> None:
    judge = make_judge(retries=0)
    judge.client = judge.client.with_options(base_url="http://127.0.0.1:9/v1")
    with pytest.raises(UserError, match=r"Connection error.*0 verdicts are saved"):
        judge.prefer(PROMPTS[:1], GOOD[:1], BAD[:1])


@pytest.mark.parametrize("name", ["logprobs", "top_logprobs", "temperature", "max_tokens"])
def test_an_option_that_the_server_does_not_know_is_left_out(make_judge: Any, server: "Server", name: str) -> None:
    def answer(body: dict[str, Any]) -> "Reply":
        if name in body:
            return 422 if name == "logprobs" else 400, {"error": {"message": f"Unsupported parameter: '{name}'"}}
        return server.prefers_good(body)

    server.answer = answer
    judge = make_judge()
    assert judge.prefer(PROMPTS, GOOD, BAD) == [1.0] * 6
    asked = len(server.bodies)
    assert judge.prefer(PROMPTS[:3], ["bad"] * 3, ["good"] * 3) == [0.0] * 3
    assert len(server.bodies) == asked + 6  # it is not tried again
    assert ("max_completion_tokens" in server.bodies[-1]) == (name == "max_tokens")


def test_the_budget_is_printed_first_and_more_than_it_is_refused(
    make_judge: Any, server: "Server", capsys: pytest.CaptureFixture[str]
) -> None:
    judge = make_judge(max_requests=13)
    assert judge.prefer(PROMPTS, GOOD, BAD) == [1.0] * 6
    assert "12 requests, about " in capsys.readouterr().out
    assert judge.prefer(PROMPTS, BAD, GOOD) == [0.0] * 6
    for again in (judge, make_judge(max_requests=13)):
        with pytest.raises(UserError, match=r"2 requests.*more than the budget: 1 of 13 requests are left.*max_req"):
            again.prefer(PROMPTS[:1], ["good"], ["bad"])
    assert len(server.bodies) == 12


def test_all_that_is_planned_is_printed_once(
    make_judge: Any, server: "Server", capsys: pytest.CaptureFixture[str]
) -> None:
    judge = make_judge()
    judge.plan(PROMPTS, GOOD, BAD)
    judge.prefer(PROMPTS[:2], GOOD[:2], BAD[:2])
    judge.prefer(PROMPTS, GOOD, BAD)
    assert capsys.readouterr().out.count("requests, about") == 1
    assert len(server.bodies) == 12


def test_repeated_requests_count_and_the_budget_ends_them(make_judge: Any, server: "Server") -> None:
    server.failures = [(500, {})] * 20
    with pytest.raises(UserError, match="budget of 12 requests is used up"):
        make_judge(max_requests=12, concurrency=1, retries=20).prefer(PROMPTS, GOOD, BAD)
    assert len(server.bodies) == 12
    with pytest.raises(UserError, match="0 of 12 requests are left"):  # those of before count
        make_judge(max_requests=12).prefer(PROMPTS, GOOD, BAD)


def test_a_budget_of_tokens_ends_cleanly_and_a_larger_one_continues(make_judge: Any, server: "Server") -> None:
    with pytest.raises(UserError, match=r"budget of 150 tokens is used up.*max_tokens"):
        make_judge(max_tokens=150, concurrency=1).prefer(PROMPTS, GOOD, BAD)
    assert len(server.bodies) == 3
    with pytest.raises(UserError, match="used up"):  # the tokens of before count
        make_judge(max_tokens=150, concurrency=1).prefer(PROMPTS, GOOD, BAD)
    assert len(server.bodies) == 3
    assert make_judge(max_tokens=1000).prefer(PROMPTS, GOOD, BAD) == [1.0] * 6
    assert set(server.questions().values()) == {1}


def test_tokens_are_estimated_where_the_server_does_not_count(make_judge: Any, server: "Server") -> None:
    def answer(body: dict[str, Any]) -> "Reply":
        status, found = server.prefers_good(body)
        return status, {**found, "usage": None}

    server.answer = answer
    judge = make_judge()
    judge.prefer(PROMPTS[:1], GOOD[:1], BAD[:1])
    questions = server.questions()
    assert judge.budget.tokens == sum(len(question) // 4 + 8 for question in questions)


@pytest.mark.parametrize(
    "odd",
    [
        {"usage": {}},
        {"usage": {"total_tokens": "many"}},
        {"choices": [None]},
        {"choices": ["A"]},
        {"choices": [{}]},
        {"choices": [{"message": {"content": ["A"]}, "logprobs": None}]},
        {"choices": [{"message": {"content": "?"}, "logprobs": {"content": [{}]}}]},
        {"choices": [{"message": {"content": "?"}, "logprobs": {"content": [{"top_logprobs": [{"token": None}]}]}}]},
        {"choices": [{"message": {}, "logprobs": {"content": [{"top_logprobs": [{"token": "A", "logprob": 9999}]}]}}]},
    ],
)
def test_an_odd_answer_is_unread_and_not_paid_twice(make_judge: Any, server: "Server", odd: dict[str, Any]) -> None:
    server.answer = lambda _: (200, {**server.completion("A" if "usage" in odd else "?")[1], **odd})
    (found,) = make_judge().prefer(PROMPTS[:1], GOOD[:1], BAD[:1])
    assert found == 1.0 if "usage" in odd else math.isnan(found)
    make_judge().prefer(PROMPTS[:1], GOOD[:1], BAD[:1])
    assert len(server.bodies) == 2


def test_an_answer_cut_off_in_a_thought_says_so(make_judge: Any, server: "Server") -> None:
    def answer(body: dict[str, Any]) -> "Reply":
        status, found = server.completion("")
        found["choices"][0]["finish_reason"] = "length"
        return status, found

    server.answer = answer
    with pytest.raises(UserError, match=r"cut off after 8 tokens.*raise judge\.answer_tokens"):
        make_judge(concurrency=1).prefer(PROMPTS, GOOD, BAD)
    assert len(server.bodies) == 1


def test_a_pair_that_is_too_long_for_the_model_is_unread(make_judge: Any, server: "Server") -> None:
    long = {"error": {"message": "This model's maximum context length is 64 tokens; reduce the messages or max_tokens"}}
    server.answer = lambda body: (
        (400, long) if "question 2" in body["messages"][0]["content"] else server.prefers_good(body)
    )
    judge = make_judge()
    assert [math.isnan(value) for value in judge.prefer(PROMPTS, GOOD, BAD)] == [False, False, True, *[False] * 3]
    assert judge.options["max_tokens"] == 8


def test_no_key_is_sent_where_there_is_none(
    make_stage: Callable[..., Stage[Any]], server: "Server", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    params = JudgeParams(kind="api", model="m", base_url=server.url)
    judge = EndpointJudge(make_stage("preferences", None, []), params, QUESTION)
    assert judge.prefer(PROMPTS, GOOD, BAD) == [1.0] * 6
    assert set(server.keys) == {None}
    server.answer = lambda _: (404, {"error": {"message": "none of the models is m"}})
    with pytest.raises(UserError, match="none of the models is m"):
        judge.prefer(PROMPTS[:1], ["good"], ["bad"])


def test_after_a_signal_nothing_is_tried_again(make_judge: Any, server: "Server") -> None:
    """The server fails, and with the second request the signal comes: the pauses of the retries send nothing more."""
    judge = make_judge(concurrency=2, retries=20)

    def answer(body: dict[str, Any]) -> "Reply":
        if len(server.bodies) >= 2:
            judge.stage.interrupts.stopping = True
        return 503, {}

    server.answer = answer
    with pytest.raises(KeyboardInterrupt):
        judge.prefer(PROMPTS, GOOD, BAD)
    assert len(server.bodies) <= 3


def test_a_signal_keeps_the_answers_on_their_way(make_judge: Any, server: "Server") -> None:
    """Two at a time; the signal comes with the third request. Both on their way are saved, and no other is sent."""
    judge = make_judge(concurrency=2)

    def answer(body: dict[str, Any]) -> "Reply":
        if len(server.bodies) >= 3:
            judge.stage.interrupts.stopping = True
        return server.prefers_good(body)

    server.answer = answer
    with pytest.raises(KeyboardInterrupt):
        judge.prefer(PROMPTS, GOOD, BAD)
    assert 3 <= len(server.bodies) <= 4
    server.answer = server.prefers_good
    assert make_judge().prefer(PROMPTS, GOOD, BAD) == [1.0] * 6
    assert set(server.questions().values()) == {1}


def test_the_key_is_in_no_file_and_no_line(make_judge: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_judge().prefer(PROMPTS, GOOD, BAD)
    assert KEY not in "".join(capsys.readouterr())
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


def test_a_key_that_is_not_there(make_judge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(UserError, match="the environment has no JUDGE_KEY"):
        make_judge()


def test_a_wrong_question(make_judge: Any) -> None:
    with pytest.raises(UserError, match="must hold"):
        make_judge(question="$prompt")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"kind": "api", "model": "m"}, "base_url"),
        ({"kind": "api", "base_url": "http://x/v1"}, "name on the server"),
        ({"kind": "data", "model": "m"}, "kind: data has no"),
        ({"kind": "model", "model": "a/b"}, "name of a folder"),
        ({"kind": "model", "model": "m", "key_variable": "K"}, "only kind: api"),
        ({"kind": "api", "model": "a/b", "base_url": "http://me:pass@x/v1"}, "must not hold a name, a password"),
        ({"kind": "api", "model": "a/b", "base_url": "ftp://x"}, "such as http"),
        ({"kind": "api", "model": "a/b", "base_url": "http://x", "key_variable": "sk-abc"}, "never the key itself"),
    ],
)
def test_parameters_that_are_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        JudgeParams(**values)
