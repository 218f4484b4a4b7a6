"""The loss on held-out demonstrations, and how much a model lost of it since SFT: the alignment tax."""

from dataclasses import dataclass, field
from typing import Any

from rlhf_core.data.tokenizer import encode_response
from rlhf_core.evaluation.intervals import Estimate, estimate_ratio
from rlhf_core.models.hf import context_length
from rlhf_core.models.sequence_logprobs import sequence_logprobs
from tasks.evaluation.evaluator import CandidateModel, Evaluator
from tasks.evaluation.results import Bootstrap, with_interval


@dataclass(frozen=True)
class Demonstrated:
    """log π of the prompts' demonstrations, in nats; empty where it cannot be compared with the SFT model's."""

    logprobs: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


def read_demonstrations(evaluator: Evaluator, candidate: CandidateModel) -> Demonstrated:
    """Those that fit the SFT model's context. Empty for a model of other tokens, or with too short a context for one
    of them: means need the same texts."""
    if not evaluator.shares_tokenizer(candidate):
        return Demonstrated()
    texts = [
        (prompt, encode_response(candidate.tokenizer, row["response"]))
        for prompt, row in zip(evaluator.prompt_ids(candidate), evaluator.rows, strict=True)
        if row["response"] is not None
    ]
    most = context_length(evaluator.reference.model)
    texts = [(prompt, response) for prompt, response in texts if len(prompt) + len(response) <= most]
    if not texts or max(len(prompt) + len(response) for prompt, response in texts) > context_length(candidate.model):
        return Demonstrated()
    pad_id = int(candidate.tokenizer.pad_token_id)
    prompts, responses = [prompt for prompt, _ in texts], [response for _, response in texts]
    logprobs = sequence_logprobs(candidate.model, prompts, responses, pad_id, evaluator.batch_size)
    return Demonstrated(logprobs, [len(response) for response in responses])


def demonstration_figures(read: Demonstrated | None, sft: Demonstrated, bootstrap: Bootstrap) -> dict[str, Any]:
    """Held-out loss and its rise since SFT, in nats per token. Intervals are over prompts, paired for the rise."""
    read = read or Demonstrated()

    def loss(nats: list[float]) -> Estimate | None:
        if not nats:
            return None
        return estimate_ratio(nats, [float(count) for count in read.tokens], bootstrap.resamples, bootstrap.seed)

    lost = [before - now for before, now in zip(sft.logprobs, read.logprobs, strict=True)] if read.logprobs else []
    return {
        **with_interval("heldout_loss", loss([-value for value in read.logprobs])),
        **with_interval("alignment_tax", loss(lost)),
    }
