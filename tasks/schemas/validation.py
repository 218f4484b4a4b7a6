"""Validates datasets with their pandera schemas, and checks that no held-out prompt is in a training dataset."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from rlhf_core.data.chat import as_text, opening
from rlhf_core.errors import UserError
from tasks.datasets.jsonl import Row, brief_names, read_jsonl

if TYPE_CHECKING:  # the import takes a second, also that of the schemas: stages without datasets do without
    import pandas as pd
    import pandera.pandas as pa

ROWS_NAMED = 5
PROBLEMS_NAMED = 20
ASKED = ("data/ingest/heldout.jsonl", "data/ingest/evaluation_prompts.jsonl")
"""Datasets of prompts that no training stage may read."""
TRAINING = frozenset(
    f"data/ingest/{name}.jsonl" for name in ("demonstrations", "pairs", "preference_prompts", "ppo_prompts")
) | {"data/preferences/preferences.jsonl", "data/preferences/samples.jsonl"}
"""Datasets that must not contain a held-out prompt."""


class Problem(NamedTuple):
    """A rule and the rows (from 1) that break it; `column` is empty for a rule about whole rows."""

    column: str
    rule: str
    rows: list[int]

    def __str__(self) -> str:
        where = f"{brief_names([self.column])}: " if self.column else ""
        if not self.rows:
            return f"{where}{self.rule}"
        named = ", ".join(map(str, self.rows[:ROWS_NAMED]))
        more = ", …" if len(self.rows) > ROWS_NAMED else ""
        count = "1 row" if len(self.rows) == 1 else f"{len(self.rows)} rows"
        return f"{where}{self.rule} ({count}: {named}{more})"


class _Missing:
    """The value of a key that a row lacks: unlike null it passes no check."""


MISSING = _Missing()


def load(root: Path, paths: Iterable[str]) -> dict[str, list[Row]]:
    """The validated datasets among `paths` (relative to `root`), without raw data. Held-out and training prompts among
    them must be disjoint. Raises UserError, see `validate` and `check_heldout_disjoint`."""
    datasets = {path: validate(read_jsonl(root / path), path) for path in paths if is_dataset(path)}
    for path in filter(datasets.__contains__, ASKED):
        check_heldout_disjoint(datasets[path], {name: datasets[name] for name in datasets if name in TRAINING})
    return datasets


def is_dataset(path: str) -> bool:
    """Whether `path` is a dataset between stages: data/<folder>/<name>.jsonl, raw data excepted."""
    parts = PurePosixPath(path).parts
    return len(parts) == 3 and parts[0] == "data" and parts[1] != "raw" and parts[2].endswith(".jsonl")


def validate(rows: list[Row], path: str) -> list[Row]:
    """`rows`, unchanged, when all of them fit the schema of the dataset at `path`.

    Raises UserError in one line with every broken rule: file, column, what it must be, how many rows, the first ones.
    Rows count from 1; in a file without blank lines that is the line.
    """
    from tasks.schemas.datasets import SCHEMAS

    schema = SCHEMAS[path].to_schema()
    if not rows:
        if SCHEMAS[path].Config.metadata.get("may_be_empty"):
            return rows
        raise UserError(f"{path}: empty data set; at least one row is needed")
    import pandas as pd
    from pandera.errors import SchemaErrors

    present = [name for name, col in schema.columns.items() if col.required or any(name in row for row in rows)]
    columns = {name: [row.get(name, MISSING) for row in rows] for name in present}
    problems = [Problem(name, "missing column", numbers) for name, numbers in _missing(columns).items()]
    problems += [Problem(name, "unknown column", numbers) for name, numbers in _unknown(rows, columns).items()]
    try:
        schema.validate(pd.DataFrame(columns, dtype=object), lazy=True)
    except SchemaErrors as errors:
        problems += _problems(errors.failure_cases, schema, columns)
    if problems:
        more = f"; and {len(problems) - PROBLEMS_NAMED} more" if len(problems) > PROBLEMS_NAMED else ""
        raise UserError(f"{path}: {'; '.join(map(str, problems[:PROBLEMS_NAMED]))}{more}")
    return rows


def _missing(columns: Mapping[str, list[object]]) -> dict[str, list[int]]:
    found = {
        name: [number for number, value in enumerate(values, start=1) if value is MISSING]
        for name, values in columns.items()
    }
    return {name: numbers for name, numbers in found.items() if numbers}


def _unknown(rows: list[Row], columns: Mapping[str, object]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for number, row in enumerate(rows, start=1):
        for name in row.keys() - columns.keys():
            found.setdefault(name, []).append(number)
    return dict(sorted(found.items()))


def _problems(
    cases: "pd.DataFrame", schema: "pa.DataFrameSchema", columns: Mapping[str, list[object]]
) -> list[Problem]:
    """pandera's table of failures (a row a failed value) as one problem a rule, without what a missing key explains."""
    import pandas as pd

    found: dict[tuple[str, str], set[int]] = {}
    for context, column, number, index in zip(
        cases["schema_context"], cases["column"], cases["check_number"], cases["index"], strict=True
    ):
        name = str(column) if context == "Column" else ""
        check = (schema.columns[name] if name else schema).checks[int(number)]
        rule = {"holds": "must be {kind}", "unique_by": "{names} must occur once"}.get(check.name, check.error)
        words = {key: " + ".join(value) if key == "names" else value for key, value in (check.statistics or {}).items()}
        numbers = found.setdefault((name, rule.format(**words)), set())
        if not pd.isna(index):
            numbers.add(int(index) + 1)
    problems = []
    for (name, rule), numbers in found.items():
        explained = {number for number in numbers if name and columns[name][number - 1] is MISSING}
        if not numbers or numbers != explained:
            problems.append(Problem(name, rule, sorted(numbers - explained)))
    return problems


def check_heldout_disjoint(heldout_rows: Sequence[Row], datasets: Mapping[str, Sequence[Row]]) -> None:
    """Raise UserError when a row of another dataset begins with the first user message of a held-out row (case and
    white space folded). It names the first such prompt and row, and how many rows there are."""
    heldout = {opening(row["prompt"]) for row in heldout_rows}
    leaks = [
        (name, number, row)
        for name, rows in datasets.items()
        for number, row in enumerate(rows, start=1)
        if opening(row["prompt"]) in heldout
    ]
    if leaks:
        name, number, row = leaks[0]
        shown = " ".join(as_text(row["prompt"]).split())[:80]
        raise UserError(
            f"leaked held-out prompt: {shown!r} is also in {name}, row {number} ({len(leaks)} such rows); "
            "run the stage ingest again, and do not edit data/ingest/ by hand"
        )
