"""A drawn picture with its words, and the line chart that most pictures are. What is drawn stands in figures.py, the
look in canvas.py."""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tasks.page.canvas import MUTED, canvas, curve, label_axes, legend, png
from tasks.page.inputs import Curve, finite
from tasks.page.wording import change

STEP = "PPO step"


@dataclass(frozen=True)
class Picture:
    """A drawn picture with its words."""

    name: str
    """File name without `.png`, and the anchor on the page."""
    section: str
    """Where on the page it stands: answer, comparison, ppo, reward or sft."""
    png: bytes
    alt: str
    """What is seen, in a sentence, for who does not see it."""
    caption: str
    """How to read it."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in dots, from the PNG's header."""
        width, height = struct.unpack(">II", self.png[16:24])
        return width, height


Line = tuple[str, str, str, bool]  # column, label, colour, dashed


def lines_picture(
    name: str,
    section: str,
    title: str,
    table: Curve,
    lines: list[Line],
    unit: str,
    caption: str,
    share: bool = False,
    zero: bool = False,
    x: str = STEP,
) -> Picture | None:
    """A picture with one panel of lines; None when the first line has no known point."""
    lines = [line for line in lines if known(table.get(line[0], []))]
    if not lines:
        return None
    figure, (axes,) = canvas(title)
    for column, label, colour, dashed in lines:
        curve(axes, table["step"], table[column], label, colour, dashed)
    if zero:
        axes.axhline(0, color=MUTED, linewidth=1)
    label_axes(axes, unit, x, share=share)
    legend(axes)
    said = line_alt([(label, table[column], 3, unit) for column, label, _, _ in lines])
    return Picture(name, section, png(figure), said, caption)


def known(values: Iterable[Any]) -> list[float]:
    return [value for value in map(finite, values) if value is not None]


def line_alt(lines: list[tuple[str, list[float], int, str]]) -> str:
    """What a line chart shows, in words: where each line starts and ends."""
    told = [change(label, values, digits, unit) for label, values, digits, unit in lines]
    return f"Line chart: {'; '.join(told)}."
