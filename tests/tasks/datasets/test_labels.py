"""Labels of people: their figures, and how they are added to the data of a run."""

import json

import pytest

from rlhf_core.errors import UserError
from tasks.check_data import require_pairs
from tasks.datasets.jsonl import write_jsonl
from tasks.datasets.labels import as_text, label_figures
from tasks.datasets.prepare import prepare
from tasks.datasets.sources.datasets import assemble, divide, rows_by_use

PAIRS = [{"prompt": f"question {i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(100)]


def label(number, annotator, *, tie=False, swap=False):
    good, bad = f"good {number}", f"bad {number}"
    chosen, rejected = (bad, good) if swap else (good, bad)
    return {
        "prompt": f"question {number}", "chosen": chosen, "rejected": rejected, "tie": tie, "annotator": annotator,
        "time": "2026-11-23T14:00:00Z", "order": [2, 1], "task": str(number),
    }  # fmt: skip


def test_figures_of_three_annotators(examples):
    """anna and ben share four pairs and differ in two of them; cleo labels one, as anna does."""
    rows = [label(i, "anna") for i in range(4)]
    rows += [label(0, "ben"), label(1, "ben", swap=True), label(2, "ben", tie=True), label(3, "ben")]
    rows += [label(0, "cleo"), label(9, "cleo"), {**PAIRS[50]}]
    figures = label_figures(examples(rows))
    # Of the nine values of the pairs with several labels seven are equal, one is the opposite, one is a tie:
    # observed disagreement 4 / 9, expected 2 (7 + 7 + 1) / (9 * 8).
    alpha = 1 - (4 / 9) / (30 / 72)
    assert figures == {
        "annotators": {"anna": 4, "ben": 3, "cleo": 2},
        "ties": 1,
        "pairs_by_several": 4,
        "alpha": pytest.approx(alpha),
        "agreement": {"anna": 3 / 5, "ben": 3 / 5, "cleo": 1.0},
    }
    assert as_text(figures) == (
        "labels: anna 4, ben 3, cleo 2; 1 ties, 4 pairs by several annotators, Krippendorff's alpha -0.07"
    )


def test_without_annotators_there_are_no_figures_and_one_alone_agrees_with_nobody(examples):
    assert label_figures(examples(PAIRS)) is None
    figures = label_figures(examples([label(1, "anna"), label(2, "anna", tie=True)]))
    assert (figures["alpha"], figures["agreement"], figures["pairs_by_several"]) == (None, {"anna": None}, 0)
    json.dumps(figures, allow_nan=False)


@pytest.fixture
def add_labels(raw):
    def write(rows):
        write_jsonl(raw(train=PAIRS) / "people.jsonl", rows)

    return write


@pytest.fixture
def made(params, raw, tmp_path):
    """The datasets and the use of the rows, with a file of labels or without."""

    def call(labels="people.jsonl", **changes):
        settings = params(labels=labels, **changes)
        prepared = prepare(settings, tmp_path / "data/raw", log=lambda line: None)
        divided = divide(prepared.kept, prepared.assignment, settings.seed, prepared.labels)
        return prepared, {name: list(rows) for name, rows in assemble(divided).items()}, rows_by_use(divided)

    return call


def shares_of(datasets):
    """The prompts of each share, and their splits."""
    names = ("demonstrations", "preference_prompts", "ppo_prompts", "heldout")
    return {name: [(row["prompt_id"], row.get("split")) for row in datasets[name]] for name in names}


def test_labels_move_no_prompt_and_become_pairs_with_the_split_of_their_prompt(add_labels, made):
    unknown = [label(number, "ben") for number in range(1000, 1200)]
    add_labels([*(label(number, "anna") for number in range(100)), *unknown])
    prepared, with_labels, uses = made(on_leak="drop")
    _, without, _ = made(labels=None)
    assert shares_of(with_labels) == shares_of(without)
    assert all({"annotator", "from_labels"}.isdisjoint(row) for row in without["pairs"])
    heldout = {row["prompt_id"] for row in with_labels["heldout"]}
    leaked = [row for row in prepared.dropped if row.reason == "leaked"]
    assert len(leaked) == len(heldout) == 10
    own = [row for row in with_labels["pairs"] if row["annotator"] is None]
    assert [{**row, "annotator": None, "from_labels": False} for row in without["pairs"]] == own
    anna, ben = ([r for r in with_labels["pairs"] if r["annotator"] == name] for name in ("anna", "ben"))
    assert (len(anna), len(ben)) == (90, 200)
    assert all(row["from_labels"] for row in anna + ben)
    assert not heldout & {row["prompt_id"] for row in anna}
    known = dict(shares_of(without)["demonstrations"] + shares_of(without)["preference_prompts"])
    assert all(row["split"] == known.get(row["prompt_id"], "train") for row in anna)
    assert 8 <= sum(row["split"] == "validation" for row in ben) <= 35, "a tenth of 200, drawn by a hash"
    assert uses["pair", "reward_train"] + uses["pair", "reward_validation"] == len(with_labels["pairs"])


def test_more_labels_change_no_split(add_labels, made):
    add_labels([label(number, "ben") for number in range(1000, 1050)])
    _, first, _ = made()
    add_labels([label(number, "ben") for number in range(1000, 1200)])
    _, second, _ = made()
    later = {row["prompt_id"]: row["split"] for row in second["pairs"]}
    assert all(later[row["prompt_id"]] == row["split"] for row in first["pairs"])


def test_labels_of_heldout_prompts_are_refused_where_the_share_is_drawn(add_labels, made):
    add_labels([label(number, "anna") for number in range(100)])
    with pytest.raises(UserError, match=r"10 training rows open like a held-out row, first data/raw/people\.jsonl row"):
        made()


def test_labels_of_heldout_files_are_leaks_too(add_labels, made, raw):
    add_labels([label(number, "anna") for number in range(4)])
    raw(test=[{"prompt": "Question  2", "chosen": "a", "rejected": "b"}])
    prepared, datasets, _ = made(on_leak="drop")
    assert {(row.file, row.row) for row in prepared.dropped if row.file.endswith("people.jsonl")} == {
        ("data/raw/people.jsonl", 3)
    }
    assert sum(row["annotator"] is not None for row in datasets["pairs"]) == 3


def test_ties_are_for_agreement_only(add_labels, made):
    add_labels([label(1000, "anna"), label(1000, "ben", tie=True), label(1001, "ben", tie=True)])
    prepared, datasets, _ = made()
    assert [(e.annotator, e.row) for e in prepared.ties] == [("ben", 2), ("ben", 3)]
    assert [row["annotator"] for row in datasets["pairs"] if row["annotator"]] == ["anna"]


def test_the_same_pair_of_several_annotators_stays_several_rows(add_labels, made):
    add_labels([label(1000, name, swap=name == "ben") for name in ("cleo", "anna", "ben", "anna")])
    prepared, datasets, _ = made()
    found = [(row["annotator"], row["chosen"]) for row in datasets["pairs"] if row["annotator"]]
    assert found == [("ben", "bad 1000"), ("anna", "good 1000"), ("cleo", "good 1000")]
    assert [(row.row, row.reason) for row in prepared.dropped] == [(4, "duplicate")]


def test_cut_off_answers_stay_marked_and_others_count_as_ended(add_labels, made):
    add_labels([label(1000, "anna") | {"chosen_ended": True, "rejected_ended": False}, label(1001, "anna")])
    _, datasets, _ = made()
    ended = {row["chosen"]: (row["chosen_ended"], row["rejected_ended"]) for row in datasets["pairs"]}
    assert ended.pop("good 1000") == (True, False)
    assert set(ended.values()) == {(True, True)}
    add_labels([label(1000, "anna")])
    _, datasets, _ = made()
    assert not any("chosen_ended" in row or "rejected_ended" in row for row in datasets["pairs"])


def test_labels_give_the_demo_pairs(add_labels, made):
    add_labels([label(number, "anna") for number in range(200)])
    demo = {"prompts": 400, "domains": 4, "needs": 7, "demonstrations_per_prompt": 1}
    prepared, datasets, uses = made(source="demo", demo=demo)
    assert len(datasets["pairs"]) == 200
    assert len(datasets["preference_prompts"]) == 108
    assert uses["pair", "reward_train"] + uses["pair", "reward_validation"] == 200
    require_pairs(prepared, "dataset")
    nothing, _, _ = made(labels=None, source="demo", demo=demo)
    with pytest.raises(UserError, match="the data have no pairs"):
        require_pairs(nothing, "dataset")


def test_other_rows_and_missing_files_are_refused(add_labels, made):
    add_labels([{"prompt": "q", "response": "a"}])
    with pytest.raises(
        UserError, match=r"people\.jsonl, row 1: a demonstration among the labels; ingest\.labels takes"
    ):
        made()
    with pytest.raises(UserError, match=r"other: not found; .* Set ingest\.labels to a name"):
        made(labels="other")
    with pytest.raises(ValueError, match="must stay below data/raw/"):
        made(labels="../people.jsonl")
