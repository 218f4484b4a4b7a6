"""Rows that must not reach training, each with its reason: bad rows, and training rows that leak a held-out prompt."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from rlhf_core.errors import UserError
from tasks.datasets.problems import Log, print_problems
from tasks.datasets.sources.example import Example, Kind

REASONS = (
    "duplicate",
    "empty",
    "same_chosen_rejected",
    "too_long",
    "bad_text",
    "bad_conversation",
    "leaked",
    "too_short",
)
"""bad_text: NUL or half a surrogate pair. bad_conversation: turns that do not make a prompt and its answer. too_short:
a text without words after its opening."""


class Dropped(NamedTuple):
    """A row that was left out."""

    file: str
    row: int
    reason: str
    kind: Kind
    why: str = ""
    """More words where the reason needs them."""

    def __str__(self) -> str:
        return f"{self.file}, row {self.row}: {self.reason}" + (f" ({self.why})" if self.why else "")


class Leak(NamedTuple):
    """A training row and the first held-out row with the same first user message."""

    training: Example
    heldout: Example


def clean(examples: list[Example], max_characters: int) -> tuple[list[Example], list[Dropped]]:
    """The good rows, in order, and the others. Of equal rows the first is kept; a row counts under its first reason.

    A held-out row that equals a training row is a leak, not a duplicate. A pair that several annotators labelled is
    several rows; a second label of one annotator, also an opposite one, is a duplicate.
    """
    kept: list[Example] = []
    dropped: list[Dropped] = []
    seen: set[tuple[object, ...]] = set()
    for example in examples:
        reason = _problem(example, max_characters)
        key = (example.heldout, *_identity(example))
        if reason is None and key in seen:
            reason = "duplicate"
        if reason is None:
            seen.add(key)
            kept.append(example)
        else:
            dropped.append(Dropped(example.file, example.row, reason, example.kind, example.broken))
    return kept, dropped


def _identity(example: Example) -> tuple[object, ...]:
    """What equal rows have in common."""
    if example.annotator is None:
        return example.prompt_id, example.rating, *example.answers
    return example.annotator, example.prompt_id, *sorted(example.answers)


def _problem(example: Example, max_characters: int) -> str | None:
    turns = [message["content"] for message in example.prompt]
    answers = example.answers
    if example.broken:
        return "bad_conversation"
    if not turns or not all(text.strip() for text in (*turns, *answers)):
        return "empty"
    if example.is_text:  # `Example.cut` found nothing to cut off
        return "too_short"
    if sum(map(len, turns)) > max_characters or any(len(text) > max_characters for text in answers):
        return "too_long"
    if not all(map(_is_clean_text, (*turns, *answers))):
        return "bad_text"
    if example.chosen is not None and example.rejected is not None:
        return "same_chosen_rejected" if example.chosen.strip() == example.rejected.strip() else None
    return None


def _is_clean_text(text: str) -> bool:
    if "\0" in text:
        return False
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def find_leaks(examples: list[Example], heldout: Iterable[Example] | None = None) -> list[Leak]:
    """Training rows with the first user message of a held-out row, see `opening`. `heldout`: the
    held-out rows; by default those among the examples."""
    first: dict[str, Example] = {}
    for example in (e for e in examples if e.heldout) if heldout is None else heldout:
        first.setdefault(example.opening, example)
    return [
        Leak(example, first[example.opening])
        for example in examples
        if not example.heldout and example.opening in first
    ]


def refuse_bad_rows(dropped: list[Dropped], log: Log) -> None:
    """Raise UserError with the count of every reason and the first row, if there are bad rows; list them before."""
    if dropped:
        raise UserError(
            f"{len(dropped)} bad rows and ingest.on_bad_row is refuse: {list_bad_rows(dropped, log)}; "
            "correct them, or set on_bad_row: drop"
        )


def list_bad_rows(dropped: list[Dropped], log: Log) -> str:
    """Their summary, after a line for each of the first rows."""
    print_problems(map(str, dropped), len(dropped), log)
    return summary(dropped)


def summary(dropped: list[Dropped]) -> str:
    """The count of every reason and the first row, in one line; empty for no rows."""
    counts = sorted(Counter(row.reason for row in dropped).items())
    first = (
        f" (first: {dropped[0].file}, row {dropped[0].row}{dropped[0].why and ': '}{dropped[0].why})" if dropped else ""
    )
    return ", ".join(f"{reason} {count}" for reason, count in counts) + first


def refuse_leaks(leaks: list[Leak], log: Log) -> None:
    """Raise UserError naming the first leak, if there is one; list them before."""
    if leaks:
        raise UserError(list_leaks(leaks, log))


def list_leaks(leaks: list[Leak], log: Log) -> str:
    """How many there are, the first one and what to do, after a line for each of the first leaks."""
    print_problems((f"leaked: {_named(leak)}" for leak in leaks), len(leaks), log)
    return (
        f"leaked held-out prompts: {len(leaks)} training rows open like a held-out row, first {_named(leaks[0])}; "
        "remove them, or set ingest.on_leak: drop to leave the training rows out"
    )


def _named(leak: Leak) -> str:
    training, heldout = leak
    return f"{training.file} row {training.row} = {heldout.file} row {heldout.row} ({training.opening[:60]!r})"
