"""The pictures that compare models: score against KL, over-optimisation, and log-probabilities of preference pairs."""

import itertools
import math
from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes

from rlhf_core.evaluation.majorant import majorant_at
from rlhf_core.evaluation.overoptimisation import Fit, rl_curve
from tasks.page.canvas import (
    HEIGHT,
    INK,
    JUDGE,
    MUTED,
    POLICY,
    PROXY,
    canvas,
    colour_of,
    label_axes,
    legend,
    percent_tick,
    png,
)
from tasks.page.comparison_table import label
from tasks.page.inputs import Row, Run, finite, interval
from tasks.page.labels import name_points
from tasks.page.picture import Picture
from tasks.page.wording import number, percent

KINDS = {"gold": "gold score", "win_rate": "win rate against SFT"}
TITLES = {"gold": "Gold score", "win_rate": "Win rate"}
TICKS = (0, 0.1, 0.25, 0.5, 1, 2, 3, 4, 6, 9, 12, 16, 25, 36, 50, 75, 100, 150, 225, 400)
MOST_TICKS = 8
PPO_POINTS = ("sft", "ppo", "interpolated", "policy")
"""Families of plots/frontier.csv that PPO's frontier is made of."""
KL_AXIS = "KL to SFT, nats per answer (√ scale)"


def frontier(run: Run) -> Picture | None:
    """The main score (`run.score`) against KL, for every model."""
    kind = run.score
    rows = [row for each in run.frontier if finite((row := _even_start(each)).get(kind)) is not None]
    if not rows:
        return None
    figure, (axes,) = canvas(f"{_title(run, kind)} against KL", height=HEIGHT * 1.3)
    named: list[tuple[float, float, str, str]] = []
    drawn = _ceiling(axes, run, kind) + _majorant(axes, rows, kind)
    for family in dict.fromkeys(row["family"] for row in rows):
        one = sorted((row for row in rows if row["family"] == family), key=_along_kl)
        colour = colour_of("ppo" if family == "interpolated" else family)
        _bars(axes, one, kind, colour)
        marker, size = {"ppo": ("o", 4), "best_of_n": ("o-", 4), "interpolated": ("d", 4)}.get(family, ("D", 5.5))
        axes.plot([_x(row) for row in one], [row[kind] for row in one], marker, color=colour, markersize=size,
                  linewidth=1.4, markerfacecolor="white" if family == "interpolated" else None)  # fmt: skip
        drawn += _along(one, kind) if family == "best_of_n" else []
        named += [(_x(row), row[kind], text, colour) for row in one if (text := _point_name(run, row, one))]
    _kl_axis(axes, [row["kl"] for row in rows])
    axes.set_ylabel(_kind(run, kind))
    if kind == "win_rate":
        axes.yaxis.set_major_formatter(percent_tick)
    axes.margins(x=0.08, y=0.1)
    name_points(axes, named, drawn)
    texts = [f"{text.strip()} {_value(kind, y)} at {number(x * x)} nats" for x, y, text, _ in named]
    return Picture(
        "frontier",
        "comparison",
        png(figure),
        f"{_title(run, kind)} against KL to SFT: {'; '.join(texts)}.",
        _frontier_caption(run, kind),
    )


def overoptimisation(run: Run) -> Picture | None:
    """Proxy and main score of PPO's snapshots against √KL, with the fitted curves."""
    rows = {
        kind: known
        for kind in dict.fromkeys(("reward", run.score))
        if (known := [row for row in run.snapshots if finite(row.get(kind)) is not None])
    }
    if "reward" not in rows:
        return None
    kinds = list(rows)
    figure, grid = canvas("Over-optimisation: PPO’s snapshots", [1] * len(kinds), height=HEIGHT * 1.3)
    for axes, kind in zip(grid, kinds, strict=True):
        colour = PROXY if kind == "reward" else JUDGE
        _bars(axes, rows[kind], kind, colour)
        axes.plot([_x(row) for row in rows[kind]], [row[kind] for row in rows[kind]], "o-", color=colour,
                  markersize=4, linewidth=1.0, label="snapshots")  # fmt: skip
        _fitted(axes, run, kind, max(_x(row) for row in rows[kind]))
        _ceiling(axes, run, kind)
        _chosen(axes, run, rows[kind], kind)
        name = _kind(run, kind).replace(" score (raw)", "\nscore (raw)").replace(" against", "\nagainst")
        label_axes(axes, name, share=kind == "win_rate")
        _name_steps(axes, rows[kind], kind)
    legend(grid[0])
    _kl_axis(grid[-1], [row["kl"] for row in run.snapshots])
    alt = "; ".join(_extremes(run, kind, rows[kind]) for kind in kinds)
    return Picture(
        "overoptimisation",
        "comparison",
        png(figure),
        f"PPO’s snapshots against KL: {alt}.",
        _overoptimisation_caption(run),
    )


def logprobs(run: Run) -> Picture | None:
    """Change of the log-probability of chosen and rejected answers, one line for each model."""
    rows = [
        (name, chosen, rejected)
        for name, one in run.models.items()
        if name != "sft"
        and (chosen := finite(one.get("logprob_chosen_change"))) is not None
        and (rejected := finite(one.get("logprob_rejected_change"))) is not None
    ]
    if not rows:
        return None
    figure, (axes,) = canvas(
        "Log-probability of chosen and rejected answers", height=max(HEIGHT, 1.4 + 0.3 * len(rows))
    )
    heights = [float(len(rows) - place) for place in range(len(rows))]
    axes.axvline(0, color=MUTED, linewidth=1)
    for (name, chosen, rejected), y in zip(rows, heights, strict=True):
        axes.plot((chosen, rejected), (y, y), color=colour_of(name), linewidth=2, alpha=0.5)
        axes.plot([chosen], [y], "o", color=colour_of(name), markersize=6.5)
        axes.plot([rejected], [y], "X", color=colour_of(name), markersize=7.5, markeredgecolor="white")
    for marker, text in (("o", "chosen"), ("X", "rejected")):
        axes.plot([], [], marker, color=INK, label=text, linestyle="none")
    legend(axes)
    axes.set_yticks(heights, [label(name, run.models) for name, _, _ in rows])
    axes.set_ylim(0.4, len(rows) + 0.6)
    axes.set_xlabel("change against SFT, nats per answer")
    alt = "; ".join(
        f"{label(n, run.models)} {number(c, 1, sign=True)} and {number(r, 1, sign=True)}" for n, c, r in rows
    )
    return Picture(
        "logprobs",
        "comparison",
        png(figure),
        f"Change of the log-probability of chosen and rejected answers against SFT, in nats: {alt}.",
        "The change of the log-probability of both answers of the validation pairs. Rejection sampling trains on the "
        "kept answers only; PPO and DPO also lower the probability of the rejected ones.",
    )


def _even_start(row: Row) -> Row:
    """The row with the SFT model's win rate against itself, one half, filled in."""
    return row | {"win_rate": 0.5} if row["family"] == "sft" and finite(row.get("win_rate")) is None else row


def _first_seed(run: Run, points: str) -> str:
    """A sentence of a caption: which points have the answers of one sampling seed, if there are several."""
    seeds = len(run.evaluation["seeds"])
    return f" {points} have the answers of only the first of the table’s {seeds} sampling seeds." if seeds > 1 else ""


def _along_kl(row: Row) -> tuple[float, float]:
    return _x(row), row["point"]


def _majorant(axes: Axes, rows: Sequence[Row], kind: str) -> list[tuple[float, float]]:
    """PPO's frontier: the concave majorant of SFT, snapshots, interpolated policies and policy. Points along it."""
    own = [row for row in rows if row["family"] in PPO_POINTS]
    kls, scores = [row["kl"] for row in own], [row[kind] for row in own]
    points = [
        (math.sqrt(kl), height)
        for part in range(101)
        if kls and (height := majorant_at(kl := max(kls) * (part / 100) ** 2, kls, scores)) is not None
    ]
    if points:
        axes.plot(*zip(*points, strict=True), color=colour_of("ppo"), linewidth=1.4)
    return points[::4]


def _ceiling(axes: Axes, run: Run, kind: str) -> list[tuple[float, float]]:
    """The optimum's score at each KL, from SFT's, dashed; nothing for a score that it does not have."""
    points = [(_x(row), row[kind]) for row in run.optimum if finite(row.get(kind)) is not None]
    start = finite(run.models.get("sft", {}).get(kind))
    if not points or start is None:
        return []
    points = [(0.0, start), *points]
    axes.plot(*zip(*points, strict=True), color=MUTED, linewidth=1.3, linestyle=(0, (5, 3)), label="the optimum")
    return points


def _frontier_caption(run: Run, kind: str) -> str:
    ceiling = (
        f" Dashed: the optimum π_SFT·exp(R/β)/Z for the {run.proxy}’s score R, as far as it can be estimated; no model "
        "has a higher proxy score at its KL."
    )
    shown = any(finite(row.get(kind)) is not None for row in run.optimum)
    return (
        "Higher at the same KL is better. The line is PPO’s frontier, the concave majorant (straight in KL) of SFT, "
        "the snapshots and, as diamonds, the policies interpolated between SFT and PPO: answering with one of two "
        "models at random reaches the line between them. Best-of-n is a line with n. Bars: 95% intervals over prompts."
        + (ceiling if shown else "")
        + _first_seed(run, "PPO’s snapshots other than the policy, and the interpolated policies,")
    )


def _point_name(run: Run, row: Row, family: Sequence[Row]) -> str:
    """The label of a point; empty for PPO's steps between the first and the last, except the chosen one."""
    point = int(row["point"])
    if row["family"] == "best_of_n":
        return f"n = {point}"
    if row["family"] == "interpolated":
        return ""
    if row["family"] != "ppo":
        return label(row["family"], run.models)
    if point == chosen_step(run):
        return f"PPO, step {point}"
    steps = [int(other["point"]) for other in family]
    return f"step {point}" if point in (min(steps), max(steps)) else ""


def chosen_step(run: Run) -> int | None:
    """The step of the snapshot that is the policy; None where the policy is an interpolation."""
    selected = run.metrics["select"]
    return selected.get("step") if selected.get("eta", 1.0) == 1.0 else None


def _name_steps(axes: Axes, rows: Sequence[Row], kind: str) -> None:
    every = max(1, math.ceil(len(rows) / 6))
    shown = [row for place, row in enumerate(reversed(rows)) if place % every == 0]
    axes.margins(y=0.16)
    name_points(axes, [(_x(row), row[kind], f"{int(row['point'])}", MUTED) for row in shown], _along(rows, kind))


def _fitted(axes: Axes, run: Run, kind: str, end: float) -> None:
    """The gain R(d) = d(α − β log d) at d = √KL (Gao et al. 2022); only where β > 0."""
    found = _fit(run, kind)
    if found is None or found[0].beta <= 0 or end <= 0:
        return
    fit, start = found
    distances = [end * step / 100 for step in range(101)]
    axes.plot(distances, [start + rl_curve(fit, d * d) for d in distances],
              color=INK, linewidth=1.2, linestyle=(0, (4, 2)), label="fitted d(α − β log d)")  # fmt: skip


def _fit(run: Run, kind: str) -> tuple[Fit, float] | None:
    """The curve fitted to PPO's snapshots, and the score at d = 0."""
    fit = (run.evaluation.get("fits") or {}).get(f"ppo_{kind}")
    return (Fit(fit["alpha"], fit["beta"], fit["r2"], fit["points"]), fit["start"]) if fit else None


def _chosen(axes: Axes, run: Run, rows: Sequence[Row], kind: str) -> None:
    for row in rows:
        if row["point"] == chosen_step(run):
            axes.plot([_x(row)], [row[kind]], "o", markersize=11, markerfacecolor="none", markeredgecolor=POLICY,
                      markeredgewidth=2, label="the policy")  # fmt: skip


def _bars(axes: Axes, rows: Iterable[Row], kind: str, colour: str) -> None:
    for row in rows:
        ends = interval(row, kind)
        if ends is not None:
            axes.plot([_x(row)] * 2, ends, color=colour, linewidth=1, alpha=0.55)


def _kl_axis(axes: Axes, kls: Sequence[float]) -> None:
    """Ticks at round numbers of nats, on a square-root scale."""
    most = max(kls)
    fitting = [tick for tick in TICKS if tick <= most * 1.05]
    wide = math.sqrt(most) / (MOST_TICKS + 1) if most > 0 else 0.0
    ticks = fitting[:1]
    for tick in fitting[1:]:
        if math.sqrt(tick) - math.sqrt(ticks[-1]) > wide:
            ticks.append(tick)
    axes.set_xticks([math.sqrt(tick) for tick in ticks], [f"{tick:g}" for tick in ticks])
    axes.set_xlabel(KL_AXIS)


def _x(row: Row) -> float:
    """√KL; a negative estimate counts as zero."""
    return math.sqrt(max(0.0, float(row["kl"])))


def _along(rows: Sequence[Row], kind: str) -> list[tuple[float, float]]:
    """Points along the line, so that labels avoid it."""
    return [
        (_x(a) + part / 8 * (_x(b) - _x(a)), a[kind] + part / 8 * (b[kind] - a[kind]))
        for a, b in itertools.pairwise(rows)
        for part in range(9)
    ]


def _extremes(run: Run, kind: str, rows: Sequence[Row]) -> str:
    best = max(rows, key=lambda row: float(row[kind]))
    last = _value(kind, rows[-1][kind])
    return f"{_kind(run, kind)} highest at step {int(best['point'])} ({_value(kind, best[kind])}), last {last}"


def _value(kind: str, value: float) -> str:
    return percent(value) if kind == "win_rate" else number(value)


def _kind(run: Run, kind: str) -> str:
    """The name of a score, for an axis."""
    return KINDS.get(kind, f"{run.proxy_score} (raw)")


def _title(run: Run, kind: str) -> str:
    return TITLES.get(kind, f"{run.proxy_score[:1].upper()}{run.proxy_score[1:]}")


def _overoptimisation_caption(run: Run) -> str:
    if run.score == "reward":
        first = f"Without a judge besides the {run.proxy}, over-optimisation cannot be seen."
    else:
        first = f"Where the proxy rises and the {_kind(run, run.score)} falls, the policy exploits the {run.proxy}."
    return (
        f"{first} Points are joined in the order of their steps (the numbers); the ring is the policy. Dashed: the "
        "curve of Gao et al. 2022 with d = √KL, fitted from SFT’s score, where KL rises with every step and the curve "
        "bends down (β > 0); in grey the optimum, as in the picture above."
        + _first_seed(run, "Snapshots other than the policy")
    )
