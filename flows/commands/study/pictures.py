"""The pictures of the frontier: both scores over √KL, and the gold score over what training has cost. Size and
style are those of the report page."""

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from flows.commands.study.points import (
    Cost,
    Runs,
    first_run,
    frontier_points,
    model_costs,
    optimum,
    points,
    sft_score,
    snapshot_costs,
)
from rlhf_core.evaluation.majorant import majorant_at
from tasks.page.canvas import JUDGE, MUTED, POLICY, canvas, colour_of, label_axes, png, styled
from tasks.page.comparison_table import label
from tasks.params.methods import WITH_MODEL

Point = tuple[float, float]

MARKERS = dict(zip((method.name for method in WITH_MODEL), "sPDv^<>hp*", strict=False))
"""Marker of each method; other models get a cross."""

PLACES = 60
"""Places at which a majorant is drawn."""
HEIGHT = 6.4  # inches; two panels and a legend do not fit into the page's height


def draw(runs: Runs) -> dict[str, bytes]:
    """The three pictures as PNG, by name."""
    pictures: dict[str, Callable[[], Figure]] = {
        "frontier": lambda: frontier(runs),
        "equal-tokens": lambda: equal_cost(runs, "tokens", lambda cost: cost.tokens, "response tokens trained on"),
        "equal-samples": lambda: equal_cost(runs, "samples", lambda cost: cost.samples, "responses sampled to train"),
    }
    made = {}
    for name, make in pictures.items():
        with styled():
            made[name] = png(make())
    return made


def frontier(runs: Runs) -> Figure:
    """Gold and proxy score over √KL: PPO's frontier for each setting, thin for each seed and thick for their mean; the
    optimum, dashed, the mean of the seeds; the alternatives as points, a point a seed. Every seed trains a reward model
    of its own, whose scores have a zero of their own: those are drawn from its SFT model's mean."""
    figure, (gold, proxy) = canvas(f"Reward against KL, {counted(runs)}", panels=(3, 2))
    figure.set_size_inches(figure.get_figwidth(), HEIGHT)
    zeros = {seed: sft_score(runs, seed, "reward") for seed in seeds_of(runs)}
    for axes, score, zero in ((gold, "gold", dict.fromkeys(zeros, 0.0)), (proxy, "reward", zeros)):
        for setting, colour in shades(runs).items():
            lines = [
                majorant(frontier_points(run, score), zero[seed])
                for (seed, other), run in runs.items()
                if other == setting
            ]
            bundle(axes, lines, f"PPO, {setting}", colour, marker="")
        firsts = {seed: run for seed in zero if (run := first_run(runs, seed)) is not None}
        ceiling(axes, [by_root(optimum(run, score), zero[seed]) for seed, run in firsts.items()])
        found = {seed: points(runs, seed, score) for seed in zero}
        placed = [dict(zip(found[s], by_root(found[s].values(), zero[s]), strict=True)) for s in zero]
        alternatives(axes, placed, numbered=axes is gold)
    label_axes(gold, "gold score")
    label_axes(proxy, "reward-model\nscore above SFT", "√KL from SFT (KL in nats per answer)")
    key_below(figure, gold)
    return figure


def majorant(found: Sequence[Point], zero: float) -> list[Point]:
    """The concave majorant of points of KL and score, over √KL, its heights above `zero`."""
    kls, scores = [kl for kl, _ in found], [score for _, score in found]
    places = [max(kls) * (part / PLACES) ** 2 for part in range(PLACES + 1)] if found else []
    line = [(kl, height) for kl in places if (height := majorant_at(kl, kls, scores)) is not None]
    return by_root(line, zero)


def ceiling(axes: Axes, lines: Sequence[Sequence[Point]]) -> None:
    """A dashed line through the means of the optima."""
    if any(lines):
        bundle(axes, lines, "the optimum", MUTED, marker="", each=False, linestyle=(0, (5, 3)))


def by_root(found: Iterable[Point], zero: float) -> list[Point]:
    """The same points over √KL (an estimate below 0 counts as 0), their scores above `zero`."""
    return [(math.sqrt(max(kl, 0.0)), value - zero) for kl, value in found]


def equal_cost(runs: Runs, name: str, cost_of: Callable[[Cost], float], axis: str) -> Figure:
    """Gold score over what training has cost. Best-of-n trains nothing: a line across."""
    figure, (axes,) = canvas(f"Gold score at equal {name}, {counted(runs)}")
    figure.set_size_inches(figure.get_figwidth(), HEIGHT * 0.75)
    for setting, colour in shades(runs).items():
        lines = [
            [(cost_of(cost), cost.gold) for cost in snapshot_costs(run)]
            for (_, other), run in runs.items()
            if other == setting
        ]
        bundle(axes, lines, f"PPO, {setting}", colour)
    firsts = [run for seed in seeds_of(runs) if (run := first_run(runs, seed)) is not None]
    trained = [{model: (cost_of(cost), cost.gold) for model, cost in model_costs(run).items()} for run in firsts]
    alternatives(axes, trained)
    across(axes, [points(runs, seed) for seed in seeds_of(runs)])
    label_axes(axes, "gold score", axis)
    key_below(figure, axes)
    return figure


def bundle(
    axes: Axes,
    lines: Sequence[Sequence[Point]],
    label: str,
    colour: Any,
    marker: str = "o",
    each: bool = True,
    linestyle: Any = "-",
) -> None:
    """A thin line each, where wanted, and a thick one with their mean height at equal x."""
    lines = [line for line in lines if line]
    if not lines:
        return
    if each and len(lines) > 1:
        for line in lines:
            axes.plot(*zip(*line, strict=True), color=colour, linewidth=0.7, alpha=0.5)
    axes.plot(*mean_line(lines), color=colour, label=label, marker=marker, markersize=3, linestyle=linestyle)


def mean_line(lines: Sequence[Sequence[Point]]) -> tuple[list[float], list[float]]:
    """x and mean height of lines (their x rising) where all of them are, at the points of the first and at the end."""
    ends = [max(line[0][0] for line in lines), min(line[-1][0] for line in lines)]
    places = sorted({*ends, *(x for x, _ in lines[0] if ends[0] <= x <= ends[1])})
    heights = [np.interp(places, [x for x, _ in line], [y for _, y in line]) for line in lines]
    return places, [float(height) for height in np.mean(heights, axis=0)]


def alternatives(axes: Axes, found: Sequence[dict[str, Point]], numbered: bool = True) -> None:
    """A point a seed and model, best-of-n with its n above where it is `numbered`; x is as it is drawn."""
    for name in dict.fromkeys(name for each in found for name in each):
        here = [each[name] for each in found if name in each]
        family = "best-of-n" if name.startswith("best_of_") else label(name)
        marker = "o" if family == "best-of-n" else MARKERS.get(name, "x")
        colour = colour_of(name)
        drawn = axes.get_legend_handles_labels()[1]
        x, y = zip(*here, strict=True)
        axes.plot(x, y, linestyle="", marker=marker, markersize=4.5, color=colour, alpha=0.85, zorder=3,
                  label=None if family in drawn else family)  # fmt: skip
        if numbered and family == "best-of-n":
            place = (fmean(x), max(y))
            axes.annotate(
                name.removeprefix("best_of_"), place, (0, 5), textcoords="offset points", ha="center", fontsize=8.5
            )


def across(axes: Axes, found: Sequence[dict[str, Point]]) -> None:
    """The mean gold score of each best-of-n, as a line with its name at the right edge."""
    for name in dict.fromkeys(name for each in found for name in each if name.startswith("best_of_")):
        level = fmean(each[name][1] for each in found if name in each)
        axes.axhline(level, color=JUDGE, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        axes.annotate(label(name), (1, level), (-2, 2), ha="right", fontsize=8, color=JUDGE, **place)


def shades(runs: Runs) -> dict[str, tuple[float, float, float]]:
    """A blue for each setting, the first the darkest."""
    settings = list(dict.fromkeys(setting for _, setting in runs))
    base = to_rgb(POLICY)
    depth = [0.65 * rank / max(1, len(settings) - 1) for rank in range(len(settings))]
    return {
        setting: (base[0] + (1 - base[0]) * d, base[1] + (1 - base[1]) * d, base[2] + (1 - base[2]) * d)
        for setting, d in zip(settings, depth, strict=True)
    }


def key_below(figure: Figure, axes: Axes) -> None:
    """One legend below the picture for all panels."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=3, handlelength=1.6, columnspacing=1.2)


def seeds_of(runs: Runs) -> list[int]:
    """In the order of the runs."""
    return list(dict.fromkeys(seed for seed, _ in runs))


def counted(runs: Runs) -> str:
    """How many training seeds, in words for a title."""
    number = len(seeds_of(runs))
    return f"{number} training seed{'s' if number != 1 else ''}"
