"""The evaluation prompts: the held-out prompts of the data, or a file of the user's."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_core.data.chat import as_text, opening
from rlhf_core.errors import UserError
from tasks.datasets.jsonl import Row, brief, iter_jsonl
from tasks.datasets.raw import below_raw
from tasks.datasets.sources import cleaning
from tasks.datasets.sources.example import RAW, Example
from tasks.datasets.sources.shapes import normalise
from tasks.params.evaluate import HELDOUT as FROM_DATA
from tasks.params.evaluate import EvaluateParams
from tasks.stage.stage import Stage

HELDOUT = "data/ingest/heldout.jsonl"
TRAINING = (
    "data/ingest/demonstrations.jsonl",
    "data/ingest/ppo_prompts.jsonl",
    "data/ingest/preference_prompts.jsonl",
    "data/preferences/preferences.jsonl",
)
"""Datasets whose prompts are used for training or selection."""
LONGEST = 2**31
"""Characters; long prompts are refused later, in tokens."""


def evaluation_prompts(stage: Stage[Any], params: EvaluateParams) -> list[Row]:
    """The first `params.max_prompts` rows {prompt_id, prompt, response}; response is a demonstration or None. With
    further columns in the data the rows have `extra`, too.

    The stage must depend on HELDOUT, TRAINING and data/raw. Raises UserError for a file without rows, with bad rows or
    with training prompts.
    """
    if params.prompts == FROM_DATA:
        return stage.read(HELDOUT)[: params.max_prompts]
    rows = read_prompts(stage.root / RAW, params.prompts)
    refuse_training_prompts(params.prompts, rows, {path: stage.read(path) for path in TRAINING})
    if len(rows) > params.max_prompts:
        stage.log(f"evaluate.prompts: the first {params.max_prompts} of {len(rows)} prompts (evaluate.max_prompts)")
    return rows[: params.max_prompts]


def source_of(params: EvaluateParams) -> str:
    """The source of the prompts, for error messages."""
    return HELDOUT if params.prompts == FROM_DATA else f"{(RAW / params.prompts).as_posix()}, distinct prompts"


def read_prompts(raw: Path, name: str) -> list[Row]:
    """The distinct prompts of the JSONL file `name` below `raw`, in the shapes that `ingest` reads. Raises UserError
    for a file without rows or with bad rows."""
    path, shown = below_raw(raw, name, "evaluate.prompts"), (RAW / name).as_posix()
    if path.suffix.lower() != ".jsonl":
        raise UserError(f'evaluate.prompts: {shown} is no *.jsonl file; each line must be one {{"prompt": …}}')
    if not path.exists():
        raise UserError(f"evaluate.prompts: {shown} not found; import it with `leash import PATH`")
    examples = list(normalise(iter_jsonl(path), shown, heldout=True))
    if any(example.is_text for example in examples):
        raise UserError(f'evaluate.prompts: {shown} has the column text; write the openings: one {{"prompt": …}} a row')
    kept, dropped = cleaning.clean(examples, LONGEST)
    bad = [row for row in dropped if row.reason != "duplicate"]
    if bad:
        raise UserError(f"evaluate.prompts: bad rows: {cleaning.summary(bad)}; correct or remove them")
    if not kept:
        raise UserError(f"evaluate.prompts: {shown} has no rows")
    distinct: dict[str, Row] = {}
    for example in kept:
        distinct.setdefault(example.prompt_id, _row(example))
    return list(distinct.values())


def refuse_training_prompts(name: str, rows: Sequence[Row], training: dict[str, list[Row]]) -> None:
    """Raise UserError if prompts open like training prompts (case and white space folded, as in the data split)."""
    seen = {opening(row["prompt"]): path for path, known in reversed(training.items()) for row in known}
    leaks = [row for row in rows if opening(row["prompt"]) in seen]
    if leaks:
        first = leaks[0]["prompt"]
        raise UserError(
            f"evaluate.prompts: {len(leaks)} of {len(rows)} prompts of {(RAW / name).as_posix()} are training prompts, "
            f"first {brief(' '.join(as_text(first).split()))} (in {seen[opening(first)]}); remove them"
        )


def _row(example: Example) -> Row:
    response = example.chosen if example.response is None else example.response
    extra = {"extra": example.extra} if example.extra else {}
    return {"prompt_id": example.prompt_id, "prompt": example.prompt, "response": response} | extra
