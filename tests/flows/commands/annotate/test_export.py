"""What is exported and counted of judgements that are written down here."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.commands.annotate.labels import export, render, statistics
from flows.commands.annotate.store import Action, Store
from flows.commands.annotate.tasks import Task, shown_order
from flows.commands.imports import importer
from rlhf_core.errors import UserError
from tests.flows.commands.annotate.conftest import task

Make = Callable[..., Store]
NOON = 1_795_435_200.0
"""2026-11-23T12:00:00Z."""


def choose(store: Store, who: str, one: Task, *best_first: int, action: Action = "rank", now: float = NOON) -> None:
    """A judgement, given as places in the task's answers."""
    shown = shown_order(one.id, len(one.answers), who, 1)
    store.judge(who, one.id, action, [shown.index(place) for place in best_first], now)


def exported(store: Store, path: Path) -> list[dict[str, Any]]:
    export(store, path)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_comparison_is_one_row(make_store: Make, tmp_path: Path) -> None:
    one = task(0)
    store = make_store([one])
    choose(store, "anna", one, 1, 0)
    order = [place + 1 for place in map(shown_order(one.id, 2, "anna", 1).index, (1, 0))]
    assert exported(store, tmp_path / "labels.jsonl") == [
        {
            "prompt": [{"role": "user", "content": "question 0"}],
            "chosen": "answer 1 of 0",
            "rejected": "answer 0 of 0",
            "chosen_ended": True,
            "rejected_ended": True,
            "tie": False,
            "annotator": "anna",
            "time": "2026-11-23T12:00:00Z",
            "order": order,
            "task": one.id,
        }
    ]


def test_cut_off_answers_are_marked(make_store: Make, tmp_path: Path) -> None:
    one = replace(task(0), ended=(True, False))
    store = make_store([one])
    choose(store, "anna", one, 1, 0)
    (row,) = exported(store, tmp_path / "labels.jsonl")
    assert (row["chosen_ended"], row["rejected_ended"]) == (False, True)


def test_a_ranking_of_four_is_six_rows(make_store: Make, tmp_path: Path) -> None:
    one = task(0, 4)
    store = make_store([one])
    choose(store, "anna", one, 2, 0, 3, 1)
    rows = exported(store, tmp_path / "labels.jsonl")
    assert [(row["chosen"][7], row["rejected"][7]) for row in rows] == [
        ("2", "0"), ("2", "3"), ("2", "1"), ("0", "3"), ("0", "1"), ("3", "1"),
    ]  # fmt: skip
    shown = shown_order(one.id, 4, "anna", 1)
    for row in rows:
        assert [shown[place - 1] for place in row["order"]] == [int(row["chosen"][7]), int(row["rejected"][7])]


def test_the_order_is_the_one_on_the_screen_for_each_annotator(make_store: Make, tmp_path: Path) -> None:
    tasks = [task(i) for i in range(30)]
    store = make_store(tasks, overlap=2)
    for one in tasks:
        choose(store, "anna", one, 0, 1)
        choose(store, "ben", one, 0, 1)
    orders = {(row["annotator"], *row["order"]) for row in exported(store, tmp_path / "labels.jsonl")}
    assert orders == {(who, *order) for who in ("anna", "ben") for order in ((1, 2), (2, 1))}


def test_ties_are_marked_and_skipped_flagged_and_gold_are_counted_only(make_store: Make, tmp_path: Path) -> None:
    tasks = [task(i) for i in range(4)]
    gold = task(9, right=0)
    store = make_store([*tasks, gold])
    for one, action in zip(tasks, ("tie", "skip", "flag"), strict=False):
        choose(store, "anna", one, action=action)  # type: ignore[arg-type]
    choose(store, "anna", tasks[3], 0, 1)
    choose(store, "anna", gold, 0, 1)
    text = export(store, tmp_path / "labels.jsonl")
    assert text.endswith(
        "labels.jsonl: 2 pairs (anna 2), ties: 1\nnot exported: skipped 1, flagged 1, gold questions 1"
    )
    rows = exported(store, tmp_path / "labels.jsonl")
    assert [(row["task"], row["tie"]) for row in rows] == [(tasks[0].id, True), (tasks[3].id, False)]
    assert rows[0]["order"] == [1, 2]
    first = shown_order(tasks[0].id, 2, "anna", 1)[0]
    assert rows[0]["chosen"] == tasks[0].answers[first]


def test_the_file_is_written_whole_or_not_at_all(make_store: Make, tmp_path: Path, monkeypatch: Any) -> None:
    store = make_store([task(0)])
    with pytest.raises(UserError, match="no labels yet"):
        export(store, tmp_path / "labels.jsonl")
    assert not (tmp_path / "labels.jsonl").exists()
    choose(store, "anna", task(0), 0, 1)
    export(store, tmp_path / "labels.jsonl")
    earlier = (tmp_path / "labels.jsonl").read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"labels.jsonl: cannot be written \(No space left on device\)"):
        export(store, tmp_path / "labels.jsonl")
    assert (tmp_path / "labels.jsonl").read_bytes() == earlier
    assert list(tmp_path.glob(".*partial")) == []


def test_a_folder_is_not_replaced(make_store: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store([task(0)])
    choose(store, "anna", task(0), 0, 1)
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work", encoding="utf-8")
    monkeypatch.chdir(folder)
    for path in (folder, Path(), Path("..")):
        with pytest.raises(UserError, match="is a folder; name a file in it"):
            export(store, path)
    assert (folder / "thesis.txt").read_text(encoding="utf-8") == "years of work"


LABEL = {"prompt": "p", "chosen": "a", "rejected": "b", "annotator": "ben", "task": "1", "order": [1, 2]}


@pytest.mark.parametrize("content", ["", "years of work\n", json.dumps(LABEL), "\0"])
def test_only_an_earlier_export_is_replaced(make_store: Make, tmp_path: Path, content: str) -> None:
    store = make_store([task(0), task(1)])
    choose(store, "anna", task(0), 0, 1)
    path = tmp_path / "labels.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=r"labels.jsonl: exists and is no export of this session.*another name$"):
        export(store, path)
    assert path.read_text(encoding="utf-8") == content
    path.unlink()
    export(store, path)
    choose(store, "anna", task(1), 0, 1)
    assert len(exported(store, path)) == 2
    other = make_store([task(0), task(1)], "other")
    choose(other, "ben", task(0), 0, 1)
    with pytest.raises(UserError, match="is no export of this session"):
        export(other, path)
    with pytest.raises(UserError, match=r"labels are JSON lines; choose a name such as labels.jsonl"):
        export(store, tmp_path / "labels.csv")


def test_an_export_can_be_imported(make_store: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = task(0, 4)
    store = make_store([one, task(1)])
    choose(store, "anna", one, 2, 0, 3, 1)
    choose(store, "anna", task(1), action="tie")
    export(store, tmp_path / "labels.jsonl")
    root = tmp_path / "project"
    (root / ".dvc").mkdir(parents=True)
    monkeypatch.setattr(importer, "dvc_add", lambda *arguments: None)
    printed: list[str] = []
    target, _ = importer.import_data(tmp_path / "labels.jsonl", root, log=printed.append)
    assert target.read_bytes() == (tmp_path / "labels.jsonl").read_bytes()
    assert any("7 pairs" in line for line in printed)
    assert any('ingest.labels: "labels.jsonl"' in line for line in printed)


def test_agreement_gold_questions_and_speed(make_store: Make) -> None:
    """Two annotators, four shared tasks: a a b b against a a b a."""
    tasks, gold = [task(i) for i in range(5)], [task(100 + i, right=0) for i in range(4)]
    store = make_store([*tasks, *gold], overlap=2)
    for one, anna, ben in zip(tasks, (0, 0, 1, 1), (0, 0, 1, 0), strict=False):
        choose(store, "anna", one, anna, 1 - anna)
        choose(store, "ben", one, ben, 1 - ben)
    choose(store, "anna", tasks[4], action="tie")  # nobody else has judged it
    for one, best in zip(gold, (0, 0, 1), strict=False):
        choose(store, "anna", one, best, 1 - best)
    choose(store, "anna", gold[3], action="skip")
    found = statistics(store)
    anna, ben = found["people"]
    assert [anna["name"], ben["name"]] == ["anna", "ben"]
    assert [anna[key] for key in ("labels", "ties", "skipped", "gold_right", "gold")] == [5, 1, 0, 2, 3]
    assert (ben["labels"], ben["gold"]) == (4, 0)
    assert (anna["agreement"], anna["shared"], ben["agreement"]) == (0.75, 4, 0.75)
    # Krippendorff: 1 − (n − 1)·Σ o_ck / Σ n_c n_k with n = 8, one unit of four that disagrees (o = 2), n_c = 5 and 3
    assert found["alpha"] == pytest.approx(1 - 7 * 2 / (2 * 5 * 3))
    assert (found["done"], found["wanted"]) == (9, 10)
    text = render(found)
    assert "75% of 4" in text
    assert "2 of 3" in text
    assert "9 of 10; Krippendorff's alpha 0.53" in text


def test_a_pause_does_not_count_for_the_speed(make_store: Make) -> None:
    tasks = [task(i) for i in range(4)]
    store = make_store(tasks)
    now = 0.0
    for seconds in (2.0, 4.0, 7200.0, 6.0):
        one = store.view("anna", now).task
        assert one is not None
        now += seconds
        store.judge("anna", one.id, "tie", [], now)
    (anna,) = statistics(store)["people"]
    assert (anna["seconds"], anna["per_hour"]) == (4.0, 900.0)
