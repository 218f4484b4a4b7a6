"""The comparison of several runs in the terminal: parameters that differ, differences paired by prompt, and the report
page's table of models."""

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
FIRST_PARAMETERS, FIRST_MODELS = 5, 2
"""Printed without `--all`: parameters that differ, and models of several runs."""
MAIN = ("gold", "win_rate", "kl_exact", "reward")
"""The first columns without `--all`."""


def compare(
    root: Path, names: Sequence[str], models: Sequence[str], everything: bool = False
) -> tuple[dict[str, Any], str]:
    """(for `--json`, for a terminal) of the runs called `names` (none: this checkout), and of `models` (none: all).
    The text is about twenty lines, all with `everything`.

    Raises UserError for a name that means no run or several, and for models that no run has.
    """
    runs = [find(root, name) for name in names or ["."]]
    known = list(dict.fromkeys(name for run in runs for name in run.evaluation["models"]))
    if unknown := [name for name in models if name not in known]:
        raise UserError(f"no run has a model called {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = [
        {name: one for name, one in run.evaluation["models"].items() if not models or name in models} for run in runs
    ]
    differences = [paired(runs[0], run, list(of)) for run, of in zip(runs[1:], chosen[1:], strict=True)]
    parameters = dict(differing(runs))
    content = {
        "runs": [
            {"run": run.name, "source": run.source, "models": of}
            | {key: run.evaluation.get(key) for key in ("win_rate_judge", "prompts", "seeds")}
            for run, of in zip(runs, chosen, strict=True)
        ],
        "differences": [_as_dict(run, found) for run, found in zip(runs[1:], differences, strict=True)],
        "parameters": {key: list(values) for key, values in parameters.items()},
    }
    lines = _lines(runs, chosen, differences, parameters, everything or bool(models))
    width = max(NARROWEST, shutil.get_terminal_size((120, 24)).columns)
    text = "\n".join(_fitted(lines, width, everything))
    return content, text


def _as_dict(run: Compared, found: Paired | str) -> dict[str, Any]:
    """A run less the first one."""
    if isinstance(found, str):
        return {"run": run.name, "missing": found}
    models = {
        name: {figure: {"difference": e.mean, "low": e.low, "high": e.high} for figure, e in one.items()}
        for name, one in found.models.items()
    }
    return {"run": run.name, "prompts": found.prompts, "models": models}


def _fitted(lines: Iterator[str | list[list[str]]], width: int, everything: bool) -> Iterator[str]:
    """Texts wrapped to the width, and tables (as columns) in bands of columns that fit it; without `everything` only
    the first band. The columns with run, model or parameter are in each band."""
    hidden = 0
    for line in lines:
        if isinstance(line, str):
            yield from textwrap.wrap(line, width, subsequent_indent="  ") or [""]
            continue
        keys = sum(column[0] in ("run", "model", "parameter") for column in line)
        bands = list(_bands(line, width, keys))
        for place, band in enumerate(bands if everything else bands[:1]):
            yield from [""] * bool(place)
            yield table(zip(*band, strict=True))
        hidden += 0 if everything else sum(len(band) - keys for band in bands[1:])
    if hidden:
        yield f"{hidden} more columns: --all"


def _lines(
    runs: Sequence[Compared],
    chosen: Sequence[Mapping[str, Figures]],
    differences: Sequence[Paired | str],
    parameters: Mapping[str, tuple[str | None, ...]],
    everything: bool,
) -> Iterator[str | list[list[str]]]:
    """Texts, and tables as their columns."""
    names = _short_names(runs)
    conditions = [_conditions(run) for run in runs]
    for name, run, words in zip(names, runs, conditions, strict=True):
        yield f"{name}: {run.source}; {words}" if len(set(conditions)) > 1 else f"{name}: {run.source}"
    yield (
        "NOTE: the runs differ in judge, prompts or sampling seeds: do not compare their figures"
        if (len(set(conditions)) > 1)
        else conditions[0]
    )
    if len(runs) > 1:
        yield ""
        yield from _parameter_lines(names, runs, parameters, everything)
    shown = _first_models(chosen, everything)
    for name, found in zip(names[1:], differences, strict=True):
        yield ""
        if isinstance(found, str):
            yield found
            continue
        yield f"{name} less {names[0]}, paired by prompt ({found.prompts} prompts), 95% interval"
        figures = list(dict.fromkeys(figure for one in found.models.values() for figure in one))
        rows = {model: found.models[model] for model in shown if model in found.models}
        heads = [["model", "", *map(label, rows)]]
        for figure in figures:
            column = column_of(figure)
            heads.append([column.name, column.unit, *(_signed(figure, one.get(figure)) for one in rows.values())])
        yield heads
    yield ""
    columns = columns_of({f"{place}/{name}": one for place, of in enumerate(chosen) for name, one in of.items()})
    if not everything:
        columns.sort(key=lambda column: MAIN.index(column.key) if column.key in MAIN else len(MAIN))
    yield _columns(names, chosen, shown, columns)
    yield "[95% interval over prompts; training seeds are not in it]  * best of its run"
    if count := len({model for of in chosen for model in of}.difference(shown)):
        yield f"{count} more models: --all, or --models NAMES"


def _first_models(chosen: Sequence[Mapping[str, Figures]], everything: bool) -> list[str]:
    """The models that are printed: all of one run, of several the policy and the first ones."""
    models = list(dict.fromkeys(model for of in chosen for model in of))
    if everything or len(chosen) == 1:
        return models
    return sorted(models, key=lambda model: model != "policy")[:FIRST_MODELS]


def _parameter_lines(
    names: Sequence[str],
    runs: Sequence[Compared],
    parameters: Mapping[str, tuple[str | None, ...]],
    everything: bool,
) -> Iterator[str | list[list[str]]]:
    unknown = [name for name, run in zip(names, runs, strict=True) if run.params is None]
    if unknown:
        yield f"parameters of {', '.join(unknown)} are not known"
    elif not parameters:
        yield "no parameter differs"
    else:
        shown = list(parameters.items())[: None if everything else FIRST_PARAMETERS]
        values = [[MISSING if value is None else shorten(value) for value in row] for _, row in shown]
        yield [["parameter", *(key for key, _ in shown)],
               *([name, *column] for name, column in zip(names, zip(*values, strict=True), strict=True))]  # fmt: skip
        if len(shown) < len(parameters):
            yield f"{len(parameters) - len(shown)} more parameters differ: --all"


def _signed(figure: str, found: Estimate | None) -> str:
    if found is None:
        return MISSING
    digits = column_of(figure).digits
    value, low, high = (number(each, digits, sign=True) for each in (found.mean, found.low, found.high))
    return f"{value} [{low}, {high}]"


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
    names: Sequence[str], chosen: Sequence[Mapping[str, Figures]], models: Sequence[str], columns: Sequence[Column]
) -> list[list[str]]:
    """Columns of text, heading and unit first: run (where there are several), model, then the figures. The runs of one
    model are below each other."""
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
