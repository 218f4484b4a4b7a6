"""The stage with pairs of the data: nothing is sampled, and the pairs are the data's."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rlhf_core.data.chat import Conversation, prompt_id
from rlhf_core.errors import UserError
from tasks import preferences
from tasks.datasets.jsonl import read_jsonl
from tasks.params.preferences import PreferencesParams
from tasks.schemas.validation import validate
from tasks.training.pairs import PREFERENCES

if TYPE_CHECKING:
    from tasks.stage.stage import Stage
    from tests.conftest import Ended, Project


def test_with_pairs_of_the_data_no_answer_is_sampled(
    finished: "Project", stage_main: Callable[["Project", str], "Ended"]
) -> None:
    prompts = [[{"role": "user", "content": f"What is a good breakfast {number}?"}] for number in range(40)]
    rows = [{"prompt_id": prompt_id(prompt), "prompt": prompt} for prompt in prompts]
    splits = ["validation" if number % 5 == 0 else "train" for number in range(len(rows))]
    finished.write_rows(
        "data/ingest/preference_prompts.jsonl",
        [{**row, "split": split} for row, split in zip(rows, splits, strict=True)],
    )
    finished.write_rows(
        "data/ingest/pairs.jsonl",
        [
            {**row, "chosen": "Oats.", "rejected": "None.", "split": split}
            for row, split in zip(rows, splits, strict=True)
        ],
    )
    finished.set("runtime.tracking", False)
    finished.set("preferences.source", "dataset")
    ended = stage_main(finished, "preferences")
    assert ended.code == 0, ended.stderr
    metrics = finished.json("metrics/preferences.json")
    assert (metrics["samples"], metrics["missing_eos_share"], metrics["pairs"]) == (0, None, len(rows))
    assert finished.rows("data/preferences/samples.jsonl") == []
    assert stage_main(finished, "reward").code == 0


def test_labels_of_people_reach_the_reward_model(
    finished: "Project", stage_main: Callable[["Project", str], "Ended"]
) -> None:
    """From data/raw through ingest and preferences, beside the demo's judged pairs, which stay the same."""
    before = {path: finished.rows(path) for path in (preferences.PROMPTS, PREFERENCES)}
    assert "annotator" not in before[PREFERENCES][0]
    label = {"chosen": "Oats.", "rejected": "None.", "tie": False, "order": [2, 1], "task": "1"}
    finished.write_rows(
        "data/raw/people.jsonl",
        [
            {**label, "prompt": row["prompt"], "annotator": name}
            for row in before[preferences.PROMPTS]
            for name in ("anna", "ben")
        ],
    )
    for name, value in {
        "runtime.tracking": False,
        "ingest.labels": "people.jsonl",
        "preferences.source": "both",
    }.items():
        finished.set(name, value)
    for stage in ("check", "check_data", "ingest", "preferences", "reward"):
        ended = stage_main(finished, stage)
        assert ended.code == 0, ended.stderr
    assert finished.rows(preferences.PROMPTS) == before[preferences.PROMPTS]
    pairs, count = finished.rows(PREFERENCES), len(before[preferences.PROMPTS])
    assert [{**row, "annotator": None} for row in before[PREFERENCES]] == pairs[: -2 * count]
    assert {row["annotator"] for row in pairs[-2 * count :]} == {"anna", "ben"}
    assert finished.json("metrics/ingest.json")["labels"]["annotators"] == {"anna": count, "ben": count}
    assert finished.json("metrics/preferences.json")["labels_by"] == {"anna": count, "ben": count}


def test_pairs_carry_their_annotator_and_the_metrics_count_them(
    tmp_path: Path, make_stage: Callable[..., "Stage[Any]"]
) -> None:
    """All labels of a pair are kept; data without annotators have no such column."""
    prompts: list[Conversation] = [[{"role": "user", "content": f"What is a good breakfast {n}?"}] for n in range(4)]
    rows = [
        {"prompt_id": prompt_id(prompt), "prompt": prompt, "chosen": "Oats.", "rejected": "None.", "split": split}
        for prompt, split in zip(prompts, ("train", "validation", "train", "train"), strict=True)
    ]
    labels = [{**row, "annotator": name} for row in rows for name in ("zoe", "data")] + [{**rows[3], "annotator": None}]
    for pairs, columns, by in ((labels, {"annotator"}, {"": 1, "data": 4, "zoe": 4}), (rows, set(), {"": 4})):
        outs = ["data/preferences/samples.jsonl", "data/preferences/preferences.jsonl", "metrics/preferences.json"]
        stage = make_stage("preferences", params("dataset"), outs, {preferences.PAIRS: pairs})
        preferences.execute(stage)
        stage.outputs.commit()
        made = validate(read_jsonl(tmp_path / outs[1]), outs[1])
        assert [row.get("annotator") for row in made] == [row.get("annotator") for row in pairs]
        assert all(row.keys() & {"annotator"} == columns for row in made)
        metrics = json.loads((tmp_path / outs[2]).read_text())
        assert (metrics["labels_by"], metrics["judge"]) == (by, None)


def test_pairs_for_training_alone_are_refused_before_anything_is_written(
    make_stage: Callable[..., "Stage[Any]"],
) -> None:
    prompt: Conversation = [{"role": "user", "content": "What is a good breakfast?"}]
    row = {"prompt_id": prompt_id(prompt), "prompt": prompt, "chosen": "Oats.", "rejected": "No", "split": "train"}
    outs = ["data/preferences/samples.jsonl", "data/preferences/preferences.jsonl", "metrics/preferences.json"]
    stage = make_stage("preferences", params("dataset"), outs, {preferences.PAIRS: [row]})
    with pytest.raises(UserError, match="validation pairs; there are 1 in train and 0 in validation"):
        preferences.execute(stage)
    assert not stage.outputs.begun


def test_cut_off_answers_of_the_data_have_no_end(make_stage: Callable[..., "Stage[Any]"]) -> None:
    prompt: Conversation = [{"role": "user", "content": "What is a good breakfast?"}]
    row = {"prompt_id": prompt_id(prompt), "prompt": prompt, "chosen": "Oats.", "rejected": "No", "split": "train"}
    pairs = [{**row, "chosen_ended": True, "rejected_ended": False}, row]
    made = preferences.dataset_pairs(make_stage("preferences", params("dataset"), [], {preferences.PAIRS: pairs}))
    assert [(pair["chosen_ended"], pair["rejected_ended"]) for pair in made] == [(True, False), (True, True)]


def test_judged_pairs_beside_labels_have_no_annotator() -> None:
    judged, labelled = {"source": "judge"}, {"source": "dataset", "annotator": "anna"}
    assert preferences.with_annotators([judged, labelled]) == [{**judged, "annotator": None}, labelled]
    assert preferences.with_annotators([judged]) == [judged]


def params(source: str) -> PreferencesParams:
    settings = {"source": source, "max_new_tokens": 8, "batch_size": 4}
    return PreferencesParams.model_validate(settings | {"annotators": {"temperature": 0.5, "flip_rate": 0.0}})
