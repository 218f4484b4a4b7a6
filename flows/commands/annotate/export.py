"""Judgements as preference pairs in a JSONL file that `leash import` reads."""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path

from flows.commands.annotate.store import Judgement, Store
from flows.commands.annotate.tasks import Task
from rlhf_core.errors import UserError
from rlhf_core.files import atomic
from tasks.datasets.jsonl import Row, iter_jsonl, write_jsonl


def export(store: Store, path: Path) -> str:
    """Write the pairs to `path`, whole or not at all, and return what was written, in words. Gold questions, skipped
    and flagged tasks are left out. Raises UserError where there are no labels, and where `path` is something else than
    an earlier export."""
    _require_replaceable(path)
    tasks, judgements = store.tasks(), store.judgements()
    labels = [one for one in judgements if tasks[one.task].right is None]
    rows = [row for one in labels for row in pair_rows(tasks[one.task], one)]
    if not rows:
        raise UserError(f"{store.path}: no labels yet, so nothing to export")
    try:
        with atomic(path) as partial:
            write_jsonl(partial, rows)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another place") from None
    names = list(dict.fromkeys(row["annotator"] for row in rows))
    people = ", ".join(f"{name} {sum(row['annotator'] == name for row in rows):,}" for name in names)
    skipped, flagged = (sum(one.action == action for one in labels) for action in ("skip", "flag"))
    ties = sum(row["tie"] for row in rows)
    return (
        f"{path}: {len(rows):,} pairs ({people}), ties: {ties:,}\n"
        f"not exported: skipped {skipped:,}, flagged {flagged:,}, gold questions {len(judgements) - len(labels):,}"
    )


def _require_replaceable(path: Path) -> None:
    if path.is_dir():
        raise UserError(f"{path}: is a folder; name a file in it, such as {path / 'labels.jsonl'}")
    if path.exists() and not _is_export(path):
        raise UserError(f"{path}: exists and is no earlier export, so it is not replaced; choose another name")


def _is_export(path: Path) -> bool:
    """Whether the first row of a file has the columns that only labels have."""
    try:
        first = next(iter_jsonl(path), None) if path.is_file() else None
    except (OSError, UserError):
        return False
    return first is not None and {"annotator", "task", "order"} <= first[1].keys()


def pair_rows(task: Task, judgement: Judgement) -> Iterator[Row]:
    """A row for each two answers; none for a skipped or flagged task. In a tie chosen is the one shown first."""
    order: Mapping[str, list[int]] = {"rank": judgement.ranking, "tie": judgement.shown}
    for better, worse in combinations(order.get(judgement.action, []), 2):
        yield {
            "prompt": task.prompt,
            "chosen": task.answers[better],
            "rejected": task.answers[worse],
            "chosen_ended": task.ended[better],
            "rejected_ended": task.ended[worse],
            "tie": judgement.action == "tie",
            "annotator": judgement.annotator,
            "time": datetime.fromtimestamp(judgement.time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "order": [judgement.shown.index(place) + 1 for place in (better, worse)],
            "task": judgement.task,
        }
