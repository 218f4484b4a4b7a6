"""Settings of the stage `ppo`."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlhf_core.config.block import Block, Count, NotNegative, Positive, PositiveNumber, Share
from rlhf_core.config.lora import LoraSettings
from rlhf_core.config.paths import BelowRaw
from rlhf_core.config.precision import Recomputed

LossAverage = Literal["tokens", "answer_means", "answer_sums"]
RatioKind = Literal["token", "sequence"]
OF_GROUPS = ("rloo", "grpo", "dr_grpo", "gdpo")
"""The advantages that compare the answers to one prompt."""


class KLConfig(Block):
    """The KL penalty keeps the policy near the reference: the SFT model, unless `round.reference` or
    `ppo.reference_ema` changes it."""

    coef: NotNegative = 0.05
    """β: the cost of one nat of KL, in units of the score after `ppo.score`."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """`fixed`: constant β. `adaptive`: β moves the KL of a response to `target` (Ziegler et al. 2019)."""
    target: PositiveNumber = 6.0
    """With `adaptive`: target KL of a response, in nats."""
    horizon: Positive = 10_000
    """With `adaptive`: number of responses over which β adapts; at least `batch_size`."""
    penalty: Literal["reward", "loss"] = "reward"
    """Subtract the penalty from each token's reward, or add it to the loss."""
    estimator: Literal["k1", "rho_k1", "rho_k3", "k2", "full", "k3"] = "k1"
    """With `penalty: reward`: k1. With `penalty: loss`: rho_k1, rho_k3, k2, full (exact, from all logits), or for
    `grpo`, `dr_grpo` and `gdpo` also k3."""

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
        if self.penalty == "loss" and self.estimator == "k1":
            raise ValueError(
                "estimator k1 in the loss has an expected gradient of zero; use rho_k1, rho_k3, k2 or full"
            )
        return self

    @model_validator(mode="after")
    def _adaptive_needs_a_start(self) -> "KLConfig":
        if self.controller == "adaptive" and self.coef == 0:
            raise ValueError("coef 0 stays 0 under the adaptive controller, which multiplies it; give a number above 0")
        return self


class CriticConfig(Block):
    """The value model of `advantage: gae`."""

    kind: Literal["separate", "shared"] = "separate"
    """`separate`: its own model. `shared`: a value head on the policy's body, with less memory and time."""
    init: Literal["reward", "sft"] = "reward"
    """Start of a separate critic: the reward model, or the SFT model with a new head. `reward` needs the default
    `scorer` and `reward.base: null`."""
    learning_rate: PositiveNumber = 1e-5
    """Learning rate of the critic; see `ppo.optimizer`."""
    value_clip: PositiveNumber = 0.2
    """Largest change of a value in one PPO step, in units of the normalised score."""
    clip_value: bool = True
    """Apply `value_clip`; never while the critic warms up."""
    warmup_steps: Count = 10
    """First PPO steps, which train only the critic: an untrained one adds noise to the advantages."""


class OptimizerConfig(Block):
    """Adam, for policy and critic."""

    betas: list[float] = Field(default_factory=lambda: [0.9, 0.95])
    """β₁ and β₂."""
    eps: PositiveNumber = 1e-8
    """ε. Keep it well below the gradients of a pretrained model, about 1e-5 per weight after clipping."""
    warmup_steps: Count = 5
    """PPO steps over which the learning rates rise; the policy's start after the critic's warm-up."""
    decay: Literal["none", "linear"] = "linear"
    """After the warm-up: constant learning rates, or a linear decay to 0 at the end."""
    max_grad_norm: PositiveNumber = 1.0
    """Larger gradients are scaled down to this norm, separately for policy and critic."""

    @model_validator(mode="after")
    def _two_betas(self) -> "OptimizerConfig":
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError("betas must be two numbers in [0, 1)")
        return self


class ScoreConfig(Block):
    """How the score of `scorer` is changed before it becomes a reward."""

    normalise: bool = True
    """Standardise by the mean and standard deviation of the scores of 512 answers of the reference."""
    clip: PositiveNumber = 5.0
    """Largest absolute score, in standard deviations; without `normalise` in units of the score."""
    missing_eos_penalty: NotNegative = 1.0
    """Subtracted from the clipped score of a response that was cut off."""


class TextConfig(Block):
    """PPO-ptx: adds a language-modelling loss on your own text."""

    coef: NotNegative = 0.0
    """Weight of this loss, per nat. 0: off."""
    file: BelowRaw = "ptx.txt"
    """UTF-8 text file below data/raw/."""
    batch_size: Positive = 16
    """Pieces of text per minibatch."""
    tokens: Annotated[int, Field(ge=2)] = 64
    """Tokens per piece."""


class VLLMConfig(Block):
    """The vLLM server, which shares the GPU with the training."""

    gpu_memory: Share = 0.4
    """Share of the GPU's memory for the server; it must be free while the server samples."""
    max_length: Positive | None = None
    """Longest prompt plus response, in tokens. null: the model's context, for which the cache must have room."""


class PPOConfig(Block):
    """The PPO loop."""

    steps: Positive = 100
    """PPO steps: each is one rollout and its updates."""
    batch_size: Positive = 256
    """Responses per step; a multiple of `samples_per_prompt` and `minibatches`."""
    samples_per_prompt: Positive = 1
    """Responses per prompt; 2 or more for `rloo`, `grpo`, `dr_grpo` and `gdpo`."""
    minibatches: Positive = 4
    """Parts of the batch, each with one optimizer step."""
    micro_batch_size: Positive = 64
    """Responses per forward and backward pass. Changes only rounding."""
    micro_batch_tokens: Positive | None = None
    """Also limits a pass to this many tokens, prompts included, a common prefix counted once. null: no such limit."""
    processes: Positive = 1
    """Processes that share the work: one per GPU, or several on a CPU. Changes only rounding."""
    sharding: Literal["none", "fsdp"] = "none"
    """With several processes: each has all models, or a part of every weight, gradient and optimizer state (FSDP2)."""
    gradient_checkpointing: Recomputed = False
    """Recompute activations: less memory, more time. true: of all layers; n: of every n-th."""
    ppo_epochs: Positive = 2
    """Passes over the rollout of a step."""
    learning_rate: PositiveNumber = 1e-6
    """Learning rate of the policy; see `ppo.optimizer`."""
    advantage: Literal["gae", "reinforce", "rloo", "grpo", "dr_grpo", "gdpo"] = "gae"
    """`gae`: with a critic. The others have a baseline from the batch (`reinforce`) or from the answers to the same
    prompt. `grpo` also divides by their standard deviation, `gdpo` (Liu et al. 2026) for each term of `scorer`
    separately."""
    skip_equal_groups: bool = False
    """Leave out prompts whose answers all have the same score: no gradient, and no part in averages (DAPO, Yu et al.
    2025, without resampling)."""
    truncated: Literal["keep", "mask"] = "keep"
    """`mask`: do not learn from answers that were cut off (DAPO's overlong filtering). They still count in baselines.
    Needs `score.missing_eos_penalty: 0`."""
    loss_average: LossAverage = "tokens"
    """Policy loss of a minibatch. `tokens`: mean over all tokens. `answer_means`: mean over responses of each one's
    token mean. `answer_sums`: mean over responses of each one's token sum, divided by `max_new_tokens`."""
    clip_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """ε: a ratio π_θ/π_old beyond 1 ± ε brings no further gain. With `ratio: sequence` about 3e-4."""
    clip_ratio_high: PositiveNumber | None = None
    """ε of the upper side (DAPO: 0.28). null: `clip_ratio`."""
    ratio: RatioKind = "token"
    """One ratio per token, or per response: the geometric mean over its tokens (GSPO, Zheng et al. 2025). `sequence`
    needs `loss_average: answer_means` and no critic."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Largest loss of a token with negative advantage, as a multiple of the advantage; often 3. null: no limit."""
    stop_kl: PositiveNumber | None = None
    """End the update when KL(π_old ‖ π_θ) of a minibatch is above this, in nats per token. null: never."""
    importance_cap: PositiveNumber | None = None
    """Weight tokens by min(π_old/π_engine, cap), where the engine's probabilities differ; often 2. null: no weights."""
    policy_gradient_steps: Count = 0
    """First PPO steps, after the critic's warm-up, with the plain policy gradient: one epoch, one minibatch."""
    vf_coef: NotNegative = 0.5
    """Weight of the value loss; matters for a shared critic."""
    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus, per nat."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount factor per token. Must be 1 without a critic."""
    lam: Annotated[float, Field(ge=0, le=1)] = 1.0
    """λ of generalised advantage estimation. 1: rewards alone; 0: the critic's value one token ahead."""
    temperature: PositiveNumber = 1.0
    """Sampling temperature; log-probabilities are computed at the same one."""
    max_new_tokens: Positive = 256
    """Longest response, in tokens."""
    max_prompt_tokens: Positive | None = None
    """Longest prompt, in tokens; for longer ones see `long_rows`. null: limited by the context alone."""
    engine: Literal["leash", "vllm"] = "leash"
    """Sampler of the responses: Leash's own, or a vLLM server (CUDA only; install it separately)."""
    vllm: VLLMConfig = VLLMConfig()
    stop_tokens: list[str] = Field(default_factory=list)
    """Texts that end a response, besides end-of-sequence; each must be one token."""
    sampler_rows: Positive | None = None
    """Responses sampled at once. null: the whole batch. Changes only rounding."""
    whiten_advantages: bool = True
    """Normalise the advantages of a batch to mean 0 and variance 1."""
    reference_ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Rate between 0 and 1 at which the reference follows the policy after each step: ref ← (1 − rate)·ref +
    rate·policy (WARP, Ramé et al. 2024). plots/ppo.csv has `kl` to the original reference, `kl_moving` to the moving
    one. null: it stays."""
    kl: KLConfig = KLConfig()
    critic: CriticConfig = CriticConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    score: ScoreConfig = ScoreConfig()
    ptx: TextConfig = TextConfig()
    lora: LoraSettings | None = None
    sample_every: Positive = 20
    """PPO steps between sets of held-out samples in data/ppo/samples.jsonl."""
    snapshot_every: Positive | None = None
    """PPO steps between snapshots of the policy, from which `select` chooses. null: only the last step's."""
    check_ratio: bool = True
    """Stop if π_θ differs from π_old before the first update: sampling and training disagree."""

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

    @model_validator(mode="before")
    @classmethod
    def _precision_has_moved(cls, values: Any) -> Any:
        if isinstance(values, dict) and "precision" in values:
            raise ValueError(
                "precision is no key of this block: it holds for all stages; remove it here, and write "
                f"`precision: {values['precision']}` at the top level of the file, beside `seed`"
            )
        return values

    @model_validator(mode="before")
    @classmethod
    def _removed(cls, values: Any) -> Any:
        found = values if isinstance(values, dict) else {}
        engine, optimizer = found.get("engine"), found.get("optimizer")
        if engine in ("transformers", "transformers_continuous"):
            raise ValueError(f"engine {engine} was removed; use leash, or vllm on a GPU")
        if isinstance(optimizer, dict) and "states" in optimizer:
            raise ValueError("optimizer.states was removed: Adam's moments are float32; remove the key, or use lora")
        return values

    @model_validator(mode="after")
    def _sharding_fits(self) -> "PPOConfig":
        quantised = self.lora is not None and self.lora.quantize != "none"
        if self.sharding == "fsdp" and (quantised or self.engine == "vllm"):
            raise ValueError("sharding fsdp divides float32 weights; set lora.quantize to none, and engine to leash")
        return self

    @model_validator(mode="after")
    def _moving_reference_fits(self) -> "PPOConfig":
        if self.reference_ema is not None and self.sharding == "fsdp":
            raise ValueError(
                "reference_ema moves whole weights, and sharding fsdp divides them; set sharding to none, or "
                "reference_ema to null"
            )
        return self

    @model_validator(mode="after")
    def _vllm_reads_whole_weights(self) -> "PPOConfig":
        if self.engine == "vllm" and self.lora is not None and self.lora.quantize != "none":
            raise ValueError(
                "engine vllm gets the policy's whole weights; set lora.quantize to none, or engine to leash"
            )
        return self

    @property
    def has_critic(self) -> bool:
        """Whether states are valued."""
        return self.advantage == "gae"

    @property
    def critic_warmup_steps(self) -> int:
        """First PPO steps, in which only the critic is trained; 0 without a critic."""
        return self.critic.warmup_steps if self.has_critic else 0

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
        if self.advantage in OF_GROUPS and self.samples_per_prompt < 2:
            raise ValueError(
                f"advantage {self.advantage} compares answers to one prompt; set samples_per_prompt to 2 or more"
            )
        if self.advantage != "gae" and self.gamma != 1.0:
            raise ValueError(f"advantage {self.advantage} has one return for a whole answer; set gamma to 1")
        if self.advantage != "gae" and "warmup_steps" in self.critic.model_fields_set and self.critic.warmup_steps:
            raise ValueError(f"advantage {self.advantage} has no critic; set critic.warmup_steps to 0")
        return self

    @model_validator(mode="after")
    def _k3_is_that_of_grpo(self) -> "PPOConfig":
        in_loss = self.kl.penalty == "loss" and self.kl.estimator == "k3"
        if in_loss and self.advantage not in ("grpo", "dr_grpo", "gdpo"):
            raise ValueError(
                "kl.estimator k3 in the loss has the gradient of the other KL; use rho_k1, rho_k3, k2 or full "
                "(only advantage grpo, dr_grpo and gdpo take it, as published)"
            )
        return self

    @model_validator(mode="after")
    def _left_out(self) -> "PPOConfig":
        if self.skip_equal_groups and self.advantage not in OF_GROUPS:
            raise ValueError(
                f"skip_equal_groups compares the answers to one prompt, and advantage {self.advantage} does not; set "
                f"it to false, or use {', '.join(OF_GROUPS)}"
            )
        if self.skip_equal_groups and self.kl.penalty == "reward" and self.kl.coef:
            raise ValueError(
                "skip_equal_groups with the KL in the reward would leave answers with equal scores without their "
                "penalty; set kl.penalty to loss, or kl.coef to 0"
            )
        if self.truncated == "mask" and self.score.missing_eos_penalty:
            raise ValueError(
                "truncated: mask leaves answers without an end out, so a penalty would only move the baseline of the "
                "others; set score.missing_eos_penalty to 0, or truncated to keep"
            )
        return self

    @model_validator(mode="after")
    def _sequence_ratio_fits(self) -> "PPOConfig":
        if self.ratio == "token":
            return self
        if self.has_critic:
            raise ValueError(
                "ratio: sequence has one ratio for an answer, and advantage gae an advantage for each token; use "
                f"ratio: token, or {', '.join(OF_GROUPS)}"
            )
        if self.loss_average != "answer_means":
            raise ValueError(
                "ratio: sequence is published with the mean over answers; set loss_average to answer_means"
            )
        if self.importance_cap is not None:
            raise ValueError(
                "importance_cap weighs tokens, and ratio: sequence has none of its own; remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _gdpo_is_the_published(self) -> "PPOConfig":
        if self.advantage != "gdpo":
            return self
        if self.kl.penalty == "reward" and self.kl.coef:
            raise ValueError(
                "advantage gdpo compares each term of the score apart, and a KL penalty in the reward is none; set "
                "kl.penalty to loss with estimator k3, or kl.coef to 0"
            )
        if not self.whiten_advantages:
            raise ValueError("advantage gdpo ends with whitening over the batch; set whiten_advantages to true")
        return self

    @model_validator(mode="after")
    def _phases_fit(self) -> "PPOConfig":
        if self.critic_warmup_steps >= self.steps:
            raise ValueError(f"critic.warmup_steps {self.critic.warmup_steps} takes all {self.steps} steps; lower it")
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
