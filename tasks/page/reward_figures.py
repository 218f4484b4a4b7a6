"""The picture of the reward model's accuracy by margin."""

from matplotlib.ticker import FixedLocator

from tasks.page.canvas import MUTED, PROXY, canvas, label_axes, png
from tasks.page.inputs import Row, Run, finite, interval
from tasks.page.picture import Picture
from tasks.page.wording import count, number, percent


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
        "fails on wide ones has learned something else. Bars: 95% intervals. Dotted: chance.",
    )


def _bucket(row: Row) -> str:
    """The ends of a bucket; the last may be open."""
    low, high = finite(row.get("low")), finite(row.get("high"))
    if low is None or high is None:
        return f"above {number(low, 1)}" if high is None else f"below {number(high, 1)}"
    return f"{number(low, 1)} to {number(high, 1)}"
