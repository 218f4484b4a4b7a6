"""Files below data/raw/ that parameters of later stages name, and `ingest` copies: evaluation prompts and texts of
PPO-ptx."""

from collections.abc import Sequence
from pathlib import Path

from rlhf_core.data.chat import as_text, opening
from rlhf_core.errors import UserError
from tasks.datasets.jsonl import Row, brief, iter_jsonl
from tasks.datasets.raw import below_raw
from tasks.datasets.sources import cleaning
from tasks.datasets.sources.example import RAW, Example
from tasks.datasets.sources.shapes import normalise

LONGEST = 2**31
"""Characters; long prompts are refused later, in tokens."""


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


def read_text(raw: Path, name: str) -> str:
    """The text file `name` below `raw`. Raises UserError for a file that cannot be read, is not UTF-8 or is empty."""
    path, shown = below_raw(raw, name, "ppo.ptx.file"), (RAW / name).as_posix()
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise UserError(f"ppo.ptx.file: cannot read {shown} ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"ppo.ptx.file: {shown} is not UTF-8 (byte {error.start})") from None
    if not text.strip():
        raise UserError(f"ppo.ptx.file: {shown} holds no text")
    return text
