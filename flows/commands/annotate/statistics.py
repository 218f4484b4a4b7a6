"""Counts, speed, agreement and gold questions of an annotation session."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from flows.commands.annotate.store import Judgement, Store
from flows.commands.annotate.tasks import Task
from flows.text import table
from rlhf_core.evaluation.krippendorff import agreements, krippendorff_alpha

Unit = tuple[str, int, int]
"""A task and the places of two of its answers."""


@dataclass(frozen=True)
class Person:
    """The figures of one annotator."""

    name: str
    labels: int
    """Tasks judged, ties included, without gold questions."""
    ties: int
    skipped: int
    flagged: int
    seconds: float | None
    """Median of a judgement; those with a pause are left out."""
    per_hour: float | None
    """Judgements an hour of work."""
    agreement: float | None
    """Share of the pairs that another annotator judged too in which both judged the same; a tie is a judgement."""
    shared: int
    """The number of such comparisons."""
    gold_right: int
    gold: int
    """Gold questions answered."""


@dataclass(frozen=True)
class Statistics:
    """The figures of a session."""

    people: list[Person]
    alpha: float | None
    """Krippendorff's alpha over all pairs (nominal: first, second or tie); None where nothing could disagree."""
    done: int
    """Judgements that count, of all annotators."""
    wanted: int
    """Tasks times overlap."""


def statistics(store: Store) -> Statistics:
    """The figures so far; annotators in the order of their first judgement."""
    tasks, judgements = store.tasks(), store.judgements()
    overlap = (store.settings() or {}).get("overlap", 1)
    by_name: dict[str, list[Judgement]] = defaultdict(list)
    for judgement in judgements:
        by_name[judgement.annotator].append(judgement)
    units = pair_values(tasks, judgements)
    values = list(units.values())
    same = agreements(values)
    people = [_person(name, found, tasks, same.get(name, []), store.seconds(name)) for name, found in by_name.items()]
    wanted = overlap * sum(task.right is None for task in tasks.values())
    return Statistics(people, krippendorff_alpha(values), sum(person.labels for person in people), wanted)


def pair_values(tasks: Mapping[str, Task], judgements: Sequence[Judgement]) -> dict[Unit, dict[str, float]]:
    """For each pair of answers, gold questions left out, each annotator's judgement: 1 where the first answer is
    preferred, 0 where the second is, 0.5 for a tie."""
    found: dict[Unit, dict[str, float]] = defaultdict(dict)
    for judgement in judgements:
        task = tasks[judgement.task]
        if task.right is not None or judgement.action not in {"rank", "tie"}:
            continue
        for a, b in task.pairs:
            places = judgement.ranking
            value = 0.5 if judgement.action == "tie" else float(places.index(a) < places.index(b))
            found[judgement.task, a, b][judgement.annotator] = value
    return dict(found)


def _person(
    name: str,
    judgements: Sequence[Judgement],
    tasks: Mapping[str, Task],
    same: Sequence[bool],
    seconds: Sequence[float],
) -> Person:
    labels = [one for one in judgements if tasks[one.task].right is None]
    gold = [one for one in judgements if tasks[one.task].right is not None and one.action in {"rank", "tie"}]
    count = {action: sum(one.action == action for one in labels) for action in ("rank", "tie", "skip", "flag")}
    return Person(
        name=name,
        labels=count["rank"] + count["tie"],
        ties=count["tie"],
        skipped=count["skip"],
        flagged=count["flag"],
        seconds=median(seconds) if seconds else None,
        per_hour=3600 / fmean(seconds) if seconds else None,
        agreement=fmean(same) if same else None,
        shared=len(same),
        gold_right=sum(one.ranking[:1] == [tasks[one.task].right] for one in gold),
        gold=len(gold),
    )


def render(found: Statistics) -> str:
    """The figures as text for the terminal."""
    heading = ["annotator", "labels", "ties", "skipped", "flagged", "median", "an hour", "agrees", "gold"]
    rows = [
        [
            person.name,
            *map(str, (person.labels, person.ties, person.skipped, person.flagged)),
            "–" if person.seconds is None else f"{person.seconds:.1f} s",
            "–" if person.per_hour is None else f"{person.per_hour:.0f}",
            "–" if person.agreement is None else f"{person.agreement:.0%} of {person.shared}",
            f"{person.gold_right} of {person.gold}" if person.gold else "–",
        ]
        for person in found.people
    ]
    alpha = "" if found.alpha is None else f"; Krippendorff's alpha {found.alpha:.2f}"
    return "\n".join(filter(None, [table([heading, *rows]) if rows else "", f"{found.done} of {found.wanted}{alpha}"]))
