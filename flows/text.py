"""Tables and values as text for the terminal."""

from collections.abc import Iterable, Mapping
from typing import Any

LONGEST_VALUE = 40


def table(rows: Iterable[Iterable[str]]) -> str:
    """Left-aligned columns; the first row is the heading."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )


def shorten(text: str, longest: int = LONGEST_VALUE) -> str:
    """The text, cut to `longest` characters."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def dotted(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested values by dotted name: {"ppo": {"kl": {"coef": 0.1}}} gives {"ppo.kl.coef": 0.1}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= dotted(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": value}
    return flat
