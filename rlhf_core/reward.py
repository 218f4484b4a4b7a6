"""The reward model: a scalar head on the SFT model's body, trained with the Bradley-Terry loss on pairs.

All pairs of a prompt stand in one batch, and each response is read once, however many pairs it is in
(Ouyang et al. 2022): pairs spread over batches would show one response several times and overfit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import PreTrainedModel

from rlhf_core.config.reward import RewardConfig
from rlhf_core.models.batch import TokenBatch, pad_batch, sequence_scores
from rlhf_core.models.lora import add_lora
from rlhf_core.training.run import Run, Schedule, train, trainer_arguments
from rlhf_core.training.trainer import GuardedTrainer, Inputs


def bradley_terry_loss(
    chosen: Float[Tensor, "batch"], rejected: Float[Tensor, "batch"], margin: Float[Tensor, "batch"] | None = None
) -> Float[Tensor, ""]:
    """−E log σ(R(chosen) − R(rejected) − margin), in nats (Ouyang et al. 2022, equation 1; the margin: Touvron et al.
    2023)."""
    gap = chosen - rejected
    return -logsigmoid(gap if margin is None else gap - margin).mean()


@dataclass(frozen=True)
class Comparison:
    """One prompt, its distinct responses as token ids, and pairs of (better, worse) places among them."""

    prompt: list[int]
    responses: list[list[int]]
    pairs: list[tuple[int, int]]


def train_reward_model(
    model: PreTrainedModel, comparisons: Sequence[Comparison], config: RewardConfig, pad_id: int, run: Run
) -> list[dict[str, float]]:
    """Train `model` in place: all its weights, or with `config.lora` adapters that are then folded into them. Returns
    the training log."""
    adapter = None if config.lora is None else add_lora(model, config.lora, run.seed)
    schedule = Schedule(
        learning_rate=config.learning_rate,
        batch_size=config.batch_size,
        micro_batch_size=config.batch_size,
        warmup_steps=config.warmup_steps,
        weight_decay=config.weight_decay,
        epochs=config.epochs,
    )
    trainer = PairTrainer(
        run,
        "reward.batch_size, reward.max_tokens or preferences.samples_per_prompt",
        model=model,
        args=trainer_arguments(run, schedule),
        train_dataset=list(comparisons),
        data_collator=PairCollator(pad_id),
    )
    log = train(trainer, run)
    if adapter is not None:
        adapter.merge()
    return log


@dataclass(frozen=True)
class PairCollator:
    """All responses of some prompts as one batch, and the pairs as rows of it."""

    pad_id: int

    def __call__(self, comparisons: Sequence[Comparison]) -> dict[str, Tensor]:
        """The batch's tensors, chosen [pairs] and rejected [pairs] as row indices, and owner [rows], which prompt a
        row answers."""
        prompts = [c.prompt for c in comparisons for _ in c.responses]
        responses = [r for c in comparisons for r in c.responses]
        starts = [sum(len(c.responses) for c in comparisons[:i]) for i in range(len(comparisons))]
        pairs = [(s + better, s + worse) for s, c in zip(starts, comparisons, strict=True) for better, worse in c.pairs]
        batch = pad_batch(prompts, responses, self.pad_id)
        return {
            "input_ids": batch.input_ids,
            "attention_mask": batch.attention_mask,
            "mask": batch.mask,
            "chosen": torch.tensor([better for better, _ in pairs]),
            "rejected": torch.tensor([worse for _, worse in pairs]),
            "owner": torch.tensor([i for i, c in enumerate(comparisons) for _ in c.responses]),
        }


SIDES = ("chosen", "rejected")
"""What a batch holds for each pair; everything else stands there for each row."""


class PairTrainer(GuardedTrainer):
    """A Trainer whose loss is Bradley-Terry over the pairs of the batch."""

    def compute_loss(self, model: PreTrainedModel, inputs: Inputs, return_outputs: bool = False, **unused: Any) -> Any:
        """The mean loss over the batch's pairs; logs the share that the model already orders rightly."""
        scores = sequence_scores(model, TokenBatch(inputs["input_ids"], inputs["attention_mask"], inputs["mask"]))
        chosen, rejected = scores[inputs["chosen"]], scores[inputs["rejected"]]
        self.note(inputs, accuracy=(chosen > rejected).float().mean().item())
        loss = self.share * bradley_terry_loss(chosen, rejected)
        return (loss, {"scores": scores}) if return_outputs else loss

    def note(self, inputs: Inputs, **means: float) -> None:
        """Means over the pairs of a pass, for the log: added up over the parts of a halved micro-batch."""
        before = {} if inputs["owner"][0] == 0 else self.noted
        self.noted: dict[str, float] = {
            name: before.get(name, 0.0) + self.share * value for name, value in means.items()
        }

    def rows(self, inputs: Inputs) -> int:
        """Prompts; the responses to one stay together."""
        owner = inputs["owner"]
        return int(owner[-1] - owner[0]) + 1

    def halves(self, inputs: Inputs, num_items: Any) -> Iterator[tuple[Inputs, float]]:
        """The pairs of the first prompts and those of the others, each with its share of all pairs."""
        owner, pairs = inputs["owner"], len(inputs["chosen"])
        prompts = self.rows(inputs)
        for places in torch.arange(prompts).tensor_split(min(2, prompts)):
            rows = (owner >= places[0]) & (owner <= places[-1])
            first, mine = int(rows.nonzero()[0]), rows[inputs["chosen"]]
            half = {name: tensor[rows] for name, tensor in inputs.items() if name not in SIDES}
            half |= {name: inputs[name][mine] - first for name in SIDES}
            yield half, int(mine.sum()) / pairs

    def log(self, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        """Add what was noted of the batch to each training log event."""
        if "loss" in logs:
            logs = {**logs, **self.noted}
        super().log(logs, *arguments, **options)


@dataclass(frozen=True)
class PairScores:
    """Scores of the two sides of each pair, and the loss over them in nats."""

    chosen: Float[Tensor, "pairs"]
    rejected: Float[Tensor, "pairs"]

    @property
    def loss(self) -> float:
        """Mean Bradley-Terry loss."""
        return bradley_terry_loss(self.chosen, self.rejected).item()

    @property
    def right(self) -> Float[Tensor, "pairs"]:
        """1 where the chosen response scores higher, ½ for equal scores, else 0."""
        return (self.chosen > self.rejected).float() + 0.5 * (self.chosen == self.rejected).float()


@torch.no_grad()
def score_pairs(model: PreTrainedModel, comparisons: Sequence[Comparison], pad_id: int, batch_size: int) -> PairScores:
    """The model's scores on all pairs, `batch_size` prompts at a time."""
    chosen, rejected = [], []
    collate = PairCollator(pad_id)
    for start in range(0, len(comparisons), batch_size):
        inputs = {k: v.to(model.device) for k, v in collate(comparisons[start : start + batch_size]).items()}
        scores = sequence_scores(model, TokenBatch(inputs["input_ids"], inputs["attention_mask"], inputs["mask"]))
        chosen.append(scores[inputs["chosen"]].cpu())
        rejected.append(scores[inputs["rejected"]].cpu())
    return PairScores(torch.cat(chosen), torch.cat(rejected))
