"""Names, descriptions and headline figures of pipeline runs in MLflow."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.summary import SUMMARY
from tasks.tracking import record

IMPORTANT = ("ppo", "scorer", "reward", "preferences", "sft", "base", "ingest")
"""Blocks of params.yaml whose changes are named first."""
NAMED_CHANGES = 2
NOTED_FIGURES = 5
"""More of them would hide the rest of the description, of which MLflow shows a few lines."""


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of metrics/<stage>.json, without those in lists and blocks."""
    return {k: float(v) for k, v in metrics.items() if isinstance(v, int | float) and not isinstance(v, bool)}


def headline(executions: Mapping[str, Path]) -> dict[str, float]:
    """The figures by which one compares pipeline runs, from the files of their executions (stage -> folder): those of
    metrics/summary.json."""
    folder = executions.get("evaluate")
    return numbers(record.read(folder / record.FILES / SUMMARY)) if folder else {}


def changes(run: Mapping[str, Any], before: Any) -> list[tuple[str, str, str]]:
    """(parameter, value before, value now) of the parameters with another value than in the MLflow run data `before`,
    most important first."""
    if before is None:
        return []
    then, now = before.params, run["params"]
    names = [name for name in dict.fromkeys((*now, *then)) if then.get(name, "none") != now.get(name, "none")[:6000]]
    order = {block: place for place, block in enumerate(IMPORTANT)}
    names.sort(key=lambda name: (order.get(name.partition(".")[0], len(order)), name == "seed"))
    return [(name, _short(then.get(name, "none")), _short(now.get(name, "none"))) for name in names]


def title(run: Mapping[str, Any], before: Any) -> str:
    """The name of a pipeline run: what differs from the run before (`kl.coef 0.05 → 0.2`), else its commit; the plus
    stands for uncommitted changes."""
    tags, found = run["tags"], changes(run, before)
    commit = f"{tags['leash.commit'][:7]}{'+' * (tags.get('leash.dirty') == 'true')}" if "leash.commit" in tags else ""
    words = [f"{_key(name)} {old} → {new}" for name, old, new in found if name != "seed"]
    parts = words[:NAMED_CHANGES] + [f"{len(words) - NAMED_CHANGES} more"] * (len(words) > NAMED_CHANGES)
    parts += [f"seed {new}" for name, _, new in found if name == "seed"]
    if before is not None and tags.get("leash.data") != before.tags.get("leash.data"):
        parts.append("other data")
    parts += [f"round {run.get('round')}"] * (run.get("round", 1) > 1)
    return ", ".join(parts)[:250] or commit or "no commit"


def note(run: Mapping[str, Any], before: Any, figures: Mapping[str, float]) -> str:
    """The description of a pipeline run, in Markdown: its result, then all that differs from the run before."""
    values = {name: value for name, value in figures.items() if not name.endswith(("_low", "_high"))}
    shown = list(values.items())[:NOTED_FIGURES]
    lines = [", ".join(f"{name} **{value:.3g}**" for name, value in shown)]
    if before is not None:
        found = [f"`{name}` {old} → {new}" for name, old, new in changes(run, before.data)]
        lines.append(f"Changed since *{before.info.run_name}*: {', '.join(found) or 'no parameter'}")
    if run.get("experiment"):
        name = run["experiment"]
        lines.append(f"DVC experiment `{name}`: `dvc exp apply {name}` brings its results back")
    commit, edited = run["tags"].get("leash.commit"), run.get("edited") or []
    more = f" and {len(edited) - 10} more" * (len(edited) > 10)
    dirty = f", with uncommitted changes in {', '.join(f'`{one}`' for one in edited[:10])}{more}" if edited else ""
    lines.append((f"commit `{commit[:12]}`" if commit else "no commit") + dirty)
    return "\n\n".join(filter(None, lines))


def _key(name: str) -> str:
    """`ppo.kl.coef` without its block where two parts are left; `reward.epochs` as it is."""
    return name.partition(".")[2] if name.count(".") > 1 else name


def _short(text: str) -> str:
    """At most 60 characters of a value; numbers as people write them."""
    try:
        return f"{json.loads(text):g}" if isinstance(json.loads(text), float) else text[:60]
    except ValueError:
        return text[:60]
