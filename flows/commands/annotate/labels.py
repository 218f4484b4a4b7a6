"""What a session has found: the labels as a file that `leash import` reads, and counts, speed and agreement."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from flows.commands.annotate.store import Judgement, Store, speed
from flows.text import table
from rlhf_core.errors import UserError
from rlhf_core.evaluation.krippendorff import agreements, krippendorff_alpha
from rlhf_core.files import atomic
from tasks.datasets.jsonl import Row, iter_jsonl, write_jsonl

ENDINGS = (".jsonl", ".ndjson", ".json")
"""Of the names of an export, so that `leash import` reads it."""


def export(store: Store, path: Path) -> str:
    """Write a row for each two answers of a task to `path`, whole or not at all, and return what was written, in words.
    In a tie chosen is the answer that was shown first. Gold questions, skipped and flagged tasks are left out. Raises
    UserError where there are no labels, and where `path` is something else than an earlier export."""
    if path.is_dir():
        raise UserError(f"{path}: is a folder; name a file in it, such as {path / 'labels.jsonl'}")
    if path.suffix not in ENDINGS:
        raise UserError(f"{path}: labels are JSON lines; choose a name such as {path.with_suffix('.jsonl').name}")
    if path.exists() and not _is_export(path, store):
        raise UserError(f"{path}: exists and is no export of this session, so it is not replaced; choose another name")
    judgements = store.judgements()
    labels = [one for one in judgements if store.tasks[one.task].right is None]
    rows: list[Row] = []
    for one in labels:
        task = store.tasks[one.task]
        best_first = {"rank": one.ranking, "tie": one.shown}.get(one.action, [])
        for better, worse in combinations(best_first, 2):
            rows.append(
                {
                    "prompt": task.prompt,
                    "chosen": task.answers[better],
                    "rejected": task.answers[worse],
                    "chosen_ended": task.ended[better],
                    "rejected_ended": task.ended[worse],
                    "tie": one.action == "tie",
                    "annotator": one.annotator,
                    "time": datetime.fromtimestamp(one.time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                    "order": [one.shown.index(place) + 1 for place in (better, worse)],
                    "task": one.task,
                }
            )
    if not rows:
        raise UserError(f"{store.path}: no labels yet, so nothing to export")
    try:
        with atomic(path) as partial:
            write_jsonl(partial, rows)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another place") from None
    people = ", ".join(f"{name} {count:,}" for name, count in Counter(row["annotator"] for row in rows).items())
    actions = Counter(one.action for one in labels)
    return (
        f"{path}: {len(rows):,} pairs ({people}), ties: {sum(row['tie'] for row in rows):,}\nnot exported: skipped "
        f"{actions['skip']:,}, flagged {actions['flag']:,}, gold questions {len(judgements) - len(labels):,}"
    )


def _is_export(path: Path, store: Store) -> bool:
    """Whether all rows of a file are labels of this session's tasks by its annotators."""
    people = {one.annotator for one in store.judgements()}
    try:
        rows = [row for _, row in iter_jsonl(path)] if path.is_file() else []
    except (OSError, UserError):
        return False
    return bool(rows) and all(
        "order" in row
        and row.get("annotator") in people
        and (task := store.tasks.get(str(row.get("task")))) is not None
        and task.prompt == row.get("prompt")
        for row in rows
    )


def statistics(store: Store) -> dict[str, Any]:
    """The figures so far. `people`: for each annotator, in the order of their first judgement, counts (`labels` are
    tasks judged, ties included, without gold questions), the figures of `speed`, and `agreement`: the share of the
    `shared` pairs that another annotator judged too in which both judged the same. `alpha`: Krippendorff's over all
    pairs (nominal: first, second or tie), None where nothing could disagree. `done` of `wanted` judgements count."""
    by_name: dict[str, list[Judgement]] = defaultdict(list)
    values: dict[tuple[str, int, int], dict[str, float]] = defaultdict(dict)
    """For each pair of answers, 1 where an annotator prefers the first, 0 where the second, 0.5 for a tie."""
    for one in store.judgements():
        by_name[one.annotator].append(one)
        task = store.tasks[one.task]
        for a, b in task.pairs if task.right is None and one.action in {"rank", "tie"} else ():
            better = 0.5 if one.action == "tie" else float(one.ranking.index(a) < one.ranking.index(b))
            values[one.task, a, b][one.annotator] = better
    same = agreements(values.values())
    people: list[dict[str, Any]] = []
    for name, judged in by_name.items():
        count = Counter(one.action for one in judged if store.tasks[one.task].right is None)
        gold = [(one, store.tasks[one.task].right) for one in judged if one.action in {"rank", "tie"}]
        right = [one.ranking[:1] == [place] for one, place in gold if place is not None]
        seconds, per_hour = speed(one.seconds for one in judged)
        equal = same.get(name, [])
        person = {
            "name": name,
            "labels": count["rank"] + count["tie"],
            "ties": count["tie"],
            "skipped": count["skip"],
            "flagged": count["flag"],
            "seconds": seconds,
            "per_hour": per_hour,
            "agreement": fmean(equal) if equal else None,
            "shared": len(equal),
            "gold_right": sum(right),
            "gold": len(right),
        }
        people.append(person)
    return {
        "people": people,
        "alpha": krippendorff_alpha(list(values.values())),
        "done": sum(person["labels"] for person in people),
        "wanted": store.settings["overlap"] * sum(task.right is None for task in store.tasks.values()),
    }


def render(found: Mapping[str, Any]) -> str:
    """The figures of `statistics` as text for the terminal."""
    rows = [["annotator", "labels", "ties", "skipped", "flagged", "median", "an hour", "agrees", "gold"]]
    for person in found["people"]:
        counts = [str(person[name]) for name in ("labels", "ties", "skipped", "flagged")]
        seconds = "–" if person["seconds"] is None else f"{person['seconds']:.1f} s"
        per_hour = "–" if person["per_hour"] is None else f"{person['per_hour']:.0f}"
        agrees = "–" if person["agreement"] is None else f"{person['agreement']:.0%} of {person['shared']}"
        gold = f"{person['gold_right']} of {person['gold']}" if person["gold"] else "–"
        rows.append([person["name"], *counts, seconds, per_hour, agrees, gold])
    alpha = "" if found["alpha"] is None else f"; Krippendorff's alpha {found['alpha']:.2f}"
    figures = f"{found['done']} of {found['wanted']}{alpha}"
    return f"{table(rows)}\n{figures}" if found["people"] else figures
