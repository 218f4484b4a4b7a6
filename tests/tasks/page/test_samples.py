"""The samples of the page: marked differences, filters and sort keys."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from rlhf_core.evaluation.judges import TIE
from tasks.page.inputs import Run
from tasks.page.samples import all_samples, differing, exploited, filters, fitting, orders, pick

MakeRun = Callable[..., Run]


@pytest.mark.parametrize(
    ("first", "second", "parts"),
    [
        ("Try tree poses.", "Try rope jumping.", (["Try ", "tree poses."], ["Try ", "rope jumping."])),
        ("a b c", "a c", (["a ", "b", " c"], ["a c"])),
        ("x same", "y same", (["", "x", " same"], ["", "y", " same"])),
        ("same", "same", (["same"], ["same"])),
        ("", "new", ([], ["", "new"])),
        (" a\n\n b ", "a b", ([" a\n\n b "], ["a b"])),
    ],
)
def test_differing_words_are_the_odd_parts(first: str, second: str, parts: tuple[list[str], list[str]]) -> None:
    assert differing(first, second) == parts


def test_parts_are_the_whole_text(make_run: MakeRun) -> None:
    run = make_run()
    for sample, row in zip(all_samples(run), run.samples, strict=True):
        assert [answer.text for answer in sample.answers] == [row["sft"], row["policy"]]
    long = " ".join(map(str, range(5000)))
    assert differing(long, "short") == ([long], ["short"])


def test_samples_are_spread_evenly_and_keep_their_row(make_run: MakeRun) -> None:
    samples = all_samples(make_run())
    assert [sample.row for sample in pick(samples, 4)] == [1, 11, 21, 31]
    assert len(pick(samples, 1000)) == len(samples)
    assert pick([], 20) == []


SCORES = {"gold_sft": 3.0, "gold_policy": 1.0, "reward_sft": 0.0, "reward_policy": 9.0}


@pytest.mark.parametrize(
    ("changed", "marks", "tags"),
    [
        ({}, [True, False], ["sft", "disagree"]),
        ({"gold_policy": 3.0}, [False, False], ["tie"]),
        ({"gold_policy": 3.0 + TIE / 2}, [False, False], ["tie"]),
        ({"gold_policy": 3.0 + 2 * TIE}, [False, True], ["policy"]),
        ({"gold_sft": 0.5}, [False, True], ["policy"]),
    ],
)
def test_the_judge_marks_the_better_answer(
    make_run: MakeRun, changed: dict[str, float], marks: list[bool], tags: list[str]
) -> None:
    run = make_run()
    sample = all_samples(replace(run, samples=[{**run.samples[0], **SCORES, **changed}]))[0]
    assert [answer.preferred for answer in sample.answers] == marks
    assert sample.tags == tags


def test_without_a_judge_the_reward_model_marks_and_sorts(make_run: MakeRun) -> None:
    run = make_run(judge=False)
    unjudged = {"gold_sft": None, "gold_policy": None}
    sample = all_samples(replace(run, samples=[{**run.samples[0], **SCORES, **unjudged}]))[0]
    assert [answer.preferred for answer in sample.answers] == [False, True]
    assert sample.tags == ["policy"]
    assert orders(run) == ["proxy change", "KL", "length change"]
    assert len(sample.ranks) == 3
    assert "disagree" not in dict(filters(run))


def test_disagreement_is_the_distance_of_the_standardised_changes(make_run: MakeRun) -> None:
    run = make_run()
    changes = [(2.0, 10.0), (4.0, 10.0), (2.0, 30.0), (4.0, 30.0)]
    rows = [
        {**run.samples[0], "gold_sft": 0.0, "gold_policy": gold, "reward_sft": 0.0, "reward_policy": reward}
        for gold, reward in changes
    ]
    samples = all_samples(replace(run, samples=rows))
    assert orders(run)[:3] == ["disagreement between proxy and gold", "gold change", "proxy change"]
    assert [sample.ranks[0] for sample in samples] == [0.0, 2.0, 2.0, 0.0]
    assert [sample.ranks[1:3] for sample in samples] == [[2.0, 10.0], [4.0, 10.0], [2.0, 30.0], [4.0, 30.0]]


def test_other_models_answers_are_those_of_the_first_sampling_seed(make_run: MakeRun) -> None:
    run = make_run()
    others = all_samples(run)[1].others
    assert [answer.model for answer in others] == [
        "best_of_1", "best_of_4", "best_of_16", "rejection_sft", "dpo", "rloo",
    ]  # fmt: skip
    assert all(answer.text.endswith(f"({answer.model}, 1)") for answer in others)
    assert dict(others[0].facts) == {"gold": "3.50", "reward model": "1.25", "tokens": "21"}
    assert dict(others[-1].facts)["KL, nats"] == "2.50"


def test_samples_above_the_limit_are_left_out_with_a_note(make_run: MakeRun) -> None:
    samples = all_samples(make_run())
    size = sum(len(answer.text) for sample in samples for answer in (*sample.answers, *sample.others))
    assert fitting(samples, size) == (samples, "")
    lean, said = fitting(samples, size - 1)
    assert [sample.row for sample in lean] == [sample.row for sample in samples]
    assert not any(sample.others for sample in lean)
    assert said == "The other models’ answers are too long for this page; they are in data/evaluate/answers.jsonl."
    kept, said = fitting(samples, sum(len(answer.text) for sample in lean for answer in sample.answers) // 2)
    assert 10 < len(kept) < 25
    assert said.endswith(f"{len(kept)} of 40 prompts are shown, spread evenly.")
    assert kept[0].row == 1


def test_exploited_answers_have_the_largest_distance_of_ranks(make_run: MakeRun) -> None:
    """The third answer is first by the proxy and last by gold; ties share the middle of their ranks."""
    run = make_run()
    scores = [(1.0, 1.0), (2.0, 1.0), (9.0, 0.0), (3.0, 4.0)]
    rows = [{**run.samples[0], "reward_policy": proxy, "gold_policy": gold} for proxy, gold in scores]
    assert exploited(replace(run, samples=rows)) == [(rows[2], 0.875, 0.125)]
    assert exploited(replace(run, samples=[{**rows[0], "gold_policy": None}])) == []
    assert exploited(replace(run, samples=[])) == []
