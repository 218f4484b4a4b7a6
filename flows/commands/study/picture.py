"""The picture of a study: PPO's gold score over √KL for each setting, with the alternatives as points."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.colors import to_rgb

from flows.commands.study.results import Table, Trial
from rlhf_core.evaluation.majorant import majorant_at
from tasks.page.canvas import MUTED, POLICY, canvas, colour_of, label_axes, png, styled
from tasks.page.comparison_table import label
from tasks.params.methods import WITH_MODEL

Point = tuple[float, float]

PPO_FAMILIES = {"sft", "ppo", "interpolated", "policy"}
"""Families of plots/frontier.csv that PPO's frontier is read from."""
MARKERS = dict(zip((method.name for method in WITH_MODEL), "sPDv^<>hp*", strict=False))
"""Marker of each method; other models get a cross."""
PLACES = 60
"""Places at which a majorant is drawn."""


def draw(groups: dict[str, list[Trial]]) -> bytes | None:
    """The PNG, from the finished trials of each setting: a thin line for each seed, a thick one for their mean, and the
    alternatives and the optimum (dashed) of the first setting. None where no trial has snapshots with a gold score."""
    drawn = {name: [one for one in group if len(_rows(one, PPO_FAMILIES)) > 1] for name, group in groups.items()}
    drawn = {name: group for name, group in drawn.items() if group}
    if not drawn:
        return None
    with styled():
        figure, (axes,) = canvas("Gold score against KL, the mean of the training seeds")
        figure.set_size_inches(figure.get_figwidth(), 4.8)
        base = np.array(to_rgb(POLICY))
        for rank, (name, group) in enumerate(drawn.items()):
            colour: Any = tuple(base + (1 - base) * 0.65 * rank / max(1, len(drawn) - 1))
            lines = [_majorant(_rows(one, PPO_FAMILIES)) for one in group]
            for line in lines if len(lines) > 1 else []:
                axes.plot(*zip(*line, strict=True), color=colour, linewidth=0.7, alpha=0.5)
            axes.plot(*mean_line(lines), color=colour, label=f"PPO, {name}")
        first = next(iter(drawn.values()))
        optima = [optimum for one in first if (optimum := _optimum(one))]
        if optima:
            axes.plot(*mean_line(optima), color=MUTED, label="the optimum", linestyle=(0, (5, 3)))
        for trial in first:
            for row in _rows(trial):
                family, known = str(row["family"]), axes.get_legend_handles_labels()[1]
                if family in PPO_FAMILIES or (family, row["point"]) == ("best_of_n", 1):
                    continue
                best_of = family == "best_of_n"
                text = "best-of-n" if best_of else label(family)
                axes.plot(
                    _root(row["kl"]), row["gold"], linestyle="", marker="o" if best_of else MARKERS.get(family, "x"),
                    markersize=4.5, color=colour_of("best_of_4" if best_of else family), alpha=0.85, zorder=3,
                    label=None if text in known else text,
                )  # fmt: skip
        label_axes(axes, "gold score", "√KL from SFT (KL in nats per answer)")
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=3, handlelength=1.6, columnspacing=1.2)
        return png(figure)


def snapshot_rows(trial: Trial) -> Table:
    """The rows of SFT and of PPO's snapshots in plots/frontier.csv, in the order of the steps."""
    return sorted(_rows(trial, {"sft", "ppo"}), key=lambda row: (row["family"] != "sft", row["point"] or 0))


def mean_line(lines: Sequence[Sequence[Point]]) -> tuple[list[float], list[float]]:
    """x and mean height of lines (their x rising) where all of them are, at the points of the first and at the end."""
    ends = [max(line[0][0] for line in lines), min(line[-1][0] for line in lines)]
    places = sorted({*ends, *(x for x, _ in lines[0] if ends[0] <= x <= ends[1])})
    heights = [np.interp(places, [x for x, _ in line], [y for _, y in line]) for line in lines]
    return places, [float(height) for height in np.mean(heights, axis=0)]


def _rows(trial: Trial, families: set[str] | None = None) -> Table:
    """The rows of plots/frontier.csv that have a KL and a gold score."""
    rows = trial.tables.get("frontier", [])
    known = [row for row in rows if isinstance(row["kl"], float) and isinstance(row["gold"], float)]
    return [row for row in known if families is None or row["family"] in families]


def _majorant(rows: Table) -> list[Point]:
    """The concave majorant of gold over KL, over √KL."""
    kls, scores = [row["kl"] for row in rows], [row["gold"] for row in rows]
    places = [max(kls) * (part / PLACES) ** 2 for part in range(PLACES + 1)]
    return [(_root(kl), height) for kl in places if (height := majorant_at(kl, kls, scores)) is not None]


def _optimum(trial: Trial) -> list[Point]:
    rows = trial.metrics.get("evaluate", {}).get("optimum") or []
    return [(_root(row["kl"]), row["gold"]) for row in rows if row.get("gold") is not None]


def _root(kl: float) -> float:
    """An estimate below 0 counts as 0."""
    return math.sqrt(max(kl, 0.0))
