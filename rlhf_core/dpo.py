"""Training of a policy on preference pairs: DPO (Rafailov et al. 2023), and the trainer for any other objective over
pairs. The reference is the model that training starts from. All pairs of a prompt are in one batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import PreTrainedModel

from rlhf_core.config.dpo import DPOConfig, PairConfig
from rlhf_core.models.batch import in_passes
from rlhf_core.models.sequence_logprobs import response_logprobs
from rlhf_core.reward import Comparison, PairCollator, PairTrainer, all_responses, fit_pairs, read_all, token_batch
from rlhf_core.training.run import Run
from rlhf_core.training.trainer import Inputs

PROMPTS = 32
"""Prompts in a forward pass without gradient."""

References = Sequence[Sequence[float]]
"""log π_ref of each response of each comparison, in nats."""


def implicit_margin(
    chosen: Float[Tensor, "pairs"],
    rejected: Float[Tensor, "pairs"],
    ref_chosen: Float[Tensor, "pairs"],
    ref_rejected: Float[Tensor, "pairs"],
    scale: float,
) -> Float[Tensor, "pairs"]:
    """r(chosen) − r(rejected) of each pair, where r = scale·(log π − log π_ref) is the implicit reward (Rafailov et al.
    2023, section 5; scale is β there). Log-probabilities [pairs] summed over the response, in nats."""
    return scale * ((chosen - ref_chosen) - (rejected - ref_rejected))


def dpo_loss(margin: Float[Tensor, "pairs"], label_smoothing: float = 0.0) -> Float[Tensor, ""]:
    """−E[(1−ε)·log σ(m) + ε·log σ(−m)]: equation 7 of Rafailov et al. 2023 (ε = 0).

    Args:
        margin: m [pairs], the implicit margin with β.
        label_smoothing: ε, the assumed share of pairs with the wrong label (conservative DPO, Mitchell 2023).

    Returns:
        The mean over the pairs, in nats; log 2 where policy and reference are the same.
    """
    return -((1 - label_smoothing) * logsigmoid(margin) + label_smoothing * logsigmoid(-margin)).mean()


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
        part = comparisons[start : start + PROMPTS]
        batch = all_responses(part, pad_id, model.device)
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
    rows = [Referenced(c, list(r)) for c, r in zip(comparisons, references, strict=True)]
    trainer_class = partial(PolicyPairTrainer, objective)
    return fit_pairs(trainer_class, model, rows, ReferencedCollator(pad_id), config, name, run)


@dataclass(frozen=True)
class Referenced:
    """A comparison with log π_ref of each of its responses, in nats."""

    comparison: Comparison
    logprobs: list[float]


@dataclass(frozen=True)
class ReferencedCollator:
    """The batch of a PairCollator, and the reference's log-probabilities of its rows."""

    pad_id: int

    def __call__(self, items: Sequence[Referenced]) -> Inputs:
        """The tensors of PairCollator and reference [rows], in nats."""
        batch = PairCollator(self.pad_id)([item.comparison for item in items])
        return batch | {"reference": torch.tensor([value for item in items for value in item.logprobs])}


class PolicyPairTrainer(PairTrainer):
    """A Trainer that minimises an objective over the pairs of the batch."""

    def __init__(self, objective: PairObjective, run: Run, keys: str, **options: Any) -> None:
        self.objective = objective
        super().__init__(run, keys, **options)

    def loss(self, model: PreTrainedModel, inputs: Inputs, items: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss over the batch's pairs; logs accuracy and margin of the implicit reward."""
        logprobs = read_all(model, response_logprobs, token_batch(inputs))
        better, worse, reference = inputs["chosen"], inputs["rejected"], inputs["reference"]
        sides = (logprobs[better], logprobs[worse], reference[better], reference[worse])
        margin = implicit_margin(*sides, self.objective.scale)
        found = margin.detach()
        self.note(accuracy=(found > 0).float().mean().item(), margin=found.mean().item())
        return self.share * self.objective.loss(margin), {"logprobs": logprobs}


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
    right = (margin > 0).double() + 0.5 * (margin == 0).double()
    return PairMargins(objective.loss(margin).item(), right.mean().item(), margin.mean().item())
