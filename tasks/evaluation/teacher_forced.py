"""Teacher-forced log-probabilities of held-out demonstrations and preference pairs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_core.data.tokenizer import encode_response
from rlhf_core.evaluation.intervals import Estimate, clustered_interval, estimate_ratio
from rlhf_core.models.hf import context_length
from rlhf_core.models.sequence_logprobs import sequence_logprobs
from tasks.datasets.jsonl import Row
from tasks.evaluation.evaluator import CandidateModel, Evaluator
from tasks.evaluation.results import Bootstrap, with_interval
from tasks.stage.long_rows import prompts_once
from tasks.training.pairs import response_tokens

SIDES = ("chosen", "rejected")

Text = tuple[list[int], list[int]]
"""A prompt and an answer to it, as token ids."""


@dataclass(frozen=True)
class TeacherForced:
    """log π of each text, in nats. A list is empty if there are no texts, or if one does not fit the context."""

    shown: list[float] = field(default_factory=list)
    """Held-out demonstrations."""
    shown_tokens: list[int] = field(default_factory=list)
    chosen: list[float] = field(default_factory=list)
    rejected: list[float] = field(default_factory=list)


def fitting_pairs(evaluator: Evaluator, pairs: Sequence[Row]) -> list[Row]:
    """The pairs of which both sides fit the SFT model's context."""
    reference = evaluator.reference
    texts = zip(*(_texts(evaluator, reference, pairs, side) for side in SIDES), strict=True)
    return [row for row, both in zip(pairs, texts, strict=True) if all(_fits(text, reference) for text in both)]


def teacher_forced_logprobs(evaluator: Evaluator, candidate: CandidateModel, pairs: Sequence[Row]) -> TeacherForced:
    """Log-probabilities of the prompts' demonstrations and of both sides of the pairs."""
    shown = list[Text]()
    if evaluator.shares_tokenizer(candidate):
        prompts = evaluator.prompt_ids(candidate)
        texts = [
            (prompt, encode_response(candidate.tokenizer, row["response"]))
            for prompt, row in zip(prompts, evaluator.rows, strict=True)
            if row["response"] is not None
        ]
        shown = [text for text in texts if _fits(text, evaluator.reference)]
    chosen, rejected = (_texts(evaluator, candidate, pairs, side) for side in SIDES)
    return TeacherForced(
        _logprobs(evaluator, candidate, shown),
        [len(response) for _, response in shown],
        _logprobs(evaluator, candidate, chosen),
        _logprobs(evaluator, candidate, rejected),
    )


def teacher_forced_figures(
    read: TeacherForced | None, sft: TeacherForced, pairs: Sequence[Row], bootstrap: Bootstrap
) -> dict[str, Any]:
    """Held-out loss (nats per token), mean log π of both sides (nats per answer), and their changes since SFT.
    Intervals are over prompts; changes are paired."""
    read = read or TeacherForced()
    loss = _loss(read.shown, read.shown_tokens, bootstrap)
    tax = [b - a for a, b in zip(read.shown, sft.shown, strict=True)] if read.shown else []
    figures = with_interval("heldout_loss", loss) | with_interval(
        "alignment_tax", _loss([-gap for gap in tax], read.shown_tokens, bootstrap)
    )
    prompts = [row["prompt_id"] for row in pairs]
    for side in SIDES:
        now, before = getattr(read, side), getattr(sft, side)
        moved = [b - a for a, b in zip(before, now, strict=True)] if now else []
        figures |= with_interval(f"logprob_{side}", _mean(now, prompts, bootstrap))
        figures |= with_interval(f"logprob_{side}_change", _mean(moved, prompts, bootstrap))
    return figures


def _texts(evaluator: Evaluator, candidate: CandidateModel, pairs: Sequence[Row], side: str) -> list[Text]:
    """A side of every pair, with the sampled tokens if the candidate has the SFT model's tokenizer."""
    tokenizer, prompt_ids = candidate.tokenizer, prompts_once(candidate.tokenizer)
    if evaluator.shares_tokenizer(candidate):
        return [(prompt_ids(row), response_tokens(tokenizer, row, side)) for row in pairs]
    return [(prompt_ids(row), encode_response(tokenizer, row[side], row[f"{side}_ended"])) for row in pairs]


def _fits(text: Text, candidate: CandidateModel) -> bool:
    return len(text[0]) + len(text[1]) <= context_length(candidate.model)


def _logprobs(evaluator: Evaluator, candidate: CandidateModel, texts: Sequence[Text]) -> list[float]:
    """log π of each text; equal texts are computed once. Empty if one does not fit: means need the same texts."""
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
