"""Supervised fine-tuning: loss on response tokens only, early stopping by the validation loss."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.config.sft import SFTConfig
from rlhf_core.errors import NonFiniteError
from rlhf_core.models.batch import pad_batch
from rlhf_core.models.hf import load_weights, save_weights, unique_weights
from rlhf_core.models.lora import add_lora
from rlhf_core.models.precision import autocast
from rlhf_core.models.recompute import recomputing
from rlhf_core.models.sequence_logprobs import response_logprobs, sequence_logprobs
from rlhf_core.models.sharding import divide, gathered, rejoin, within
from rlhf_core.training.loop import Schedule, Training
from rlhf_core.training.processes import Processes, map_whole
from rlhf_core.training.run import Run


@dataclass(frozen=True)
class Demonstration:
    """A prompt and the response to imitate, as token ids; the response ends with the end-of-sequence token."""

    prompt: list[int]
    response: list[int]
    counted: list[bool] | None = None
    """Which tokens of `response` are imitated, where it holds several turns; None: all."""

    @property
    def tokens(self) -> int:
        """How many tokens are imitated."""
        return len(self.response) if self.counted is None else sum(self.counted)


@dataclass(frozen=True)
class SFTResult:
    """The log and the losses of a training, in nats per response token."""

    log: list[dict[str, float]]
    base_validation_loss: float
    validation_loss: float
    best_step: int
    steps: int


def fine_tune(
    model: PreTrainedModel,
    training: Sequence[Demonstration],
    validation: Sequence[Demonstration],
    config: SFTConfig,
    pad_id: int,
    run: Run,
    keys: str = "sft.micro_batch_size or sft.max_tokens",
) -> SFTResult:
    """Train `model` in place, all its weights or with `config.lora` adapters that are then merged, and leave it with
    the weights of the lowest validation loss. `keys` are what a user can lower where memory is short. With
    `run.processes` the model is divided meanwhile, and whole in the main process in the end."""

    def sums(places: Sequence[int]) -> dict[str, Tensor]:
        rows = [training[place] for place in places]
        prompts, responses, counted = columns(rows)
        batch = pad_batch(prompts, responses, pad_id, model.device, counted)
        return {"loss": -within(model, partial(response_logprobs, model, batch)).sum()}

    def validation_loss() -> float:
        with autocast(run.precision, model.device):
            return response_loss(model, validation, pad_id, config.micro_batch_size, run.processes)

    adapter = None if config.lora is None else add_lora(model, config.lora, run.seed)  # changes no output yet
    if run.processes is not None:
        divide(model, run.precision == "bfloat16")
    base_loss, best = validation_loss(), run.state_dir / "best.safetensors"
    loop = Training(
        model,
        sums,
        weights=[row.tokens for row in training],
        tokens=[len(row.prompt) + len(row.response) for row in training],
        schedule=Schedule.of(config, len(training)),
        run=run,
        keys=keys,
        most_items=config.micro_batch_size,
        keep=[best],
    )
    with recomputing([model], config.gradient_checkpointing), loop.running():
        while not loop.ended:
            loop.step()
            if loop.ended or loop.done % config.evaluate_every == 0:
                loss = validation_loss()
                if not math.isfinite(loss):
                    raise NonFiniteError(f"step {loop.done}: the validation loss is {loss}; lower the learning rate")
                loop.record(validation_loss=loss)
                best_step, _ = best_of(loop.log)
                if best_step == loop.done:
                    weights = gathered(unique_weights(model) if adapter is None else adapter.state_dict())
                    if run.is_main:
                        save_weights(best, weights)
                later = sum("validation_loss" in row and row["step"] > best_step for row in loop.log)
                loop.ended |= 0 < config.patience <= later
            loop.checkpoint()
    rejoin(model)
    if run.is_main:
        load_weights(best, unique_weights(model))
        if adapter is not None:
            adapter.merge_on_host()
    step, loss = best_of(loop.log)
    return SFTResult(loop.log, base_loss, loss, step, loop.done)


def columns(rows: Sequence[Demonstration]) -> tuple[list[list[int]], list[list[int]], list[list[bool] | None]]:
    """Prompts, responses and which of their tokens count."""
    return [row.prompt for row in rows], [row.response for row in rows], [row.counted for row in rows]


def best_of(log: Sequence[dict[str, float]]) -> tuple[int, float]:
    """(step, loss) of the first lowest validation loss of a log."""
    loss, step = min((row["validation_loss"], int(row["step"])) for row in log if "validation_loss" in row)
    return step, loss


def response_loss(
    model: PreTrainedModel,
    rows: Sequence[Demonstration],
    pad_id: int,
    batch_size: int,
    processes: Processes | None = None,
) -> float:
    """Mean negative log-likelihood of the tokens to imitate, in nats per token over all rows; of a model that is
    divided over `processes`, or whole. NaN without rows."""

    def logprobs(part: Sequence[Demonstration]) -> list[float]:
        prompts, responses, counted = columns(part)
        return sequence_logprobs(model, prompts, responses, pad_id, batch_size, counted)

    tokens = sum(row.tokens for row in rows)
    return -math.fsum(map_whole(model, processes, rows, logprobs)) / tokens if tokens else math.nan
