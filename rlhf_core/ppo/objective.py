"""The loss of one micro-batch: policy loss, value loss, entropy bonus, and the KL to the reference with `kl.penalty:
loss`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_core.config.ppo import LossAverage, PPOConfig
from rlhf_core.models.batch import TokenBatch
from rlhf_core.models.head import Predictions
from rlhf_core.models.token_logprobs import exact_kl, logprobs_and_entropy
from rlhf_core.ppo.actor_critic import ActorCritic
from rlhf_core.ppo.kl import estimate_kl
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
    padding; the predictions are those of the real tokens only."""

    batch: TokenBatch
    predictions: Predictions
    logprobs: Float[Tensor, "rows time"]
    entropy: Float[Tensor, "rows time"]
    exact_kl: Float[Tensor, "rows time"] | None
    """KL(π_θ ‖ π_ref) with gradient, where it is a term of the loss."""
    values: Float[Tensor, "rows time"]
    old_logprobs: Float[Tensor, "rows time"]
    ref_logprobs: Float[Tensor, "rows time"]
    engine_logprobs: Float[Tensor, "rows time"]
    old_values: Float[Tensor, "rows time"]
    advantages: Float[Tensor, "rows time"]
    returns: Float[Tensor, "rows time"]
    scale: float
    weights: Float[Tensor, "rows"]
    """Of each answer in the losses of the policy (`answer_weights`)."""

    @classmethod
    def over(
        cls,
        rows: Sequence[int],
        rollout: Rollout,
        credit: Credit,
        models: ActorCritic,
        config: PPOConfig,
        pad_id: int,
        trains_policy: bool = True,
        mean_length: float = 1.0,
    ) -> "Pass":
        """A forward pass over the given rows, with a graph of the policy only where it is trained. `mean_length`: of
        the minibatch's answers, in tokens."""
        batch = rollout.batch(rows, pad_id)
        exact = config.kl.penalty == "loss" and config.kl.estimator == "full"

        def read(predictions: Predictions) -> tuple[Predictions, Tensor, Tensor, Tensor | None]:
            chosen, entropy = logprobs_and_entropy(predictions, batch.response_tokens, config.temperature)
            kl = partial(exact_kl, predictions, temperature=config.temperature)
            return predictions, chosen, entropy, models.read_reference(batch, kl) if exact else None

        (predictions, logprobs, entropy, kl), values = models.read(batch, read, trains_policy)

        def part(table: Tensor) -> Tensor:
            return table[rows, : batch.time]

        return cls(
            batch=batch,
            predictions=predictions,
            logprobs=batch.spread(logprobs),
            entropy=batch.spread(entropy),
            exact_kl=None if kl is None else batch.spread(kl),
            values=values,
            old_logprobs=part(rollout.old_logprobs),
            ref_logprobs=part(rollout.ref_logprobs),
            engine_logprobs=part(rollout.engine_logprobs),
            old_values=part(rollout.old_values),
            advantages=part(credit.weights),
            returns=part(credit.returns),
            scale=credit.scale,
            weights=answer_weights(config.loss_average, batch.mask.sum(dim=1), mean_length, config.max_new_tokens),
        )


def answer_weights(
    average: LossAverage, lengths: Float[Tensor, "rows"], mean_length: float, longest: int
) -> Float[Tensor, "rows"]:
    """What the tokens of each answer weigh in a sum that is then divided by the tokens of the minibatch, whose answers
    have `mean_length` tokens on average.

    `answer_sums` is the mean over answers of each one's sum, divided by the constant `longest` (the length limit): the
    published gradient in the scale of the other averages, so that the limit of its norm has the same meaning for all
    methods (rule 30). Adam is invariant to such a constant.
    """
    if average == "tokens":
        return torch.ones_like(lengths)
    if average == "answer_means":
        return mean_length / lengths.clamp(min=1)
    return torch.full_like(lengths, mean_length / longest)


def losses_of(forward: Pass, config: PPOConfig, plan: StepPlan, models: ActorCritic) -> dict[str, Tensor]:
    """`total_loss` and its parts, each summed over the real tokens of the rows; the policy's parts with the weights of
    their answers."""
    value_loss = compute_value_loss(
        forward.values,
        forward.returns,
        forward.old_values,
        config.critic.clip_value and plan.trains_policy,
        config.critic.value_clip,
        forward.batch.mask,
        reduction="none",
    )

    def weighted(loss: Float[Tensor, "rows time"]) -> Float[Tensor, ""]:
        return (loss.sum(dim=1) * forward.weights).sum()

    losses = combine_losses(
        weighted(policy_loss(forward, config, plan)),
        value_loss.sum(),
        forward.entropy.sum(),
        config.vf_coef if config.has_critic else 0.0,
        config.entropy_coef,
    )
    if config.kl.penalty == "loss":
        losses["kl_loss"] = weighted(kl_loss(forward, config))
        losses["total_loss"] = losses["total_loss"] + plan.kl_coef / forward.scale * losses["kl_loss"]
    if not plan.trains_policy:
        losses["total_loss"] = config.vf_coef * losses["value_loss"]
    return losses


def policy_loss(forward: Pass, config: PPOConfig, plan: StepPlan) -> Float[Tensor, "rows time"]:
    """The policy loss of each token; 0 on padding."""
    mask, weights = forward.batch.mask, None
    if config.importance_cap is not None:
        weights = importance_weights(forward.old_logprobs, forward.engine_logprobs, config.importance_cap, mask)
    if not plan.uses_ratio:
        return compute_policy_gradient_loss(
            forward.logprobs, forward.advantages, mask, weights=weights, reduction="none"
        )
    if config.objective == "kl_penalty":
        return compute_kl_penalty_loss(
            forward.logprobs,
            forward.old_logprobs,
            forward.advantages,
            plan.step_price,
            mask,
            weights=weights,
            reduction="none",
        )
    return compute_ppo_loss(
        forward.logprobs,
        forward.old_logprobs,
        forward.advantages,
        config.clip_ratio,
        mask,
        dual_clip=config.dual_clip,
        weights=weights,
        reduction="none",
    )


def kl_loss(forward: Pass, config: PPOConfig) -> Float[Tensor, "rows time"]:
    """KL(π_θ ‖ π_ref) of each token in nats, with the gradient of the settings' estimator; 0 on padding. `k3` is GRPO's
    (Shao et al. 2024, equation 4), without the ratio."""
    mask, kind = forward.batch.mask, config.kl.estimator
    if kind == "k3":
        return estimate_kl(forward.logprobs, forward.ref_logprobs, "k3", mask)
    if kind in ("rho_k1", "rho_k3", "k2"):
        return compute_kl_loss(
            forward.logprobs, forward.old_logprobs, forward.ref_logprobs, kind, mask, reduction="none"
        )
    assert forward.exact_kl is not None
    return forward.exact_kl
