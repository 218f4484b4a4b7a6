"""The five datasets of a run, made from clean examples and their shares, row by row. Rows stand in the order of the
splits' hash: the first n of a dataset are a random sample of it, whatever the order of the raw files."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import attrgetter

from tasks.datasets.jsonl import Row
from tasks.datasets.sources.example import Example
from tasks.datasets.sources.splits import Assignment, Share, rank


def assemble(examples: list[Example], assignment: Assignment, seed: int) -> dict[str, Iterator[Row]]:
    """Every example in its share: as demonstration (a pair's chosen answer counts), pair and prompt, or prompt.

    The datasets that `ingest` writes to data/ingest/, by name, columns as in `tasks/schemas/`. The rows are made while
    they are read, once, so that a million of them never stand in memory.
    """
    shares: dict[Share, list[Example]] = {"heldout": [], "demonstrations": [], "preferences": [], "ppo": []}
    for example in examples:
        shares[assignment.share[example.opening]].append(example)
    for members in shares.values():
        members.sort(key=lambda e: (rank(seed, e.opening), e.prompt_id, e.kind, e.answers))

    def split(example: Example) -> str:
        return "validation" if example.opening in assignment.validation else "train"

    return {
        "demonstrations": _unique(
            {**_prompt(e), "response": _demonstration(e), "split": split(e)}
            for e in shares["demonstrations"]
            if e.kind != "prompt"
        ),
        "pairs": (
            {**_prompt(e), "chosen": e.chosen, "rejected": e.rejected, "split": split(e)}
            for e in shares["preferences"]
            if e.kind == "pair"
        ),
        "preference_prompts": _unique({**_prompt(e), "split": split(e)} for e in shares["preferences"]),
        "ppo_prompts": _unique(_prompt(e) for e in shares["ppo"]),
        "heldout": _heldout(shares["heldout"]),
    }


def _prompt(example: Example) -> Row:
    return {"prompt_id": example.prompt_id, "prompt": example.prompt}


def _demonstration(example: Example) -> str | None:
    return example.response if example.response is not None else example.chosen


def _unique(rows: Iterable[Row]) -> Iterator[Row]:
    """Rows without those whose prompt and response occurred before; equal prompts stand together."""
    for _, same_prompt in groupby(rows, key=lambda row: row["prompt_id"]):
        seen = set()
        for row in same_prompt:
            if row.get("response") not in seen:
                seen.add(row.get("response"))
                yield row


def _heldout(examples: Iterable[Example]) -> Iterator[Row]:
    """One row a prompt, with its first demonstration where it has one; equal prompts stand together."""
    for _, same_prompt in groupby(examples, key=attrgetter("prompt_id")):
        group = list(same_prompt)
        answers = (answer for answer in map(_demonstration, group) if answer is not None)
        yield {**_prompt(group[0]), "response": next(answers, None)}
