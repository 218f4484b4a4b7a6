"""The stage with pairs of the data, and in later rounds."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rlhf_core.data.chat import Conversation, prompt_id
from rlhf_core.errors import UserError
from rlhf_core.models.hf import save_checkpoint
from tasks.datasets.jsonl import read_jsonl, write_jsonl
from tasks.judging import preference_pairs as preferences
from tasks.params.preferences import PreferencesParams
from tasks.schemas.validation import validate
from tasks.training.pairs import PREFERENCES
from tests.tasks.conftest import TINY

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
        preferences.make_pairs(stage, None)
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
        preferences.make_pairs(stage, None)
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


def test_three_rounds_with_a_third_each_sample_every_prompt_once(
    make_stage: Callable[..., "Stage[Any]"], asked: list[dict[str, Any]]
) -> None:
    rows = [{**row, "split": "train"} for row in asked]
    third = {"round": {"share": 0.3333}}
    stage = make_stage("preferences", params("judge"), [], {preferences.PROMPTS: rows}, blocks=third)
    parts = [preferences.prompts_of_round(stage, number) for number in range(1, 7)]
    assert sorted(row["prompt_id"] for part in parts[:3] for row in part) == sorted(row["prompt_id"] for row in rows)
    assert {len(part) for part in parts} == {3, 4}
    places = [[rows.index(row) for row in part] for part in parts]
    assert all(found == sorted(found) for found in places), "in the order of the data"
    assert places[0] != [0, 1, 2], "not the first ones"
    assert places[3:] == places[:3], "after the last part comes the first one again"


def test_without_a_share_every_round_samples_all_prompts(
    make_stage: Callable[..., "Stage[Any]"], asked: list[dict[str, Any]]
) -> None:
    stage = make_stage("preferences", params("judge"), [], {preferences.PROMPTS: asked}, blocks={"round": {}})
    assert preferences.prompts_of_round(stage, 1) == preferences.prompts_of_round(stage, 5) == asked


def test_a_later_round_has_all_pairs_and_a_prompt_keeps_its_split(tmp_path: Path) -> None:
    own = {"prompt_id": "a", "chosen": "x", "rejected": "y", "source": "judge", "split": "train"}
    label = {"prompt_id": "b", "chosen": "x", "rejected": "y", "source": "dataset", "split": "validation"}
    write_jsonl(tmp_path / "rounds/1/preferences.jsonl", [own, label])
    earlier = preferences.earlier_pairs(tmp_path, 1)
    assert earlier == [{**own, "round": 1}, {**label, "round": 1}]
    new = [own, {**own, "prompt_id": "b"}, label, {**label, "annotator": "anna"}, {**label, "prompt_id": "c"}]
    pairs = preferences.after_earlier_rounds(earlier, new, 2)
    assert pairs[:2] == earlier
    assert [(pair["prompt_id"], pair["source"], pair["split"], pair["round"]) for pair in pairs[2:]] == [
        ("a", "judge", "train", 2),  # a judged pair is another comparison
        ("b", "judge", "validation", 2),  # the split of round 1
        ("b", "dataset", "validation", 2),  # by another annotator; the data's own pair was in round 1
        ("c", "dataset", "validation", 2),
    ]
    write_jsonl(tmp_path / "rounds/2/preferences.jsonl", pairs)
    assert preferences.earlier_pairs(tmp_path, 2) == pairs


def test_pairs_outlast_a_round_that_functions_alone_have_scored(tmp_path: Path) -> None:
    pair = {"prompt_id": "a", "chosen": "x", "rejected": "y", "source": "judge", "split": "train"}
    for number, rows in {1: [], 2: [pair], 3: []}.items():
        write_jsonl(tmp_path / f"rounds/{number}/preferences.jsonl", rows)
    assert preferences.earlier_pairs(tmp_path, 1) == []
    assert preferences.earlier_pairs(tmp_path, 3) == [{**pair, "round": 2}]


def test_a_later_round_samples_from_the_last_policy_with_other_random_numbers(
    workshop: Path,
    make_stage: Callable[..., "Stage[Any]"],
    asked: list[dict[str, Any]],
    close_round: Callable[[Path, int], None],
) -> None:
    """Also with pairs of the data alone: people can label these answers."""
    rows = [{**row, "split": "train" if place % 3 else "validation"} for place, row in enumerate(asked)]
    outs = ["data/preferences/samples.jsonl", "data/preferences/preferences.jsonl", "metrics/preferences.json"]

    def samples(state: str, source: str) -> list[dict[str, Any]]:
        given = {preferences.PROMPTS: rows, preferences.PAIRS: []}
        stage = make_stage("preferences", params(source), outs, given, blocks={"round": {}}, state=state)
        preferences.make_pairs(stage, None)
        stage.outputs.commit()
        return [row["response_ids"] for row in read_jsonl(workshop / outs[0])]

    first = samples("one", "judge")
    assert "round" not in read_jsonl(workshop / outs[1])[0]
    close_round(workshop, 1)
    shutil.copy(workshop / outs[1], workshop / "rounds/1/preferences.jsonl")
    shutil.copytree(workshop / "models/sft", workshop / "rounds/1/policy", dirs_exist_ok=True)
    assert samples("same model", "judge") != first, "the same model with other random numbers"
    save_checkpoint(workshop / "rounds/1/policy", TINY.tiny_lm(seed=9), TINY.tiny_tokenizer())
    second = samples("two", "judge")
    pairs = validate(read_jsonl(workshop / outs[1]), outs[1])
    assert {pair["round"] for pair in pairs} == {1, 2}
    assert json.loads((workshop / outs[2]).read_text())["pairs_by_round"].keys() == {"1", "2"}
    assert samples("people", "dataset") == second
    assert [pair["round"] for pair in read_jsonl(workshop / outs[1])] == [1] * sum(p["round"] == 1 for p in pairs)
    tokenizer = TINY.tiny_tokenizer()
    tokenizer.chat_template += " "
    save_checkpoint(workshop / "rounds/1/policy", TINY.tiny_lm(seed=9), tokenizer)
    with pytest.raises(UserError, match="rounds/1/policy has another tokenizer than models/sft"):
        samples("other", "judge")
