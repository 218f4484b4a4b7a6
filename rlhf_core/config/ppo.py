"""Settings of the stage `ppo`. What PPO does with them: `rlhf_core/ppo/`, docs/ppo.md."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlhf_core.config.block import Block

Positive = Annotated[int, Field(ge=1)]
PositiveNumber = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]


class KLConfig(Block):
    """The leash: how far the policy may go from its reference, in nats."""

    coef: NotNegative
    """β, the price of one nat."""
    controller: Literal["fixed", "adaptive"]
    target: PositiveNumber
    """Adaptive controller: the KL per sequence it steers to, in nats."""
    horizon: Positive
    """Adaptive controller: responses over which β follows."""
    penalty: Literal["reward", "loss"] = "reward"
    """Where the price is paid: in the reward of each token, or as a term of the loss."""
    estimator: Literal["k1", "rho_k1", "rho_k3", "k2", "full", "k3"] = "k1"
    """In the reward: k1. In the loss: rho_k1, rho_k3, k2, or full (exact, from the logits of both models)."""
    placement: Literal["token", "sequence_end"] = "token"
    """Of the penalty in the reward: at each token, or its sum at the last one."""

    @model_validator(mode="after")
    def _right_optimum(self) -> "KLConfig":
        if self.penalty == "reward" and self.estimator != "k1":
            raise ValueError(
                f"estimator {self.estimator} in the reward moves the optimum away from π_ref·exp(R/β)/Z; "
                "use k1 (all estimators are logged), or penalty: loss"
            )
        if self.penalty == "loss" and self.estimator in ("k1", "k3"):
            gradient = "an expected gradient of zero" if self.estimator == "k1" else "the gradient of the other KL"
            raise ValueError(f"estimator {self.estimator} in the loss has {gradient}; use rho_k1, rho_k3, k2 or full")
        return self

    @model_validator(mode="after")
    def _adaptive_needs_a_start(self) -> "KLConfig":
        if self.controller == "adaptive" and self.coef == 0:
            raise ValueError("coef 0 stays 0 under the adaptive controller, which multiplies it; give a number above 0")
        return self


class CriticConfig(Block):
    """A model of its own that predicts the return of every state."""

    init: Literal["reward", "sft"]
    learning_rate: PositiveNumber
    value_clip: PositiveNumber
    """Largest change of a value in one update, in units of the normalised score."""
    clip_value: bool
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """First PPO steps in which only the critic learns."""


class StepPriceConfig(Block):
    """The price of a step away from the policy that sampled, for `objective: kl_penalty`."""

    coef: PositiveNumber = 1.0
    """At the start, in units of the advantage per nat; doubled or halved after each PPO step."""
    target: PositiveNumber = 0.003
    """KL(π_old ‖ π_θ) of a PPO step that it steers to, in nats per token."""


class OptimizerConfig(Block):
    """Adam for policy and critic."""

    betas: list[float]
    eps: PositiveNumber
    warmup_steps: Annotated[int, Field(ge=0)]
    """PPO steps over which the learning rate rises."""
    decay: Literal["none", "linear"]
    max_grad_norm: PositiveNumber

    @model_validator(mode="after")
    def _two_betas(self) -> "OptimizerConfig":
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError("betas must be two numbers in [0, 1)")
        return self


class ScoreConfig(Block):
    """What happens to the reward model's score before it becomes a reward."""

    normalise: bool
    """Subtract the mean and divide by the standard deviation of the scores of SFT samples."""
    clip: PositiveNumber
    """After normalisation, in standard deviations."""
    missing_eos_penalty: NotNegative


class PPOConfig(Block):
    """One block for the whole loop."""

    steps: Positive
    batch_size: Positive
    """Responses per step."""
    minibatches: Positive
    micro_batch_size: Positive
    """Responses per forward and backward pass; changes no result beyond rounding."""
    ppo_epochs: Positive
    learning_rate: PositiveNumber
    objective: Literal["clip", "kl_penalty"] = "clip"
    """PPO's first form (the clip), or its second (an adaptive price on the step, `step_price`)."""
    step_price: StepPriceConfig = StepPriceConfig()
    clip_ratio: Annotated[float, Field(gt=0, lt=1)]
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bounds the loss of a token with negative advantage at this many times the advantage; 3 is usual."""
    stop_kl: PositiveNumber | None = None
    """A PPO step ends before the minibatch at which KL(π_old ‖ π_θ) is above this, in nats per token."""
    max_ratio: Annotated[float, Field(gt=1)] | None = None
    """A minibatch whose mean π_θ/π_old is above this is skipped."""
    importance_cap: PositiveNumber | None = None
    """Weighs tokens by min(π_old/π_engine, cap), for an engine that does not sample from π itself; 2 is usual."""
    policy_gradient_steps: Annotated[int, Field(ge=0)] = 0
    """First PPO steps of the policy (after the critic's warm-up) with the plain policy gradient: one epoch, one
    minibatch, no ratio."""
    vf_coef: NotNegative
    entropy_coef: NotNegative
    gamma: Annotated[float, Field(gt=0, le=1)]
    lam: Annotated[float, Field(ge=0, le=1)]
    temperature: PositiveNumber
    max_new_tokens: Positive
    engine: Literal["leash", "transformers", "transformers_continuous"] = "leash"
    """What samples: our own sampler, `generate` of transformers, or its continuous batching (CUDA only; responses then
    depend on the batch, not on their keys alone)."""
    stop_tokens: list[str] = Field(default_factory=list)
    """Texts that end a response beside end-of-sequence; each exactly one token of the tokenizer."""
    sampler_rows: Positive | None = None
    """Responses that are sampled side by side; null: the whole batch. Changes no result beyond rounding."""
    whiten_advantages: bool
    kl: KLConfig
    critic: CriticConfig
    optimizer: OptimizerConfig
    score: ScoreConfig
    sample_every: Positive
    """Steps between two sets of twenty held-out samples on disk."""
    check_ratio: bool = True

    @model_validator(mode="before")
    @classmethod
    def _sampling_is_the_policy(cls, values: Any) -> Any:
        truncating = {"top_k", "top_p", "min_p", "min_new_tokens", "repetition_penalty"}
        for key in sorted(truncating & set(values if isinstance(values, dict) else ())):
            raise ValueError(
                f"{key} is refused in rollouts: it changes what is sampled without changing π, "
                "and makes the KL estimate negative; remove it"
            )
        return values

    @model_validator(mode="after")
    def _batches_fit(self) -> "PPOConfig":
        if self.batch_size % self.minibatches:
            raise ValueError(f"batch_size {self.batch_size} must be a multiple of minibatches {self.minibatches}")
        if self.kl.controller == "adaptive" and self.batch_size > self.kl.horizon:
            raise ValueError(
                f"batch_size {self.batch_size} must not exceed kl.horizon {self.kl.horizon}: "
                "β would swing instead of follow"
            )
        return self
