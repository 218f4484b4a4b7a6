"""Pairs labelled by a language model: what is a pair, a tie or unread, its agreement, and the stage that uses it."""

import json
import math
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rlhf_core.data.chat import Conversation
from rlhf_core.data.scorer import Answers, Scored
from rlhf_core.errors import UserError
from rlhf_core.evaluation.judges import RubricJudge
from tasks.judging.labelling import agreement, label, of_dataset, with_known_order
from tasks.judging.preference_pairs import measure_agreement
from tests import warm
from tests.conftest import clean_environment

if TYPE_CHECKING:
    from tasks.stage.stage import Stage
    from tests.conftest import Ended, Project
    from tests.tasks.judging.conftest import Reply, Server


KEY = "-".join(("sk", "of", "this", "test"))
"""Joined, so that the file of the test does not hold it."""


@dataclass
class Ranking:
    """Prefers the text that comes first in `order`; texts in `swayed` go by the place, and those in `mute` are
    unread."""

    order: Sequence[str]
    swayed: str = ""
    mute: str = ""
    name: str = "ranking"

    def prefer(self, prompts: Sequence[Conversation], firsts: Sequence[str], seconds: Sequence[str]) -> list[float]:
        return [self._one(a, b) for _, a, b in zip(prompts, firsts, seconds, strict=True)]

    def _one(self, first: str, second: str) -> float:
        if self.mute and self.mute in (first, second):
            return math.nan
        if self.swayed and self.swayed in (first, second):
            return 1.0
        return float(self.order.index(first) < self.order.index(second))


def samples(*answers: str, of: str = "p") -> list[dict[str, Any]]:
    prompt = [{"role": "user", "content": of}]
    return [{"prompt_id": of, "prompt": prompt, "response": text, "sample": k} for k, text in enumerate(answers)]


def test_every_two_different_answers_to_a_prompt_are_a_pair() -> None:
    rows = samples("b", "a", "b", "c") + samples("c", "a", of="q")
    found = label(rows, Ranking("abc"))
    assert found.pairs == [(1, 0), (0, 3), (1, 2), (1, 3), (2, 3), (5, 4)]
    assert found.identical == 1
    assert found.figures() == {"judged": 6, "unread": 0, "ties": 0, "tie_share": 0.0, "position_bias": 0.0}


def test_a_verdict_that_changes_with_the_order_is_a_tie_and_makes_no_pair() -> None:
    found = label(samples("a", "b", "x"), Ranking("abx", swayed="x"))
    assert found.pairs == [(0, 1)]
    assert found.figures() == {
        "judged": 3, "unread": 0, "ties": 2, "tie_share": 2 / 3, "position_bias": pytest.approx(1 / 3),
    }  # fmt: skip


def test_what_is_unread_is_counted_and_makes_no_pair() -> None:
    found = label(samples("a", "b", "x"), Ranking("abx", mute="x"))
    assert found.pairs == [(0, 1)]
    assert found.figures() == {"judged": 3, "unread": 2, "ties": 0, "tie_share": 0.0, "position_bias": 0.0}


def test_equal_answers_alone_make_no_pair() -> None:
    found = label(samples("a", "a"), Ranking("a"))
    assert (found.pairs, found.identical) == ([], 1)
    assert found.figures() == {"judged": 0, "unread": 0, "ties": 0, "tie_share": None, "position_bias": None}


def test_agreement_with_known_pairs() -> None:
    """Of ten prompts seven are judged right, one wrong, one ties, and one is unread."""
    rows = [
        {"prompt_id": str(k), "prompt": [], "chosen": "a", "rejected": {7: "A", 8: "x", 9: "y"}.get(k, "b")}
        for k in range(10)
    ]
    found, unread = agreement(Ranking("Aab", swayed="x", mute="y"), of_dataset(rows), seed=1)
    assert unread == 1
    assert found is not None
    assert (found.share, found.pairs) == (pytest.approx(7.5 / 9), 9)
    assert 0.4 < found.low < found.share < found.high <= 1.0


def test_a_judge_of_which_nothing_can_be_read_is_refused(make_stage: Callable[..., "Stage[Any]"]) -> None:
    rows = [{"prompt_id": "1", "prompt": [], "chosen": "a", "rejected": "b"}]
    assert agreement(Ranking("ab", mute="a"), of_dataset(rows), seed=1) == (None, 1)
    with pytest.raises(UserError, match="not one of 1 verdicts of the judge ranking can be read; it must reply with"):
        measure_agreement(make_stage("preferences", None, []), of_dataset(rows), Ranking("ab", mute="a"))


def test_the_order_of_a_scorer_is_known_where_it_is_no_tie() -> None:
    class Length(RubricJudge):
        def __call__(self, answers: Answers) -> Scored:
            return Scored([float(len(text)) for text in answers.texts])

    found = with_known_order(samples("a", "bb", "c", "dd"), Length(), 3)
    known = list(zip(found.pairs.a, found.pairs.b, found.b_better, strict=True))
    assert known == [("a", "bb", 1.0), ("a", "dd", 1.0), ("bb", "c", 0.0)]


@pytest.fixture
def labelled(finished: "Project", server: "Server", monkeypatch: pytest.MonkeyPatch) -> "Project":
    """The tiny run, whose preferences are to be labelled by the server: by the order of the alphabet."""

    def answer(body: dict[str, Any]) -> "Reply":
        text = body["messages"][0]["content"]
        first, second = text.split("Answer A:\n")[1].split("\n\nReply")[0].split("\n\nAnswer B:\n")
        return server.completion("A" if first < second else "B")

    server.answer = answer
    monkeypatch.setenv("JUDGE_KEY", KEY)
    finished.set("runtime.tracking", False)
    finished.set("preferences.source", "model")
    finished.set("preferences.samples_per_prompt", 2)
    finished.set("preferences.agreement_pairs", 20)
    finished.set("judge", {"kind": "api", "model": "m", "base_url": server.url, "key_variable": "JUDGE_KEY"})
    return finished


def test_the_stage_labels_with_an_endpoint(
    labelled: "Project", stage_main: Callable[["Project", str], "Ended"], server: "Server"
) -> None:
    labelled.set("runtime.tracking", True)
    for stage in ("check", "check_data"):
        assert stage_main(labelled, stage).code == 0
    ended = stage_main(labelled, "preferences")
    assert ended.code == 0, ended.stderr
    pairs, metrics = labelled.rows("data/preferences/preferences.jsonl"), labelled.json("metrics/preferences.json")
    assert all(pair["chosen"] < pair["rejected"] for pair in pairs)
    figures = metrics["judge_model"]
    assert len(pairs) == metrics["pairs"] == figures["judged"]
    assert (figures["ties"], figures["unread"], figures["position_bias"]) == (0, 0, 0.0)
    assert set(server.questions().values()) == {1}
    assert len(server.bodies) == 2 * figures["judged"]  # those of the agreement are among them
    assert figures["agreement"]["with"] == "gold rubric (simulated)"
    assert 0 < figures["agreement"]["pairs"] <= 20
    low, high = figures["agreement"]["share_low"], figures["agreement"]["share_high"]
    assert low <= figures["agreement"]["share"] <= high
    assert metrics["judge"] == f"m at {server.url}", "the page compares it with the judge of evaluate.json"
    lines = ended.stdout.splitlines()
    agrees, labels = (next(i for i, line in enumerate(lines) if text in line) for text in ("agrees with", "ties (verd"))
    assert agrees < labels
    assert ended.stdout.index("requests, about") < ended.stdout.index("verdict ")
    assert KEY not in ended.stdout + ended.stderr + json.dumps(metrics)
    files = [path for path in labelled.root.rglob("*") if path.is_file() and ".git/" not in str(path)]
    assert any("tracking" in path.parts for path in files)
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


def test_a_judge_of_the_data_labels_nothing(
    finished: "Project", stage_main: Callable[["Project", str], "Ended"]
) -> None:
    finished.set("preferences.source", "model")
    ended = stage_main(finished, "check")
    assert ended.code == 2
    assert "preferences.source is model, but judge.kind is data" in ended.stderr


@pytest.mark.slow
def test_a_killed_stage_sends_no_answered_question_again(labelled: "Project", server: "Server") -> None:
    """SIGKILL after twenty answers: only what was on its way then, at most eight, is sent twice."""
    answer, process = server.answer, None

    def kill(body: dict[str, Any]) -> "Reply":
        if len(server.bodies) == 20:
            assert process is not None
            process.send_signal(signal.SIGKILL)
        return answer(body)

    server.answer = kill
    command = [sys.executable, "-m", "tasks", "preferences"]
    process = warm.Popen(command, cwd=labelled.root, env=clean_environment(), text=True)
    assert process.wait(timeout=200) == -signal.SIGKILL
    server.answer = answer
    done = labelled.stage("preferences")
    assert done.returncode == 0, done.stderr
    again = [question for question, times in server.questions().items() if times > 1]
    assert len(again) <= 8
    assert len(server.questions()) == 2 * labelled.json("metrics/preferences.json")["judge_model"]["judged"]


@pytest.mark.slow
def test_the_evaluation_uses_the_same_judge(
    labelled: "Project", stage_main: Callable[["Project", str], "Ended"], server: "Server"
) -> None:
    labelled.evaluate_little()
    ended = stage_main(labelled, "evaluate")
    assert ended.code == 0, ended.stderr
    metrics = labelled.json("metrics/evaluate.json")
    assert (metrics["judged_by"], metrics["win_rate_judge"]) == ("pairs", f"m at {server.url}")
    assert (metrics["judge_checks"]["unread"], metrics["judge_checks"]["self_agreement"]) == (0, 1.0)
    assert set(server.questions().values()) == {1}


@pytest.mark.slow
def test_a_local_model_labels_too(labelled: "Project", stage_main: Callable[["Project", str], "Ended"]) -> None:
    """A random model with large weights, whose verdicts depend on the texts, and a question of the user's."""
    folder = labelled.root / "models/judges"
    tokenizer = AutoTokenizer.from_pretrained(labelled.root / "models/sft")
    config = AutoConfig.from_pretrained(labelled.root / "models/sft", max_position_embeddings=1024)
    config.initializer_range = 0.5
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "long")
    tokenizer.save_pretrained(folder / "long")
    labelled.set("judge", {"kind": "model", "model": "long", "question": "short.txt"})
    ended = stage_main(labelled, "preferences")
    assert ended.code == 2
    assert "judge.question: models/judges/short.txt cannot be read" in ended.stderr
    (folder / "short.txt").write_text("$prompt $first $second $first_letter $second_letter", encoding="utf-8")
    ended = stage_main(labelled, "preferences")
    assert ended.code == 0, ended.stderr
    metrics = labelled.json("metrics/preferences.json")
    figures = metrics["judge_model"]
    assert figures["judged"] == figures["ties"] + metrics["pairs"]
    assert (figures["unread"], metrics["judge"]) == (0, "long")
