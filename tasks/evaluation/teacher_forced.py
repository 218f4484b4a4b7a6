"""What a model makes of texts that it did not write: held-out demonstrations, and answers that were chosen or turned
down. How `evaluate` shows what a method did to answers that it never sampled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_core.data.tokenizer import encode_prompt, encode_response
from rlhf_core.evaluation.intervals import Estimate, clustered_interval, estimate_ratio
from rlhf_core.models.hf import context_length
from rlhf_core.models.sequence_logprobs import sequence_logprobs
from tasks.datasets.jsonl import Row
from tasks.evaluation.evaluator import CandidateModel, Evaluator
from tasks.evaluation.results import Bootstrap
from tasks.training.pairs import response_tokens

Text = tuple[list[int], list[int]]
"""A prompt and an answer to it, as token ids."""


@dataclass(frozen=True)
class TeacherForced:
    """log π in nats of each text, in the order of the texts; a list is empty where there are none, or where a text does
    not fit the model's context."""

    shown: list[float] = field(default_factory=list)
    """Of the held-out demonstrations."""
    shown_tokens: list[int] = field(default_factory=list)
    chosen: list[float] = field(default_factory=list)
    rejected: list[float] = field(default_factory=list)


def fitting_pairs(evaluator: Evaluator, pairs: Sequence[Row]) -> list[Row]:
    """The pairs of which the SFT model can read both sides."""
    return [
        row
        for row in pairs
        if all(
            _fits(_side(evaluator, evaluator.reference, row, side), evaluator.reference)
            for side in ("chosen", "rejected")
        )
    ]


def teacher_forced_logprobs(evaluator: Evaluator, candidate: CandidateModel, pairs: Sequence[Row]) -> TeacherForced:
    """The demonstrations of the exam's prompts, and both sides of the pairs."""
    encode = _encoder(candidate)
    shown = [encode(row["prompt"], row["response"]) for row in evaluator.rows if row["response"] is not None]
    shown = (
        [text for text in shown if _fits(text, evaluator.reference)] if evaluator.shares_tokenizer(candidate) else []
    )
    sides = {side: [_side(evaluator, candidate, row, side) for row in pairs] for side in ("chosen", "rejected")}
    return TeacherForced(
        _logprobs(evaluator, candidate, shown),
        [len(response) for _, response in shown],
        _logprobs(evaluator, candidate, sides["chosen"]),
        _logprobs(evaluator, candidate, sides["rejected"]),
    )


def teacher_forced_figures(
    read: TeacherForced | None, sft: TeacherForced, pairs: Sequence[Row], bootstrap: Bootstrap
) -> dict[str, Any]:
    """Held-out loss (nats a token) and mean log π of both sides (nats an answer), with what changed since SFT.
    Intervals over prompts; the changes are paired."""
    read = read or TeacherForced()
    loss = _loss(read.shown, read.shown_tokens, bootstrap)
    tax = [b - a for a, b in zip(read.shown, sft.shown, strict=True)] if read.shown else []
    figures = _two("heldout_loss", loss) | _two(
        "alignment_tax", _loss([-gap for gap in tax], read.shown_tokens, bootstrap)
    )
    prompts = [row["prompt_id"] for row in pairs]
    for side in ("chosen", "rejected"):
        now, before = getattr(read, side), getattr(sft, side)
        moved = [b - a for a, b in zip(before, now, strict=True)] if now else []
        figures |= _two(f"logprob_{side}", _mean(now, prompts, bootstrap))
        figures |= _two(f"logprob_{side}_change", _mean(moved, prompts, bootstrap))
    return figures


def _encoder(candidate: CandidateModel) -> Callable[[Any, str], Text]:
    tokenizer = candidate.tokenizer
    return lambda prompt, response: (encode_prompt(tokenizer, prompt), encode_response(tokenizer, response))


def _side(evaluator: Evaluator, candidate: CandidateModel, row: Row, side: str) -> Text:
    """A side of a pair: as it was sampled, where the contestant has the tokens that it was sampled in."""
    tokenizer, prompt = candidate.tokenizer, encode_prompt(candidate.tokenizer, row["prompt"])
    if evaluator.shares_tokenizer(candidate):
        return prompt, response_tokens(tokenizer, row, side)
    return prompt, encode_response(tokenizer, row[side], row[f"{side}_ended"])


def _fits(text: Text, candidate: CandidateModel) -> bool:
    return len(text[0]) + len(text[1]) <= context_length(candidate.model)


def _logprobs(evaluator: Evaluator, candidate: CandidateModel, texts: Sequence[Text]) -> list[float]:
    """Equal texts are read once. Nothing where one does not fit: means over other texts could not be compared."""
    if not all(_fits(text, candidate) for text in texts):
        return []
    distinct = {(tuple(prompt), tuple(response)): None for prompt, response in texts}
    pad_id = int(candidate.tokenizer.pad_token_id)
    prompts, responses = [list(p) for p, _ in distinct], [list(r) for _, r in distinct]
    found = dict(
        zip(distinct, sequence_logprobs(candidate.model, prompts, responses, pad_id, evaluator.batch_size), strict=True)
    )
    return [found[tuple(prompt), tuple(response)] for prompt, response in texts]


def _loss(logprobs: Sequence[float], tokens: Sequence[int], bootstrap: Bootstrap) -> Estimate | None:
    if not logprobs:
        return None
    nats, counts = [-value for value in logprobs], [float(count) for count in tokens]
    return estimate_ratio(nats, counts, bootstrap.resamples, bootstrap.seed)


def _mean(values: Sequence[float], prompts: Sequence[str], bootstrap: Bootstrap) -> Estimate | None:
    if not values:
        return None
    places = {prompt: place for place, prompt in enumerate(dict.fromkeys(prompts))}
    owners = [places[prompt] for prompt in prompts]
    ends = clustered_interval(values, owners, bootstrap.resamples, bootstrap.seed)
    return Estimate(sum(values) / len(values), *ends, None)


def _two(name: str, found: Estimate | None) -> dict[str, Any]:
    return {name: None if found is None else found.mean, f"{name}_ci95": None if found is None else found.interval}
