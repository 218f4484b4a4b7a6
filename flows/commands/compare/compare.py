"""The comparison of several runs in the terminal: parameters that differ, differences paired by prompt, and the report
page's table of models."""

import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from flows.commands.compare.sources import Compared, find
from flows.text import shorten, table
from rlhf_core.errors import UserError
from rlhf_core.evaluation.intervals import estimate_difference
from tasks.page.comparison_table import COLUMNS, Figures, cells, columns_of, label
from tasks.page.wording import MISSING, number

NARROWEST = 60
LONGEST_NAME = 20
GAP = 2
KEYS = ("run", "model", "parameter")
"""Columns with the names of the rows."""
FIRST_PARAMETERS, FIRST_MODELS = 5, 2
"""Printed without `--all`: parameters that differ, and models of several runs."""
MAIN = ("gold", "win_rate", "kl", "reward")
"""The first columns without `--all`."""
PAIRED = {
    figure: next(column for column in COLUMNS if column.key == key)
    for figure, key in {"gold": "gold", "reward": "reward", "kl": "kl", "tokens": "response_tokens"}.items()
}
"""Columns of answers.jsonl whose differences are paired, and how they are printed."""
RESAMPLES, SEED = 2000, 1


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
    chosen: list[dict[str, Figures]] = [
        {name: one for name, one in run.evaluation["models"].items() if not models or name in models} for run in runs
    ]
    content = {
        "runs": [
            {"run": run.name, "source": run.source, "models": of}
            | {key: run.evaluation.get(key) for key in ("win_rate_judge", "prompts", "seeds")}
            for run, of in zip(runs, chosen, strict=True)
        ],
        "differences": [paired(runs[0], run, list(of)) for run, of in zip(runs[1:], chosen[1:], strict=True)],
        "parameters": differing(runs),
    }
    shown = list(models or known)
    if not (everything or models or len(runs) == 1):
        shown = sorted(known, key=lambda model: model != "policy")[:FIRST_MODELS]
    return content, _text(runs, chosen, shown, content, everything)


def paired(first: Compared, other: Compared, models: Sequence[str]) -> dict[str, Any]:
    """`other` less `first` on the prompts that both answered: the differences of the models that both have, with 95%
    intervals, or `missing`: why there are none, in one line.

    Best-of-n is left out: answers.jsonl has one pick of it, its figures use all samples. Scores of two reward models
    are not compared: they have different zeros.
    """
    tables = []
    for run in (first, other):
        if isinstance(run.answers, str):
            return {"run": other.name, "missing": f"{run.name}: no paired difference, {run.answers}"}
        rows = pd.DataFrame(run.answers, columns=["model", "prompt_id", "seed", *PAIRED]).dropna(subset=["seed"])
        of_prompts = rows.astype(dict.fromkeys(PAIRED, float)).groupby(["model", "prompt_id"])
        means = of_prompts[list(PAIRED)].mean(skipna=False)
        tables.append({name: means.loc[name] for name in models if name in means.index.get_level_values("model")})
    shared = [name for name in models if all(name in one for one in tables)]
    prompts = sorted(set.intersection(*(set(one[name].index) for one in tables for name in shared)) if shared else ())
    if len(prompts) < 2:
        why = f"it has no model and prompts in common with {first.name}"
        return {"run": other.name, "missing": f"{other.name}: no paired difference, {why}"}
    of_sft = [run.evaluation["models"].get("sft", {}).get("reward") for run in (first, other)]
    one_reward_model = of_sft[0] is not None and of_sft[0] == of_sft[1]
    found: dict[str, dict[str, Any]] = {}
    for name in shared:
        before, after = (one[name].loc[prompts] for one in tables)
        found[name] = {}
        for figure in PAIRED:
            known = before[figure].notna().all() and after[figure].notna().all()
            if known and (figure != "reward" or one_reward_model):
                e = estimate_difference(before[figure].to_numpy(), after[figure].to_numpy(), RESAMPLES, SEED)
                found[name][figure] = {"difference": e.mean, "low": e.low, "high": e.high}
    return {"run": other.name, "prompts": len(prompts), "models": found}


def differing(runs: Sequence[Compared]) -> dict[str, list[str | None]]:
    """Parameters that differ between runs, with their values; none where those of a run are not known."""
    if any(run.params is None for run in runs):
        return {}
    known = [run.params or {} for run in runs]
    names = dict.fromkeys(name for params in known for name in params)
    values = {name: [params.get(name) for params in known] for name in names}
    return {name: row for name, row in values.items() if len(set(row)) > 1}


def _text(
    runs: Sequence[Compared],
    chosen: Sequence[Mapping[str, Figures]],
    shown: Sequence[str],
    content: Mapping[str, Any],
    everything: bool,
) -> str:
    """The comparison for a terminal, with the models `shown`."""
    width = max(NARROWEST, shutil.get_terminal_size((120, 24)).columns)
    lines: list[str] = []
    hidden = 0

    def add(text: str) -> None:
        lines.extend(textwrap.wrap(text, width, subsequent_indent="  ") or [""])

    def add_table(columns: list[list[str]]) -> None:
        """As many columns as fit; with `everything` the others below, beside the names of the rows again."""
        nonlocal hidden
        keys = [column for column in columns if column[0] in KEYS]
        bands: list[list[list[str]]] = [[]]
        for column in columns[len(keys) :]:
            beside = (*keys, *bands[-1], column)
            if bands[-1] and sum(max(map(len, one)) + GAP for one in beside) - GAP > width:
                bands.append([])
            bands[-1].append(column)
        visible = bands if everything else bands[:1]
        hidden += sum(map(len, bands[len(visible) :]))
        lines.append("\n\n".join(table(zip(*keys, *band, strict=True)) for band in visible))

    short = [run.name if len(run.name) <= LONGEST_NAME else f"…{run.name[1 - LONGEST_NAME :]}" for run in runs]
    names = [name if short.count(name) == 1 else f"{place}: {name}" for place, name in enumerate(short, start=1)]
    conditions = [_conditions(run.evaluation) for run in runs]
    differ = len(set(conditions)) > 1
    for name, run, words in zip(names, runs, conditions, strict=True):
        add(f"{name}: {run.source}" + (f"; {words}" if differ else ""))
    note = "NOTE: the runs differ in judge, prompts or sampling seeds: do not compare their figures"
    add(note if differ else conditions[0])

    parameters: Mapping[str, list[str | None]] = content["parameters"]
    unknown = [name for name, run in zip(names, runs, strict=True) if run.params is None]
    first = list(parameters)[: None if everything else FIRST_PARAMETERS]
    if len(runs) > 1:
        add("")
        if unknown:
            add(f"parameters of {', '.join(unknown)} are not known")
        elif not parameters:
            add("no parameter differs")
        else:
            values = [[MISSING if one is None else shorten(one) for one in parameters[key]] for key in first]
            heads = [["parameter", *first]]
            add_table(heads + [[name, *(row[place] for row in values)] for place, name in enumerate(names)])
        if len(first) < len(parameters):
            add(f"{len(parameters) - len(first)} more parameters differ: --all")

    for name, found in zip(names[1:], content["differences"], strict=True):
        add("")
        if "missing" in found:
            add(found["missing"])
            continue
        add(f"{name} less {names[0]}, paired by prompt ({found['prompts']} prompts), 95% interval")
        models = [model for model in shown if model in found["models"]]
        differences = [["model", "", *map(label, models)]]
        for figure, column in PAIRED.items():
            if any(figure in one for one in found["models"].values()):
                of_models = [found["models"][model].get(figure, {}) for model in models]
                ends = [[number(one.get(key), column.digits, sign=True) for key in ("difference", "low", "high")]
                        for one in of_models]  # fmt: skip
                differences.append([column.name, column.unit, *(_with_interval(*one) for one in ends)])
        add_table(differences)

    add("")
    columns = columns_of({f"{place}/{name}": one for place, of in enumerate(chosen) for name, one in of.items()})
    if not everything:
        columns.sort(key=lambda column: MAIN.index(column.key) if column.key in MAIN else len(MAIN))
    rows = [(place, model) for model in shown for place, of in enumerate(chosen) if model in of]
    figures = [["run", "", *(names[place] for place, _ in rows)]] if len(runs) > 1 else []
    figures.append(["model", "", *(label(model, chosen[place]) for place, model in rows)])
    for column in columns:
        of_runs = [cells(of, column) for of in chosen]
        shown_cells = [of_runs[place][model] for place, model in rows]
        texts = [_with_interval(one.text, one.low, one.high) + " *" * one.best for one in shown_cells]
        figures.append([column.name, column.unit, *texts])
    add_table(figures)
    add("[95% interval over prompts; training seeds are not in it]  * best of its run")
    if count := len({model for of in chosen for model in of}.difference(shown)):
        add(f"{count} more models: --all, or --models NAMES")
    if hidden:
        add(f"{hidden} more columns: --all")
    return "\n".join(lines)


def _with_interval(text: str, low: str, high: str) -> str:
    return f"{text} [{low}, {high}]" if low not in ("", MISSING) else text


def _conditions(evaluation: Mapping[str, Any]) -> str:
    seeds = ", ".join(map(str, evaluation.get("seeds") or [])) or "not known"
    judge, prompts = evaluation.get("win_rate_judge", "no judge"), evaluation.get("prompts", "?")
    return f"judged by {judge}, {prompts} prompts, sampling seeds {seeds}"
