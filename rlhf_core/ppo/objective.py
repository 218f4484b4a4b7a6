"""The loss of one micro-batch: policy loss, value loss, entropy bonus, and the KL to the reference with `kl.penalty:
loss`."""

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
from rlhf_core.ppo.plan import StepPlan
from rlhf_core.ppo.rollout import Credit, Rollout


@dataclass(frozen=True)
class Pass:
    """One forward pass of policy and critic over some rows of a rollout, and the rollout's values of them: [b, t], 0 on
    padding; the logits are those of the real tokens only."""

    batch: TokenBatch
    logits: Float[Tensor, "tokens vocabulary"]
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
        """A forward pass over the given rows."""
        batch = rollout.batch(rows, pad_id)
        logits, values = models.forward(batch)
        logprobs, entropy = map(batch.spread, logprobs_and_entropy(logits, batch.response_tokens, temperature))

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


def losses_of(forward: Pass, config: PPOConfig, plan: StepPlan, models: ActorCritic) -> dict[str, Tensor]:
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
        policy_loss(forward, config, plan),
        value_loss,
        masked_sum(forward.entropy, mask),
        config.vf_coef if config.has_critic else 0.0,
        config.entropy_coef,
    )
    if config.kl.penalty == "loss":
        losses["kl_loss"] = kl_loss(forward, config, models)
        losses["total_loss"] = losses["total_loss"] + plan.kl_coef / forward.scale * losses["kl_loss"]
    if not plan.trains_policy:
        losses["total_loss"] = config.vf_coef * losses["value_loss"]
    return losses


def policy_loss(forward: Pass, config: PPOConfig, plan: StepPlan) -> Tensor:
    """The policy loss of the settings, summed over real tokens."""
    mask, weights = forward.batch.mask, None
    if config.importance_cap is not None:
        weights = importance_weights(forward.old_logprobs, forward.engine_logprobs, config.importance_cap, mask)
    if not plan.uses_ratio:
        return compute_policy_gradient_loss(
            forward.logprobs, forward.advantages, mask, weights=weights, reduction="sum"
        )
    if config.objective == "kl_penalty":
        return compute_kl_penalty_loss(
            forward.logprobs,
            forward.old_logprobs,
            forward.advantages,
            plan.step_price,
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
    return full_kl(forward.logits / config.temperature, ref_logits / config.temperature).sum()
