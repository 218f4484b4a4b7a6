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
    """The Bradley-Terry reward model: a scalar head on the SFT model's body, or on that of `base`. All pairs of a
    prompt are in one batch."""

    base: Annotated[BelowRaw | list[BelowRaw], BeforeValidator(_one_message)] | None = None
    """A folder below data/raw/ with another causal language model, on whose body the reward model is trained; it reads
    texts with that model's tokenizer and chat template. A list has one folder for each of the `members`, all with the
    same tokenizer; the model of `judge_share` is trained on the first. null: the SFT model."""
    max_pairs: Annotated[int, Field(ge=2)] | None = None
    """Train on this many of the training pairs that PPO's reward model has, drawn by seed: those of a smaller number
    are among those of a larger one. Held-out pairs and the pairs of `judge_share` stay. null: all."""
    learning_rate: LearningRate = 1e-5
    """Peak learning rate: it rises over the warm-up, then falls along a cosine to 0."""
    epochs: PositiveNumber = 1.0
    """Passes over the pairs; a reward model overfits after one or a few."""
    batch_size: Positive = 16
    """Prompts (not pairs) per optimizer step."""
    warmup_steps: Count = 10
    """Optimizer steps in which the learning rate rises from 0."""
    weight_decay: NotNegative = 0.0
    """Weight decay of AdamW; 0 switches it off."""
    max_tokens: Positive = 1024
    """Longest prompt plus response, in tokens; `long_rows` says what happens to longer rows."""
    micro_batch_tokens: Positive = 8192
    """Tokens of a forward and backward pass, which reads whole prompts with all their answers: each prompt once, each
    answer once. Lower it when memory runs out; it changes no result, except for rounding. On a CPU at most 2048."""
    gradient_checkpointing: Recomputed = False
    """Recompute activations in the backward pass: of no layer (false), of every layer (true), or of every n-th layer.
    Less memory, more time."""
    lora: LoraSettings | None = None
    processes: Positive = 1
    """Processes over which the model is divided while it is trained (FSDP2): one per GPU, or several on a CPU. Each has
    its part of every weight, gradient and optimizer state. Changes no result, except for rounding."""
    members: Positive = 1
    """Reward models, trained one after another on the same pairs, with other heads and in another order of the data.
    Their scores are combined by `combine` (Coste et al. 2023)."""
    combine: Literal["mean", "min", "mean_minus_std"] = "mean"
    """The score of several members: their mean, the lowest, or the mean minus `std_coef` standard deviations. First the
    mean of each member's scores on held-out answers is subtracted."""
    std_coef: NotNegative = 1.0
    """Weight of the members' standard deviation with `combine: mean_minus_std`."""
    judge_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the training prompts whose pairs train a second reward model, with another seed, and not PPO's. Where
    nothing else judges, `evaluate` takes win rates from it. 0: none."""

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
