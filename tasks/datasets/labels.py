"""Who labelled how many pairs, and how far the annotators agree."""

from collections import Counter
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
