"""How large the difference of two JSON, JSONL or CSV files is."""

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

READERS: Mapping[str, Callable[[str], Any]] = {
    ".json": json.loads,
    ".jsonl": lambda text: [json.loads(line) for line in text.splitlines() if line],
    ".csv": lambda text: list(csv.DictReader(text.splitlines())),
}


def difference(suffix: str, before: str, after: str) -> str:
    """`largest relative difference 3e-16 at gold_policy` where only numbers differ, |a − b| over the larger of |a| and
    |b|; else the first place with other content. `suffix` is one of `READERS`."""
    try:
        old, new = (dict(_leaves(READERS[suffix](text))) for text in (before, after))
    except ValueError as error:
        return f"one of the two files cannot be read ({error})"
    if odd := [place for place in {**old, **new} if place not in old or place not in new]:
        return f"{odd[0]} is in one of the two only"
    largest, where = 0.0, ""
    for place, a in old.items():
        b = new[place]
        if a == b:
            continue
        if not isinstance(a, float) or not isinstance(b, float):
            return f"other content at {place}"
        relative = abs(a - b) / max(abs(a), abs(b))
        if relative > largest:
            largest, where = relative, place
    return f"largest relative difference {largest:.0e} at {where}" if where else "equal numbers, written otherwise"


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted place, value) of all that is no list or mapping; numbers, also those of a CSV, as float."""
    if isinstance(value, Mapping | list):
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value, start=1):
            yield from _leaves(part, f"{place}.{key}" if place else str(key))
        return
    try:
        yield place, value if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        yield place, value
