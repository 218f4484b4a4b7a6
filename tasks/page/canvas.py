"""Style of the pictures: size, colours, axes, and reproducible PNG bytes. pyplot and its global state are not used."""

import io
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from tasks.params.methods import METHODS

SFT, POLICY, JUDGE, PROXY = "#77828f", "#1668c7", "#b26a00", "#8250a8"
"""The same colours as in style.css.j2."""
COLOURS = {"sft": SFT, "policy": POLICY, "ppo": POLICY} | {method.name: method.colour for method in METHODS}
OTHER = "#3f4650"
"""Colour of the user's models."""
PALETTE = 96
"""Number of colours in a PNG; a third of the bytes of true colour."""
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


@dataclass(frozen=True)
class Picture:
    """A PNG with its caption and alternative text."""

    name: str
    """File name without `.png`, and the anchor on the page."""
    png: bytes
    alt: str
    """Alternative text for screen readers."""
    caption: str

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels, from the PNG's header."""
        width, height = struct.unpack(">II", self.png[16:24])
        return width, height


def colour_of(model: str) -> str:
    """The colour of a model or of a family of models."""
    return COLOURS.get("best_of_n" if model.startswith("best_of_") else model, OTHER)


def canvas(
    title: str, panels: Sequence[float] = (1,), height: float = HEIGHT, width: float = WIDTH, columns: int = 1
) -> tuple[Figure, list[Axes]]:
    """A figure with a title and panels, row by row; `panels` are the relative heights of the rows."""
    figure = Figure(figsize=(width, height), layout="constrained")
    if title:
        figure.suptitle(title, x=0.012, ha="left", fontsize=11.5, fontweight="bold")
    grid = figure.subplots(len(panels), columns, sharex=True, squeeze=False, height_ratios=list(panels))
    return figure, list(grid.flat)


def png(figure: Figure) -> bytes:
    """The picture as PNG without metadata, so that equal pictures have equal bytes."""
    drawn, buffer = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", metadata={"Software": None})
    picture = Image.open(drawn).convert("RGB")
    picture = picture.quantize(PALETTE, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    picture.save(buffer, format="png", optimize=True)
    return buffer.getvalue()


def styled() -> Any:
    """A context with matplotlib's defaults and this style; the user's matplotlibrc is ignored."""
    defaults: dict[Any, Any] = {
        key: value for key, value in mpl.rcParamsDefault.items() if not key.startswith("backend")
    }
    return mpl.rc_context(defaults | STYLE)


def curve(axes: Axes, x: list[float], y: list[float], label: str, colour: str, dashed: bool = False) -> None:
    """A line through the finite points; with markers where they are few."""
    known = [(a, b) for a, b in zip(x, y, strict=True) if math.isfinite(a) and math.isfinite(b)]
    if not known:
        return
    axes.plot(
        [a for a, _ in known],
        [b for _, b in known],
        label=label,
        color=colour,
        linestyle=(0, (4, 2)) if dashed else "-",
        marker="o" if len(known) <= 12 else "",
        markersize=3.5,
    )


def label_axes(axes: Axes, y: str, x: str = "", share: bool = False) -> None:
    """Set axis labels and ticks: integers on x; percentages on y if it is a share."""
    axes.set_ylabel(y)
    if x:
        axes.set_xlabel(x)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    if share:
        axes.yaxis.set_major_formatter(percent_tick)


def percent_tick(value: float, _position: float) -> str:
    """A share as a percentage."""
    return f"{100 * value:.4g}%".replace("-", "−")


def legend(axes: Axes) -> None:
    """A legend above the panel, if it has more than one line."""
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
