"""The datasets of a run, made from clean examples and their shares, and the use of each raw row. Rows are in the
order of the splits' hash: the first n of a dataset are a random sample of it, in whatever order the raw files are."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from tasks.datasets.jsonl import Row
from tasks.datasets.sources.example import Example, Kind
from tasks.datasets.sources.ratings import rating_of
from tasks.datasets.sources.shapes import ENDED
from tasks.datasets.sources.splits import Assignment, Share, rank

USES = ("sft_train", "sft_validation", "reward_train", "reward_validation", "ppo", "heldout")
"""Uses of a row. reward_*: as a pair; in data without pairs, as a prompt with sampled answers that are judged, or
with its rating."""
PARTS = ("training", "validation", "heldout")
"""What a row with several uses is for, where prompts are shared; each row that is used counts under one of them."""
REPEATED, ELSEWHERE, TOO_LOW = "repeated", "used_elsewhere", "rated_too_low"
"""Why a clean row is not used: another row has the same prompt (for SFT: the same prompt and answer), its prompt was
drawn for a use that this kind of row does not fit, or its answer is rated too low to imitate."""


@dataclass(frozen=True)
class Divided:
    """Clean examples by share, in the order of the splits' hash; equal prompts are adjacent. Where prompts are shared,
    an example is in several shares."""

    shares: dict[Share, list[Example]]
    assignment: Assignment
    pairs: list[Example]
    """The reward model's pairs: those of the share `preferences`, and all of `labels`."""
    labels: list[Example]
    """Labelled pairs that were added to the data; their prompts can be in any share, or in none."""
    rating_column: str | None = None
    """The column with the ratings of demonstrations, where the reward model learns from them."""


def divide(
    examples: Iterable[Example],
    assignment: Assignment,
    seed: int,
    labels: Iterable[Example] = (),
    rating_column: str | None = None,
) -> Divided:
    """Every example in the shares of its opening, and the labelled pairs that are added."""

    def place(e: Example) -> tuple[object, ...]:
        return rank(seed, e.opening), e.prompt_id, e.kind, e.answers, e.annotator or ""

    shares: dict[Share, list[Example]] = {"heldout": [], "demonstrations": [], "preferences": [], "ppo": []}
    for example in examples:
        for name in assignment.share[example.opening]:
            shares[name].append(example)
    for members in shares.values():
        members.sort(key=place)
    added = list(labels)
    own = [example for example in shares["preferences"] if example.kind == "pair"]
    return Divided(shares, assignment, sorted(own + added, key=place) if added else own, added, rating_column)


def assemble(divided: Divided) -> dict[str, Iterator[Row]]:
    """The datasets that `ingest` writes to data/ingest/, by name. A pair is also a demonstration (its chosen answer).
    Pairs have the column `annotator` where one of them has an annotator, `from_labels` where some are labels that were
    added, and `chosen_ended` and `rejected_ended` where one of them says it. Datasets of prompts have the column
    `extra` where a row of the data has further columns.

    The rows are iterators, to be read once: a million rows do not fit into memory.
    """
    shares, split = divided.shares, divided.assignment.split
    annotated = any(e.annotator for e in divided.pairs)
    labels = {id(e) for e in divided.labels}
    cut = any(e.ended is not None for e in divided.pairs)
    more = any(e.extra for members in shares.values() for e in members)
    return {
        "demonstrations": _unique(
            {**_prompt(e), "response": _demonstration(e), "split": split(e)}
            for e in shares["demonstrations"]
            if e.kind != "prompt" and not e.low
        ),
        "pairs": (
            {**_prompt(e), "chosen": e.chosen, "rejected": e.rejected, "split": split(e)}
            | ({"annotator": e.annotator} if annotated else {})
            | ({"from_labels": id(e) in labels} if labels else {})
            | (dict(zip(ENDED, e.ended or (True, True), strict=True)) if cut else {})
            for e in divided.pairs
        ),
        "ratings": (
            {**_prompt(e), "response": e.response, "rating": rating, "split": split(e)}
            for e in shares["preferences"]
            if divided.rating_column is not None and (rating := rating_of(e, divided.rating_column)) is not None
        ),
        "preference_prompts": (
            {**_prompt(group[0]), "split": split(group[0]), **_extra(group, more)}
            for group in _by_prompt(shares["preferences"])
        ),
        "ppo_prompts": ({**_prompt(group[0]), **_extra(group, more)} for group in _by_prompt(shares["ppo"])),
        "heldout": _heldout(shares["heldout"], more),
    }


def rows_by_use(divided: Divided, rewarded: bool = True) -> Counter[tuple[Kind, str]]:
    """How many rows of each kind have each of `USES`, or are `REPEATED` or used `ELSEWHERE`. Every example counts once;
    where prompts are shared, under each of its uses, and once under one of `PARTS` or why it has no use; without a
    reward model (`rewarded`) they do not count as its."""
    has_pairs = any(example.kind == "pair" for example in divided.shares["preferences"])
    shared = divided.assignment.shared
    found = Counter((e.kind, f"reward_{divided.assignment.split(e)}") for e in divided.labels)
    if shared:
        found += Counter(
            (e.kind, "training" if divided.assignment.split(e) == "train" else "validation") for e in divided.labels
        )
    uses: dict[int, tuple[Example, set[str]]] = {}  # of shared prompts, by the example's identity
    for share, members in divided.shares.items():
        for _, same_prompt in groupby(members, key=attrgetter("prompt_id")):
            seen: set[str | None] = set()
            for example in same_prompt:
                use = _use(share, example, seen, has_pairs, divided.assignment.split(example))
                if share == "preferences" and divided.rating_column is not None:
                    rated = rating_of(example, divided.rating_column) is not None
                    use = f"reward_{divided.assignment.split(example)}" if rated else ELSEWHERE
                if shared:
                    uses.setdefault(id(example), (example, set()))[1].add(use)
                else:
                    found[example.kind, use] += 1
    for example, of_one in uses.values():
        served = of_one.intersection(USES)
        validates = any(use.endswith("_validation") for use in served)  # without a reward model for `select`
        if not rewarded:
            served -= {"reward_train", "reward_validation"}
        reason = TOO_LOW if TOO_LOW in of_one else REPEATED if REPEATED in of_one else ELSEWHERE
        part = "validation" if validates else "training" if served else reason
        found.update((example.kind, use) for use in (served if "heldout" in served else served | {part}))
    return found


def _use(share: Share, example: Example, seen: set[str | None], has_pairs: bool, split: str) -> str:
    """The use of one row; `seen` holds the answers of earlier rows with the same prompt in this share."""
    if share == "preferences" and example.kind == "pair":
        return f"reward_{split}"
    if (share == "demonstrations" and example.kind == "prompt") or (share == "preferences" and has_pairs):
        return ELSEWHERE
    if share == "demonstrations" and example.low:
        return TOO_LOW
    answer = _demonstration(example) if share == "demonstrations" else None
    if answer in seen:
        return REPEATED
    seen.add(answer)
    return {"demonstrations": f"sft_{split}", "preferences": f"reward_{split}"}.get(share, share)


def _prompt(example: Example) -> Row:
    return {"prompt_id": example.prompt_id, "prompt": example.prompt}


def _demonstration(example: Example) -> str | None:
    return example.response if example.response is not None else example.chosen


def _unique(rows: Iterable[Row]) -> Iterator[Row]:
    """Rows without those whose prompt and response occurred before; equal prompts are adjacent."""
    for _, same_prompt in groupby(rows, key=lambda row: row["prompt_id"]):
        seen = set()
        for row in same_prompt:
            if row.get("response") not in seen:
                seen.add(row.get("response"))
                yield row


def _heldout(examples: Iterable[Example], more: bool) -> Iterator[Row]:
    """One row a prompt, with its first demonstration where it has one."""
    for group in _by_prompt(examples):
        answers = (answer for example in group if not example.low and (answer := _demonstration(example)) is not None)
        yield {**_prompt(group[0]), "response": next(answers, None), **_extra(group, more)}


def _by_prompt(examples: Iterable[Example]) -> Iterator[list[Example]]:
    """The examples of each prompt; equal prompts are adjacent."""
    for _, same_prompt in groupby(examples, key=attrgetter("prompt_id")):
        yield list(same_prompt)


def _extra(group: list[Example], more: bool) -> Row:
    """The column `extra` of a prompt: the further columns of its rows, without those that have different values."""
    if not more:
        return {}
    found: Row = {}
    different = set()
    for example in group:
        for name, value in example.extra.items():
            if found.setdefault(name, value) != value:
                different.add(name)
    return {"extra": {name: value for name, value in sorted(found.items()) if name not in different}}
