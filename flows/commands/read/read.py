"""`leash read`: which failure modes of RL training show in the metrics of another library."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from flows.commands.read.formats import Record, read_records
from flows.commands.read.libraries import LIBRARIES, NAMES, Figure, Library
from flows.text import table
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.errors import UserError
from rlhf_core.ppo.detectors import COLUMNS, WINDOW, Settings
from rlhf_core.ppo.health import Monitor

NEEDS = {
    "reward_hacking": ("reward_raw", "kl"),
    "kl_spike": ("kl",),
    "entropy_collapse": ("entropy",),
    "diverging_critic": ("value_loss", "explained_variance"),
    "frozen_reward": ("reward_raw", "clip_fraction"),
    "stale_data": ("clip_fraction_last_epoch",),
    "repetition": ("repeated_ngram_share",),
    "length_drift": ("response_tokens_mean",),
    "missing_ends": ("missing_eos_share",),
    "exploding_gradient": ("grad_norm_policy",),
    "huge_penalty": ("min_token_reward",),
    "engine_mismatch": ("engine_mismatch_k3", "response_tokens_mean"),
}
"""The columns without which a detector finds nothing."""
NEUTRAL = dict.fromkeys(COLUMNS, None) | dict.fromkeys(("reward_raw", "kl", "update_kl", "min_token_reward"), 0.0)
NEUTRAL |= dict.fromkeys(("repeated_ngram_share", "repeating_answer_share", "missing_eos_share"), 0.0)
NEUTRAL |= {"engine_mismatch_k3": 0.0, "entropy": 1.0, "response_tokens_mean": 1.0}
"""Values with which no detector finds anything, for columns that are not recorded. Where it is None, a step may lack
the figure; a step without one of the others is left out."""


def read(sources: Sequence[str], prompts: int | None = None) -> tuple[dict[str, Any], str]:
    """What the detectors find in the files of one run, as an object and as text.

    Args:
        sources: files, folders of event files, or `runs:/ID` of MLflow.
        prompts: prompts in a step; windows are longer below 20. None: at least 20.

    Raises:
        UserError: a file that cannot be read, of no known library, or of another run than the others.
    """
    files = {source: read_records(source) for source in sources}
    library = _recognised(files)
    raw, notes = _merged(files, library)
    steps = sorted(raw)

    # Their figures as our columns. A figure that is not finite is a finding, and missing for the detectors.
    present = {name for values in raw.values() for name in values}
    chosen: dict[str, tuple[str, Figure]] = {}
    for column, figure in library.figures.items():
        if name := next((name for name in figure.names if name in present), None):
            chosen[column] = (name, figure)
    rows = [_converted(step, raw[step], chosen, library) for step in steps]
    missing = {column: "not recorded there" for column in COLUMNS[1:] if column not in chosen}
    for column, why in library.incomparable.items():
        if why.split()[0] in present:
            missing[column] = f"not comparable: {why}"
            if not any(column in needs for needs in NEEDS.values()):
                notes.append(f"{column} is {missing[column]}")
    numbers = {column: [value for row in rows if (value := row[column]) is not None] for column in chosen}
    for column, (name, figure) in list(chosen.items()):
        known = numbers[column]
        if column == "kl" and known and not any(known):
            missing[column] = f"{name} is 0 at every step: there is no reference model"
        elif not known and figure.per_token:
            missing[column] = f"{name} is per token, and there is no mean length in the same steps"
        elif 2 * len(known) < len(rows):
            missing[column] = f"{name} has a number in {len(known)} of {len(rows)} steps only"
        if column in missing:
            del chosen[column]
    always = [column for column in chosen if NEUTRAL[column] is not None]
    whole = [row for row in rows if all(row[column] is not None for column in always)]
    if len(whole) < len(rows):
        notes.append(f"{len(rows) - len(whole)} of {len(rows)} steps lack a figure and are left out")

    # The detectors, step by step as in our own training, on neutral values where nothing is recorded.
    monitor = Monitor(PPOConfig())
    monitor.settings = Settings(prompts or 20, 1)
    for row in whole:
        monitor.observe(NEUTRAL | {"step": row["step"]} | {column: row[column] for column in chosen})
    unchecked = {
        mode: ", ".join(f"{column} ({missing[column]})" for column in needs if column in missing)
        for mode, needs in NEEDS.items()
        if any(column in missing for column in needs)
    }
    findings = [
        {"name": alert.name, "step": alert.step, "message": alert.message, "at_end": alert.name in monitor.active}
        for alert in monitor.alerts
        if alert.name not in unchecked
    ]
    findings = _non_finite(raw) + findings
    for finding in findings:
        finding["remedy"] = library.remedies[str(finding["name"])]
    window = monitor.settings.window
    if len(whole) < 2 * window:
        notes.append(
            f"{len(whole)} steps: too few for detectors that compare two windows of {window}, and for all but "
            "exploding_gradient and kl_spike where there is less than one"
        )
    gaps = [after - before for before, after in pairwise(steps)]
    if gaps and max(gaps) > 2 * (usual := median(gaps)):
        place = gaps.index(max(gaps))
        notes.append(f"no figures between steps {steps[place]} and {steps[place + 1]}, where {usual:.0f} is usual")
    if prompts is None:
        notes.append(f"windows have {WINDOW} rows, as with 20 prompts a step (--prompts N for another number)")
    found = {
        "library": library.name,
        "version": library.version,
        "files": list(sources),
        "rows": len(whole),
        "first_step": steps[0],
        "last_step": steps[-1],
        "findings": findings,
        "not_seen": [mode for mode in NEEDS if mode not in unchecked and mode not in {f["name"] for f in findings}],
        "not_checked": unchecked,
        "figures": {
            column: {
                "from": _source(name, figure),
                "first": numbers[column][0],
                "last": numbers[column][-1],
                "note": figure.note,
            }
            for column, (name, figure) in chosen.items()
        },
        "notes": notes,
    }
    return found, render(found)


def render(found: Mapping[str, Any]) -> str:
    """The result as text: findings first, then what to change, then what was read and how."""
    head = f"{found['library']} (names of {found['version']}): {found['rows']} rows, steps {found['first_step']} to "
    blocks = [f"{head}{found['last_step']}"]
    if found["findings"]:
        lines = [
            (one["name"], str(one["step"]), "yes" if one["at_end"] else "no", one["message"])
            for one in found["findings"]
        ]
        blocks.append(table([("failure mode", "step", "at the end", "what was found"), *lines]))
        remedies = {one["name"]: one["remedy"] for one in found["findings"]}
        blocks.append("\n".join(["what helps", *(f"  {name}: {remedy}" for name, remedy in remedies.items())]))
    else:
        blocks.append("no failure mode was found")
    blocks.append(f"not seen: {', '.join(found['not_seen']) or 'none'}")
    blocks.append("\n".join(["not checked", *(f"  {mode}: {why}" for mode, why in found["not_checked"].items())]))
    figures = [
        (column, *(_shown(how[end]) for end in ("first", "last")), how["from"], how["note"])
        for column, how in found["figures"].items()
    ]
    blocks.append(table([("figure", "first", "last", "read from", "note"), *figures]))
    blocks.append("\n".join(["notes", *(f"  {note}" for note in found["notes"])]) if found["notes"] else "")
    return "\n\n".join(block for block in blocks if block)


def _shown(figure: float) -> str:
    """Three digits, whole numbers from 100 on, and 0 for what rounding leaves of it."""
    return f"{figure:.0f}" if abs(figure) >= 100 else f"{figure if abs(figure) > 1e-6 else 0:.3g}"


def _recognised(files: Mapping[str, Sequence[Record]]) -> Library:
    """The one library whose names the files have."""
    names = {name for records in files.values() for _, values in records for name in values}
    found = [library for library in LIBRARIES if names.issuperset(library.marks)]
    if len(found) > 1:
        both = " and ".join(f"{library.name} ({', '.join(library.marks)})" for library in found)
        raise UserError(f"{', '.join(files)}: figures of {both}; name the files of one run")
    if not found:
        known = "; ".join(f"{library.name}: {' and '.join(library.marks)}" for library in LIBRARIES)
        some = ", ".join(sorted(names)[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
        raise UserError(
            f"{', '.join(files)}: no RL metrics of a known library; found {some}; a library is recognised by ({known})"
        )
    return found[0]


def _merged(files: Mapping[str, list[Record]], library: Library) -> tuple[dict[int, dict[str, float]], list[str]]:
    """The figures by step. Where a resumed run repeats steps, what came before is dropped from there on. Raises
    UserError where figures of the first step come twice: there are two runs."""
    used = {name for figure in library.figures.values() for name in figure.names}
    merged: dict[int, dict[str, float]] = {}
    notes: list[str] = []
    for source, records in sorted(files.items(), key=lambda item: min(step for step, _ in item[1])):
        for step, values in records:
            if twice := used & merged.get(step, {}).keys() & values.keys():
                if step == min(merged):
                    raise UserError(
                        f"{source}: {min(twice)} of step {step}, the first one, is there twice, so there are two runs; "
                        "name the files of one run, and split a file of two"
                    )
                stale = [later for later in merged if later >= step]
                notes.append(f"{source} repeats step {step}, as a resumed run does; steps {step} to {max(stale)} of "
                             "before are left out")  # fmt: skip
                for later in stale:
                    del merged[later]
            if used & values.keys() or step in merged:
                merged.setdefault(step, {}).update(values)
    return merged, notes


def _converted(
    step: int, values: Mapping[str, float], chosen: Mapping[str, tuple[str, Figure]], library: Library
) -> dict[str, float | None]:
    """One row of our columns, with our units; None where there is no finite number."""
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    parts = [finite.get(name) for name in library.optimizer_steps]
    optimizer_steps = parts[0] / parts[1] if len(parts) == 2 and parts[0] and parts[1] else 1.0
    length = finite.get(chosen["response_tokens_mean"][0]) if "response_tokens_mean" in chosen else None
    row: dict[str, float | None] = {"step": step}
    for column, (name, figure) in chosen.items():
        value = finite.get(name)
        if value is not None and figure.summed:
            value /= optimizer_steps
        if value is not None and figure.per_token:
            value = None if length is None else value * length
        row[column] = value
    return row


def _non_finite(raw: Mapping[int, Mapping[str, float]]) -> list[dict[str, Any]]:
    """A finding for the first step with NaN or infinity in a loss, a norm, or a figure of the table."""
    last = max(raw)
    for step in sorted(raw):
        bad = [name for name, value in raw[step].items()
               if not math.isfinite(value) and (name in NAMES or "loss" in name or "norm" in name)]  # fmt: skip
        if bad:
            ends = any(not math.isfinite(raw[last].get(name, 0.0)) for name in bad)
            return [
                {"name": "non_finite", "step": step, "message": f"NaN or infinite: {', '.join(bad)}", "at_end": ends}
            ]
    return []


def _source(name: str, figure: Figure) -> str:
    """How a figure is made from what is recorded."""
    return name + " / optimizer steps" * figure.summed + " × mean length" * figure.per_token
