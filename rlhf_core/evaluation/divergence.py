"""How far a model's answers are from a reference: KL and entropy of whole answers, read after sampling. PPO measures
its own rollouts elsewhere (`rlhf_core/ppo/`); this is for models that are only looked at."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from rlhf_core.models.batch import pad_batch, response_logits
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
    """`responses` (token ids) are samples of `model` at `temperature`; both models share the tokenizer.

    Answers of similar length are read together.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]) + len(responses[i]))
    found: dict[int, tuple[float, float, float]] = {}
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        batch = pad_batch([prompts[i] for i in rows], [responses[i] for i in rows], pad_id, model.device)
        ours, entropy = logprobs_and_entropy(response_logits(model, batch), batch.actions, temperature, batch.mask)
        theirs = ours
        if reference is not model:
            theirs, _ = logprobs_and_entropy(response_logits(reference, batch), batch.actions, temperature, batch.mask)
        sums = (estimate_kl(ours, theirs, "k1", batch.mask), estimate_kl(ours, theirs, "k3", batch.mask), entropy)
        found |= zip(rows, zip(*(part.sum(dim=1).tolist() for part in sums), strict=True), strict=True)
    k1, k3, entropies = zip(*(found[i] for i in range(len(prompts))), strict=True) if prompts else ((), (), ())
    return Divergence(list(k1), list(k3), list(entropies))
