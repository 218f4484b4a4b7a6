"""Writes docs/reference/files.md, the datasets between the stages with their columns; a test compares the page with the
code.

python docs/make_files.py
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from tasks.schemas.datasets import SCHEMAS  # noqa: E402

PAGE = HERE / "reference" / "files.md"
HEAD = """# Datasets between the stages
Every stage checks the rows of each dataset that it reads (pandera), and ends with all that is wrong before it computes.
One JSON object a line. `prompt_id` must belong to its prompt, no prompt may be in train and in validation, and chosen
and rejected must differ. This page is made from `tasks/schemas/datasets.py` by `python docs/make_files.py`.
"""


def page() -> str:
    """The page with the present schemas."""
    parts = [HEAD.rstrip()]
    for path, model in SCHEMAS.items():
        schema = model.to_schema()
        parts += ["", f"## {path}", str(model.__doc__), "", "| column | must be | meaning |", "|---|---|---|"]
        for name, column in schema.columns.items():
            rule = column.metadata["kind"] + " or null" * column.metadata["or_null"]
            rule += "" if column.required else "; may be missing"
            parts.append(f"| `{name}` | {rule} | {column.description} |")
        once = [check.statistics["names"] for check in schema.checks if check.name == "unique_by"]
        parts += ["", *(f"Rows differ in {' + '.join(f'`{name}`' for name in names)}." for names in once)]
    return "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
