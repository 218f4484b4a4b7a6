"""A picture with its caption and alternative text."""

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tasks.page.inputs import finite
from tasks.page.wording import number

STEP = "PPO step"


@dataclass(frozen=True)
class Picture:
    """A PNG with its caption and alternative text."""

    name: str
    """File name without `.png`, and the anchor on the page."""
    section: str
    """Section of the page: answer, comparison, ppo, reward or sft."""
    png: bytes
    alt: str
    """Alternative text for screen readers."""
    caption: str

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels, from the PNG's header."""
        width, height = struct.unpack(">II", self.png[16:24])
        return width, height


def known(values: Iterable[Any]) -> list[float]:
    """The finite values."""
    return [value for value in map(finite, values) if value is not None]


def line_alt(lines: list[tuple[str, list[float], int, str]]) -> str:
    """Alternative text with the first and last value of each line (label, values, digits, unit)."""
    return f"Line chart: {'; '.join(_ends(*line) for line in lines)}."


def _ends(label: str, values: list[float], digits: int, unit: str) -> str:
    ends = [number(value, digits) for value in values if math.isfinite(value)]
    change = f"from {ends[0]} to {ends[-1]}" if len(ends) > 1 else ends[0]
    return f"{label} {change} {unit}".strip()
