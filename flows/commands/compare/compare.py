"""The comparison table of several runs in the terminal, with the columns of the report page, the paired differences
between the runs, and the parameters that differ."""

import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.commands.compare.paired import Paired, column_of, paired
from flows.commands.compare.sources import Compared, find
from flows.text import shorten, table
from rlhf_core.errors import UserError
from rlhf_core.evaluation.intervals import Estimate
from tasks.page.comparison_table import Cell, Column, Figures, cells, columns_of, label
from tasks.page.wording import MISSING, number

NARROWEST = 60
LONGEST_NAME = 20
GAP = 2


def compare(root: Path, names: Sequence[str], models: Sequence[str]) -> tuple[dict[str, Any], str]:
    """(for `--json`, for a terminal) of the runs called `names` (none: this checkout), and of `models` (none: all).

    Raises UserError for a name that means no run or several, and for models that no run has.
    """
    runs = [find(root, name) for name in names or ["."]]
    _require(models, runs)
    chosen = [_chosen(run, models) for run in runs]
    width = max(NARROWEST, shutil.get_terminal_size((120, 24)).columns)
    differences = [paired(runs[0], run, list(models)) for run, models in zip(runs[1:], chosen[1:], strict=True)]
    return _content(runs, chosen, differences), "\n".join(_lines(runs, chosen, differences, width))


def _require(models: Sequence[str], runs: Sequence[Compared]) -> None:
    known = list(dict.fromkeys(name for run in runs for name in run.evaluation["models"]))
    if unknown := [name for name in models if name not in known]:
        raise UserError(f"no run has a model called {', '.join(unknown)}; there are {', '.join(known)}")


def _chosen(run: Compared, models: Sequence[str]) -> dict[str, Figures]:
    return {name: one for name, one in run.evaluation["models"].items() if not models or name in models}


def _content(
    runs: Sequence[Compared], chosen: Sequence[Mapping[str, Figures]], differences: Sequence[Paired | str]
) -> dict[str, Any]:
    described = [
        {
            "run": run.name,
            "source": run.source,
            **{key: run.evaluation.get(key) for key in ("win_rate_judge", "prompts", "seeds")},
            "models": dict(models),
        }
        for run, models in zip(runs, chosen, strict=True)
    ]
    parameters = {key: list(values) for key, values in differing(runs)}
    less = [_difference(run, found) for run, found in zip(runs[1:], differences, strict=True)]
    return {"runs": described, "differences": less, "parameters": parameters}


def _difference(run: Compared, found: Paired | str) -> dict[str, Any]:
    """A run less the first one."""
    if isinstance(found, str):
        return {"run": run.name, "missing": found}
    models = {
        name: {figure: {"difference": e.mean, "ci95": e.interval} for figure, e in one.items()}
        for name, one in found.models.items()
    }
    return {"run": run.name, "prompts": found.prompts, "models": models}


def _difference_lines(names: Sequence[str], differences: Sequence[Paired | str], width: int) -> Iterator[str]:
    for name, found in zip(names[1:], differences, strict=True):
        yield ""
        if isinstance(found, str):
            yield from _wrapped(found, width)
            continue
        yield from _wrapped(f"{name} less {names[0]}, paired by prompt ({found.prompts} prompts), 95% interval", width)
        figures = list(dict.fromkeys(figure for one in found.models.values() for figure in one))
        heads = [(column_of(figure).name, column_of(figure).unit) for figure in figures]
        rows = [
            (label(model), *(_signed(figure, one.get(figure)) for figure in figures))
            for model, one in found.models.items()
        ]
        yield table([("model", *(head for head, _ in heads)), ("", *(unit for _, unit in heads)), *rows])


def _signed(figure: str, found: Estimate | None) -> str:
    if found is None:
        return MISSING
    digits = column_of(figure).digits
    value, low, high = (number(each, digits, sign=True) for each in (found.mean, *found.interval))
    return f"{value} [{low}, {high}]"


def _lines(
    runs: Sequence[Compared],
    chosen: Sequence[Mapping[str, Figures]],
    differences: Sequence[Paired | str],
    width: int,
) -> Iterator[str]:
    names = _short_names(runs)
    for name, run in zip(names, runs, strict=True):
        yield from _wrapped(f"{name}: {run.source}; {_conditions(run)}", width)
    if len({_conditions(run) for run in runs}) > 1:
        yield from _wrapped(
            "NOTE: the runs differ in judge, prompts or sampling seeds: do not compare their figures", width
        )
    everything = {f"{place}/{name}": one for place, models in enumerate(chosen) for name, one in models.items()}
    for band in _bands(_columns(names, chosen, columns_of(everything)), width, keys=1 + (len(runs) > 1)):
        yield ""
        yield table(zip(*band, strict=True))
    yield ""
    yield from _wrapped("[95% interval over prompts; training seeds are not in it]  * best of its run", width)
    yield from _difference_lines(names, differences, width)
    if rows := list(differing(runs)):
        yield ""
        yield table(
            [
                ("parameter", *names),
                *((key, *(MISSING if value is None else shorten(value) for value in values)) for key, values in rows),
            ]
        )
    elif len(runs) > 1 and all(run.params is not None for run in runs):
        yield "no parameter differs"
    for name, run in zip(names, runs, strict=True):
        if run.params is None and len(runs) > 1:
            yield f"parameters of {name} are not known"


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent="  ")


def differing(runs: Sequence[Compared]) -> Iterator[tuple[str, tuple[str | None, ...]]]:
    """Parameters that differ between runs, with their values; none where those of a run are not known."""
    known = [run.params for run in runs if run.params is not None]
    if len(known) != len(runs):
        return
    for key in dict.fromkeys(key for params in known for key in params):
        values = tuple(params.get(key) for params in known)
        if len(set(values)) > 1:
            yield key, values


def _columns(
    names: Sequence[str], chosen: Sequence[Mapping[str, Figures]], columns: Sequence[Column]
) -> list[list[str]]:
    """Columns of text, heading and unit first: run (where there are several), model, then the figures. The runs of one
    model are below each other."""
    models = list(dict.fromkeys(model for one in chosen for model in one))
    rows = [(place, model) for model in models for place, one in enumerate(chosen) if model in one]
    heads = [["model", "", *(label(model, chosen[place]) for place, model in rows)]]
    if len(names) > 1:
        heads.insert(0, ["run", "", *(names[place] for place, _ in rows)])
    for column in columns:
        found = [cells(one, column) for one in chosen]
        heads.append([column.name, column.unit, *(_cell_text(found[place][model]) for place, model in rows)])
    return heads


def _bands(columns: list[list[str]], width: int, keys: int) -> Iterator[list[list[str]]]:
    """The columns in groups that fit `width`, the first `keys` columns before each group."""
    widths = [max(map(len, column)) + GAP for column in columns]
    fixed = sum(widths[:keys])
    band: list[int] = []
    for place in range(keys, len(columns)):
        if band and fixed + sum(widths[other] for other in band) + widths[place] - GAP > width:
            yield [*columns[:keys], *(columns[other] for other in band)]
            band = []
        band.append(place)
    yield [*columns[:keys], *(columns[other] for other in band)]


def _cell_text(cell: Cell) -> str:
    spread = f" [{cell.low}, {cell.high}]" if cell.low else ""
    return f"{cell.text}{spread}{' *' if cell.best else ''}"


def _short_names(runs: Sequence[Compared]) -> list[str]:
    """The names of the runs in the table; numbered where two would be equal."""
    short = [run.name if len(run.name) <= LONGEST_NAME else f"…{run.name[1 - LONGEST_NAME :]}" for run in runs]
    return [name if short.count(name) == 1 else f"{place}: {name}" for place, name in enumerate(short, start=1)]


def _conditions(run: Compared) -> str:
    e = run.evaluation
    seeds = ", ".join(map(str, e.get("seeds") or [])) or "not known"
    return f"judged by {e.get('win_rate_judge', 'no judge')}, {e.get('prompts', '?')} prompts, sampling seeds {seeds}"
