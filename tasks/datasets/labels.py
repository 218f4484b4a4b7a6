"""Who labelled how many pairs, how far the annotators agree, and pairs that contradict each other."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from rlhf_core.evaluation.krippendorff import agreements, krippendorff_alpha
from tasks.datasets.sources.example import Example

Unit = Mapping[str, float]
"""Two answers to a prompt: annotator → 1 or 0 (the first or the second one in alphabetical order), or 0.5 for a tie."""


def label_figures(examples: Iterable[Example]) -> dict[str, Any] | None:
    """Pairs and ties by annotator, pairs that several of them labelled, Krippendorff's alpha (nominal), and for each
    annotator the share of the others' labels of the same pairs that are equal. None without annotators."""
    labelled = [example for example in examples if example.annotator is not None]
    if not labelled:
        return None
    units = list(units_of(labelled))
    shared = agreements(units)
    counts = Counter(example.annotator or "" for example in labelled if not example.tie)
    names = sorted({name for unit in units for name in unit})
    return {
        "annotators": {name: counts[name] for name in names},
        "ties": sum(example.tie for example in labelled),
        "pairs_by_several": sum(len(unit) > 1 for unit in units),
        "alpha": krippendorff_alpha(units),
        "agreement": {name: fmean(shared[name]) if name in shared else None for name in names},
    }


def units_of(labelled: Sequence[Example]) -> Iterable[Unit]:
    """The labels of each pair of answers, in whatever order they were shown."""
    units: dict[tuple[str, ...], dict[str, float]] = {}
    for example in labelled:
        first, second = sorted(example.answers)
        value = 0.5 if example.tie else float(example.chosen == first)
        units.setdefault((example.prompt_id, first, second), {})[example.annotator or ""] = value
    return units.values()


def as_text(figures: Mapping[str, Any]) -> str:
    """The figures in one line."""
    counts = ", ".join(f"{name} {count:,}" for name, count in figures["annotators"].items())
    alpha = "" if figures["alpha"] is None else f", Krippendorff's alpha {figures['alpha']:.2f}"
    shared = f"{figures['pairs_by_several']:,} pairs by several annotators"
    return f"labels: {counts}; {figures['ties']:,} ties, {shared}{alpha}"


def contradictions(pairs: Iterable[Example]) -> list[str]:
    """How many pairs (two answers to a prompt) are chosen both ways: by one annotator, or without any, they contradict
    each other; by different ones it is disagreement. White space around an answer does not count."""
    same: dict[tuple[str, ...], list[Example]] = defaultdict(list)
    for example in pairs:
        same[example.prompt_id, *sorted(text.strip() for text in example.answers)].append(example)
    found: dict[bool, list[str]] = {True: [], False: []}
    for rows in same.values():
        one_way = [row for row in rows if (row.chosen or "").strip() == (rows[0].chosen or "").strip()]
        other_way = [row for row in rows if row not in one_way]
        if other_way:
            by_one = ((a, b) for a in one_way for b in other_way if a.annotator == b.annotator)
            a, b = next(by_one, (one_way[0], other_way[0]))
            found[a.annotator == b.annotator].append(f"{place_of(a)} and {place_of(b)}")
    words = {True: "contradictions", False: "disagreements of annotators"}
    return [
        f"{words[kind]}: {len(places):,} {'pair is' if len(places) == 1 else 'pairs are'} chosen both ways "
        f"({'; '.join(places[:2])}{'; …' if len(places) > 2 else ''})"
        for kind, places in found.items()
        if places
    ]


def place_of(example: Example) -> str:
    """File and row, for messages."""
    return f"{example.file} row {example.row}"
