"""What is asked: the shapes of files, and which answers are compared."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest

from flows.commands.annotate.tasks import first_tasks, read_gold, read_tasks, shown_order, shuffled
from rlhf_core.errors import UserError
from tests.flows.commands.annotate.conftest import task, write_rows


def test_the_samples_of_a_run_are_grouped_by_prompt_and_equal_texts_are_shown_once(tmp_path: Path) -> None:
    def sample(prompt: str, number: int, response: str, ended: bool) -> dict[str, Any]:
        turns = [{"role": "user", "content": prompt}]
        row = {"prompt_id": prompt, "prompt": turns, "sample": number, "response": response, "response_ids": [1]}
        return row | {"ended": ended, "split": "train"}

    rows = [sample("p", 0, "a", True), sample("q", 0, "x", True), sample("p", 1, "b", False)]
    rows += [sample("p", 2, "a", True), sample("p", 3, "c", True), sample("q", 1, "x", True)]
    found = read_tasks(write_rows(tmp_path / "samples.jsonl", rows), 2)
    assert [task.answers for task in found] == [("a", "b"), ("a", "c"), ("b", "c")], "q has one text only"
    assert [task.ended for task in found] == [(True, False), (True, True), (False, True)]
    assert found[0].prompt == [{"role": "user", "content": "p"}]


def test_the_cut_off_answer_of_a_pair_is_marked(tmp_path: Path) -> None:
    row = {"prompt": "p", "chosen": "a", "rejected": "b", "chosen_ended": False}
    (task,) = read_tasks(write_rows(tmp_path / "pairs.jsonl", [row]), 2)
    assert dict(zip(task.answers, task.ended, strict=True)) == {"a": False, "b": True}


@pytest.mark.parametrize(
    ("rows", "size", "answers"),
    [
        ([{"prompt": "p", "responses": ["a", "b", "c"]}], 2, [("a", "b"), ("a", "c"), ("b", "c")]),
        ([{"prompt": "p", "response": text} for text in "abcdef"], 4, [("a", "b", "c", "d"), ("e", "f")]),
        ([{"prompt": "p", "responses": ["a", "b", "c", "d", "e"]}], 4, [("a", "b", "c", "d")]),
        ([{"prompt": "p", "chosen": "a", "rejected": "b"}, {"prompt": "p", "chosen": "c", "rejected": "b"}], 2,
         [("a", "b"), ("c", "b")]),
        ([{"prompt": "p", "chosen": "a", "rejected": "b"}, {"prompt": "p", "chosen": "c", "rejected": "b"}], 4,
         [("a", "b", "c")]),
        ([{"prompt": "p", "chosen": "a", "rejected": "b"}] * 2, 2, [("a", "b")]),
        ([{"prompt": "p", "chosen": "a", "rejected": "b"}, {"prompt": "p", "chosen": "b", "rejected": "a"}], 2,
         [("a", "b")]),
    ],
)  # fmt: skip
def test_shapes_of_a_file(tmp_path: Path, rows: list[dict[str, Any]], size: int, answers: list[tuple[str]]) -> None:
    assert [task.answers for task in read_tasks(write_rows(tmp_path / "own.jsonl", rows), size)] == answers


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl.gz", ".json"])
def test_formats_of_a_file_are_those_of_import(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"own{suffix}"
    columns = {"prompt": ["p", "q"], "chosen": ["a", "c"], "rejected": ["b", "d"]}
    table = pyarrow.table(columns)
    if suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    elif suffix == ".csv":
        pyarrow.csv.write_csv(table, path)
    elif suffix == ".json":
        path.write_text(json.dumps(table.to_pylist()))
    else:
        path.write_bytes(gzip.compress(write_rows(tmp_path / "rows.jsonl", table.to_pylist()).read_bytes()))
    assert [task.answers for task in read_tasks(path, 2)] == [("a", "b"), ("c", "d")]
    assert [task.right for task in read_gold(path)] == [0, 0]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"prompt": "p", "responses": ["a", "b"]}, {"prompt": "p", "responses": ["a\ud800", "b"]}],
         "row 2: half a surrogate pair"),
        ([{"prompt": "p\ud800", "responses": ["a", "b"]}], "row 1: half a surrogate pair"),
        ([{"prompt": "p", "responses": ["a", "a"]}], "no prompt has two different answers"),
        ([{"prompt": "p", "responses": "ab"}], "row 1: responses: expected a list of texts"),
        ([{"prompt": "p", "response": "a"}, {"prompt": "p"}], "row 2: missing column response"),
        ([{"prompt": "p"}], "row 1: expected a prompt that ends with the user, and its answers"),
        ([{"responses": ["a", "b"]}], "row 1: missing column prompt"),
        ([{"prompt": None, "responses": ["a", "b"]}], "row 1: expected a prompt"),
        ([{"prompt": [{"role": "assistant", "content": "x"}], "responses": ["a", "b"]}], "row 1: expected a prompt"),
        ([], "no rows, so there is nothing to compare"),
    ],
)  # fmt: skip
def test_bad_files_are_one_line(tmp_path: Path, rows: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(UserError) as caught:
        read_tasks(write_rows(tmp_path / "own.jsonl", rows), 2)
    assert words in str(caught.value)
    assert "own.jsonl" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_gold_questions_know_their_answer_and_need_pairs(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "p", "chosen": "a", "rejected": "b"}]
    (gold,) = read_gold(write_rows(tmp_path / "gold.jsonl", rows))
    assert (gold.answers, gold.right) == (("a", "b"), 0)
    (label,) = read_tasks(tmp_path / "gold.jsonl", 2)
    assert label.id != gold.id, "the same pair may be a task and a gold question"
    with pytest.raises(UserError, match="row 1: a gold question needs prompt, chosen and another rejected"):
        read_gold(write_rows(tmp_path / "gold.jsonl", [{"prompt": "p", "responses": ["a", "b"]}]))
    with pytest.raises(UserError, match="row 1: a gold question"):
        read_gold(write_rows(tmp_path / "gold.jsonl", [{"prompt": "p", "chosen": "a", "rejected": "a"}]))


def test_pairs_count_the_pairs_of_a_ranking() -> None:
    twos, fours = [task(i) for i in range(40)], [task(i, 4) for i in range(40)]
    assert [len(first_tasks(tasks, pairs)) for tasks, pairs in ((twos, 30), (fours, 30), (fours, 31))] == [30, 5, 6]
    mixed = [task(0, 4), task(1), task(2), task(3, 3), task(4, 4)]
    assert first_tasks(mixed, 8) == mixed[:3], "6 + 1 + 1"
    assert first_tasks(mixed, 9) == mixed[:4]
    assert first_tasks(mixed, 99) == mixed


def test_orders_depend_on_seed_annotator_and_task_only() -> None:
    tasks = [task(i) for i in range(50)]
    assert shuffled(tasks, 1) == shuffled(tasks[::-1], 1) != shuffled(tasks, 2)
    orders = {who: [shown_order(one.id, 2, who, 1) for one in tasks] for who in ("anna", "ben")}
    assert orders["anna"] != orders["ben"]
    assert orders["anna"] != [shown_order(one.id, 2, "anna", 2) for one in tasks]
    assert orders["anna"] == [shown_order(one.id, 2, "anna", 1) for one in tasks]
    assert 15 < sum(order == [0, 1] for order in orders["anna"]) < 35
    four = {tuple(shown_order(task(i, 4).id, 4, "anna", 1)) for i in range(300)}
    assert len(four) == 24
