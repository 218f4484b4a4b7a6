"""Settings of the stage `reward`: the Bradley-Terry reward model."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from rlhf_core.config.block import Block, Count, LearningRate, NotNegative, Positive, PositiveNumber
from rlhf_core.config.lora import LoraSettings, require_divisible
from rlhf_core.config.paths import BelowRaw, stay_below
from rlhf_core.config.precision import Recomputed


def _one_message(value: Any) -> Any:
    """Raise ValueError for what is neither a text nor a list of texts: a union would give two messages."""
    for name in value if isinstance(value, list) and value else [value]:
        if not isinstance(name, str):
            raise ValueError("give a folder below data/raw/, or a list with one for each member")  # noqa: TRY004
        stay_below(name)
    return value


class RewardConfig(Block):
    """The Bradley-Terry reward model: a scalar head on a language model."""

    base: Annotated[BelowRaw | list[BelowRaw], BeforeValidator(_one_message)] | None = None
    """Folder below data/raw/ with the language model to start from; its tokenizer and chat template are used. A list
    has one for each of the `members`, all with the same tokenizer; `judge_share` uses the first. null: the SFT
    model."""
    max_pairs: Annotated[int, Field(ge=2)] | None = None
    """Number of training pairs to use, at most as many as there are. Drawn by seed; fewer are a subset of more. null:
    all."""
    learning_rate: LearningRate = 1e-5
    """Peak learning rate; cosine decay to 0."""
    epochs: PositiveNumber = 1.0
    """Passes over the pairs; more than a few overfit."""
    batch_size: Positive = 16
    """Prompts per optimizer step, each with all its pairs."""
    warmup_steps: Count = 10
    """Optimizer steps in which the learning rate rises."""
    weight_decay: NotNegative = 0.0
    """Of AdamW."""
    max_tokens: Positive = 1024
    """Longest prompt plus answer, in tokens (see `long_rows`)."""
    micro_batch_tokens: Positive = 8192
    """Tokens per forward and backward pass, on a CPU at most 2048. Changes only rounding."""
    gradient_checkpointing: Recomputed = False
    """Recompute activations: less memory, more time. true: of all layers; n: of every n-th."""
    lora: LoraSettings | None = None
    processes: Positive = 1
    """Processes that divide the model (FSDP2): one per GPU, or several on a CPU."""
    members: Positive = 1
    """Reward models in the ensemble, trained on the same pairs with different heads and data orders (Coste et al.
    2023)."""
    combine: Literal["mean", "min", "mean_minus_std"] = "mean"
    """Score of the ensemble: mean, minimum, or mean minus `std_coef` standard deviations. Each member's mean on
    held-out answers is subtracted first."""
    std_coef: NotNegative = 1.0
    """Weight of the standard deviation in `mean_minus_std`."""
    judge_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the training prompts kept for a second reward model, which judges in `evaluate` if nothing else does. 0:
    none."""

    @model_validator(mode="after")
    def _divisible(self) -> "RewardConfig":
        require_divisible(self.processes, self.lora)
        return self

    @model_validator(mode="after")
    def _a_base_for_each_member(self) -> "RewardConfig":
        if isinstance(self.base, list) and len(self.base) != self.members:
            raise ValueError(
                f"base lists {len(self.base)} models and members is {self.members}; list one for each member, or name "
                "one for all"
            )
        return self

    @property
    def bases(self) -> list[str]:
        """The folder of each member's base, that of the first also for the judging model; empty for the SFT model."""
        return self.base if isinstance(self.base, list) else [] if self.base is None else [self.base] * self.members
