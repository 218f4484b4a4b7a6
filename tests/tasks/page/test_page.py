"""The page: numbers, verdicts and judges are those of the inputs, texts are escaped, nothing is fetched."""

import html
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rlhf_core.errors import UserError
from rlhf_core.evaluation.intervals import bounds
from tasks.page.canvas import Picture
from tasks.page.comparison_table import COLUMNS, COST, Column, columns_of, label
from tasks.page.figures import draw
from tasks.page.inputs import Run, read_run
from tasks.page.page import (
    comparison,
    made_from,
    render,
    reward_facts,
    script_hash,
    write_page,
)
from tasks.page.verdicts import NO, OPEN, YES, findings
from tasks.params.loader import read_yaml
from tests.security.test_page import browse

MakeRun = Callable[..., Run]
Drawn = dict[bool, list[Picture]]
VOID = {"meta", "link", "img", "input"}
MARKS = re.compile(r"</?(?:ins|del)>")


class Document(HTMLParser):
    """Every tag with its attributes, the visible words, and whether each tag that opens also closes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.scripts: list[tuple[dict[str, str], str]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append((self.tags[-1][1], data))
        elif "style" not in self.open:
            self.words.append(data)

    def all(self, name: str) -> list[str]:
        """Values of an attribute, in the order of the page."""
        return [attributes[name] for _, attributes in self.tags if name in attributes]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def build(run: Run, samples: int = 20, pictures: list[Picture] | None = None) -> str:
    return render(run, pictures or [], samples, {"data/evaluate/answers.jsonl": "0123abcd"})


def evaluated(run: Run, **changed: object) -> Run:
    return replace(run, metrics=run.metrics | {"evaluate": run.evaluation | changed})


def verdicts(run: Run) -> dict[str, tuple[str, str]]:
    return {finding.question: (finding.verdict, finding.figure) for finding in findings(run)}


def test_verdict_follows_the_interval(make_run: MakeRun) -> None:
    run = make_run()
    for ends, word in (([0.85, 0.91], YES), ([0.49, 0.6], OPEN), ([0.2, 0.4], NO), (None, OPEN)):
        assert findings(evaluated(run, **bounds("win_rate", ends)))[0].verdict == word
    first = findings(run)[0]
    assert (first.figure, first.measured) == (
        "88.2% (85.0% to 91.2%)", "win rate of the policy, by the gold rubric (simulated)",
    )  # fmt: skip
    text = Document(build(run)).text
    assert f"Better than SFT: yes. {first.figure}: {first.measured}, on 400 held-out prompts." in text
    assert "Not shown" not in text


def test_the_verdict_answers_the_whole_question(make_run: MakeRun) -> None:
    run = alternative(make_run(), "dpo", gold_minus_policy=0.5, **bounds("gold_minus_policy", [0.4, 0.6]))
    text = Document(build(run)).text
    assert "Is the policy better than SFT – and than the alternatives?" in text
    assert (
        "Better than the alternatives: yes for Best of 4, Rejection SFT; no evidence either way for RLOO, "
        "Best of 16 (16 samples per answer); no for DPO."
    ) in text
    text = Document(build(make_run(alternatives=False))).text
    assert "Is the policy better than SFT?" in text
    assert "alternatives" not in text


CHANCE, FEW = "the reward model is not shown to be better than chance", "only 40 held-out prompts, fewer than 100"


@pytest.mark.parametrize(
    ("ends", "prompts", "said"),
    [([0.51, 0.9], 100, []), (None, 100, []), ([0.0, 0.25], 40, [CHANCE, FEW]), ([0.4, 0.7], 100, [CHANCE])],
)
def test_a_note_says_when_the_figures_mean_little(
    make_run: MakeRun, ends: list[float] | None, prompts: int, said: list[str]
) -> None:
    run = evaluated(make_run(), prompts=prompts)
    run = replace(run, metrics=run.metrics | {"reward": run.metrics["reward"] | bounds("heldout_accuracy", ends)})
    text = Document(build(run)).text
    assert [words for words in (CHANCE, FEW) if words in text] == said
    assert ("The figures of this run mean little: " in text) == bool(said)


def test_a_reward_model_that_a_baseline_beats_is_named_in_the_verdict(make_run: MakeRun) -> None:
    run = evaluated(make_run(), prompts=100)
    reward = run.metrics["reward"] | {"heldout_accuracy": 0.6, **bounds("heldout_accuracy", [0.55, 0.65])}
    reward |= {"length_accuracy": 0.55, "ahead_of_length": 0.05, **bounds("ahead_of_length", [0.01, 0.09])}
    reward |= {"words_accuracy": 0.62, "ahead_of_words": -0.02, **bounds("ahead_of_words", [-0.06, 0.02])}
    text = Document(build(replace(run, metrics=run.metrics | {"reward": reward}))).text
    assert (
        "The figures of this run mean little: the reward model is not shown to be better than a bag of words, 60.0% of "
        "the held-out pairs against 62.0%, "
    ) in text
    assert (
        "trained by a reward model that is not shown to be better than a bag of words, on 100 held-out prompts" in text
    )
    better = reward | bounds("ahead_of_words", [0.001, 0.02])
    assert "bag of words, 6" not in Document(build(replace(run, metrics=run.metrics | {"reward": better}))).text


def test_a_judging_reward_model_no_better_than_chance_is_named_where_it_judges(make_run: MakeRun) -> None:
    run = make_run(judge=False)
    weak = run.metrics["reward"] | {"judge_accuracy": 0.52, **bounds("judge_accuracy", [0.4, 0.64])}
    run = replace(run, metrics=run.metrics | {"reward": weak})
    words = "the judging reward model is not shown to be better than chance, 52.0% (40.0% to 64.0%) of 678"
    assert "better than chance" not in Document(build(run)).text
    assert words in Document(build(evaluated(run, judged_by="judging reward model"))).text


def test_without_a_judge_gold_is_not_mentioned(make_run: MakeRun, pictures: Drawn) -> None:
    run = make_run(judge=False)
    page = re.sub(r"data:image/png;base64,[^\"]*", "", build(run, pictures=pictures[False]))
    assert pictures[False][0].caption in html.unescape(page)
    assert "gold" not in page.casefold()
    text = Document(page).text
    assert "by the reward model" in findings(run)[0].measured
    assert "The win rate is by the reward model." in text
    assert "The answer that the reward model puts higher is marked." in text


def test_a_judge_that_only_compares_is_not_called_the_reward_model(make_run: MakeRun) -> None:
    run = make_run(judge=False, pairs=True)
    page = re.sub(r"data:image/png;base64,[^\"]*", "", build(run, pictures=draw(run)))
    text = Document(page).text
    assert "Answers are compared in pairs by the judge model critic, in both orders" in text
    assert "the policy’s win rate varies by 1.1 points (sd)" in text
    for untrue in ("The data have no judge", "Without a judge", "Without another judge", "is by the reward model"):
        assert untrue not in text
    assert "gold" not in page.casefold()


@pytest.mark.parametrize(
    ("name", "shown"),
    [("rewards/short.py", "rewards/short.py"), ("reward model", "the reward model"), ("the rubric", "the rubric")],
)
def test_a_judge_has_one_article_and_a_file_has_none(make_run: MakeRun, name: str, shown: str) -> None:
    run = evaluated(make_run(), win_rate_judge=name)
    assert findings(run)[0].measured.endswith(f"by {shown}")


def rated(run: Run, by_reward_model: float, by_judging_model: float | None = None) -> Run:
    """Every model with win rates by the reward models; None: the win rate itself is the judging one's."""
    models = {
        name: one
        | {
            "win_rate_by_reward_model": None if name == "sft" else by_reward_model,
            "win_rate_by_judging_model": one["win_rate"] if by_judging_model is None else by_judging_model,
        }
        for name, one in run.models.items()
    }
    return evaluated(run, models=models, win_rate_by_reward_model=by_reward_model)


def test_the_page_says_that_a_reward_model_judges_that_ppo_was_not_trained_on(make_run: MakeRun) -> None:
    """And what PPO's own would say; the main win rate is not shown twice."""
    run = make_run(judge=False)
    name = "judging reward model"
    run = rated(evaluated(run, judged_by=name, win_rate_judge=name), 0.954)
    text = Document(build(run, pictures=draw(run))).text
    assert "trained on the pairs of other prompts, with another seed" in text
    assert "By the score that PPO maximised it is 95.4%." in text
    assert findings(run)[0].measured == "win rate of the policy, by the judging reward model"
    assert "By PPO’s own score the same win rate" in text
    assert "By the judging reward model" not in text
    for untrue in (
        "by the reward model, which PPO maximised",
        "is by the reward model",
        "The judge gives no scores",
    ):
        assert untrue not in text


def test_with_a_judge_the_page_has_all_three_win_rates(make_run: MakeRun) -> None:
    text = Document(build(rated(make_run(), 0.954, 0.91))).text
    assert "Win rate against SFT" in text
    assert "By PPO’s own score the same win rate By the judging reward model the same win rate" in text
    assert "judging" not in Document(build(make_run())).text


def test_the_facts_of_an_ensemble_are_shown_where_there_is_one(make_run: MakeRun) -> None:
    run = make_run()
    assert "Members" not in Document(build(run)).text
    several = {"member_1_accuracy": 0.84, "member_2_accuracy": 0.86, "disagreement": 0.314, "judge_accuracy": 0.8}
    several |= {"judge_accuracy_low": 0.7, "judge_accuracy_high": 0.9}
    run = replace(
        run,
        metrics=run.metrics | {"reward": run.metrics["reward"] | several},
        params=run.params | {"reward": {"members": 2, "combine": "mean_minus_std", "std_coef": 0.5}},
    )
    text = Document(build(run)).text
    assert "Members, and how they are combined 2, mean less 0.50 standard deviations" in text
    assert "Members’ held-out accuracy 84.0%, 86.0%" in text
    assert "Members’ disagreement on held-out answers 0.31" in text
    assert "Judging reward model, held-out accuracy 80.0% (70.0% to 90.0%)" in text


def test_with_a_judge_that_only_compares_differences_are_win_rates(make_run: MakeRun) -> None:
    told = {finding.question: finding for finding in findings(make_run(judge=False, pairs=True))}
    assert told["Better than Best of 4?"].equal_kl.startswith("−10.0 points (")
    assert told["Better than Rejection SFT?"].equal_kl.startswith("+12.5 points (")
    stop = told["Better to stop earlier?"]
    assert (stop.verdict, stop.figure) == (OPEN, "+1.2 points (−0.8 points to +3.2 points)")
    assert stop.measured == (
        "win rate against SFT on the test prompts: step 50 (best by the judge model critic on 120 validation prompts) "
        "less step 60, the last one"
    )


def test_with_a_judge_gold_is_in_table_pictures_and_samples(make_run: MakeRun, pictures: Drawn) -> None:
    run = make_run()
    text = Document(build(run, pictures=pictures[True])).text
    assert "Gold score mean" in text
    assert "higher gold score" in text
    assert text.count("no person has judged") == 1
    assert any("gold score from" in picture.alt for picture in pictures[True])
    assert "In both orders simulated annotators (gold rubric) gave the same verdict for 98.5% of 1,200 pairs" in text
    assert "How much another training seed would change is not in them." in text
    assert "a logistic regression of the wins on the difference in length" in text


def test_texts_of_users_and_models_are_escaped(make_run: MakeRun) -> None:
    run = evaluated(make_run(), judge="<script>judge()</script>")
    run = replace(run, params=run.params | {"<script>key": {"<b>": "<script>value"}})
    run = replace(run, samples=[{**row, "prompt": [{"role": "<b>r", "content": "<i>c"}] * 2} for row in run.samples])
    page = build(run, samples=40)
    document = Document(page)
    assert len(document.scripts) == 1
    assert "b" not in {tag for tag, _ in document.tags}
    assert document.open == []
    for raw in (
        "</p></article><script>document.title='owned'</script>",
        "{{ 7 * 7 }} and $x_1$",
        "<script>judge()</script>",
    ):
        assert html.escape(raw, quote=False).replace("'", "&#39;") in MARKS.sub("", page)


def test_all_texts_of_the_samples_are_shown_as_they_are(make_run: MakeRun) -> None:
    run = make_run()
    page = MARKS.sub("", build(run, samples=len(run.samples)))
    words = [word for word in Document(page).words if word.strip()]
    for row in run.samples:
        for text in (row["sft"], row["policy"], *(message["content"] for message in row["prompt"])):
            assert not text.strip() or text.replace("\x00", "") in "\n".join(words).replace("\x00", "")
    assert "(empty answer)" in page
    assert "cut off at the limit, without end of sequence" in page
    directed = [attributes for tag, attributes in Document(page).tags if attributes.get("class") == "text"]
    assert directed
    assert all(attributes.get("dir") == "auto" for attributes in directed)


def test_nothing_is_fetched(make_run: MakeRun, pictures: Drawn) -> None:
    page = build(make_run(), pictures=pictures[True])
    document = Document(page)
    for reference in document.all("src") + document.all("href"):
        assert reference.startswith(("data:", "#"))
    style = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert "default-src 'none'" in html.unescape(page)
    assert {tag for tag, _ in document.tags}.isdisjoint({"iframe", "object", "embed"})


def test_only_the_script_of_the_page_may_run(make_run: MakeRun) -> None:
    document = Document(build(make_run()))
    (script,) = document.scripts
    assert script[0] == {}
    policy = next(attributes["content"] for _, attributes in document.tags if "http-equiv" in attributes)
    assert f"script-src '{script_hash(script[1])}';" in policy
    assert not [name for _, attributes in document.tags for name in attributes if name.startswith("on")]
    for reaching_out in ("fetch(", "XMLHttpRequest", "import(", "innerHTML", "eval(", "http"):
        assert reaching_out not in script[1]


def test_page_is_accessible(make_run: MakeRun, pictures: Drawn) -> None:
    document = Document(build(make_run(), pictures=pictures[True]))
    identities = document.all("id")
    assert len(identities) == len(set(identities))
    for reference in [href for href in document.all("href") if href.startswith("#")] + [
        "#" + name for name in document.all("aria-labelledby")
    ]:
        assert reference[1:] in identities
    images = [attributes for tag, attributes in document.tags if tag == "img"]
    assert len(images) == 3
    assert all(len(image["alt"]) > 20 for image in images)
    assert document.tags[0] == ("html", {"lang": "en"})
    assert document.open == []


def test_size_is_modest(make_run: MakeRun, pictures: Drawn, tmp_path: Path) -> None:
    write_page(build(make_run(), pictures=pictures[True]), tmp_path / "index.html")
    assert (tmp_path / "index.html").stat().st_size < 1_500_000


@pytest.mark.parametrize(("width", "hidden"), [(1280, True), (400, False)])
def test_tables_have_a_hint_to_scroll_only_where_they_overflow(
    make_run: MakeRun, tmp_path: Path, width: int, hidden: bool
) -> None:
    """The tables of all models are whole at 1280 pixels."""
    write_page(build(make_run()), tmp_path / "index.html")
    hints = re.findall(r'<p class="hint[^>]*>', browse(tmp_path / "index.html", tmp_path / "profile", width))
    assert ["hidden" in hint.replace("aria-hidden", "") for hint in hints] == [hidden] * 3


@pytest.mark.parametrize(
    ("judge", "labels_by", "alpha", "said"),
    [
        ("simulated annotators (demo rubric)", None, None, "simulated annotators (demo rubric)"),
        (None, None, None, "the data set’s own pairs"),
        (None, {"": 100}, None, "the data set’s own pairs"),
        (None, {"anna": 70, "ben": 30}, 0.614, "anna 70, ben 30; Krippendorff’s α 0.61"),
        (None, {"": 40, "anna": 60}, None, "anna 60, the data set’s own pairs 40"),
        (None, {"": 40, "data": 60}, None, "data 60, the data set’s own pairs 40"),
        ("judge", {"": 20}, None, "judge 80, the data set’s own pairs 20"),
        ("judge", {"judge": 20}, None, "judge 80, judge 20"),
        ("judge", {"<b>anna</b>": 20}, 1.0, "judge 80, <b>anna</b> 20; Krippendorff’s α 1.00"),
        (None, {f"a{n}": 1 for n in range(100)}, None, ", ".join(f"a{n} 1" for n in range(12)) + " and 88 more"),
    ],
)
def test_the_page_names_whose_labels_the_reward_model_learned_from(
    make_run: MakeRun, judge: str | None, labels_by: dict[str, int] | None, alpha: float | None, said: str
) -> None:
    run = make_run()
    preferences = run.metrics["preferences"] | {"judge": judge, "labels_by": labels_by, "pairs": 100}
    ingest = run.metrics["ingest"] | {"labels": None if alpha is None else {"alpha": alpha}}
    run = replace(run, metrics=run.metrics | {"preferences": preferences, "ingest": ingest})
    assert ("Labels", said) in reward_facts(run)
    assert "<b>anna</b>" not in build(run)
    assert said in Document(build(run)).text


def test_the_page_says_how_far_a_language_models_labels_can_be_trusted(make_run: MakeRun) -> None:
    run = make_run()
    judge = {"judged": 100, "unread": 3, "ties": 20, "tie_share": 0.2, "position_bias": 0.1}
    known = {"with": "pairs of the data", "share": 0.75, "share_low": 0.7, "share_high": 0.8, "pairs": 90, "unread": 1}
    for agreement, said in (
        (known, ("The labelling model’s agreement with pairs of the data (95% interval)", "75.0% (70.0% to 80.0%)")),
        (None, ("The labelling model’s agreement with people (95% interval)", "unknown")),
    ):
        preferences = run.metrics["preferences"] | {"judge": "m", "judge_model": judge | {"agreement": agreement}}
        facts = reward_facts(replace(run, metrics=run.metrics | {"preferences": preferences}))
        assert facts[1] == said, "after the line that names the model"
        assert ("Its verdicts that change with the order (ties)", "20.0%") in facts
        assert ("Its replies that cannot be read", "3") in facts


@pytest.mark.parametrize(("labelled", "unused"), [("judge model critic", False), ("another model", True)])
def test_the_page_says_where_the_judge_of_the_win_rate_labelled_the_training_pairs(
    make_run: MakeRun, labelled: str, unused: bool
) -> None:
    run = make_run(pairs=True, judge=False)
    preferences = run.metrics["preferences"] | {"judge": labelled}
    text = Document(build(replace(run, metrics=run.metrics | {"preferences": preferences}))).text
    assert ("it gives no scores and is not used in training" in text) is unused
    assert ("also labelled the pairs that the reward model learned from" in text) is not unused


def test_the_table_says_at_which_temperature_and_length_models_answered(make_run: MakeRun) -> None:
    run = make_run()
    settings = run.params["evaluate"] | {"temperature": 0.7, "max_new_tokens": 64}
    text = Document(build(replace(run, params=run.params | {"evaluate": settings}))).text
    assert "sampled at temperature T = 0.7 with at most 64 tokens" in text
    assert "KL to SFT nats per answer, T = 0.7" in text


def test_parameters_are_shown_without_runtime(make_run: MakeRun) -> None:
    text = Document(build(make_run())).text
    for shown in (
        "threads 2",
        "learning_rate 0.0001",
        "kl.controller adaptive",
        "optimizer.betas [0.9, 0.95]",
        "<|pad|>",
    ):
        assert shown in text
    assert "progress_seconds" not in text


def test_every_verdict_has_its_figure_and_interval(make_run: MakeRun) -> None:
    """The policy minus the other model; the strongest other model comes first."""
    run = make_run()
    told = verdicts(run)
    assert list(told)[:2] == ["Better than SFT?", "Better than RLOO?"]
    verdict, figure = told["Better than RLOO?"]
    assert (verdict, figure.startswith("−0.06 (")) == (OPEN, True)
    better = {question for question, (word, _) in told.items() if word == YES}
    assert better >= {f"Better than {name}?" for name in ("DPO", "Best of 4", "Rejection SFT")}
    assert "Better than Best of 1?" not in told, "best of 1 is the SFT model"
    assert told["Better than Best of 16?"][0] == OPEN
    assert told["Better to stop earlier?"] == (OPEN, "+0.05 (−0.01 to +0.11)")
    text = Document(build(run)).text
    before = ""
    for finding in findings(run):
        measured = "" if finding.measured == before else f" {finding.measured}"
        equal_kl = f"{finding.equal_kl_verdict} {finding.equal_kl}" if finding.equal_kl else "–"
        assert f"{finding.question}{measured} {finding.verdict} {finding.figure} {equal_kl}" in text
        before = finding.measured


def test_the_verdict_at_equal_kl_follows_its_own_interval(make_run: MakeRun) -> None:
    run = make_run()
    gaps = {name: dict(one) for name, one in run.evaluation["frontier"].items()}
    gaps["best_of_16"] |= {"gold_gap": -0.22, **bounds("gold_gap", [-0.41, -0.03])}
    run = evaluated(run, frontier=gaps)
    found = {finding.other: finding for finding in findings(run)}["best_of_16"]
    assert (found.verdict, found.equal_kl_verdict, found.equal_kl) == (OPEN, NO, "−0.22 (−0.41 to −0.03)")
    assert (
        "At equal KL: yes for DPO, Rejection SFT; no evidence either way for RLOO; no for Best of 16, Best of 4."
    ) in Document(build(run)).text


def test_the_page_shows_the_hashes_of_its_inputs(make_run: MakeRun) -> None:
    """Other parameters have another hash."""
    run = make_run()
    text = Document(build(run)).text
    assert "data/evaluate/answers.jsonl 0123abcd" in text
    first, other = (made_from(each, {})[0][1] for each in (run, replace(run, params=run.params | {"seed": 99})))
    assert first in text
    assert first != other


def alternative(run: Run, name: str, **changed: object) -> Run:
    return evaluated(run, models=run.models | {name: run.models[name] | changed})


def test_the_verdict_follows_the_other_methods_interval(make_run: MakeRun) -> None:
    run = alternative(make_run(), "rloo", gold_minus_policy=0.5, **bounds("gold_minus_policy", [0.4, 0.6]))
    assert verdicts(run)["Better than RLOO?"] == (NO, "−0.50 (−0.60 to −0.40)")
    run = alternative(run, "rloo", gold_minus_policy=-0.5, **bounds("gold_minus_policy", [-0.6, -0.4]))
    assert verdicts(run)["Better than RLOO?"] == (YES, "+0.50 (+0.40 to +0.60)")


def stopping(run: Run, step: int, ends: list[float]) -> Run:
    paired = run.evaluation["stopping"] | {"best_step": step, "difference": sum(ends) / 2, **bounds("difference", ends)}
    selected = run.metrics["select"] | {"best_judge_step": step}
    run = evaluated(run, stopping=paired)
    return replace(run, metrics=run.metrics | {"select": selected})


@pytest.mark.parametrize(
    ("step", "ends", "word"),
    [
        (50, [-0.01, 0.2], OPEN),
        (50, [0.01, 0.2], YES),
        (50, [-0.2, -0.01], NO),
        (0, [0.01, 0.2], YES),
        (60, [0.0, 0.0], NO),
    ],
)
def test_stopping_earlier_is_better_where_the_paired_interval_excludes_0(
    make_run: MakeRun, step: int, ends: list[float], word: str
) -> None:
    found = findings(stopping(make_run(), step, ends))[-1]
    assert found.verdict == word
    assert ("the SFT model" if step == 0 else f"step {step}") in found.measured


def test_intervals_that_do_not_overlap_alone_are_no_evidence_on_stopping(make_run: MakeRun) -> None:
    run = make_run()
    fallen = [row | {"gold_high": 2.0, "gold_low": 1.9} if row["point"] == 60 else row for row in run.frontier]
    assert findings(replace(run, frontier=fallen))[-1].verdict == OPEN


def test_without_a_judge_the_best_snapshot_is_by_the_reward_model(make_run: MakeRun) -> None:
    unjudged = findings(make_run(judge=False))[-1]
    assert unjudged.verdict == NO
    assert unjudged.measured.endswith("best by the reward model, which PPO optimises on 120 validation prompts")
    run = make_run()
    skipped = run.metrics["select"] | {"prompts": 0}
    assert "Better to stop earlier?" not in verdicts(replace(run, metrics=run.metrics | {"select": skipped}))


def test_interpolation_from_sft_is_noted(make_run: MakeRun) -> None:
    run = make_run()
    assert not any("between SFT" in finding.equal_kl for finding in findings(run))
    gaps = {name: dict(one) for name, one in run.evaluation["frontier"].items()}
    gaps["best_of_4"]["between"] = ["sft", "eta 0.3"]
    told = [finding.equal_kl for finding in findings(evaluated(run, frontier=gaps))]
    assert [each.endswith(", between SFT and η = 0.3") for each in told].count(True) == 1
    held = "In the intervals at equal KL both scores and both KLs vary"
    assert Document(build(run)).text.count(held) == 1
    assert held not in Document(build(make_run(alternatives=False))).text


def test_comparison_shows_every_model_with_its_intervals_and_the_best(make_run: MakeRun) -> None:
    run = make_run()
    columns, rows = comparison(run)
    text = Document(build(run)).text
    assert [name for name, _, _ in rows] == list(run.models)
    for cost in (False, True):  # the two tables
        for _, called, row in rows:
            told = " ".join(
                f"{cell.text}{' (best)' if cell.best else ''}{f' {cell.low} to {cell.high}' if cell.low else ''}"
                for column, cell in zip(columns, row, strict=True)
                if (column.key in COST) == cost
            )
            assert f"{called} {told}" in text
    best = {column.key: called for place, column in enumerate(columns) for _, called, row in rows if row[place].best}
    assert best["gold"] == "RLOO"
    policy = {column.key: cell for column, cell in zip(columns, rows[1][2], strict=True)}
    assert (policy["response_tokens"].low, policy["response_tokens"].high) == ("33.9", "33.9")
    assert (policy["alignment_tax"].low, policy["alignment_tax"].high) == ("0.209", "0.213")
    assert "reward" not in best
    assert "kl" not in best


def test_equal_figures_have_no_best(make_run: MakeRun) -> None:
    run = make_run()
    for name in run.models:
        run = alternative(run, name, gold=2.0)
    columns, rows = comparison(run)
    gold = [column.key for column in columns].index("gold")
    assert not any(row[gold].best for _, _, row in rows)


def test_without_alternatives_there_is_a_page(make_run: MakeRun) -> None:
    run = make_run(alternatives=False, several=False)
    text = Document(build(run)).text
    assert [finding.question for finding in findings(run)] == ["Better than SFT?", "Better to stop earlier?"]
    assert "Other models’ answers" not in text
    assert "sampling seeds" not in text


ALERTS = [
    {"name": "kl_spike", "step": 12, "message": "KL went from 0.1 to 0.9 <nats>", "remedy": "raise β (kl.coef)"},
    {"name": "repetition", "step": 30, "message": "3-grams went from 1% to 40%", "remedy": "raise entropy_coef"},
]


def alerted(run: Run, alerts: object) -> Run:
    return replace(run, metrics=run.metrics | {"ppo": run.metrics["ppo"] | {"alerts": alerts}})


def test_alerts_are_shown_with_their_remedy(make_run: MakeRun, pictures: Drawn) -> None:
    document = Document(build(alerted(make_run(), ALERTS), pictures=pictures[True]))
    assert not document.open
    assert "PPO’s alert at step 12: kl spike Seen: KL went from 0.1 to 0.9 <nats>. What helps: raise β (kl.coef)." in (
        document.text
    )
    assert "alert at step 30: repetition" in document.text
    assert "No alert" not in document.text


def test_without_an_alert_there_is_a_note(make_run: MakeRun, pictures: Drawn) -> None:
    text = Document(build(alerted(make_run(), []), pictures=pictures[True])).text
    assert "No alert: no detector saw" in text
    assert "alert at step" not in text


def test_without_detectors_there_is_no_note_on_alerts(make_run: MakeRun, pictures: Drawn) -> None:
    assert "No alert" not in Document(build(make_run(), pictures=pictures[True])).text


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("metrics/ppo.json", None, "file not found"),
        ("metrics/ppo.json", "{", "broken JSON"),
        ("metrics/ppo.json", "[]", "expected a JSON object"),
        ("plots/ppo.csv", None, "file not found"),
        ("plots/frontier.csv", None, "file not found"),
        ("plots/frontier.csv", "step,kl\n1,2\n", "family"),
        ("metrics/select.json", None, "file not found"),
        ("metrics/evaluate.json", "{}", "win_rate"),
        ("metrics/evaluate.json", '{"win_rate": NaN, "win_rate_judge": "reward model"}', "win_rate"),
        ("metrics/evaluate.json", '{"win_rate": 0.5, "win_rate_judge": "a", "judged_by": "b", "seeds": [1]}', "models"),
    ],
)
def test_broken_inputs_are_named(make_run: MakeRun, tmp_path: Path, name: str, content: str | None, said: str) -> None:
    make_run()
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=rf"{re.escape(name)}.*{said}"):
        read_run([], [], tmp_path)


def test_a_method_that_is_not_the_published_one_has_another_name() -> None:
    models = {"rloo": {"recipe": "ppo_style"}, "grpo": {"recipe": "dr_grpo"}, "reinforce": {"recipe": "published"}}
    assert [label(name, models) for name in models] == ["RLOO (PPO style)", "Dr. GRPO", "REINFORCE"]
    assert label("rloo") == "RLOO"
    assert label("grpo", {"grpo": {"recipe": "gdpo"}}) == "GDPO"


def scored_by(run: Run, *terms: str) -> Run:
    """A run without judge and reward model, whose score is a sum of terms."""
    name = f"scorer ({' + '.join(f'1 × {term}' for term in terms)})"
    means = {"": 0.25, "_low": 0.2, "_high": 0.3}
    figures = {f"reward/{term}{end}": value for term in terms for end, value in means.items()}
    models = {model: one | figures for model, one in run.models.items()}
    evaluation = run.evaluation | {"judged_by": "scorer", "win_rate_judge": name, "scorer": name, "models": models}
    off = {stage: {"enabled": False} for stage in ("reward", "preferences")}
    curves = {stage: {} for stage in ("reward", "reward_calibration", "reward_margins")}
    return replace(run, metrics=run.metrics | off | {"evaluate": evaluation}, curves=run.curves | curves)


def test_without_sft_the_base_model_is_called_so() -> None:
    assert label("sft", {"sft": {"recipe": "base"}}) == "SFT (the base model)"
    assert label("sft", {"sft": {"recipe": None}}) == label("sft") == "SFT"


def test_a_score_of_functions_is_named_and_its_terms_have_columns(make_run: MakeRun) -> None:
    run = scored_by(make_run(judge=False), "exact.py", "short.py")
    assert (run.is_judged, run.score, run.has_reward_model) == (False, "reward", False)
    shown = [(column.name, column.unit) for column in columns_of(run.models)]
    assert shown[:3] == [("Proxy score", "scorer, raw"), ("exact.py", "mean"), ("short.py", "mean")]
    document = Document(build(run))
    assert not document.open
    assert "by the scorer (1 × exact.py + 1 × short.py)" in document.text
    assert "0.25 0.20 to 0.30" in document.text
    assert not re.search("reward model", document.text, re.IGNORECASE)


def test_a_single_function_has_no_column_beside_the_total(make_run: MakeRun) -> None:
    run = scored_by(make_run(judge=False), "exact.py")
    assert [column.name for column in columns_of(run.models)][:2] == ["Proxy score", "Win rate against SFT"]


def test_the_policy_of_an_earlier_round_is_named_by_its_round() -> None:
    assert label("round_2") == "Round 2's policy"


def test_an_empty_block_round_is_no_parameter(make_run: MakeRun, tmp_path: Path) -> None:
    """A project without rounds has no such block, and the page is that of before."""
    make_run()
    assert "round" in read_yaml(tmp_path / "params.yaml")
    assert "round" not in read_run([], [], tmp_path).params


def test_a_box_shows_the_answers_that_only_the_proxy_likes(make_run: MakeRun) -> None:
    run = make_run()
    scores = {"gold_policy": 1.4, "reward_policy": 6.33, "policy": "bean salad, bean salad, or bean salad"}
    run = replace(run, samples=[*run.samples[:3], run.samples[3] | scores, *run.samples[4:]])
    text = Document(build(alerted(run, ALERTS))).text
    box = text[text.index("Where proxy and gold disagree") : text.index("All models")]
    said = (
        "bean salad, bean salad, or bean salad reward model 6.33, above 99% of the policy’s answers gold 1.40, above 1%"
    )
    assert said in box
    assert "PPO’s alert at step 12" in box
    agreeing = replace(run, samples=[row | {"gold_policy": row["reward_policy"]} for row in run.samples])
    assert "Where proxy and gold disagree" not in Document(build(agreeing)).text
    assert "Alerts of PPO PPO’s alert at step 12" in Document(build(alerted(agreeing, ALERTS))).text


def test_the_glossary_explains_the_columns_that_are_shown(make_run: MakeRun) -> None:
    assert [column.key for column in COLUMNS if not column.meaning] == []
    document = Document(build(make_run()))
    glossary = document.text[document.text.index("What the words mean") :]
    for word in ("SFT", "Nat", "Proxy score", "Distinct-2", "Alignment tax"):
        assert f"{word} " in glossary
    assert "By the judging reward model" not in glossary


def test_a_share_of_the_optimum_that_is_noise_is_not_shown() -> None:
    share = Column("optimum_share", "", "", "share", 0)
    assert [share.text(value) for value in (-7.86, 2.01, 1.01, -0.5, None)] == ["–", "–", "101%", "−50%", "–"]
