"""The pictures of the reward model's worth: accuracy by margin, scores of chosen and rejected answers, and agreement
with the judge before and after PPO. Its training and calibration stand in figures.py."""

from matplotlib.ticker import FixedLocator

from tasks.page.canvas import INK, MUTED, POLICY, PROXY, SFT, canvas, label_axes, legend, percent_tick, png
from tasks.page.inputs import Row, Run, finite, interval
from tasks.page.picture import Picture, known
from tasks.page.wording import count, number, percent, percent_interval


def reward_margins(run: Run) -> Picture | None:
    """Accuracy by how far apart the two answers are."""
    metrics = run.metrics["reward"]
    rows = [row for row in metrics.get("margins") or [] if finite(row.get("accuracy")) is not None and row.get("pairs")]
    if not rows:
        return None
    by = "judge’s margin" if metrics.get("margin_by") == "gold" else "reward model’s own margin"
    figure, (axes, below) = canvas("Reward model: accuracy by margin", panels=(5, 2))
    places = range(len(rows))
    for place, row in zip(places, rows, strict=True):
        ends = interval(row.get("accuracy_ci95"))
        if ends is not None:
            axes.plot((place, place), ends, color=PROXY, linewidth=7, alpha=0.3, solid_capstyle="butt")
        axes.plot([place], [row["accuracy"]], "o", color=PROXY, markersize=5)
    axes.axhline(0.5, color=MUTED, linewidth=1, linestyle=(0, (2, 3)))
    below.bar(places, [row["pairs"] for row in rows], color=PROXY, alpha=0.45, width=0.8)
    label_axes(axes, "pairs ranked\nright", share=True)
    label_axes(below, "pairs", by)
    below.xaxis.set_major_locator(FixedLocator(list(places)))
    below.set_xticklabels([_bucket(row) for row in rows])
    told = [f"{_bucket(row)}: {percent(row['accuracy'])} of {count(row['pairs'])}" for row in rows]
    return Picture(
        "reward_margins",
        "reward",
        png(figure),
        f"Accuracy of the reward model by the {by}: {'; '.join(told)}.",
        f"How often the reward model ranks a held-out pair right, by the {by}: close pairs are hard, and a model that "
        "fails on wide ones has learnt something else. Bars: 95% intervals. Dotted: a coin.",
    )


def reward_scores(run: Run) -> Picture | None:
    """Scores of chosen and of rejected answers."""
    table = run.curves["reward_scores"]
    low, high = table.get("low", []), table.get("high", [])
    lines = [("chosen", "chosen", PROXY), ("rejected", "rejected", INK)]
    if not low or any(not known(table.get(column, [])) for column, _, _ in lines):
        return None
    figure, (axes,) = canvas("Reward model: scores of chosen and rejected")
    for column, text, colour in lines:
        axes.stairs(table[column], [*low, high[-1]], fill=True, color=colour, alpha=0.25)
        axes.stairs(table[column], [*low, high[-1]], color=colour, linewidth=1.5, label=text,
                    linestyle="-" if column == "chosen" else (0, (4, 2)))  # fmt: skip
    label_axes(axes, "share of answers", "reward-model score (raw)", share=True)
    legend(axes)
    middles = [(a + b) / 2 for a, b in zip(low, high, strict=True)]
    means = {
        column: sum(m * share for m, share in zip(middles, table[column], strict=True)) / (sum(table[column]) or 1.0)
        for column, _, _ in lines
    }
    return Picture(
        "reward_scores",
        "reward",
        png(figure),
        f"Histograms of the scores of chosen (mean about {number(means['chosen'], 1)}) and rejected answers (about "
        f"{number(means['rejected'], 1)}).",
        "Scores of the held-out pairs’ answers. What the two hills share, the reward model cannot tell apart by score "
        "alone; it compares answers to one prompt.",
    )


def reward_agreement(run: Run) -> Picture | None:
    """Agreement of reward model and judge on SFT's and on the policy's answers."""
    found = run.evaluation.get("reward_model") or {}
    rows: list[tuple[str, str, Row]] = [
        (name, colour, found[key])
        for key, name, colour in (("sft", "SFT’s answers", SFT), ("policy", "policy’s answers", POLICY))
        if finite((found.get(key) or {}).get("agreement")) is not None
    ]
    if not rows:
        return None
    figure, (axes,) = canvas("Agreement of reward model and judge")
    for y, (name, colour, one) in zip((1.0, 0.0), rows, strict=False):
        if ends := interval(one.get("agreement_ci95")):
            axes.plot(ends, (y, y), color=colour, linewidth=11, alpha=0.35, solid_capstyle="butt")
        axes.plot([one["agreement"]], [y], "o", color=colour, markersize=9)
        axes.annotate(
            f"{name}: {percent(one['agreement'])} ({percent_interval(one.get('agreement_ci95'))})",
            (0.0, y), (0, 14), textcoords="offset points", xycoords=("axes fraction", "data"), color=INK,
            fontsize=9.5, bbox={"fc": "white", "ec": "none", "pad": 1.5},
        )  # fmt: skip
    axes.axvline(0.5, color=MUTED, linewidth=1, linestyle=(0, (3, 3)))
    lowest = min([0.5, *(ends[0] for _, _, one in rows if (ends := interval(one.get("agreement_ci95"))))])
    axes.set(
        xlim=(lowest - 0.03, 1.01), ylim=(-0.6, 1.7), yticks=[], xlabel="pairs of one prompt’s answers ordered alike"
    )
    axes.xaxis.set_major_formatter(percent_tick)
    axes.spines["left"].set_visible(False)
    said = "; ".join(
        f"{name} {percent(one['agreement'])}, {percent_interval(one.get('agreement_ci95'))}" for name, _, one in rows
    )
    return Picture(
        "reward_agreement",
        "reward",
        png(figure),
        f"Share of pairs that reward model and judge order alike: {said}.",
        "Before and after PPO: on pairs of answers to one prompt, how often reward model and judge prefer the same. "
        "PPO moves to answers that the reward model was not trained on, so its agreement there is what counts. "
        + _matched(found.get("sft") or {})
        + "Bars: 95% intervals; dashed: a coin.",
    )


def _matched(sft: Row) -> str:
    """How much of a fall is no fault of the reward model's."""
    rate = finite(sft.get("agreement_at_policy_margins"))
    if rate is None:
        return ""
    return (
        f"Answers that lie close together are hard to order anywhere: were SFT’s as close as the policy’s, it would be "
        f"{percent(rate)} for SFT. "
    )


def _bucket(row: Row) -> str:
    """The ends of a bucket; the last may be open."""
    low, high = finite(row.get("low")), finite(row.get("high"))
    if low is None or high is None:
        return f"above {number(low, 1)}" if high is None else f"below {number(high, 1)}"
    return f"{number(low, 1)} to {number(high, 1)}"
