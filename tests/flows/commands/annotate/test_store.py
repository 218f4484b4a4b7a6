"""Who gets which task, and what is stored: undo, overlap, leases, gold questions, two requests at once."""

import shutil
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.commands.annotate import store as module
from flows.commands.annotate.store import (
    LEASE_SECONDS,
    RESTART_SECONDS,
    TOKEN_SECONDS,
    AlreadyJudged,
    Store,
    UnknownTask,
    create,
)
from flows.commands.annotate.tasks import Task
from rlhf_core.errors import UserError
from tests.flows.commands.annotate.conftest import task

Make = Callable[..., Store]


def on_screen(store: Store, annotator: str, now: float = 0.0) -> Task:
    found = store.view(annotator, now).task
    assert found is not None
    return found


def test_a_choice_is_stored_as_places_of_the_answers_whatever_order_was_shown(make_store: Make) -> None:
    store = make_store([task(i, 4) for i in range(20)])
    for now in range(20):
        view = store.view("anna", now)
        assert view.task is not None
        store.judge("anna", view.task.id, "rank", [view.shown.index(place) for place in (2, 0, 3, 1)], now + 0.5)
    judgements = store.judgements()
    assert all(one.ranking == [2, 0, 3, 1] for one in judgements)
    assert [one.seconds for one in judgements] == [0.5] + [1.0] * 19, "from the moment the task was sent"
    assert len({tuple(one.shown) for one in judgements}) > 5
    assert store.view("anna", 30.0).task is None


@pytest.mark.parametrize("places", [[0], [0, 0], [0, 2], [0, 1, 2], []])
def test_a_ranking_has_each_answer_once(make_store: Make, places: list[int]) -> None:
    store = make_store([task(0)])
    with pytest.raises(UnknownTask):
        store.judge("anna", on_screen(store, "anna").id, "rank", places, 1.0)
    with pytest.raises(UnknownTask):
        store.judge("anna", task(1).id, "tie", [], 1.0)
    assert store.judgements() == []


def test_undo_takes_back_the_last_choices_one_by_one_and_shows_them_again(make_store: Make) -> None:
    store = make_store([task(i) for i in range(4)])
    ids = []
    for now in range(3):
        ids.append(on_screen(store, "anna", now).id)
        store.judge("anna", ids[-1], "tie", [], now)
    for place in (2, 1):
        view = store.undo("anna", ids[place], 10.0)
        assert view.task is not None
        assert (view.task.id, view.last, view.done) == (ids[place], ids[place - 1], place)
    with pytest.raises(AlreadyJudged):
        store.undo("anna", ids[1], 11.0)  # the same request again, as after a lost answer
    assert [one.task for one in store.judgements()] == ids[:1]
    store.judge("anna", ids[1], "rank", [0, 1], 12.0)
    assert on_screen(store, "anna", 13.0).id == ids[2]


def test_the_second_choice_for_a_task_is_refused_and_the_first_stays(make_store: Make) -> None:
    """Two tabs show the same task."""
    store = make_store([task(0), task(1)])
    first, second = on_screen(store, "anna", 0.0), on_screen(store, "anna", 1.0)
    assert first == second
    store.judge("anna", first.id, "rank", [0, 1], 2.0)
    with pytest.raises(AlreadyJudged):
        store.judge("anna", first.id, "tie", [], 3.0)
    assert [one.action for one in store.judgements()] == ["rank"]


def test_two_annotators_get_different_tasks_and_an_expired_lease_is_given_on(make_store: Make) -> None:
    store = make_store([task(0), task(1)])
    a, b = on_screen(store, "anna", 0.0), on_screen(store, "ben", 0.0)
    assert a != b
    assert store.view("cora", 1.0).task is None
    assert on_screen(store, "anna", LEASE_SECONDS - 1) == a, "a look renews it"
    later = LEASE_SECONDS + 1
    assert on_screen(store, "cora", later) == b
    store.judge("cora", b.id, "tie", [], later)
    assert store.view("ben", later).task is None
    store.judge("ben", b.id, "tie", [], later)  # he had it on the screen all the time: not lost
    assert len(store.judgements()) == 2


@pytest.mark.parametrize("overlap", [1, 2, 3])
def test_each_task_goes_to_as_many_annotators_as_the_overlap(make_store: Make, overlap: int) -> None:
    tasks = [task(i) for i in range(12)]
    store = make_store(tasks, overlap=overlap)
    people = ["anna", "ben", "cora"]
    for now in range(100):
        for who in people:
            view = store.view(who, now)
            if view.task is not None:
                store.judge(who, view.task.id, "tie", [], now)
    by_task = {one.id: [j.annotator for j in store.judgements() if j.task == one.id] for one in tasks}
    assert all(len(names) == len(set(names)) == overlap for names in by_task.values())


def test_a_skipped_task_goes_to_another_annotator(make_store: Make) -> None:
    store = make_store([task(0)])
    one = on_screen(store, "anna")
    assert store.judge("anna", one.id, "skip", [], 1.0).task is None
    assert on_screen(store, "ben", 2.0) == one


def test_gold_questions_come_after_every_n_tasks_for_each_annotator(make_store: Make) -> None:
    gold = [task(100 + i, right=0) for i in range(3)]
    tasks = [task(i) for i in range(7)]
    store = make_store([*tasks, *gold], gold_every=2, overlap=2)
    for who in ("anna", "ben"):
        kinds, counts = [], []
        while (view := store.view(who, 1.0)).task is not None:
            kinds.append("gold" if view.task.right is not None else "label")
            counts.append((view.done, view.left))
            store.judge(who, view.task.id, "tie", [], 2.0)
        assert kinds == ["label", "label", "gold"] * 3 + ["label"]
        assert counts == [(done, 10 - done) for done in range(10)]


def test_undo_of_a_gold_question_shows_it_again(make_store: Make) -> None:
    store = make_store([task(0), task(1), task(100, right=0)], gold_every=1)
    store.judge("anna", on_screen(store, "anna").id, "tie", [], 1.0)
    gold = on_screen(store, "anna", 2.0)
    assert gold.right == 0
    store.judge("anna", gold.id, "tie", [], 3.0)
    assert store.undo("anna", gold.id, 4.0).task == gold


def test_everything_is_there_after_the_database_is_opened_again(make_store: Make, tmp_path: Path) -> None:
    store = make_store([task(0), task(1), task(2)], answers=2)
    first = on_screen(store, "anna")
    store.judge("anna", first.id, "rank", [1, 0], 1.0)
    second, judged, settings = on_screen(store, "anna", 2.0), store.judgements(), store.settings
    store.close()
    again = Store(tmp_path / "labels.db")
    assert on_screen(again, "anna", 3.0) == second
    assert again.judgements() == judged
    assert again.settings == settings
    assert list(again.tasks.values()) == [task(0), task(1), task(2)]
    again.close()


def test_a_commit_is_on_the_disk_when_it_returns(make_store: Make) -> None:
    """EXTRA flushes the file and its folder at every commit (SQLite documentation of `synchronous`)."""
    store = make_store([task(0)])
    assert store._base.execute("PRAGMA synchronous").fetchone() == (3,)
    assert store._base.execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_a_first_start_that_was_killed_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, settings = tmp_path / "labels.db", {"overlap": 1, "gold_every": 1, "seed": 1}
    monkeypatch.setattr(module, "SCHEMA", module.SCHEMA + "; CREATE TABLE tasks (again)")
    with pytest.raises(sqlite3.Error):
        create(path, settings, [task(0)])
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    create(path, settings, [task(0)])
    assert list(tmp_path.iterdir()) == [path]
    store = Store(path)
    assert list(store.tasks.values()) == [task(0)]
    store.close()


def test_many_requests_at_once_store_each_task_once(make_store: Make) -> None:
    store = make_store([task(i) for i in range(40)])
    refused = []

    def work(who: str) -> None:
        while (view := store.view(who, 1.0)).task is not None:
            try:
                store.judge(who, view.task.id, "tie", [], 1.0)
            except AlreadyJudged:
                refused.append(who)

    threads = [threading.Thread(target=work, args=(who,)) for who in ("anna", "anna", "ben", "ben")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert sorted(one.task for one in store.judgements()) == sorted(store.tasks)


def test_tokens_of_others_and_old_ones_end(make_store: Make) -> None:
    store = make_store([task(0)])
    store.add_tokens({"anna": "a1", "ben": "b1"}, 0.0)
    store.add_tokens({"anna": "a2"}, 60.0)
    assert store.tokens(60.0) == [("a1", "anna"), ("a2", "anna")], "an open page goes on after a restart"
    store.add_tokens({"anna": "a3"}, RESTART_SECONDS + 1)
    assert store.tokens(RESTART_SECONDS + 1) == [("a2", "anna"), ("a3", "anna")]
    store.judge("anna", task(0).id, "tie", [], 3 * RESTART_SECONDS)
    store.add_tokens({"anna": "a4"}, 4 * RESTART_SECONDS)
    assert len(store.tokens(4 * RESTART_SECONDS)) == 3, "anna has labelled within the hour"
    store.add_tokens({"anna": "a5"}, 5 * RESTART_SECONDS)
    assert store.tokens(5 * RESTART_SECONDS) == [("a4", "anna"), ("a5", "anna")]


def test_an_address_ends_after_seven_days_while_the_server_runs(make_store: Make) -> None:
    store = make_store([task(0)])
    store.add_tokens({"anna": "a1"}, 0.0)
    assert store.tokens(TOKEN_SECONDS) == [("a1", "anna")]
    assert store.tokens(TOKEN_SECONDS + 1) == []


def test_a_skip_that_another_annotator_has_taken_over_is_not_undone(make_store: Make) -> None:
    store = make_store([task(0), task(1), task(2)])
    one = on_screen(store, "anna")
    store.judge("anna", one.id, "skip", [], 1.0)
    assert on_screen(store, "ben", 2.0) == one
    with pytest.raises(AlreadyJudged):
        store.undo("anna", one.id, 3.0)
    assert [(j.annotator, j.task, j.action) for j in store.judgements()] == [("anna", one.id, "skip")]
    store.judge("ben", one.id, "skip", [], 4.0)
    assert store.undo("anna", one.id, 5.0).task == one


def test_the_database_file_alone_has_every_choice(make_store: Make, tmp_path: Path) -> None:
    store = make_store([task(0), task(1)])
    store.judge("anna", on_screen(store, "anna").id, "tie", [], 1.0)
    copy = Store(Path(shutil.copy(store.path, tmp_path / "copy.db")))
    assert copy.judgements() == store.judgements() != []
    copy.close()
    assert [path.name for path in tmp_path.glob("labels*")] == ["labels.db"]


def test_a_session_of_an_earlier_version_continues(make_store: Make, tmp_path: Path) -> None:
    """It has a write-ahead log, here as a kill leaves it."""
    store = make_store([task(0), task(1)])
    store._base.execute("PRAGMA journal_mode = WAL")
    store.judge("anna", on_screen(store, "anna").id, "tie", [], 1.0)
    shutil.copytree(store.path.parent, tmp_path / "killed")
    assert (tmp_path / "killed" / f"{store.path.name}-wal").stat().st_size
    again = Store(tmp_path / "killed" / store.path.name)
    assert again.judgements() == store.judgements() != []
    again.close()
    assert [path.name for path in (tmp_path / "killed").glob("*.db*")] == [store.path.name]


def test_a_file_that_is_no_database_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "labels.db").write_text("no database " * 100, encoding="utf-8")
    with pytest.raises(UserError, match=r"cannot be opened.*another --name"):
        Store(tmp_path / "labels.db")
