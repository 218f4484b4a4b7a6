"""Writes the table of row shapes into docs/how-to/own-data.md; a test compares the page with the code.

python docs/make_shapes.py
"""

import json
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from tasks.datasets.sources.shapes import SHAPES  # noqa: E402

GUIDE = HERE / "how-to" / "own-data.md"
BEGIN = "<!-- The table is made from tasks/datasets/sources/shapes.py: python docs/make_shapes.py -->"


def page() -> str:
    """The guide with the present table."""
    lines = ["| columns | becomes | for example |", "|---|---|---|"]
    lines += [f"| {s.columns} | {s.becomes} | `{json.dumps(s.example)}` |" for s in SHAPES]
    text = GUIDE.read_text(encoding="utf-8")
    return re.sub(rf"{re.escape(BEGIN)}\n(\|.*\n)*", lambda _: "\n".join([BEGIN, *lines]) + "\n", text)


if __name__ == "__main__":
    GUIDE.write_text(page(), encoding="utf-8")
