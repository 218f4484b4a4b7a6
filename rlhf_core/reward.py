"""The reward model: a scalar head on the SFT model's body, trained with the Bradley-Terry loss. All pairs of a prompt
are in one batch: spread over batches, each response would be trained on several times and overfit (Ouyang et al.
2022)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import PreTrainedModel

from rlhf_core.config.lora import LoraSettings
from rlhf_core.config.precision import Recomputed
from rlhf_core.config.reward import RewardConfig
from rlhf_core.models.batch import TokenBatch, in_passes, pad_batch, sequence_scores
from rlhf_core.models.lora import add_lora
from rlhf_core.models.recompute import recomputing
from rlhf_core.models.sharding import divide, is_divided, rejoin, within
from rlhf_core.models.shared_body import save_adapter
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
    """One prompt, its distinct responses as token ids, and pairs of (better, worse) places among them; `round` is the
    first round in which the prompt has pairs."""

    prompt: list[int]
    responses: list[list[int]]
    pairs: list[tuple[int, int]]
    round: int = 1


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
    return fit_pairs(PairTrainer, model, comparisons, PairCollator(pad_id), config, "reward", run, folder)


class PairSettings(Protocol):
    """Parameters of training on pairs."""

    @property
    def learning_rate(self) -> float: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def epochs(self) -> float: ...
    @property
    def lora(self) -> LoraSettings | None: ...
    @property
    def gradient_checkpointing(self) -> Recomputed: ...


def fit_pairs(
    trainer_class: "Callable[..., PairTrainer]",
    model: PreTrainedModel,
    rows: Sequence[Any],
    collate: Callable[[Sequence[Any]], Inputs],
    settings: PairSettings,
    block: str,
    run: Run,
    folder: Path | None = None,
) -> list[dict[str, float]]:
    """Train `model` in place on rows of pairs: all its weights, or with `settings.lora` adapters, which are written to
    `folder` and then merged into the weights. `block` is the settings' block of params.yaml, for errors. Returns the
    training log. With `run.processes` the model is divided while it is trained, and whole in the main process then."""
    adapter = None if settings.lora is None else add_lora(model, settings.lora, run.seed)
    if run.processes is not None:
        divide(model, run.precision == "bfloat16")
    schedule = Schedule(
        learning_rate=settings.learning_rate,
        batch_size=settings.batch_size,
        micro_batch_size=settings.batch_size,
        warmup_steps=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        epochs=settings.epochs,
    )
    trainer = trainer_class(
        run,
        f"{block}.batch_size, {block}.max_tokens or preferences.samples_per_prompt",
        model=model,
        args=trainer_arguments(run, schedule),
        train_dataset=list(rows),
        data_collator=collate,
    )
    with recomputing([model], settings.gradient_checkpointing):
        log = train(trainer, run)
    rejoin(model)
    if run.is_main and adapter is not None and settings.lora is not None:
        if folder is not None:
            save_adapter(folder, adapter, settings.lora)
        adapter.merge_on_host()
    return log


@dataclass(frozen=True)
class PairCollator:
    """Some prompts with all their responses as one batch, and the pairs as rows of it."""

    pad_id: int

    def __call__(self, comparisons: Sequence[Comparison]) -> Inputs:
        """input_ids, attention_mask and mask of a `TokenBatch` with a row for each response; owner [rows], the place of
        its comparison; chosen [pairs] and rejected [pairs], the rows of the two responses of a pair."""
        starts = [sum(len(c.responses) for c in comparisons[:i]) for i in range(len(comparisons))]
        pairs = [(s + better, s + worse) for s, c in zip(starts, comparisons, strict=True) for better, worse in c.pairs]
        batch = all_responses(comparisons, self.pad_id)
        return {
            "input_ids": batch.input_ids,
            "attention_mask": batch.attention_mask,
            "mask": batch.mask,
            "owner": torch.tensor([place for place, c in enumerate(comparisons) for _ in c.responses]),
            "chosen": torch.tensor([better for better, _ in pairs]),
            "rejected": torch.tensor([worse for _, worse in pairs]),
        }


def all_responses(comparisons: Sequence[Comparison], pad_id: int, device: torch.device | str = "cpu") -> TokenBatch:
    """All responses of the comparisons, each behind its prompt."""
    rows = [(c.prompt, response) for c in comparisons for response in c.responses]
    return pad_batch([prompt for prompt, _ in rows], [response for _, response in rows], pad_id, device)


def token_batch(inputs: Inputs) -> TokenBatch:
    """The rows of a `PairCollator`'s batch."""
    return TokenBatch(inputs["input_ids"], inputs["attention_mask"], inputs["mask"])


def read_all(
    model: PreTrainedModel, read: Callable[[PreTrainedModel, TokenBatch], Float[Tensor, "rows"]], batch: TokenBatch
) -> Float[Tensor, "batch"]:
    """`read(model, batch)`, one number a row, with gradient: in passes that fit into memory, or in one where the model
    is divided."""
    if is_divided(model):
        return within(model, partial(read, model, batch))
    return in_passes(partial(read, model), batch)


PAIRS = ("chosen", "rejected")
"""Tensors of a batch with a row for each pair; the others have a row for each response."""


class PairTrainer(GuardedTrainer):
    """A Trainer whose loss is Bradley-Terry over the pairs of the batch."""

    def loss(self, model: PreTrainedModel, inputs: Inputs, items: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss over the batch's pairs; logs the share of pairs whose chosen response scores higher."""
        scores = read_all(model, sequence_scores, token_batch(inputs))
        chosen, rejected = scores[inputs["chosen"]], scores[inputs["rejected"]]
        self.note(accuracy=(chosen > rejected).float().mean().item())
        return self.share * bradley_terry_loss(chosen, rejected), {"scores": scores}

    def note(self, **means: float) -> None:
        """Add means over the pairs of a pass to the batch's log."""
        before = {} if self.first else self.noted
        self.noted: dict[str, float] = {
            name: before.get(name, 0.0) + self.share * value for name, value in means.items()
        }

    def rows(self, inputs: Inputs) -> int:
        """The number of comparisons."""
        return int(inputs["owner"][-1]) + 1

    def parts(self, inputs: Inputs, num_items: Any) -> Iterator[tuple[Inputs, float]]:
        """The whole batch; once halved, the first prompts and the others, each with its share of all pairs. Where the
        model is divided, each prompt, because the processes make equal numbers of passes."""
        prompts, owner, pairs = self.rows(inputs), inputs["owner"], len(inputs["chosen"])
        number = prompts if self.processes is not None else 2 if self.halving.done else 1
        for places in torch.arange(prompts).tensor_split(min(number, prompts)):
            rows = (owner >= places[0]) & (owner <= places[-1])
            first, mine = int(rows.nonzero()[0]), rows[inputs["chosen"]]
            part = {name: tensor[rows] for name, tensor in inputs.items() if name not in PAIRS}
            part |= {name: inputs[name][mine] - first for name in PAIRS}
            yield part | {"owner": part["owner"] - places[0].to(owner.device)}, int(mine.sum()) / pairs

    def log(self, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        """Add the noted means to each training log event."""
        if "loss" in logs:
            noted = torch.tensor(list(self.noted.values()), dtype=torch.float64, device=self.args.device)
            logs = {**logs, **dict(zip(self.noted, self.sum_over_processes(noted).tolist(), strict=True))}
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
    """The model's scores of all pairs, in the order of the comparisons; `batch_size` prompts are read at a time."""
    chosen, rejected = [], []
    collate = PairCollator(pad_id)
    for start in range(0, len(comparisons), batch_size):
        inputs = {k: v.to(model.device) for k, v in collate(comparisons[start : start + batch_size]).items()}
        scores = in_passes(partial(sequence_scores, model), token_batch(inputs))
        chosen.append(scores[inputs["chosen"]].cpu())
        rejected.append(scores[inputs["rejected"]].cpu())
    return PairScores(torch.cat(chosen), torch.cat(rejected))
