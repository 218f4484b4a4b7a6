"""The five datasets of a run, made from clean examples and their shares. Rows stand in the order of the splits' hash:
the first n of a dataset are a random sample of it, whatever the order of the raw files."""

from collections.abc import Iterable
from dataclasses import dataclass

from tasks.jsonl import Row
from tasks.sources.example import Example
from tasks.sources.splits import Assignment, Share, rank


@dataclass(frozen=True)
class Datasets:
    """What `ingest` writes to data/ingest/, columns as in `tasks/schemas/`."""

    demonstrations: list[Row]
    pairs: list[Row]
    preference_prompts: list[Row]
    ppo_prompts: list[Row]
    heldout: list[Row]


def assemble(examples: list[Example], assignment: Assignment, seed: int) -> Datasets:
    """Every example in its share: as demonstration (a pair's chosen answer counts), pair and prompt, or prompt."""
    ordered = sorted(examples, key=lambda e: (rank(seed, e.opening), e.prompt_id, e.kind, e.answers))
    shares: dict[Share, list[Example]] = {"heldout": [], "demonstrations": [], "preferences": [], "ppo": []}
    for example in ordered:
        shares[assignment.share[example.opening]].append(example)

    def split(example: Example) -> str:
        return "validation" if example.opening in assignment.validation else "train"

    return Datasets(
        demonstrations=_unique(
            {**_prompt(e), "response": _demonstration(e), "split": split(e)}
            for e in shares["demonstrations"]
            if e.kind != "prompt"
        ),
        pairs=[
            {**_prompt(e), "chosen": e.chosen, "rejected": e.rejected, "split": split(e)}
            for e in shares["preferences"]
            if e.kind == "pair"
        ],
        preference_prompts=_unique({**_prompt(e), "split": split(e)} for e in shares["preferences"]),
        ppo_prompts=_unique(_prompt(e) for e in shares["ppo"]),
        heldout=_heldout(shares["heldout"]),
    )


def _prompt(example: Example) -> Row:
    return {"prompt_id": example.prompt_id, "prompt": example.prompt}


def _demonstration(example: Example) -> str | None:
    return example.response if example.response is not None else example.chosen


def _unique(rows: Iterable[Row]) -> list[Row]:
    """Rows without those whose prompt and response occurred before."""
    first: dict[tuple[str, str | None], Row] = {}
    for row in rows:
        first.setdefault((row["prompt_id"], row.get("response")), row)
    return list(first.values())


def _heldout(examples: list[Example]) -> list[Row]:
    """One row a prompt, with its first demonstration where it has one."""
    rows: dict[str, Row] = {}
    for example in examples:
        row = rows.setdefault(example.prompt_id, {**_prompt(example), "response": None})
        if row["response"] is None:
            row["response"] = _demonstration(example)
    return list(rows.values())
