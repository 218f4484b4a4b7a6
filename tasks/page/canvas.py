"""The look of every picture: size, colours, axes, and PNG bytes that are the same for the same numbers. What is drawn
stands in figures.py. Figure objects only: pyplot and its global state stay out."""

import io
import math
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from tasks.params.methods import METHODS

SFT, POLICY, JUDGE, PROXY = "#77828f", "#1668c7", "#b26a00", "#8250a8"
"""One colour a meaning, on the page too: the SFT model, the policy, the judge's score, the reward model's score."""
COLOURS = {"sft": SFT, "policy": POLICY, "ppo": POLICY} | {method.name: method.colour for method in METHODS}
OTHER = "#3f4650"
"""Of the models that a user adds."""
PALETTE = 96
"""Colours of a picture's palette: a third of the bytes of true colour, and no difference to the eye."""
INK, MUTED, RULE = "#1c2430", "#56616f", "#dfe3e8"
WIDTH, HEIGHT, DPI = 4.8, 3.3, 200  # inches, inches, dots per inch

STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so the bytes do not depend on the machine's fonts
    "font.size": 10.5,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": "#aab2bd",
    "axes.labelcolor": MUTED,
    "axes.labelsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "legend.fontsize": 9.5,
    "legend.frameon": False,
    "lines.linewidth": 1.7,
    "lines.solid_capstyle": "round",
    "savefig.dpi": DPI,
}


def colour_of(model: str) -> str:
    """The colour of a model or of a family of models."""
    return COLOURS.get("best_of_n" if model.startswith("best_of_") else model, OTHER)


def canvas(title: str, panels: Sequence[float] = (1,), height: float = HEIGHT) -> tuple[Figure, list[Axes]]:
    """A figure with a title and one panel above another; `panels` are their relative heights. All have one width."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    figure.suptitle(title, x=0.012, ha="left", fontsize=11.5, fontweight="bold")
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=list(panels))
    return figure, list(grid[:, 0])


def png(figure: Figure) -> bytes:
    """The picture as PNG, without the metadata (program, version) that would change its bytes."""
    drawn, buffer = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", metadata={"Software": None})
    picture = Image.open(drawn).convert("RGB")
    picture = picture.quantize(PALETTE, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    picture.save(buffer, format="png", optimize=True)
    return buffer.getvalue()


def styled() -> Any:
    """A context in which matplotlib's defaults and this page's style hold, whatever the user's matplotlibrc says."""
    defaults: dict[Any, Any] = {
        key: value for key, value in mpl.rcParamsDefault.items() if not key.startswith("backend")
    }
    return mpl.rc_context(defaults | STYLE)


def curve(axes: Axes, x: list[float], y: list[float], label: str, colour: str, dashed: bool = False) -> bool:
    """A line through the points that are known. A few points get markers. False, and nothing drawn, without any."""
    known = [(a, b) for a, b in zip(x, y, strict=True) if math.isfinite(a) and math.isfinite(b)]
    if not known:
        return False
    axes.plot(
        [a for a, _ in known],
        [b for _, b in known],
        label=label,
        color=colour,
        linestyle=(0, (4, 2)) if dashed else "-",
        marker="o" if len(known) <= 12 else "",
        markersize=3.5,
    )
    return True


def label_axes(axes: Axes, y: str, x: str = "", share: bool = False) -> None:
    """Axis names with units, whole numbers below, percentages at the side where it is a share."""
    axes.set_ylabel(y)
    if x:
        axes.set_xlabel(x)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    if share:
        axes.yaxis.set_major_formatter(percent_tick)


def percent_tick(value: float, _position: float) -> str:
    """A share as a percentage with no more decimals than it needs."""
    return f"{100 * value:.4g}%".replace("-", "−")


def legend(axes: Axes) -> None:
    """The legend above the panel, where it hides no line. Nothing for a panel with a single line."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        axes.legend(
            handles,
            labels,
            loc="lower left",
            bbox_to_anchor=(-0.015, 0.99),
            ncols=3,
            borderaxespad=0.1,
            handlelength=1.6,
            columnspacing=1.2,
        )
