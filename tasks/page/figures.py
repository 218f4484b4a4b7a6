"""The report's pictures: the frontier, PPO's curves, and the reward model's calibration. A picture without numbers is
left out; `dvc plots show` has every other curve of the run."""

import itertools
import math
from collections.abc import Sequence

from matplotlib.ticker import MultipleLocator

from rlhf_core.evaluation.majorant import majorant_at
from tasks.page.canvas import (
    INK,
    JUDGE,
    MUTED,
    POLICY,
    PROXY,
    SFT,
    Picture,
    canvas,
    colour_of,
    curve,
    label_axes,
    legend,
    percent_tick,
    png,
    styled,
)
from tasks.page.comparison_table import label
from tasks.page.inputs import Row, Run, finite, interval
from tasks.page.labels import name_points
from tasks.page.wording import number, percent

WIDE = 10.4
"""Inches, the width of the page."""
STEP = "PPO step"
NAMES = {"gold": "gold score", "win_rate": "win rate against SFT"}
TICKS = (0, 0.1, 0.25, 0.5, 1, 2, 3, 4, 6, 9, 12, 16, 25, 36, 50, 75, 100, 150, 225, 400)
MOST_TICKS = 12
MOST_STEPS = 8
"""Snapshots that are all labelled."""
PPO_POINTS = ("sft", "ppo", "interpolated", "policy")
"""Families of plots/frontier.csv that PPO's frontier is made of."""


def draw(run: Run) -> list[Picture]:
    """All pictures that the run has numbers for, in the order of the page."""
    with styled():
        drawn = [make(run) for make in PICTURES]
    return [picture for picture in drawn if picture is not None]


def frontier(run: Run) -> Picture | None:
    """The main score (`run.score`) against KL: every model, PPO's concave majorant, and the optimum."""
    kind, title = run.score, NAMES.get(run.score, f"{run.proxy_score} (raw)")
    rows = [row | {"win_rate": 0.5} if row["family"] == "sft" and kind == "win_rate" else row for row in run.frontier]
    rows = [row for row in rows if finite(row.get(kind)) is not None]
    if not rows:
        return None
    figure, (axes,) = canvas("", height=4.6, width=WIDE)
    drawn: list[tuple[float, float]] = []
    ceiling = [(_root(row["kl"]), row[kind]) for row in run.optimum if finite(row.get(kind)) is not None]
    start = finite(run.models.get("sft", {}).get(kind))
    if ceiling and start is not None:
        drawn += [(0.0, start), *ceiling]
        axes.plot(*zip(*drawn, strict=True), color=MUTED, linewidth=1.3, linestyle=(0, (5, 3)), label="the optimum")
    own = [row for row in rows if row["family"] in PPO_POINTS]
    kls, scores = [row["kl"] for row in own], [row[kind] for row in own]
    line = [
        (math.sqrt(kl), height)
        for part in range(101)
        if kls and (height := majorant_at(kl := max(kls) * (part / 100) ** 2, kls, scores)) is not None
    ]
    if line:
        axes.plot(*zip(*line, strict=True), color=colour_of("ppo"), linewidth=1.4, label="PPO’s frontier")
    drawn += line[::4]
    named: list[tuple[float, float, str, str]] = []
    for family in dict.fromkeys(row["family"] for row in rows):
        one = sorted((row for row in rows if row["family"] == family), key=lambda row: (row["kl"], row["point"]))
        colour = colour_of("ppo" if family == "interpolated" else family)
        points = [(_root(row["kl"]), row[kind]) for row in one]
        for (x, _), row in zip(points, one, strict=True):
            if ends := interval(row, kind):
                axes.plot([x, x], ends, color=colour, linewidth=1, alpha=0.55)
        marker, size = {"ppo": ("o", 5), "best_of_n": ("o-", 5), "interpolated": ("d", 5)}.get(family, ("D", 6.5))
        axes.plot(*zip(*points, strict=True), marker, color=colour, markersize=size, linewidth=1.4,
                  markerfacecolor="white" if family == "interpolated" else None)  # fmt: skip
        if family == "best_of_n":
            drawn += [
                (a + part / 8 * (b - a), low + part / 8 * (high - low))
                for (a, low), (b, high) in itertools.pairwise(points)
                for part in range(9)
            ]
        texts = (_point_name(run, row, one) for row in one)
        named += [(x, y, text, colour) for (x, y), text in zip(points, texts, strict=True) if text]
    most = max(row["kl"] for row in rows)
    wide = math.sqrt(most) / (MOST_TICKS + 1) if most > 0 else 0.0
    ticks = [0.0]
    for tick in TICKS[1:]:
        if tick <= most * 1.05 and math.sqrt(tick) - math.sqrt(ticks[-1]) > wide:
            ticks.append(tick)
    axes.set_xticks([math.sqrt(tick) for tick in ticks], [f"{tick:g}" for tick in ticks])
    axes.set_xlabel("KL to SFT, nats per answer (√ scale)")
    axes.set_ylabel(title)
    if kind == "win_rate":
        axes.yaxis.set_major_formatter(percent_tick)
    axes.margins(x=0.06, y=0.1)
    legend(axes)
    name_points(axes, named, drawn)
    shown = percent if kind == "win_rate" else number
    texts = (f"{text} {shown(y)} at {number(x * x)} nats" for x, y, text, _ in named)
    seeds = len(run.evaluation["seeds"])
    more = ", the snapshots" if sum(row["family"] == "ppo" for row in rows) > 1 else ""
    if between := any(row["family"] == "interpolated" for row in rows):
        more += " and, as diamonds, the policies interpolated between SFT and PPO"
    caption = (
        "Higher at the same KL is better. The line is PPO’s frontier, the concave majorant (straight in KL) of SFT"
        f"{more or ' and the policy'}: answering with one of two models at random reaches the line between them. "
        "Best-of-n is a line with n. Bars: 95% intervals over prompts."
    )
    if ceiling:
        caption += (
            f" Dashed: the optimum π_SFT·exp(R/β)/Z for the {run.proxy}’s score R, as far as it can be estimated; no "
            "model has a higher proxy score at its KL."
        )
    if seeds > 1 and (more or between):
        caption += (
            " PPO’s snapshots other than the policy, and the interpolated policies, have the answers of only the first "
            f"of the table’s {seeds} sampling seeds."
        )
    alt = f"{title[:1].upper()}{title[1:]} against KL to SFT: {'; '.join(texts)}."
    return Picture("frontier", png(figure), alt, caption)


def ppo_curves(run: Run) -> Picture | None:
    """PPO by step: scores, KL and coefficient, entropy, length, explained variance, and what else the run logged."""
    ppo = run.curves["ppo"]
    panels = [
        ("gold", "gold score", JUDGE, 2, False),
        ("reward_raw", f"{run.proxy_score} (raw)", PROXY, 2, False),
        ("reward/std", "disagreement of the reward models", PROXY, 2, False),
        ("kl", "KL to SFT, nats per answer", POLICY, 2, False),
        ("kl_coef", "coefficient β of the KL", INK, 4, False),
        ("entropy", "entropy, nats per token", POLICY, 3, False),
        ("response_tokens_mean", "length, tokens", POLICY, 1, False),
        ("missing_eos_share", "without end of sequence", INK, 3, True),
        ("clip_fraction", "clipped tokens", POLICY, 3, True),
        ("explained_variance", "explained variance of the critic", POLICY, 3, False),
    ]
    known = {name: [value for value in ppo.get(name, []) if math.isfinite(value)] for name, *_ in panels}
    if not run.has_judge:
        known["gold"] = []
    if len(set(known["kl_coef"])) == 1:  # the coefficient is fixed
        known["kl_coef"] = []
    panels = [panel for panel in panels if known[panel[0]]]
    if not panels:
        return None
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure, grid = canvas("", [1.0] * rows, height=0.3 + 1.75 * rows, width=WIDE, columns=columns)
    for place, (axes, (name, title, colour, _, share)) in enumerate(zip(grid, panels, strict=False)):
        curve(axes, ppo["step"], ppo[name], title, colour)
        axes.set_title(title, loc="left", fontsize=10, color=INK)
        label_axes(axes, "", STEP if place + columns >= len(panels) else "", share=share)
        axes.tick_params(labelbottom=place + columns >= len(panels))
    before = finite(run.evaluation.get("response_tokens_sft"))
    lengths = [axes for axes, panel in zip(grid, panels, strict=False) if panel[0] == "response_tokens_mean"]
    if lengths and before is not None:
        lengths[0].axhline(before, color=SFT, linewidth=1.5, linestyle=(0, (4, 2)))
    for axes in grid[len(panels) :]:
        axes.remove()
    ends = []
    for name, title, _, digits, _ in panels:
        first, last = number(known[name][0], digits), number(known[name][-1], digits)
        ends.append(f"{title} from {first} to {last}" if len(known[name]) > 1 else f"{title} {last}")
    unjudged = {
        "scores": " For the judge's score see the frontier.",
        "pairs": " The judge gives no scores; see the win rate of the snapshots in the frontier.",
        "judging reward model": " For the judge see the win rate of the snapshots in the frontier.",
    }.get(run.judged_by, " Without another judge, this does not show whether the policy exploits it.")
    caption = (
        f"Where the proxy rises and gold falls, the policy exploits the {run.proxy}." if known["gold"]
        else f"The {run.proxy_score} is the proxy that PPO maximises.{unjudged}"
    ) + (
        " Entropy near zero: the policy repeats itself. Growing length is a warning: reward models often prefer long "
        "answers (dashed: SFT’s held-out mean). Clipped tokens near zero: updates are too small; above a third: too "
        "large. Explained variance of 1: the critic predicts the return; 0: only its mean."
    )  # fmt: skip
    return Picture("ppo", png(figure), f"Line charts of PPO: {'; '.join(ends)}.", caption)


def reward_calibration(run: Run) -> Picture | None:
    """Predicted against observed preference, with the number of pairs in each bin."""
    table = run.curves["reward_calibration"]
    keys = ("predicted", "observed", "pairs", "bin_low", "bin_high")
    rows = [
        row
        for row in zip(*(table.get(key, []) for key in keys), strict=True)
        if not any(map(math.isnan, row)) and row[2] > 0
    ]
    if not rows:
        return None
    figure, (axes, below) = canvas("Calibration on held-out pairs", panels=(5, 2))
    low = min(row[3] for row in rows)
    axes.plot((low, 1), (low, 1), color=MUTED, linewidth=1, linestyle=(0, (3, 3)), label="perfect")
    axes.plot(
        [row[0] for row in rows], [row[1] for row in rows], "o-", color=PROXY, markersize=4.5, label="held-out pairs"
    )
    label_axes(axes, "pairs ranked correctly", share=True)
    legend(axes)
    below.bar([row[3] for row in rows], [row[2] for row in rows], [row[4] - row[3] for row in rows],
              align="edge", color=PROXY, alpha=0.45, edgecolor="white", linewidth=1)  # fmt: skip
    label_axes(below, "pairs", "predicted probability")
    below.xaxis.set_major_locator(MultipleLocator(0.1))
    below.xaxis.set_major_formatter(percent_tick)
    error = number(run.metrics["reward"].get("expected_calibration_error"), 3)
    return Picture(
        "reward_calibration",
        png(figure),
        f"Calibration of the reward model in {len(rows)} bins; expected calibration error {error}.",
        "How often the answer that the model prefers is the chosen one, by the predicted probability. Dashed: perfect "
        f"calibration; below it the model is overconfident. Expected calibration error: {error}.",
    )


PICTURES = (frontier, ppo_curves, reward_calibration)


def _root(kl: float) -> float:
    """√KL; a negative estimate counts as zero."""
    return math.sqrt(max(0.0, float(kl)))


def _point_name(run: Run, row: Row, family: Sequence[Row]) -> str:
    """The label of a point; empty for interpolated policies, and where PPO has more than MOST_STEPS snapshots also for
    those between the first and the last, except the one that is the policy."""
    point, selected = int(row["point"]), run.metrics["select"]
    if row["family"] == "best_of_n":
        return f"n = {point}"
    if row["family"] == "interpolated":
        return ""
    if row["family"] != "ppo":
        return label(row["family"], run.models)
    if point == selected.get("step") and selected.get("eta", 1.0) == 1.0:
        return f"PPO, step {point}"
    steps = [int(other["point"]) for other in family]
    return f"step {point}" if len(steps) <= MOST_STEPS or point in (min(steps), max(steps)) else ""
