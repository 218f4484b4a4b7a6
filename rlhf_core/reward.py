"""The reward model: a scalar head on the SFT model's body, trained with the Bradley-Terry loss. All pairs of a prompt
are in one batch: spread over batches, each response would be trained on several times and overfit (Ouyang et al.
2022)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.config.lora import LoraSettings
from rlhf_core.config.precision import Recomputed
from rlhf_core.config.reward import RewardConfig
from rlhf_core.models.batch import TokenBatch, in_passes, pad_batch, sequence_scores
from rlhf_core.models.lora import add_lora
from rlhf_core.models.packed import can_pack
from rlhf_core.models.recompute import recomputing
from rlhf_core.models.sharding import divide, rejoin, within
from rlhf_core.models.shared_body import save_adapter
from rlhf_core.pair_losses import bradley_terry_loss, order_right
from rlhf_core.progress import report
from rlhf_core.training.loop import Schedule, Settings, Sums, Training
from rlhf_core.training.run import Run

__all__ = ["Comparison", "PairScores", "bradley_terry_loss", "score_pairs", "train_reward_model"]


@dataclass(frozen=True)
class Comparison:
    """One prompt, its distinct responses as token ids, and pairs of (better, worse) places among them; `round` is the
    first round in which the prompt has pairs. `ratings` of the responses, where the pairs come from ratings."""

    prompt: list[int]
    responses: list[list[int]]
    pairs: list[tuple[int, int]]
    round: int = 1
    ratings: list[float] | None = None


def train_reward_model(
    model: PreTrainedModel,
    comparisons: Sequence[Comparison],
    config: RewardConfig,
    pad_id: int,
    run: Run,
    folder: Path | None = None,
) -> list[dict[str, float]]:
    """Train `model` in place, see `fit_pairs`. Returns the log: loss (nats) and accuracy (share of the batch's pairs
    whose chosen response scores higher)."""

    def sums(places: Sequence[int]) -> dict[str, Tensor]:
        batch, better, worse = pair_batch([comparisons[place] for place in places], pad_id, model.device)
        scores = within(model, partial(sequence_scores, model, batch))
        chosen, rejected = scores[better], scores[worse]
        loss = len(better) * bradley_terry_loss(chosen, rejected)
        return {"loss": loss, "accuracy": order_right(chosen - rejected).sum()}

    return fit_pairs(model, comparisons, sums, config, "reward", run, folder)


class PairSettings(Settings, Protocol):
    """Parameters of every training on pairs."""

    @property
    def micro_batch_tokens(self) -> int: ...
    @property
    def lora(self) -> LoraSettings | None: ...
    @property
    def gradient_checkpointing(self) -> Recomputed: ...


def fit_pairs(
    model: PreTrainedModel,
    comparisons: Sequence[Comparison],
    sums: Sums,
    settings: PairSettings,
    block: str,
    run: Run,
    folder: Path | None = None,
) -> list[dict[str, float]]:
    """Train `model` in place on comparisons: all its weights, or with `settings.lora` adapters, which are written to
    `folder` and then merged into the weights. The loss is the mean over the pairs of a batch. A pass reads whole
    comparisons. `block` is the settings' block of params.yaml, for errors. Returns the training log. With
    `run.processes` the model is divided while it is trained, and whole in the main process then."""
    adapter = None if settings.lora is None else add_lora(model, settings.lora, run.seed)
    if run.processes is not None:
        divide(model, run.precision == "bfloat16")
    if can_pack(model):  # a prompt is read once, and no padding
        tokens = [len(c.prompt) + sum(map(len, c.responses)) for c in comparisons]
    else:
        tokens = [len(c.responses) * (len(c.prompt) + max(map(len, c.responses))) for c in comparisons]
    loop = Training(
        model,
        sums,
        weights=[len(c.pairs) for c in comparisons],
        tokens=tokens,
        schedule=Schedule.of(settings, len(comparisons)),
        run=run,
        keys=f"{block}.micro_batch_tokens, {block}.max_tokens or preferences.samples_per_prompt",
        most_tokens=settings.micro_batch_tokens,
    )
    with recomputing([model], settings.gradient_checkpointing), loop.running():
        while not loop.ended:
            loop.step()
            loop.checkpoint()
    rejoin(model)
    if run.is_main and adapter is not None and settings.lora is not None:
        if folder is not None:
            save_adapter(folder, adapter, settings.lora)
        adapter.merge_on_host()
    return loop.log


def pair_batch(
    comparisons: Sequence[Comparison], pad_id: int, device: torch.device | str = "cpu"
) -> tuple[TokenBatch, Int[Tensor, "pairs"], Int[Tensor, "pairs"]]:
    """All responses of the comparisons, each a row behind its prompt; the rows of the chosen and of the rejected
    response of each pair. The first token of a whole text, a response without a prompt, is given: nothing predicts it,
    so it is not in the mask."""
    rows = [(c.prompt, response) for c in comparisons for response in c.responses]
    starts = [sum(len(c.responses) for c in comparisons[:i]) for i in range(len(comparisons))]
    pairs = [(s + better, s + worse) for s, c in zip(starts, comparisons, strict=True) for better, worse in c.pairs]
    chosen, rejected = torch.tensor(pairs, dtype=torch.long, device=device).view(-1, 2).T
    counted = [None if prompt else [place > 0 for place in range(len(answer))] for prompt, answer in rows]
    batch = pad_batch([prompt for prompt, _ in rows], [answer for _, answer in rows], pad_id, device, counted)
    return batch, chosen, rejected


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
        return order_right(self.chosen - self.rejected)


@torch.no_grad()
def score_pairs(model: PreTrainedModel, comparisons: Sequence[Comparison], pad_id: int, batch_size: int) -> PairScores:
    """The model's scores of all pairs, in the order of the comparisons; `batch_size` prompts are read at a time."""
    sides = []
    for start in range(0, len(comparisons), batch_size):
        report("scoring", start, len(comparisons))
        batch, chosen, rejected = pair_batch(comparisons[start : start + batch_size], pad_id, model.device)
        scores = in_passes(partial(sequence_scores, model), batch)
        sides.append(torch.stack([scores[chosen], scores[rejected]]).cpu())
    return PairScores(*torch.cat(sides, dim=1))
