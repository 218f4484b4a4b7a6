"""What other libraries call the figures that our detectors read, and which of their options help.

Names and definitions were read in the sources of the stated versions. KL and entropy are in nats everywhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Figure:
    """A figure of a library under its own names; the first that is recorded is used."""

    names: tuple[str, ...]
    note: str = ""
    """How it differs from ours, where it can still be compared."""
    per_token: bool = False
    """Converted to a figure per answer: multiplied by the mean length of the same step."""
    summed: bool = False
    """A sum over the optimizer steps of a step: divided by their number."""


@dataclass(frozen=True)
class Library:
    """One library, or one of its trainers."""

    name: str
    version: str
    marks: tuple[str, ...]
    """Names that together occur in no other library of the table."""
    figures: Mapping[str, Figure]
    """By our column."""
    incomparable: Mapping[str, str]
    """Our column → its figure (the first word), and the other meaning that it has."""
    remedies: Mapping[str, str]
    """By failure mode, with this library's own options."""
    optimizer_steps: tuple[str, ...] = field(default=())
    """Two names whose ratio is the number of optimizer steps in a step."""


BIASED_VALUES = (
    "the returns contain the critic's own values, which is equal to ours only at λ = 1; below, a diverging critic is "
    "found late or never"
)
DURING_UPDATE = "mean over the minibatches of an update, not the distance after it"

TRL_GROUPS = Library(
    name="TRL GRPO or RLOO",
    version="1.16.0",
    marks=("completions/mean_length", "frac_reward_zero_std"),
    figures={
        "reward_raw": Figure(("reward",), "weighted sum of the reward functions"),
        "kl": Figure(("kl",), "k3 of the policy in training (GRPO), k1 of the sampling policy (RLOO)", per_token=True),
        "entropy": Figure(("entropy",)),
        "response_tokens_mean": Figure(("completions/mean_length",)),
        "missing_eos_share": Figure(("completions/clipped_ratio",)),
        "clip_fraction": Figure(("clip_ratio/region_mean",), "of answers where the ratio is per answer (RLOO, GSPO)"),
        "grad_norm_policy": Figure(("grad_norm",)),
    },
    incomparable={
        "engine_mismatch_k3": "sampling/sampling_logp_difference/mean is a mean absolute difference, not a KL",
    },
    remedies={
        "reward_hacking": "read completions first (log_completions); if they are worse, raise beta, and change the "
        "reward functions or reward_weights",
        "kl_spike": "lower learning_rate by an order of magnitude, epsilon: 0.1 instead of 0.2, raise beta",
        "entropy_collapse": "GRPO: raise entropy_coef or epsilon_high (0.28); both trainers: sample at a higher "
        "temperature",
        "frozen_reward": "lower learning_rate or num_iterations so that less is clipped, or raise epsilon",
        "length_drift": "raise beta; with loss_type: grpo long wrong answers are favoured: use dapo or dr_grpo",
        "missing_ends": "raise max_completion_length, or set mask_truncated_completions",
        "exploding_gradient": "lower learning_rate or max_grad_norm, and read the completions of this step",
        "non_finite": "lower learning_rate; train in bf16 or float32 instead of fp16",
    },
)

TRL_PPO = Library(
    name="TRL PPO (trl.experimental.ppo)",
    version="0.29.0 and 1.12",
    marks=("policy/clipfrac_avg", "objective/scores"),
    figures={
        "reward_raw": Figure(("objective/scores",), "after missing_eos_penalty"),
        "kl": Figure(("objective/kl",), "per answer already; k1 by default (kl_estimator)"),
        "clip_fraction": Figure(("policy/clipfrac_avg",)),
        "value_loss": Figure(("loss/value_avg",)),
    },
    incomparable={
        "entropy": "policy/entropy_avg and objective/entropy include padding",
        "update_kl": f"policy/approxkl_avg is k2 with padding, {DURING_UPDATE}",
        "missing_eos_share": "val/num_eos_tokens counts tokens of an unknown number of answers",
    },
    remedies={
        "reward_hacking": "raise kl_coef, retrain the reward model (reward_model_path) on the new failure cases, or "
        "both",
        "kl_spike": "lower learning_rate by an order of magnitude, cliprange: 0.1 instead of 0.2, raise kl_coef",
        "frozen_reward": "lower learning_rate or num_ppo_epochs so that less is clipped, or raise cliprange",
        "non_finite": "lower learning_rate, set whiten_rewards, train in bf16 or float32 instead of fp16",
    },
)

VERL = Library(
    name="verl",
    version="0.9.1",
    marks=("critic/score/mean", "response_length/mean"),
    figures={
        "reward_raw": Figure(("critic/score/mean",), "before the KL penalty"),
        "kl": Figure(
            ("actor/kl_loss", "actor/reward_kl_penalty"),
            "k3 (actor/kl_loss) or k1 by default; needs actor_rollout_ref.actor.loss_agg_mode: token-mean, the "
            "default. actor/reward_kl_penalty is a mean of the answers' means, so the product is approximate",
            per_token=True,
        ),
        "entropy": Figure(("actor/entropy",)),
        "response_tokens_mean": Figure(("response_length/mean",)),
        "missing_eos_share": Figure(("response_length/clip_ratio",), "share of answers of the greatest length"),
        "clip_fraction": Figure(("actor/pg_clipfrac",)),
        "value_loss": Figure(("critic/vf_loss",)),
        "explained_variance": Figure(("critic/vf_explained_var",), f"{BIASED_VALUES} (algorithm.lam, by default 1)"),
        "grad_norm_policy": Figure(("actor/grad_norm",)),
        "grad_norm_critic": Figure(("critic/grad_norm",)),
        "engine_mismatch_k3": Figure(("rollout_corr/k3_kl",)),
    },
    incomparable={
        "update_kl": f"actor/ppo_kl is k1, {DURING_UPDATE}",
        "min_token_reward": "critic/rewards/min is of an answer, not of a token",
    },
    remedies={
        "reward_hacking": "read answers first (trainer.rollout_data_dir); if they are worse, raise "
        "algorithm.kl_ctrl.kl_coef (algorithm.use_kl_in_reward) or actor_rollout_ref.actor.kl_loss_coef "
        "(use_kl_loss), and change the reward",
        "kl_spike": "lower actor_rollout_ref.actor.optim.lr by an order of magnitude, "
        "actor_rollout_ref.actor.clip_ratio: 0.1 instead of 0.2, raise algorithm.kl_ctrl.kl_coef or "
        "actor_rollout_ref.actor.kl_loss_coef, or algorithm.kl_ctrl.type: adaptive",
        "entropy_collapse": "raise actor_rollout_ref.actor.entropy_coeff or actor_rollout_ref.actor.clip_ratio_high "
        "(0.28), or sample at a higher actor_rollout_ref.rollout.temperature",
        "diverging_critic": "lower critic.optim.lr and critic.cliprange_value, raise trainer.critic_warmup",
        "frozen_reward": "lower actor_rollout_ref.actor.optim.lr or actor_rollout_ref.actor.ppo_epochs so that less "
        "is clipped, or raise actor_rollout_ref.actor.clip_ratio",
        "length_drift": "raise algorithm.kl_ctrl.kl_coef or actor_rollout_ref.actor.kl_loss_coef; look at the reward "
        "of long answers",
        "missing_ends": "raise data.max_response_length, or lower the reward of cut answers",
        "exploding_gradient": "lower actor_rollout_ref.actor.optim.lr (critic.optim.lr) or its optim.clip_grad, and "
        "read the answers of this step",
        "engine_mismatch": "weigh tokens with algorithm.rollout_correction.rollout_is: token, or make the dtype of "
        "rollout and actor equal",
        "non_finite": "lower actor_rollout_ref.actor.optim.lr; NaN in critic/score means that all answers were aborted",
    },
)

OPENRLHF = Library(
    name="OpenRLHF",
    version="0.11.2",
    marks=("ppo_clip_ratio", "actor_lr"),
    figures={
        "reward_raw": Figure(("rollout/reward_mean", "reward"), "after length penalties"),
        "kl": Figure(
            ("kl",),
            "k1 by default (--algo.kl.estimator), tokens limited to ±10; without --algo.kl.use_loss a mean of the "
            "answers' means, so the product with the length is approximate",
            per_token=True,
        ),
        "entropy": Figure(("entropy_loss",), "recorded only with --actor.entropy_coef (0 is enough)"),
        "response_tokens_mean": Figure(("rollout/response_length_mean", "response_length")),
        "missing_eos_share": Figure(("rollout/truncated_rate",)),
        "clip_fraction": Figure(("ppo_clip_ratio",)),
        "value_loss": Figure(("critic_loss",)),
        "grad_norm_policy": Figure(("actor_grad_norm",), "of the last optimizer step"),
        "grad_norm_critic": Figure(("critic_grad_norm",)),
    },
    incomparable={
        "update_kl": f"ppo_kl is k1, {DURING_UPDATE}",
        "engine_mismatch_k3": "vllm_kl is k1, whose noise is larger than the limit",
    },
    remedies={
        "reward_hacking": "raise --algo.kl.init_coef, retrain the reward model (--reward.model_name_or_path) on the "
        "new failure cases, or both",
        "kl_spike": "lower --actor.adam.lr by an order of magnitude, --actor.eps_clip 0.1 instead of 0.2, raise "
        "--algo.kl.init_coef",
        "entropy_collapse": "raise --actor.entropy_coef, the upper value of --actor.eps_clip_low_high, or "
        "--rollout.temperature",
        "frozen_reward": "lower --actor.adam.lr or --train.max_epochs so that less is clipped, or raise "
        "--actor.eps_clip",
        "length_drift": "raise --algo.kl.init_coef, or penalise length with --reward.overlong_buffer_len",
        "missing_ends": "raise --rollout.max_new_tokens, or penalise cut answers with "
        "--reward.stop_properly_penalty_coef",
        "exploding_gradient": "lower --actor.adam.lr (--critic.adam.lr) or --actor.max_norm, narrow "
        "--reward.clip_range",
        "non_finite": "lower --actor.adam.lr and --critic.adam.lr, narrow --reward.clip_range",
    },
)

NEMO_RL = Library(
    name="NeMo-RL",
    version="commit 006907a",
    marks=("token_mult_prob_error", "mean_gen_tokens_per_sample"),
    figures={
        "reward_raw": Figure(("reward",), "after reward_scaling and reward_shaping"),
        "kl": Figure(
            ("kl_penalty",),
            "k3 by default; needs loss_fn.token_level_loss: true, otherwise the product with the length is approximate",
            per_token=True,
            summed=True,
        ),
        "entropy": Figure(("approx_entropy",), "estimated from the sampled tokens", summed=True),
        "response_tokens_mean": Figure(("mean_gen_tokens_per_sample",)),
        "missing_eos_share": Figure(("truncation_rate",)),
        "grad_norm_policy": Figure(("grad_norm",), summed=True),
        "engine_mismatch_k3": Figure(
            ("gen_kl_error",), "k3 by default (loss_fn.reference_policy_kl_type)", summed=True
        ),
    },
    incomparable={"clip_fraction": "probs_ratio_clamped is a mean ratio, not a share of clipped tokens"},
    remedies={
        "reward_hacking": "read answers first (train_data_step*.jsonl); if they are worse, raise "
        "loss_fn.reference_policy_kl_penalty and change the reward",
        "kl_spike": "lower policy.optimizer.kwargs.lr by an order of magnitude, loss_fn.ratio_clip_min and "
        "ratio_clip_max: 0.1 instead of 0.2, raise loss_fn.reference_policy_kl_penalty",
        "entropy_collapse": "raise loss_fn.ratio_clip_max (0.28), or sample at a higher policy.generation.temperature",
        "length_drift": "raise loss_fn.reference_policy_kl_penalty, or switch on reward_shaping "
        "(overlong_buffer_length)",
        "missing_ends": "raise policy.generation.max_new_tokens, or switch on overlong_filtering",
        "exploding_gradient": "lower policy.optimizer.kwargs.lr or policy.max_grad_norm",
        "engine_mismatch": "set loss_fn.use_importance_sampling_correction, or make "
        "policy.generation.vllm_cfg.precision equal to policy.precision",
        "non_finite": "lower policy.optimizer.kwargs.lr or policy.max_grad_norm",
    },
    optimizer_steps=("num_valid_samples", "global_valid_seqs"),
)

LIBRARIES = (TRL_GROUPS, TRL_PPO, VERL, OPENRLHF, NEMO_RL)
NAMES = frozenset(
    name
    for library in LIBRARIES
    for names in (library.marks, library.optimizer_steps, *(figure.names for figure in library.figures.values()))
    for name in names
)
"""All names of the table."""
