"""Training of a policy on preference pairs: DPO (Rafailov et al. 2023), and any other objective over pairs. The
reference is the model that training starts from. All pairs of a prompt are in one batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.config.dpo import DPOConfig, PairConfig
from rlhf_core.models.batch import in_passes
from rlhf_core.models.sequence_logprobs import response_logprobs
from rlhf_core.models.sharding import within
from rlhf_core.pair_losses import dpo_loss, implicit_margin, order_right
from rlhf_core.progress import report
from rlhf_core.reward import Comparison, fit_pairs, pair_batch
from rlhf_core.training.run import Run

PROMPTS = 32
"""Prompts in a forward pass without gradient."""

References = Sequence[Sequence[float]]
"""log π_ref of each response of each comparison, in nats."""


@dataclass(frozen=True)
class PairObjective:
    """The loss of a method on pairs."""

    scale: float
    """The implicit reward is scale·log(π/π_ref)."""
    loss: Callable[[Float[Tensor, "pairs"]], Float[Tensor, ""]]
    """A function of the implicit margins."""


def dpo_objective(config: DPOConfig) -> PairObjective:
    """The objective of DPO."""
    return PairObjective(config.beta, partial(dpo_loss, label_smoothing=config.label_smoothing))


@torch.no_grad()
def reference_logprobs(model: PreTrainedModel, comparisons: Sequence[Comparison], pad_id: int) -> list[list[float]]:
    """log π of every response of every comparison, in nats, under the model as it is now."""
    found = []
    for start in range(0, len(comparisons), PROMPTS):
        report("reading", start, len(comparisons))
        part = comparisons[start : start + PROMPTS]
        batch, _, _ = pair_batch(part, pad_id, model.device)
        flat = iter(in_passes(partial(response_logprobs, model), batch).tolist())
        found += [[next(flat) for _ in c.responses] for c in part]
    return found


def train_on_pairs(
    model: PreTrainedModel,
    comparisons: Sequence[Comparison],
    references: References,
    config: PairConfig,
    objective: PairObjective,
    pad_id: int,
    run: Run,
    name: str,
) -> list[dict[str, float]]:
    """Train `model` in place, see `fit_pairs`.

    `references` are `reference_logprobs` of the model that `model` starts from; `name` is the block of `config` in
    params.yaml, for errors. Returns the training log: loss, accuracy (share of the batch's pairs that the implicit
    reward orders as their labels do) and margin (the mean implicit margin).
    """

    def sums(places: Sequence[int]) -> dict[str, Tensor]:
        batch, better, worse = pair_batch([comparisons[place] for place in places], pad_id, model.device)
        policy = within(model, partial(response_logprobs, model, batch))
        reference = torch.tensor([value for place in places for value in references[place]], device=model.device)
        margin = implicit_margin(policy[better], policy[worse], reference[better], reference[worse], objective.scale)
        loss = len(margin) * objective.loss(margin)
        return {"loss": loss, "accuracy": order_right(margin).sum(), "margin": margin.sum()}

    return fit_pairs(model, comparisons, sums, config, name, run)


@dataclass(frozen=True)
class PairMargins:
    """Loss, accuracy and margin of a policy's implicit reward on pairs."""

    loss: float
    """Mean loss of the objective."""
    accuracy: float
    """Share of the pairs ordered as their labels do; equal rewards count half."""
    margin: float
    """Mean implicit reward of the chosen response minus that of the rejected one."""


def measure_pairs(
    model: PreTrainedModel,
    comparisons: Sequence[Comparison],
    references: References,
    objective: PairObjective,
    pad_id: int,
) -> PairMargins:
    """Loss, accuracy and margin over all pairs of the comparisons, without training on them."""
    logprobs = reference_logprobs(model, comparisons, pad_id)
    sides = [
        (policy[better], policy[worse], reference[better], reference[worse])
        for c, policy, reference in zip(comparisons, logprobs, references, strict=True)
        for better, worse in c.pairs
    ]
    chosen, rejected, ref_chosen, ref_rejected = torch.tensor(sides, dtype=torch.float64).T
    margin = implicit_margin(chosen, rejected, ref_chosen, ref_rejected, objective.scale)
    return PairMargins(objective.loss(margin).item(), order_right(margin).mean().item(), margin.mean().item())
