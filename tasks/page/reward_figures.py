"""The pictures of the reward model."""

import math

from matplotlib.ticker import FixedLocator, MultipleLocator

from tasks.page.canvas import INK, MUTED, PROXY, canvas, curve, label_axes, legend, percent_tick, png
from tasks.page.inputs import Row, Run, finite, interval
from tasks.page.picture import Picture, known, line_alt
from tasks.page.wording import count, number, percent


def reward_training(run: Run) -> Picture | None:
    """Training loss and accuracy, with the held-out accuracy."""
    table, metrics = run.curves["reward"], run.metrics["reward"]
    if not known(table.get("loss", [])) or not known(table.get("accuracy", [])):
        return None
    figure, (axes, above) = canvas("Reward model: loss and accuracy", panels=(4, 5))
    curve(axes, table["step"], table["loss"], "training loss", PROXY)
    label_axes(axes, "loss, nats\nper pair")
    curve(above, table["step"], table["accuracy"], "training batch", PROXY)
    held_out, ends = finite(metrics.get("heldout_accuracy")), interval(metrics, "heldout_accuracy")
    if held_out is not None:
        above.axhline(held_out, color=INK, linewidth=1.4, label="held-out")
    if ends is not None:
        above.axhspan(*ends, color=INK, alpha=0.12, linewidth=0)
    above.axhline(0.5, color=MUTED, linewidth=1, linestyle=(0, (2, 3)))
    above.set_ylim(top=1.02)
    label_axes(above, "pairs ranked\nright", "training step", share=True)
    legend(above)
    alt = line_alt(
        [("training loss", table["loss"], 3, "nats per pair"), ("training accuracy", table["accuracy"], 2, "")]
    )
    return Picture(
        "reward_training",
        "reward",
        png(figure),
        f"{alt} Held-out accuracy {percent(held_out)}.",
        f"Held-out accuracy {percent(held_out)}, on pairs of prompts that were not trained on; "
        "the band is its 95% interval. Dotted: chance."
        + (" The training is that of the first member." if "member_2_accuracy" in metrics else ""),
    )


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
    figure, (axes, below) = canvas("Reward model: calibration", panels=(5, 2))
    low = min(row[3] for row in rows)
    axes.plot((low, 1), (low, 1), color=MUTED, linewidth=1, linestyle=(0, (3, 3)), label="perfect")
    axes.plot(
        [row[0] for row in rows], [row[1] for row in rows], "o-", color=PROXY, markersize=4.5, label="held-out pairs"
    )
    label_axes(axes, "pairs ranked right", share=True)
    legend(axes)
    below.bar(
        [row[3] for row in rows],
        [row[2] for row in rows],
        [row[4] - row[3] for row in rows],
        align="edge",
        color=PROXY,
        alpha=0.45,
        edgecolor="white",
        linewidth=1,
    )
    label_axes(below, "pairs", "predicted probability")
    below.xaxis.set_major_locator(MultipleLocator(0.1))
    below.xaxis.set_major_formatter(percent_tick)
    error = number(run.metrics["reward"].get("expected_calibration_error"), 3)
    return Picture(
        "reward_calibration",
        "reward",
        png(figure),
        f"Calibration of the reward model in {len(rows)} bins; expected calibration error {error}.",
        "How often the answer that the model prefers is the chosen one, by the predicted probability. Dashed: perfect "
        f"calibration; below it the model is overconfident. Expected calibration error: {error}.",
    )


def reward_margins(run: Run) -> Picture | None:
    """Accuracy by the margin between the two answers."""
    metrics = run.metrics["reward"]
    table = run.curves["reward_margins"]
    rows = [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]
    rows = [row for row in rows if finite(row.get("accuracy")) is not None and finite(row.get("pairs"))]
    if not rows:
        return None
    by = "judge’s margin" if metrics.get("margin_by") == "gold" else "reward model’s own margin"
    figure, (axes, below) = canvas("Reward model: accuracy by margin", panels=(5, 2))
    places = range(len(rows))
    for place, row in zip(places, rows, strict=True):
        ends = interval(row, "accuracy")
        if ends is not None:
            axes.plot((place, place), ends, color=PROXY, linewidth=7, alpha=0.3, solid_capstyle="butt")
        axes.plot([place], [row["accuracy"]], "o", color=PROXY, markersize=5)
    axes.axhline(0.5, color=MUTED, linewidth=1, linestyle=(0, (2, 3)))
    below.bar(places, [row["pairs"] for row in rows], color=PROXY, alpha=0.45, width=0.8)
    label_axes(axes, "pairs ranked\nright", share=True)
    label_axes(below, "pairs", by)
    below.xaxis.set_major_locator(FixedLocator(list(places)))
    below.set_xticklabels([_bucket(row) for row in rows])
    texts = [f"{_bucket(row)}: {percent(row['accuracy'])} of {count(row['pairs'])}" for row in rows]
    return Picture(
        "reward_margins",
        "reward",
        png(figure),
        f"Accuracy of the reward model by the {by}: {'; '.join(texts)}.",
        f"How often the reward model ranks a held-out pair right, by the {by}: pairs with a small margin "
        "are hard; errors at a large margin are a warning. Bars: 95% intervals. Dotted: chance.",
    )


def _bucket(row: Row) -> str:
    """The ends of a bucket; the last may be open."""
    low, high = finite(row.get("low")), finite(row.get("high"))
    if low is None or high is None:
        return f"above {number(low, 1)}" if high is None else f"below {number(high, 1)}"
    return f"{number(low, 1)} to {number(high, 1)}"
