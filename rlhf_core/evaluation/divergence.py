"""KL of a model to a reference, and its entropy, summed over whole answers; for evaluation, not for training."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from rlhf_core.models.batch import TokenBatch, map_batches, response_logits
from rlhf_core.models.token_logprobs import logprobs_and_entropy
from rlhf_core.ppo.kl import estimate_kl


@dataclass(frozen=True)
class Divergence:
    """Of each answer, in the order of the answers."""

    k1: list[float] = field(default_factory=list)
    """Σ (log π − log π_ref), in nats; its mean over answers of π estimates KL(π ‖ π_ref)."""
    k3: list[float] = field(default_factory=list)
    """Σ of the estimator k3, which is never negative, in nats."""
    entropy: list[float] = field(default_factory=list)
    """Σ of the entropies of π at each token, in nats."""


@torch.no_grad()
def measure_divergence(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    *,
    pad_id: int,
    temperature: float,
    batch_size: int,
) -> Divergence:
    """`responses` (token ids) are samples of `model` at `temperature`; both models share the tokenizer."""

    def read(batch: TokenBatch) -> list[tuple[float, ...]]:
        ours, entropy = logprobs_and_entropy(response_logits(model, batch), batch.response_tokens, temperature)
        theirs = ours
        if reference is not model:
            theirs, _ = logprobs_and_entropy(response_logits(reference, batch), batch.response_tokens, temperature)
        parts = (estimate_kl(ours, theirs, "k1"), estimate_kl(ours, theirs, "k3"), entropy)
        return list(zip(*(batch.spread(part).sum(dim=1).tolist() for part in parts), strict=True))

    if not prompts:
        return Divergence()
    found = map_batches(read, prompts, responses, pad_id=pad_id, batch_size=batch_size, device=model.device)
    return Divergence(*map(list, zip(*found, strict=True)))
