"""The page: numbers are those of the inputs, texts are escaped, nothing is fetched, and no judge is made up."""

import html
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rlhf_core.errors import UserError
from tasks.evaluation.comparison_table import columns_of, models_of
from tasks.page.answer import findings, verdict
from tasks.page.figures import draw
from tasks.page.inputs import Run, read_run
from tasks.page.page import comparison, headline, render, script_hash, write_page
from tasks.page.picture import Picture

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
    return render(run, pictures or [], samples)


def evaluated(run: Run, **changed: object) -> Run:
    return replace(run, metrics=run.metrics | {"evaluate": run.evaluation | changed})


def table(run: Run) -> dict[str, tuple[str, str, str]]:
    return {line.name: (line.sft, line.policy, line.change) for line in headline(run)}


def test_headline_shows_the_numbers_of_the_inputs(make_run: MakeRun) -> None:
    assert table(make_run()) == {
        "Win rate against SFT": ("", "88.2% (85.0% to 91.2%)", ""),
        "Ties": ("", "0.8%", ""),
        "Gold score": ("1.71", "4.05", "+2.33"),
        "Reward-model score": ("−0.20", "2.14", "+2.34"),
        "KL to SFT, k1": ("", "4.22", ""),
        "KL to SFT, k3": ("", "4.30", ""),
        "Response length": ("21.4", "33.9", "+12.5"),
        "Share without eos": ("1.8%", "0.2%", "−1.5 points"),
        "Distinct-1": ("0.123", "0.101", "−0.022"),
        "Distinct-2": ("0.457", "0.400", "−0.057"),
        "Held-out loss": ("1.234", "1.456", "+0.222"),
    }


def test_page_prints_every_headline_number_once_in_its_row(make_run: MakeRun) -> None:
    run = make_run()
    text = Document(build(run)).text
    for line in headline(run):
        assert " ".join(f"{line.name} {line.unit} {line.sft} {line.policy} {line.change}".split()) in text


def test_verdict_follows_the_interval(make_run: MakeRun) -> None:
    run = make_run()
    for ends, word in (([0.85, 0.91], "Yes."), ([0.49, 0.6], "Not shown."), ([0.2, 0.4], "No."), (None, "Not shown.")):
        assert verdict(evaluated(run, win_rate_ci95=ends))[0] == word
    assert verdict(run)[1] == (
        "The policy’s win rate against SFT is 88.2% on 400 held-out prompts (95% interval 85.0% to 91.2%), "
        "judged by the gold rubric (simulated)."
    )


def test_without_a_judge_nothing_speaks_of_gold(make_run: MakeRun, pictures: Drawn) -> None:
    run = make_run(judge=False)
    page = re.sub(r"data:image/png;base64,[^\"]*", "", build(run, pictures=pictures[False]))
    assert pictures[False][0].caption in html.unescape(page)
    assert "gold" not in page.casefold()
    text = Document(page).text
    assert "judged by the reward model" in verdict(run)[1]
    assert "The win rate is judged by the reward model." in text
    assert "The answer that the reward model puts higher is marked." in text
    win_rate = pictures[False][0]
    assert "judged by the reward model" in win_rate.alt
    assert "Judged by the reward model" in win_rate.caption


def test_a_judge_that_only_compares_is_not_called_the_reward_model(make_run: MakeRun) -> None:
    run = make_run(judge=False, pairs=True)
    page = re.sub(r"data:image/png;base64,[^\"]*", "", build(run, pictures=draw(run)))
    text = Document(page).text
    assert "Answers are compared in pairs by the judge model critic, asked in both orders" in text
    assert "Ties neither preferred over both orders; half a win each 0.8%" in text
    assert "the policy’s win rate varies by 1.1 points (sd)" in text
    for untrue in ("The data bring no judge", "Without a judge", "Without another judge", "judged by the reward model"):
        assert untrue not in text
    assert "gold" not in page.casefold()


def test_a_judge_that_only_compares_answers_with_win_rates(make_run: MakeRun) -> None:
    told = {finding.question: finding for finding in findings(make_run(judge=False, pairs=True))}
    assert (
        "At equal KL, above PPO’s snapshots in win rate against SFT: Best of 4 (+10.0 points); below: Rejection SFT "
        "(−12.5 points) and DPO (−7.5 points); no difference shown: Best of 16 (+0.8 points) and RLOO (+1.2 points)."
    ) in told["Better than the best alternative?"].sentence
    assert told["When to stop?"].word == "Not shown."
    assert told["When to stop?"].sentence.startswith(
        "The snapshot of step 50 has the best win rate, judged by the judge model critic, on 120 validation prompts. "
        "On the test prompts its win rate against SFT less that of the last snapshot is +1.2 points (95% interval −0.8 "
        "points to +3.2 points, paired by prompt): no difference shown. "
    )


def test_an_evaluation_that_does_not_say_what_kind_of_judge_it_had(make_run: MakeRun) -> None:
    def older(run: Run) -> Run:
        known = {key: value for key, value in run.evaluation.items() if key not in ("judged_by", "stopping")}
        return replace(run, metrics=run.metrics | {"evaluate": known})

    runs = [older(make_run()), older(make_run(judge=False, pairs=True)), older(make_run(judge=False))]
    assert [(run.judged_by, run.score) for run in runs] == [
        ("scores", "gold"), ("pairs", "win_rate"), ("reward model", "reward"),
    ]  # fmt: skip
    assert [findings(run)[2].word for run in runs[:2]] == ["Perhaps at step 50 of 60."] * 2


def test_ties_are_called_what_they_are(make_run: MakeRun) -> None:
    units = {
        pairs: next(line.unit for line in headline(make_run(judge=not pairs, pairs=pairs)) if line.name == "Ties")
        for pairs in (False, True)
    }
    assert units == {
        False: "both answers score the same; half a win each",
        True: "neither preferred over both orders; half a win each",
    }


def test_with_a_judge_gold_stands_in_table_pictures_and_samples(make_run: MakeRun, pictures: Drawn) -> None:
    run = make_run()
    text = Document(build(run, pictures=pictures[True])).text
    assert "Gold score mean; no model sees it" in text
    assert "higher gold score" in text
    assert "Simulated means a stand-in for people" in text
    assert any("gold score from" in picture.alt for picture in pictures[True])
    assert "Asked in both orders, simulated annotators (gold rubric) said the same for 98.5% of 1,200 pairs" in text
    assert "How much another training seed would change is not in them." in text
    assert "a logistic regression of the wins on the difference in length" in text


def test_texts_of_users_and_models_are_escaped(make_run: MakeRun) -> None:
    run = evaluated(make_run(), judge="<script>judge()</script>")
    run = replace(run, params=run.params | {"<script>key": {"<b>": "<script>value"}})
    run = replace(run, samples=[{**row, "prompt": [{"role": "<b>r", "content": "<i>c"}] * 2} for row in run.samples])
    page = build(run, samples=40)
    document = Document(page)
    assert len(document.scripts) == 2
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
    data, script = document.scripts
    assert data[0] == {"type": "application/json", "id": "samples-data"}
    assert script[0] == {}
    policy = next(attributes["content"] for _, attributes in document.tags if "http-equiv" in attributes)
    assert f"script-src '{script_hash(script[1])}';" in policy
    assert not [name for _, attributes in document.tags for name in attributes if name.startswith("on")]
    for reaching_out in ("fetch(", "XMLHttpRequest", "import(", "innerHTML", "eval(", "http"):
        assert reaching_out not in script[1]


def test_page_can_be_read_without_eyes_and_mouse(make_run: MakeRun, pictures: Drawn) -> None:
    document = Document(build(make_run(), pictures=pictures[True]))
    identities = document.all("id")
    assert len(identities) == len(set(identities))
    for reference in [href for href in document.all("href") if href.startswith("#")] + [
        "#" + name for name in document.all("aria-labelledby")
    ]:
        assert reference[1:] in identities
    images = [attributes for tag, attributes in document.tags if tag == "img"]
    assert len(images) == 19
    assert all(len(image["alt"]) > 20 for image in images)
    assert document.tags[0] == ("html", {"lang": "en"})
    assert document.open == []


def test_size_is_modest(make_run: MakeRun, pictures: Drawn, tmp_path: Path) -> None:
    write_page(build(make_run(), pictures=pictures[True]), tmp_path / "index.html")
    assert (tmp_path / "index.html").stat().st_size < 1_500_000


def test_parameters_stand_there_without_runtime(make_run: MakeRun) -> None:
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
    assert "Rows dropped duplicate 17, empty 4, too long 2" in text


def test_the_three_answers_follow_the_intervals(make_run: MakeRun) -> None:
    run = make_run()
    told = {finding.question: (finding.word, finding.sentence) for finding in findings(run)}
    assert told["Better than SFT?"] == verdict(run)
    word, sentence = told["Better than the best alternative?"]
    assert word == "Not shown."
    assert "The best alternative is RLOO, gold score 4.11 against the policy’s 4.05: +0.06 (95% interval" in sentence
    assert "The policy is better than DPO, Best of 4, Rejection SFT and Best of 1. No difference is shown" in sentence
    assert "No difference is shown from Best of 16. " in sentence
    assert sentence.endswith(
        "At equal KL, above PPO’s snapshots in gold score: Best of 4 (+0.40); below: Rejection SFT (−0.50) and DPO "
        "(−0.30); no difference shown: Best of 16 (+0.03) and RLOO (+0.05)."
    )
    word, sentence = told["When to stop?"]
    assert word == "Not shown."
    assert (
        "The snapshot of step 50 has the best gold score on 120 validation prompts. On the test prompts its gold"
        in (sentence)
    )
    assert "is +0.05 (95% interval −0.01 to +0.11, paired by prompt): no difference shown." in sentence


def alternative(run: Run, name: str, **changed: object) -> Run:
    models = {**models_of(run.evaluation)}
    return evaluated(run, models=models | {name: {**models[name], **changed}})


def test_where_another_method_wins_the_answer_says_so(make_run: MakeRun) -> None:
    run = alternative(make_run(), "rloo", gold_minus_policy=0.5, gold_minus_policy_ci95=[0.4, 0.6])
    run = alternative(run, "best_of_16", gold_minus_policy=0.3, gold_minus_policy_ci95=[0.2, 0.4])
    found = findings(run)[1]
    assert found.word == "No."
    assert "+0.50 (95% interval +0.40 to +0.60). Better than the policy, too: Best of 16 (+0.30)." in found.sentence
    for name in [name for name in models_of(run.evaluation) if name not in ("sft", "policy")]:
        run = alternative(run, name, gold_minus_policy=-0.5, gold_minus_policy_ci95=[-0.6, -0.4])
    assert findings(run)[1].word == "Yes."


def test_what_is_said_of_the_best_alternative_is_its_own_interval(make_run: MakeRun) -> None:
    """Another model's interval may be clear where that of the best one is not, and the other way round."""
    run = make_run()
    for name in [name for name in models_of(run.evaluation) if name not in ("sft", "policy", "rloo", "dpo")]:
        run = alternative(run, name, gold_minus_policy=-0.5, gold_minus_policy_ci95=[-0.6, -0.4])
    unclear = alternative(run, "rloo", gold_minus_policy=0.2, gold_minus_policy_ci95=[-0.1, 0.5])
    unclear = alternative(unclear, "dpo", gold_minus_policy=0.1, gold_minus_policy_ci95=[0.05, 0.15])
    found = findings(unclear)[1]
    assert found.word == "No."
    assert "+0.50). The interval includes no difference. Better than the policy: DPO (+0.10)." in found.sentence
    beaten = alternative(run, "rloo", gold_minus_policy=-0.1, gold_minus_policy_ci95=[-0.2, -0.01])
    beaten = alternative(beaten, "dpo", gold_minus_policy=-0.2, gold_minus_policy_ci95=[-0.5, 0.1])
    found = findings(beaten)[1]
    assert found.word == "Not shown."
    assert "includes no difference" not in found.sentence
    assert "No difference is shown from DPO." in found.sentence


def stopping(run: Run, step: int, ends: list[float]) -> Run:
    paired = run.evaluation["stopping"] | {"best_step": step, "difference": sum(ends) / 2, "difference_ci95": ends}
    selected = run.metrics["select"] | {"best_judge_step": step}
    run = evaluated(run, stopping=paired)
    return replace(run, metrics=run.metrics | {"select": selected})


@pytest.mark.parametrize(
    ("step", "ends", "word", "who"),
    [
        (50, [-0.01, 0.2], "Not shown.", "The snapshot of step 50 has"),
        (50, [0.01, 0.2], "At step 50 of 60.", "The snapshot of step 50 has"),
        (50, [-0.2, -0.01], "Not before the end.", "The snapshot of step 50 has"),
        (0, [0.01, 0.2], "Before PPO began.", "The SFT model has"),
        (0, [-0.01, 0.2], "Not shown.", "The SFT model has"),
        (60, [0.0, 0.0], "Not before the end.", "The last snapshot, step 60, has"),
    ],
)
def test_when_to_stop_is_sure_where_the_paired_interval_excludes_0(
    make_run: MakeRun, step: int, ends: list[float], word: str, who: str
) -> None:
    found = findings(stopping(make_run(), step, ends))[2]
    assert found.word == word
    assert found.sentence.startswith(who)
    assert ("no difference shown" in found.sentence) is (ends[0] < 0 < ends[1])


def test_intervals_that_do_not_overlap_alone_tell_nothing_of_stopping(make_run: MakeRun) -> None:
    run = make_run()
    fallen = [row | {"gold_high": 2.0, "gold_low": 1.9} if row["point"] == 60 else row for row in run.frontier]
    assert findings(replace(run, frontier=fallen))[2].word == "Not shown."


def test_where_no_judge_chose_the_answer_says_whose_score_it_is(make_run: MakeRun) -> None:
    unjudged = findings(make_run(judge=False))[2]
    assert unjudged.word == "Not before the end."
    assert "has the best reward-model score, which is what PPO climbs, on 120" in unjudged.sentence
    run = make_run()
    skipped = run.metrics["select"] | {"prompts": 0}
    assert len(findings(replace(run, metrics=run.metrics | {"select": skipped}))) == 2


def test_what_is_interpolated_from_sft_is_said(make_run: MakeRun) -> None:
    run = make_run()
    assert "no snapshot between SFT" not in findings(run)[1].sentence
    gaps = {name: dict(one) for name, one in run.evaluation["frontier"].items()}
    for name in ("best_of_4", "rejection_sft"):
        gaps[name]["between"] = [0, 25]
    told = findings(evaluated(run, frontier=gaps))[1].sentence
    assert told.endswith(
        "PPO has no snapshot between SFT and step 25: interpolated there, for Best of 4 and Rejection SFT."
    )
    held = "In the intervals at equal KL both scores and both KLs vary"
    assert Document(build(run)).text.count(held) == 1
    assert held not in Document(build(make_run(alternatives=False))).text


def test_comparison_shows_every_model_with_its_intervals_and_the_best(make_run: MakeRun) -> None:
    run = make_run()
    columns, rows = comparison(run)
    text = Document(build(run)).text
    assert [name for name, _, _ in rows] == list(models_of(run.evaluation))
    for _, called, row in rows:
        told = " ".join(
            f"{cell.text}{' (best)' if cell.best else ''}{f' {cell.low} to {cell.high}' if cell.low else ''}"
            for cell in row
        )
        assert f"{called} {told}" in text
    best = {column.key: called for place, column in enumerate(columns) for _, called, row in rows if row[place].best}
    assert best["gold"] == "RLOO"
    policy = {column.key: cell for column, cell in zip(columns, rows[1][2], strict=True)}
    assert (policy["response_tokens"].low, policy["response_tokens"].high) == ("33.9", "33.9")
    assert (policy["alignment_tax"].low, policy["alignment_tax"].high) == ("0.209", "0.213")
    assert "reward" not in best
    assert "kl" not in best


def test_what_is_equal_everywhere_is_nobodys_best(make_run: MakeRun) -> None:
    run = make_run()
    for name in models_of(run.evaluation):
        run = alternative(run, name, gold=2.0)
    columns, rows = comparison(run)
    gold = [column.key for column in columns].index("gold")
    assert not any(row[gold].best for _, _, row in rows)


def test_without_alternatives_the_page_stands(make_run: MakeRun) -> None:
    run = make_run(alternatives=False, several=False)
    text = Document(build(run)).text
    assert [finding.question for finding in findings(run)] == ["Better than SFT?", "When to stop?"]
    assert "overlap" not in {column.key for column in columns_of(models_of(run.evaluation))}
    assert "Other models’ answers" not in text
    assert "sampling seeds" not in text


def test_an_evaluation_older_than_the_comparison_has_two_models(make_run: MakeRun) -> None:
    run = make_run()
    old = {key: value for key, value in run.evaluation.items() if key not in ("models", "frontier", "fits", "seeds")}
    run = replace(run, metrics=run.metrics | {"evaluate": old}, frontier=[], answers=[])
    _, rows = comparison(run)
    assert [(name, row[0].text) for name, _, row in rows] == [("sft", "1.71"), ("policy", "4.05")]
    assert "PPO policy 4.05 (best)" in Document(build(run)).text


def test_missing_numbers_leave_rows_out(make_run: MakeRun) -> None:
    run = evaluated(
        make_run(), heldout_loss_sft=None, heldout_loss_policy=None, kl_k3_per_sequence=float("nan"), ties=None
    )
    assert {"Held-out loss", "KL to SFT, k3", "Ties"}.isdisjoint(table(run))
    assert "nan" not in Document(build(run)).text.casefold().split()


ALERTS = [
    {"name": "kl_spike", "step": 12, "message": "KL went from 0.1 to 0.9 <nats>", "remedy": "raise β (kl.coef)"},
    {"name": "repetition", "step": 30, "message": "3-grams went from 1% to 40%", "remedy": "raise entropy_coef"},
]


def alerted(run: Run, alerts: object) -> Run:
    return replace(run, metrics=run.metrics | {"ppo": run.metrics["ppo"] | {"alerts": alerts}})


def test_alerts_stand_there_with_what_helps(make_run: MakeRun, pictures: Drawn) -> None:
    document = Document(build(alerted(make_run(), ALERTS), pictures=pictures[True]))
    assert not document.open
    assert "PPO raised 2 alerts on the way" in document.text
    assert "Alert at step 12: kl spike Seen: KL went from 0.1 to 0.9 <nats>. What helps: raise β (kl.coef)." in (
        document.text
    )
    assert "Alert at step 30: repetition" in document.text
    assert "No alert" not in document.text


def test_without_an_alert_the_page_says_so(make_run: MakeRun, pictures: Drawn) -> None:
    text = Document(build(alerted(make_run(), []), pictures=pictures[True])).text
    assert "No alert: none of the detectors" in text
    assert "raised" not in text


def test_a_run_that_was_not_watched_is_not_called_healthy(make_run: MakeRun, pictures: Drawn) -> None:
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
    ],
)
def test_broken_inputs_are_named(make_run: MakeRun, tmp_path: Path, name: str, content: str | None, said: str) -> None:
    make_run()
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=rf"{re.escape(name)}.*{said}"):
        read_run([], [], tmp_path)
