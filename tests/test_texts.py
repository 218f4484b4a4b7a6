"""The tiny pipeline on a column of texts with a label each: without chat turns and without pairs, judged by a function
that no model sees."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Project, Reproduce

pytestmark = pytest.mark.slow
REVIEWS = Path(__file__).resolve().parents[2] / "shared/data/reviews/train.jsonl"
FILMS = ("film", "story", "cast", "music", "end", "plot", "start", "scene", "joke", "song")


def use_texts(project: "Project", rows: list[dict[str, object]]) -> None:
    """These texts in place of the demo's data, with the parameters of examples/reviews.yaml that differ."""
    (project.root / "data/raw/reviews").mkdir(parents=True)
    (project.root / "data/raw/reviews/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, value in {
        "ingest.source": "files",
        "ingest.files": {"path": "reviews"},
        "ingest.opening_words": 3,
        "ingest.rating_column": "label",
        "ingest.sft_rating_above": -1,
        "base.format": "text",
        "preferences.source": "ratings",
        "judge": {"kind": "function", "function": "sentiment.py"},
        "select.rule": "best_judge",
        "runtime.tracking": False,
    }.items():
        project.set(name, value)


def require_a_whole_run(project: "Project") -> None:
    """Figures and rows that only a run of texts has."""
    assert project.json("metrics/preferences.json") == {"enabled": False}
    assert project.rows("data/preferences/samples.jsonl") == project.rows("data/preferences/preferences.jsonl") == []
    reward, ingest = project.json("metrics/reward.json"), project.json("metrics/ingest.json")
    assert reward["train_ratings"] + reward["heldout_ratings"] <= ingest["ratings"]
    assert 0 <= reward["heldout_accuracy"] <= 1
    assert reward["heldout_pairs"] > 0

    evaluate = project.json("metrics/evaluate.json")
    assert (evaluate["judge"], evaluate["judged_by"]) == ("rewards/sentiment.py", "scores")
    assert all(model["gold_low"] <= model["gold"] <= model["gold_high"] for model in evaluate["models"].values())
    answers = [row["response"] for row in project.rows("data/evaluate/answers.jsonl") if row["response"]]
    assert any(answer.startswith(" ") for answer in answers), "the white space between opening and continuation is kept"
    assert not any(answer.endswith(" ") for answer in answers)
    assert project.json("metrics/select.json")["best_judge_step"] is not None

    page = re.sub("<[^>]*>", " ", (project.root / "report/index.html").read_text(encoding="utf-8"))
    assert "The gold score comes from a judge that is not used in training: rewards/sentiment.py" in page
    assert "win rate of the policy, by rewards/sentiment.py" in page
    assert f"the data set’s own ratings of {reward['train_ratings']:,} answers" in page
    template = (project.root / "models/policy/chat_template.jinja").read_text()
    assert "<|user|>" not in template + (project.root / "models/policy/tokenizer.json").read_text()


def test_texts_with_labels_run_through_all_stages(project: "Project", reproduce: "Reproduce") -> None:
    good, bad = ("a moving and funny joy", "wonderful and bright"), ("a dull mess", "boring and bad")
    rows: list[dict[str, object]] = [
        {"text": f"The {first} and {second} are {words}.", "label": int(words in good)}
        for first in FILMS
        for second in FILMS
        for words in (*good, *bad)
    ]
    use_texts(project, rows)
    project.evaluate_little()
    reproduce(project)
    require_a_whole_run(project)

    with (project.root / "rewards/sentiment.txt").open("a") as file:
        file.write("+ mess\n")
    stale = project.stale()
    assert {"check", "select", "evaluate"} <= stale
    assert not {"ingest", "sft", "reward"} & stale


@pytest.mark.exhaustive
@pytest.mark.skipif(not REVIEWS.is_file(), reason="the reviews are not there")
def test_real_reviews_run_through_all_stages(project: "Project", reproduce: "Reproduce") -> None:
    with REVIEWS.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line, _ in zip(file, range(1500), strict=False)]
    use_texts(project, rows)
    project.set("long_rows", "drop")
    reproduce(project)
    require_a_whole_run(project)
