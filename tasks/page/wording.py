"""Formatting of numbers on the page and in its pictures."""

from typing import Any

from tasks.page.inputs import finite

MISSING = "–"


def number(value: Any, digits: int = 2, sign: bool = False) -> str:
    """`value` with a fixed number of decimals and a minus sign (U+2212); an en dash if it is missing or not finite."""
    known = finite(value)
    if known is None:
        return MISSING
    rounded = round(known, digits) + 0.0  # −0.0 becomes 0.0
    return f"{rounded:{'+' if sign and rounded else ''},.{digits}f}".replace("-", "−")


def count(value: Any) -> str:
    """A whole number with thousands separators."""
    return number(value, 0)


def percent(value: Any, digits: int = 1, sign: bool = False) -> str:
    """A share in [0, 1] as a percentage."""
    known = finite(value)
    return MISSING if known is None else number(100 * known, digits, sign) + "%"


def points(value: Any, digits: int = 1) -> str:
    """A difference between two shares, in percentage points."""
    known = finite(value)
    return MISSING if known is None else number(100 * known, digits, sign=True) + " points"


def percent_interval(ends: tuple[float, float] | None) -> str:
    """The ends of the interval of a share as `85.0% to 91.3%`."""
    return MISSING if ends is None else f"{percent(ends[0])} to {percent(ends[1])}"
