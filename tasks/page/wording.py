"""How numbers are written on the page and in its pictures: one place, so that a figure reads the same everywhere.
Only formatting lives here."""

import math
from typing import Any

from tasks.page.inputs import finite, interval

MISSING = "–"


def number(value: Any, digits: int = 2, sign: bool = False) -> str:
    """`value` with a fixed number of decimals and a real minus sign; an en dash where there is none."""
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


def percent_interval(value: Any) -> str:
    """`[low, high]` of a share as `85.0% to 91.3%`."""
    ends = interval(value)
    return MISSING if ends is None else f"{percent(ends[0])} to {percent(ends[1])}"


def change(label: str, values: list[float], digits: int = 2, unit: str = "") -> str:
    """Where a curve starts and ends, for the text beside a picture. `values` may hold NaN, but not only NaN."""
    known = [value for value in values if math.isfinite(value)]
    ends = (
        f"{label} {number(known[0], digits)}"
        if len(known) == 1
        else (f"{label} from {number(known[0], digits)} to {number(known[-1], digits)}")
    )
    return f"{ends} {unit}".strip()
