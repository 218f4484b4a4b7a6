"""Names and descriptions of pipeline runs in MLflow."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tasks.tracking.defaults import filled

IMPORTANT = ("ppo", "scorer", "reward", "preferences", "sft", "base", "ingest")
"""Blocks of params.yaml whose changes are named first."""
NAMED_CHANGES = 2
NOTED_FIGURES = 5
"""More of them would hide the rest of the description, of which MLflow shows a few lines."""


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of metrics/<stage>.json, without those in lists and blocks."""
    return {k: float(v) for k, v in metrics.items() if isinstance(v, int | float) and not isinstance(v, bool)}


def changes(run: Mapping[str, Any], before: Any) -> list[tuple[str, str, str]]:
    """(parameter, value before, value now) of the parameters with another value than in the MLflow run `before`, most
    important first."""
    then, now = (filled(params) for params in (before.data.params if before else run["params"], run["params"]))
    names = [name for name in {**now, **then} if then.get(name, "none") != now.get(name, "none")[:6000]]
    order = {block: place for place, block in enumerate(IMPORTANT)}
    names.sort(key=lambda name: (order.get(name.partition(".")[0], len(order)), name == "seed"))
    return [(name, _short(then.get(name, "none")), _short(now.get(name, "none"))) for name in names]


def title(run: Mapping[str, Any], before: Any) -> str:
    """The name of a pipeline run: what differs from the run before (`kl.coef 0.05 → 0.2`), else its commit; the plus
    stands for uncommitted changes."""
    tags, words, last = run["tags"], [], []
    for name, old, new in changes(run, before):
        if name == "seed":
            last.append(f"seed {new}")
        else:  # `ppo.kl.coef` without its block; `reward.epochs` as it is
            words.append(f"{name.partition('.')[2] if name.count('.') > 1 else name} {old} → {new}")
    if len(words) > NAMED_CHANGES:
        words[NAMED_CHANGES:] = [f"{len(words) - NAMED_CHANGES} more"]
    if before and tags.get("leash.data") != before.data.tags.get("leash.data"):
        last.append("other data")
    if "leash.round" in tags:
        last.append(f"round {tags['leash.round']}")
    commit = tags.get("leash.commit", "")[:7] + "+" * (tags.get("leash.dirty") == "true")
    return ", ".join(words + last)[:250] or (commit if "leash.commit" in tags else "no commit")


def note(run: Mapping[str, Any], before: Any, figures: Mapping[str, float]) -> str:
    """The description of a pipeline run, in Markdown: its result, then all that differs from the run before."""
    shown = [name for name in figures if not name.endswith(("_low", "_high"))][:NOTED_FIGURES]
    lines = [", ".join(f"{name} **{figures[name]:.3g}**" for name in shown)]
    if before is not None:
        found = [f"`{name}` {old} → {new}" for name, old, new in changes(run, before)]
        lines.append(f"Changed since *{before.info.run_name}*: {', '.join(found) or 'no parameter'}")
    if name := run.get("experiment"):
        lines.append(f"DVC experiment `{name}`: `dvc exp apply {name}` brings its results back")
    commit, edited = run["tags"].get("leash.commit"), run.get("edited") or []
    more = f" and {len(edited) - 10} more" * (len(edited) > 10)
    dirty = f", with uncommitted changes in {', '.join(f'`{one}`' for one in edited[:10])}{more}" if edited else ""
    lines.append((f"commit `{commit[:12]}`" if commit else "no commit") + dirty)
    return "\n\n".join(filter(None, lines))


def _short(text: str) -> str:
    """At most 60 characters of a value; numbers as people write them."""
    try:
        return f"{json.loads(text):g}" if isinstance(json.loads(text), float) else text[:60]
    except ValueError:
        return text[:60]
