"""Outputs of a stage: equal content gives equal bytes. They are written to temporary paths, and renamed when all are
complete."""

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_core import files
from tasks.datasets.jsonl import write_jsonl

DIGITS = 10
"""Significant digits of floats in metrics/ and plots/: processors of another type differ in the last of 17."""


def rounded(value: Any) -> Any:
    """`value` with every float in it, also in mappings and lists, rounded to `DIGITS` significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list | tuple) else value


class Outputs:
    """The outs of one stage. `path` returns where to write an out; `commit` renames all of them into place. As a
    context, it removes what was written when the stage fails."""

    def __init__(self, root: Path, declared: Sequence[str]) -> None:
        self.root = root
        self.declared = list(declared)
        self.begun: list[str] = []

    def path(self, out: str) -> Path:
        """Where to write `out` until `commit`. Raises ValueError for a path that dvc.yaml does not declare."""
        if out not in self.declared:
            raise ValueError(f"{out} is no out of this stage in dvc.yaml ({', '.join(self.declared)})")
        place = self._beside(out)
        if out not in self.begun:
            files.remove(place)
            place.parent.mkdir(parents=True, exist_ok=True)
            self.begun.append(out)
        return place

    def write_json(self, out: str, content: Mapping[str, Any]) -> None:
        """Indented JSON in the order given; NaN is refused."""
        text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
        self.path(out).write_text(text + "\n", encoding="utf-8")

    def write_jsonl(self, out: str, rows: Iterable[dict[str, Any]]) -> None:
        """JSON lines; one blank line where there are no rows, because DVC warns of an empty file."""
        write_jsonl(self.path(out), rows)
        if self.path(out).stat().st_size == 0:
            self.path(out).write_bytes(b"\n")

    def write_csv(self, out: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """A table with the columns of the first row and `rounded` numbers; None becomes an empty cell. Raises
        ValueError without rows."""
        if not rows:
            raise ValueError(f"{out}: a table needs at least one row")
        with self.path(out).open("w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
            table.writeheader()
            table.writerows(map(rounded, rows))

    def commit(self) -> None:
        """Rename every out into place. Raises ValueError when one that dvc.yaml declares was not written."""
        missing = [out for out in self.declared if out not in self.begun or not self._beside(out).exists()]
        if missing:
            raise ValueError(f"the stage ended without writing {', '.join(missing)}")
        for out in self.declared:  # a full disk fails here, while the old outs are in place
            files.flush(self._beside(out))
        for out in self.declared:
            files.replace(self._beside(out), self.root / out)
        self.begun.clear()

    def __enter__(self) -> "Outputs":
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        for out in self.begun if failed else ():
            files.remove(self._beside(out))
        self.begun.clear()

    def _beside(self, out: str) -> Path:
        return files.partial_path(self.root / out)
