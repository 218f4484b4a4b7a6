"""What one micro-batch adds to the loss of its minibatch: the policy term that the settings name, the value loss, the
entropy bonus, and the KL to the reference where it stands in the loss. Formulas are in `losses` and `kl`, optimiser
steps in `update`."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.models.batch import TokenBatch
from rlhf_core.models.masked import masked_sum
from rlhf_core.models.token_logprobs import logprobs_and_entropy
from rlhf_core.ppo.actor_critic import ActorCritic
from rlhf_core.ppo.kl import full_kl
from rlhf_core.ppo.losses import (
    combine_losses,
    compute_kl_loss,
    compute_kl_penalty_loss,
    compute_policy_gradient_loss,
    compute_ppo_loss,
    compute_value_loss,
    importance_weights,
)
from rlhf_core.ppo.rollout import Credit, Rollout


@dataclass(frozen=True)
class Prices:
    """What the controllers set for a PPO step."""

    kl: float
    """β, of KL(π_θ ‖ π_ref), in units of the score per nat."""
    step: float
    """Of KL(π_old ‖ π_θ), in units of the advantage per nat; `objective: kl_penalty` only."""


@dataclass(frozen=True)
class Phase:
    """Which terms a PPO step trains."""

    policy: bool
    """False while only the critic warms up."""
    ratio: bool
    """False in the warm-up with the plain policy gradient."""

    def epochs(self, config: PPOConfig) -> int:
        """How often the phase goes through a rollout."""
        return config.ppo_epochs if self.ratio else 1

    def minibatches(self, config: PPOConfig) -> int:
        """Optimiser steps of an epoch."""
        return config.minibatches if self.ratio else 1

    @classmethod
    def of(cls, config: PPOConfig, step: int) -> "Phase":
        """The phase of a step (counted from 0)."""
        of_the_policy = step - config.critic.warmup_steps
        return cls(policy=of_the_policy >= 0, ratio=not 0 <= of_the_policy < config.policy_gradient_steps)


@dataclass(frozen=True)
class Pass:
    """One forward pass of policy and critic over some rows, beside what the rollout knew about them: [b, t], 0 on
    padding."""

    batch: TokenBatch
    logits: Float[Tensor, "rows time vocabulary"]
    logprobs: Float[Tensor, "rows time"]
    entropy: Float[Tensor, "rows time"]
    values: Float[Tensor, "rows time"]
    old_logprobs: Float[Tensor, "rows time"]
    ref_logprobs: Float[Tensor, "rows time"]
    engine_logprobs: Float[Tensor, "rows time"]
    old_values: Float[Tensor, "rows time"]
    advantages: Float[Tensor, "rows time"]
    returns: Float[Tensor, "rows time"]
    scale: float

    @classmethod
    def over(
        cls,
        rows: Sequence[int],
        rollout: Rollout,
        credit: Credit,
        models: ActorCritic,
        temperature: float,
        pad_id: int,
    ) -> "Pass":
        """Both models on the given rows of a rollout."""
        batch = rollout.batch(rows, pad_id)
        logits, values = models.forward(batch)
        logprobs, entropy = logprobs_and_entropy(logits, batch.actions, temperature, batch.mask)

        def part(table: Tensor) -> Tensor:
            return table[rows, : batch.time]

        return cls(
            batch=batch,
            logits=logits,
            logprobs=logprobs,
            entropy=entropy,
            values=values,
            old_logprobs=part(rollout.old_logprobs),
            ref_logprobs=part(rollout.ref_logprobs),
            engine_logprobs=part(rollout.engine_logprobs),
            old_values=part(rollout.old_values),
            advantages=part(credit.weights),
            returns=part(credit.returns),
            scale=credit.scale,
        )


def losses_of(forward: Pass, config: PPOConfig, phase: Phase, prices: Prices, models: ActorCritic) -> dict[str, Tensor]:
    """`total_loss` and its parts, each summed over the real tokens of the rows."""
    mask = forward.batch.mask
    value_loss = compute_value_loss(
        forward.values,
        forward.returns,
        forward.old_values,
        config.critic.clip_value,
        config.critic.value_clip,
        mask,
        reduction="sum",
    )
    losses = combine_losses(
        policy_loss(forward, config, phase, prices),
        value_loss,
        masked_sum(forward.entropy, mask),
        config.vf_coef if config.has_critic else 0.0,
        config.entropy_coef,
    )
    if config.kl.penalty == "loss":
        losses["kl_loss"] = kl_loss(forward, config, models)
        losses["total_loss"] = losses["total_loss"] + prices.kl / forward.scale * losses["kl_loss"]
    if not phase.policy:
        losses["total_loss"] = config.vf_coef * losses["value_loss"]
    return losses


def policy_loss(forward: Pass, config: PPOConfig, phase: Phase, prices: Prices) -> Tensor:
    """The policy term of the settings, summed over real tokens."""
    mask, weights = forward.batch.mask, None
    if config.importance_cap is not None:
        weights = importance_weights(forward.old_logprobs, forward.engine_logprobs, config.importance_cap, mask)
    if not phase.ratio:
        return compute_policy_gradient_loss(
            forward.logprobs, forward.advantages, mask, weights=weights, reduction="sum"
        )
    if config.objective == "kl_penalty":
        return compute_kl_penalty_loss(
            forward.logprobs,
            forward.old_logprobs,
            forward.advantages,
            prices.step,
            mask,
            weights=weights,
            reduction="sum",
        )
    return compute_ppo_loss(
        forward.logprobs,
        forward.old_logprobs,
        forward.advantages,
        config.clip_ratio,
        mask,
        dual_clip=config.dual_clip,
        weights=weights,
        reduction="sum",
    )


def kl_loss(forward: Pass, config: PPOConfig, models: ActorCritic) -> Tensor:
    """KL(π_θ ‖ π_ref) in nats, summed over real tokens, with the gradient of the settings' estimator."""
    mask, kind = forward.batch.mask, config.kl.estimator
    if kind in ("rho_k1", "rho_k3", "k2"):
        return compute_kl_loss(
            forward.logprobs, forward.old_logprobs, forward.ref_logprobs, kind, mask, reduction="sum"
        )
    ref_logits = models.reference_logits(forward.batch)
    return masked_sum(full_kl(forward.logits / config.temperature, ref_logits / config.temperature, mask), mask)
