"""Settings of the stage `ppo`. What PPO does with them: `rlhf_core/ppo/`, docs/ppo.md."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlhf_core.config.block import Block
from rlhf_core.config.health import HealthConfig
from rlhf_core.config.lora import LoraSettings
from rlhf_core.config.paths import BelowRaw

Positive = Annotated[int, Field(ge=1)]
PositiveNumber = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]


class KLConfig(Block):
    """The leash: how far the policy may go from its reference, in nats."""

    coef: NotNegative
    """β, the price of one nat."""
    controller: Literal["fixed", "adaptive"]
    """`adaptive` moves β so that the KL of a response comes to `target` (Ziegler et al. 2019)."""
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
        if self.penalty == "reward" and self.estimator in ("rho_k1", "rho_k3"):
            raise ValueError(
                f"estimator {self.estimator} in the reward is refused: rewards are paid at the rollout, where ρ is 1; "
                "rho_k1 and rho_k3 are losses; use k1, or penalty: loss"
            )
        if self.penalty == "reward" and self.estimator != "k1":
            raise ValueError(
                f"estimator {self.estimator} in the reward moves the optimum away from π_ref·exp(R/β)/Z; "
                "use k1 (all estimators are logged), or penalty: loss"
            )
        if self.penalty == "loss" and self.placement != "token":
            raise ValueError(
                "placement says where the penalty in the reward stands; with penalty: loss leave it at token"
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
    """What predicts the return of every state, for `advantage: gae`."""

    kind: Literal["separate", "shared"] = "separate"
    """A model of its own, or a head on the policy's body: one forward pass for both, and less memory."""
    init: Literal["reward", "sft"]
    """Where a separate critic starts: at the reward model as it is, in units of the raw score, or at the SFT body with
    a fresh head. A shared head starts at 0."""
    learning_rate: PositiveNumber
    """Of the critic's own weights; warm-up and decay are those of `optimizer`."""
    value_clip: PositiveNumber
    """Largest change of a value in one update, in units of the normalised score."""
    clip_value: bool
    """Bound the change of a value in one update (`value_clip`)."""
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
    """Adam's two decay rates."""
    eps: PositiveNumber
    """Adam's ε."""
    warmup_steps: Annotated[int, Field(ge=0)]
    """PPO steps over which the learning rate rises."""
    decay: Literal["none", "linear"]
    """Of the learning rate after its warm-up: none, or in a line to 0 at the last step."""
    max_grad_norm: PositiveNumber
    """A longer gradient is shortened to this norm."""

    @model_validator(mode="after")
    def _two_betas(self) -> "OptimizerConfig":
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError("betas must be two numbers in [0, 1)")
        return self


class ScoreConfig(Block):
    """What happens to the reward model's score before it becomes a reward."""

    normalise: bool
    """Subtract the mean and divide by the standard deviation of the scores of SFT samples."""
    scale: Literal["none", "running"] = "none"
    """`running`: divide by the standard deviation of all scores of the run so far, in place of `normalise`. The mean
    stays, and `clip` is around 0."""
    clip: PositiveNumber
    """After normalisation or scaling, in standard deviations."""
    missing_eos_penalty: NotNegative
    """Subtracted from the score of a response that was cut off, after normalisation and clip."""

    @model_validator(mode="after")
    def _one_scale(self) -> "ScoreConfig":
        if self.normalise and self.scale != "none":
            raise ValueError("normalise and scale both divide the score by a deviation; switch one of them off")
        return self


class TextConfig(Block):
    """PPO-ptx: a language-modelling loss on a text of yours beside PPO's; off at coefficient 0."""

    coef: NotNegative = 0.0
    """Weight of the loss, in units of the advantage per nat."""
    file: BelowRaw = "ptx.txt"
    """A UTF-8 text file below data/raw/."""
    batch_size: Positive = 16
    """Pieces of text in each minibatch."""
    tokens: Annotated[int, Field(ge=2)] = 64
    """Length of a piece."""


class PPOConfig(Block):
    """One block for the whole loop."""

    steps: Positive
    """Rollouts, each followed by `ppo_epochs` passes over it."""
    batch_size: Positive
    """Responses per step."""
    samples_per_prompt: Positive = 1
    """Responses to each prompt of a step; `rloo` and `grpo` compare them and need 2 or more."""
    minibatches: Positive
    """Parts of the batch, each followed by an optimizer step."""
    micro_batch_size: Positive
    """Responses per forward and backward pass; changes no result beyond rounding."""
    micro_batch_tokens: Positive | None = None
    """The same limit in tokens, prompts and padding included; null: rows alone count."""
    processes: Positive = 1
    """Processes that share the work, each with all the models: one a GPU, or several on a CPU."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of matrix products (autocast); weights, losses and log-probabilities stay float32."""
    ppo_epochs: Positive
    """Passes over the responses of a step."""
    learning_rate: PositiveNumber
    """Of the policy."""
    advantage: Literal["gae", "reinforce", "rloo", "grpo"] = "gae"
    """`gae` needs a critic; the others take their baseline from other responses: of the batch, or of the prompt."""
    objective: Literal["clip", "kl_penalty"] = "clip"
    """PPO's first form (the clip), or its second (an adaptive price on the step, `step_price`)."""
    step_price: StepPriceConfig = StepPriceConfig()
    clip_ratio: Annotated[float, Field(gt=0, lt=1)]
    """ε: π_θ/π_old earns nothing beyond 1 ± ε."""
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
    """Weight of the value loss; it matters where policy and critic share a body."""
    entropy_coef: NotNegative
    """Weight of the entropy bonus, in units of the advantage per nat; 0 switches it off."""
    gamma: Annotated[float, Field(gt=0, le=1)]
    """Discount of a later reward, per token."""
    lam: Annotated[float, Field(ge=0, le=1)]
    """λ of generalised advantage estimation: 1 trusts rewards alone, 0 the critic one token ahead."""
    temperature: PositiveNumber
    """Of the sampling; 1 is the model's own distribution. π_θ and π_ref are read at the same one."""
    max_new_tokens: Positive
    """Longest answer, in tokens."""
    engine: Literal["leash", "transformers", "transformers_continuous"] = "leash"
    """What samples: our own sampler, `generate` of transformers, or its continuous batching (CUDA only; responses then
    depend on the batch, not on their keys alone)."""
    stop_tokens: list[str] = Field(default_factory=list)
    """Texts that end a response beside end-of-sequence; each exactly one token of the tokenizer."""
    sampler_rows: Positive | None = None
    """Responses that are sampled side by side; null: the whole batch. Changes no result beyond rounding."""
    whiten_advantages: bool
    """Give the advantages of a batch mean 0 and deviation 1."""
    kl: KLConfig
    critic: CriticConfig
    optimizer: OptimizerConfig
    score: ScoreConfig
    ptx: TextConfig = TextConfig()
    lora: LoraSettings | None = None
    sample_every: Positive
    """Steps between two sets of twenty held-out samples on disk."""
    snapshot_every: Positive | None = None
    """Steps between two snapshots of the policy (its trained weights alone), from which `select` chooses; null: only
    the last step's."""
    check_ratio: bool = True
    """Stop the run where π_θ is not π_old before the first update: sampling and training then disagree."""
    health: HealthConfig = HealthConfig()

    @model_validator(mode="before")
    @classmethod
    def _sampling_is_the_policy(cls, values: Any) -> Any:
        truncating = {"top_k", "top_p", "min_p", "min_new_tokens", "repetition_penalty"}
        for key in sorted(truncating & set(values if isinstance(values, dict) else ())):
            raise ValueError(
                f"{key} is refused in rollouts: it changes what is sampled without changing π, "
                "so the KL estimate no longer is one of KL(π‖π_ref); remove it"
            )
        return values

    @property
    def has_critic(self) -> bool:
        """Whether states are valued."""
        return self.advantage == "gae"

    @property
    def needs_critic_model(self) -> bool:
        """Whether the critic is a model of its own."""
        return self.has_critic and self.critic.kind == "separate"

    @model_validator(mode="after")
    def _groups_fit(self) -> "PPOConfig":
        if self.batch_size % self.samples_per_prompt:
            raise ValueError(
                f"batch_size {self.batch_size} counts responses and must be a multiple of samples_per_prompt "
                f"{self.samples_per_prompt}"
            )
        if self.advantage in ("rloo", "grpo") and self.samples_per_prompt < 2:
            raise ValueError(
                f"advantage {self.advantage} compares answers to one prompt; set samples_per_prompt to 2 or more"
            )
        if self.advantage != "gae" and self.gamma != 1.0:
            raise ValueError(f"advantage {self.advantage} has one return for a whole answer; set gamma to 1")
        if self.advantage != "gae" and self.critic.warmup_steps:
            raise ValueError(f"advantage {self.advantage} has no critic; set critic.warmup_steps to 0")
        return self

    @model_validator(mode="after")
    def _phases_fit(self) -> "PPOConfig":
        if self.has_critic and self.critic.warmup_steps >= self.steps:
            raise ValueError(f"critic.warmup_steps {self.critic.warmup_steps} takes all {self.steps} steps; lower it")
        if self.objective == "kl_penalty" and self.dual_clip is not None:
            raise ValueError("dual_clip bounds the clipped objective; with objective: kl_penalty remove it")
        if self.objective == "kl_penalty" and self.ppo_epochs * self.minibatches == 1:
            raise ValueError(
                "objective kl_penalty prices the distance to the policy that sampled, which one epoch of one minibatch "
                "never leaves; raise ppo_epochs or minibatches"
            )
        return self

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
