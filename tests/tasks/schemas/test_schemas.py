"""Every schema lets good rows through and names what is wrong in bad ones, all at once."""

import copy
import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from rlhf_core.data.chat import prompt_id
from rlhf_core.errors import UserError
from tasks.datasets.jsonl import write_jsonl
from tasks.schemas.datasets import SCHEMAS
from tasks.schemas.validation import check_heldout_disjoint, is_dataset, load, validate

PATHS = list(SCHEMAS)
COLUMNS = {path: model.to_schema().columns for path, model in SCHEMAS.items()}
VALUES = {
    "model": "sft",
    "seed": 1,
    "response": "an answer",
    "reason": "schedule",
    "chosen": "good",
    "rejected": "bad",
    "split": "train",
    "source": "judge",
    "sample": 0,
    "step": 0,
    "sft": "",
    "policy": "an answer",
    "sft_tokens": 0,
    "policy_tokens": 7,
    "tokens": 2,
    "mean_reward": 0.5,
    "rating": 1,
    **dict.fromkeys(("ended", "chosen_ended", "rejected_ended", "sft_ended", "policy_ended"), True),
    **dict.fromkeys(("gold", "gold_sft", "gold_policy"), None),
    **dict.fromkeys(("reward", "reward_sft", "reward_policy"), -1.5),
    "kl": 2,
    "response_ids": [5, 0],
    "chosen_ids": [5, 0],
    "rejected_ids": None,
    "annotator": "anna",
    "from_labels": True,
    "extra": {"answer": "2"},
    "terms": {"exact.py": 1.0},
    "round": 2,
}
OPTIONAL = {"annotator", "from_labels", "chosen_ended", "rejected_ended", "extra", "terms", "round"}
OBJECTS = {"extra", "terms"}
NULLABLE = {"annotator", "chosen_ids", "rejected_ids", "gold", "gold_sft", "gold_policy", "seed"}
NULLABLE_HERE = {("response", "data/ingest/heldout.jsonl"), ("response", "data/ingest/evaluation_prompts.jsonl")}
NULLABLE_HERE |= {("kl", "data/evaluate/answers.jsonl")}
NUMBERS = {"kl", "rating", "reward", "mean_reward", "reward_sft", "reward_policy"} | {"gold", "gold_sft", "gold_policy"}
MAY_BE_EMPTY = {"data/ingest/pairs.jsonl", "data/best_of_n/samples.jsonl", "data/rejection_sft/samples.jsonl"}
MAY_BE_EMPTY |= {"data/ingest/ratings.jsonl", "data/preferences/preferences.jsonl", "data/preferences/samples.jsonl"}
MAY_BE_EMPTY |= {"data/ingest/demonstrations.jsonl"}


def rows_for(path, count=3):
    rows = []
    for number in range(count):
        prompt = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": f"question {number}"}]
        row = {"prompt_id": prompt_id(prompt), "prompt": prompt}
        row |= {name: VALUES[name] for name in COLUMNS[path] if name not in row}
        rows.append(row)
    return rows


def error(path, rows):
    with pytest.raises(UserError) as caught:
        validate(rows, path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("path", PATHS)
def test_good_rows_pass_unchanged(path):
    rows = rows_for(path)
    before = copy.deepcopy(rows)
    assert validate(rows, path) == before


@pytest.mark.parametrize("path", PATHS)
def test_empty_data_sets(path):
    if path in MAY_BE_EMPTY:
        assert validate([], path) == []
    else:
        assert "empty data set" in error(path, [])


@pytest.mark.parametrize("path", PATHS)
def test_every_column_is_needed_and_no_other_known(path):
    for name in COLUMNS[path]:
        rows = rows_for(path)
        del rows[1][name]
        assert error(path, rows) == f"{path}: {name}: missing column (1 row: 2)"
    rows = rows_for(path)
    rows[2]["typo"] = 1
    assert error(path, rows) == f"{path}: typo: unknown column (1 row: 3)"


@pytest.mark.parametrize("path", PATHS)
def test_an_optional_column_is_in_all_rows_or_in_none(path):
    optional = {name for name, column in COLUMNS[path].items() if not column.required}
    assert optional <= OPTIONAL
    validate([{name: row[name] for name in row.keys() - optional} for row in rows_for(path)], path)


@pytest.mark.parametrize("path", PATHS)
def test_every_column_refuses_a_value_of_another_type(path):
    for name in COLUMNS[path]:
        for wrong in (["x"], *([] if name in OBJECTS else [{"a": 1}]), *([] if name in NUMBERS else [1.5])):
            rows = rows_for(path)
            rows[1][name] = wrong
            assert f"{name}: must be" in error(path, rows)


@pytest.mark.parametrize("path", PATHS)
def test_null_only_where_there_may_be_nothing(path):
    for name in COLUMNS[path]:
        rows = rows_for(path)
        rows[1][name] = None
        if name in NULLABLE or (name, path) in NULLABLE_HERE:
            validate(rows, path)
        else:
            assert f"{name}: must be" in error(path, rows)


@pytest.mark.parametrize("path", PATHS)
def test_numbers_are_finite(path):
    for name in NUMBERS & set(COLUMNS[path]):
        for wrong in (float("nan"), float("inf"), True):
            rows = rows_for(path)
            rows[2][name] = wrong
            assert f"{name}: must be a finite number (1 row: 3)" in error(path, rows)


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        "question",
        [{"role": "user", "content": " "}],
        [{"role": "human", "content": "x"}],
        [{"role": ["user"], "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": "x", "name": "y"}],
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
    ],
)
def test_prompts_are_conversations_that_end_with_the_user(prompt):
    path = "data/ingest/ppo_prompts.jsonl"
    rows = rows_for(path)
    rows[0]["prompt"] = prompt
    assert "prompt: must be a conversation of non-empty turns that ends with role user (1 row: 1)" in error(path, rows)


@pytest.mark.parametrize("path", PATHS)
def test_identity_belongs_to_the_prompt(path):
    rows = rows_for(path)
    rows[1]["prompt_id"] = "0" * 16
    assert error(path, rows) == f"{path}: prompt_id does not belong to prompt (1 row: 2)"


@pytest.mark.parametrize("path", PATHS)
def test_repeated_rows(path):
    rows = rows_for(path)
    rows.append(copy.deepcopy(rows[0]))
    if path == "data/preferences/preferences.jsonl":  # samples of a model may be equal
        validate(rows, path)
    else:
        assert re.search(r"must occur once \(1 row: 4\)$", error(path, rows))


@pytest.mark.parametrize(
    "path", [path for path in PATHS if "preferences/" in path or "demo" in path or "pairs" in path]
)
def test_failure_05_a_prompt_is_in_one_split(path):
    rows = rows_for(path)
    again = {name: "another" for name in ("response", "chosen") if name in rows[0]}
    rows.append({**rows[0], **again, "split": "validation", **({"sample": 1} if "sample" in rows[0] else {})})
    assert error(path, rows) == f"{path}: prompt is in train and in validation (1 row: 4)"


@pytest.mark.parametrize(
    ("path", "changes", "says"),
    [
        ("data/ingest/demonstrations.jsonl", {"split": "test"}, "split: must be train or validation"),
        ("data/ingest/demonstrations.jsonl", {"response": "\n "}, "response: must be non-empty text"),
        ("data/ingest/heldout.jsonl", {"response": ""}, "response: must be non-empty text"),
        ("data/ingest/pairs.jsonl", {"chosen": "x", "rejected": "x"}, "chosen equals rejected"),
        ("data/preferences/preferences.jsonl", {"chosen": "x", "rejected": "x"}, "chosen equals rejected"),
        ("data/preferences/preferences.jsonl", {"source": "human"}, "source: must be judge or dataset"),
        ("data/preferences/preferences.jsonl", {"chosen_ids": "5 0"}, "chosen_ids: must be a list of token ids"),
        ("data/preferences/samples.jsonl", {"response_ids": [5, -1]}, "response_ids: must be a list of token ids"),
        ("data/preferences/preferences.jsonl", {"chosen_ended": 1}, "chosen_ended: must be true or false"),
        ("data/preferences/samples.jsonl", {"sample": -1}, "sample: must be a whole number from 0"),
        ("data/evaluate/samples.jsonl", {"sft_tokens": True}, "sft_tokens: must be a whole number from 0"),
    ],
)
def test_values(path, changes, says):
    rows = rows_for(path)
    rows[1] |= changes
    assert error(path, rows) == f"{path}: {says} (1 row: 2)"


def test_all_problems_at_once_with_counts_and_first_rows():
    path = "data/ingest/pairs.jsonl"
    rows = rows_for(path, 20)
    for number in range(8):
        rows[number]["chosen"] = ""
    rows[9]["split"] = "dev"
    del rows[11]["rejected"]
    assert error(path, rows).removeprefix(f"{path}: ").split("; ") == [
        "rejected: missing column (1 row: 12)",
        "split: must be train or validation (1 row: 10)",
        "chosen: must be non-empty text (8 rows: 1, 2, 3, 4, 5, …)",
    ]


def test_every_dataset_of_the_graph_has_a_schema():
    graph = YAML(typ="safe", pure=True).load(Path(__file__).parents[3] / "dvc.yaml")
    inputs = {dep for stage in graph["stages"].values() for dep in stage["deps"] if is_dataset(dep)}
    assert inputs <= set(PATHS)
    for path in ("data/raw/pairs.jsonl", "metrics/ingest.json", "data/ingest/pairs.csv", "data/a/b/c.jsonl"):
        assert not is_dataset(path)


def test_failure_04_load_reads_only_datasets_and_checks_the_heldout_prompts(tmp_path):
    heldout, training = rows_for("data/ingest/heldout.jsonl", 4)[3:], rows_for("data/ingest/ppo_prompts.jsonl")
    write_jsonl(tmp_path / "data/ingest/heldout.jsonl", heldout)
    write_jsonl(tmp_path / "data/ingest/ppo_prompts.jsonl", training)
    paths = ["tasks/ppo.py", "data/raw", "models/sft", "data/ingest/heldout.jsonl", "data/ingest/ppo_prompts.jsonl"]
    assert load(tmp_path, paths) == {paths[3]: heldout, paths[4]: training}
    leaked = [
        {"role": "user", "content": "QUESTION  3"},
        {"role": "assistant", "content": "a"},
        training[0]["prompt"][-1],
    ]
    training.append(training[0] | {"prompt_id": prompt_id(leaked), "prompt": leaked})
    write_jsonl(tmp_path / "data/ingest/ppo_prompts.jsonl", training)
    with pytest.raises(
        UserError, match=r"leaked held-out prompt: .*QUESTION 3.* in data/ingest/ppo_prompts\.jsonl, row 4"
    ):
        load(tmp_path, paths)
    with pytest.raises(UserError, match=r"demonstrations\.jsonl: file not found"):
        load(tmp_path, ["data/ingest/demonstrations.jsonl"])


def test_evaluation_samples_of_heldout_prompts_are_no_leak(tmp_path):
    for path in ("data/ingest/heldout.jsonl", "data/evaluate/samples.jsonl"):
        write_jsonl(tmp_path / path, rows_for(path))
    assert len(load(tmp_path, ["data/ingest/heldout.jsonl", "data/evaluate/samples.jsonl"])) == 2


def test_failure_04_disjoint_counts_every_leak():
    rows = rows_for("data/ingest/ppo_prompts.jsonl")
    check_heldout_disjoint(rows[:1], {"other": rows[1:]})
    with pytest.raises(UserError, match=r"is also in other, row 1 \(3 such rows\)"):
        check_heldout_disjoint(rows, {"other": rows})
