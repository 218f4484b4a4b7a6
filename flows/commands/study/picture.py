"""The picture of a study: PPO's gold score and reward over √KL for each setting, with the alternatives as points."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb

from flows.commands.study.trials import Trial
from rlhf_core.evaluation.majorant import majorant_at
from tasks.page.canvas import MUTED, POLICY, canvas, colour_of, label_axes, png, styled
from tasks.page.comparison_table import label

Point = tuple[float, float]

PPO_FAMILIES = {"sft", "ppo", "interpolated", "policy"}
"""Families of plots/frontier.csv that PPO's frontier is read from."""
SCORES = {"gold": "gold score", "reward": "reward"}
"""Columns of plots/frontier.csv, one for each panel, in words."""
PLACES = 60
"""Places at which a majorant is drawn."""


def draw(groups: dict[str, list[Trial]]) -> bytes | None:
    """The PNG, from the finished trials of each setting: a thin line for each seed, a thick one for their mean, and the
    alternatives and the optimum (dashed) of the first setting; the gold score where there is one, and beside it the
    reward, which PPO maximises. None where no trial has snapshots."""
    panels = {key: lines for key in SCORES if (lines := _lines(groups, key))}
    if not panels:
        return None
    with styled():
        figure, places = canvas("Score against KL, mean of the seeds", columns=len(panels))
        figure.set_size_inches(figure.get_figwidth() * (1 + 0.5 * (len(panels) - 1)), 4.8)
        for axes, (key, lines) in zip(places, panels.items(), strict=True):
            _panel(axes, lines, [trial for trial in groups[next(iter(lines))] if _majorant(trial, key)], key)
            label_axes(axes, SCORES[key], "√KL from SFT, KL in nats per answer")
        handles, labels = places[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=3, handlelength=1.6, columnspacing=1.2)
        return png(figure)


def _lines(groups: dict[str, list[Trial]], key: str) -> dict[str, list[list[Point]]]:
    """The lines of each setting's seeds; no setting without a line."""
    lines = {name: [line for trial in group if (line := _majorant(trial, key))] for name, group in groups.items()}
    return {name: found for name, found in lines.items() if found}


def _panel(axes: Axes, lines: dict[str, list[list[Point]]], first: Sequence[Trial], key: str) -> None:
    base = np.array(to_rgb(POLICY))
    for rank, (name, found) in enumerate(lines.items()):
        colour: Any = tuple(base + (1 - base) * 0.65 * rank / max(1, len(lines) - 1))
        for line in found if len(found) > 1 else []:
            axes.plot(*zip(*line, strict=True), color=colour, linewidth=0.7, alpha=0.5)
        axes.plot(*mean_line(found), color=colour, label=f"PPO, {name}")
    optima = [
        [(_root(row["kl"]), row[key]) for row in rows]
        for trial in first
        if (rows := [r for r in trial.metrics.get("evaluate", {}).get("optimum") or [] if r.get(key) is not None])
    ]
    if optima:
        axes.plot(*mean_line(optima), color=MUTED, label="the optimum", linestyle=(0, (5, 3)))
    others = [
        row for trial in first for row in trial.frontier if row["family"] not in PPO_FAMILIES and pd.notna(row.get(key))
    ]
    for family in dict.fromkeys(row["family"] for row in others):
        best_of = family == "best_of_n"
        points = [row for row in others if row["family"] == family and not (best_of and row["point"] == 1)]
        axes.plot(
            [_root(row["kl"]) for row in points], [row[key] for row in points], "o" if best_of else "D",
            label="best-of-n" if best_of else label(family), color=colour_of(family), markersize=4.5, alpha=0.85,
            zorder=3,
        )  # fmt: skip


def mean_line(lines: Sequence[Sequence[Point]]) -> tuple[list[float], list[float]]:
    """x and mean height of lines (their x rising) where all of them are, at the points of the first and at the end."""
    ends = [max(line[0][0] for line in lines), min(line[-1][0] for line in lines)]
    places = sorted({*ends, *(x for x, _ in lines[0] if ends[0] <= x <= ends[1])})
    heights = [np.interp(places, [x for x, _ in line], [y for _, y in line]) for line in lines]
    return places, [float(height) for height in np.mean(heights, axis=0)]


def _majorant(trial: Trial, key: str) -> list[Point]:
    """The concave majorant of PPO's score over KL, over √KL; empty for a trial with less than two points."""
    rows = [row for row in trial.frontier if row["family"] in PPO_FAMILIES and pd.notna(row.get(key))]
    if len(rows) < 2:
        return []
    kls, scores = [row["kl"] for row in rows], [row[key] for row in rows]
    places = [max(kls) * (part / PLACES) ** 2 for part in range(PLACES + 1)]
    return [(_root(kl), height) for kl in places if (height := majorant_at(kl, kls, scores)) is not None]


def _root(kl: float) -> float:
    """An estimate below 0 counts as 0."""
    return float(np.sqrt(max(kl, 0.0)))
