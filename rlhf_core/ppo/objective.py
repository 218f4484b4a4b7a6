"""The loss of one micro-batch: policy loss, value loss, entropy bonus, and the KL to the reference with `kl.penalty:
loss`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from rlhf_core.config.ppo import LossAverage, PPOConfig
from rlhf_core.models.batch import TokenBatch
from rlhf_core.models.head import Predictions
from rlhf_core.models.token_logprobs import action_logprobs, exact_kl, logprobs_and_entropy
from rlhf_core.ppo.actor_critic import ActorCritic
from rlhf_core.ppo.losses import compute_kl_loss, compute_ppo_total_loss, importance_weights
from rlhf_core.ppo.rollout import Credit, Rollout


@dataclass(frozen=True)
class Pass:
    """One forward pass of policy and critic over some rows of a rollout, and the rollout's values of them: [b, t], 0 on
    padding."""

    batch: TokenBatch
    logprobs: Float[Tensor, "rows time"]
    entropy: Float[Tensor, "rows time"]
    """Of π_θ, with gradient, where it is a term of the loss; else that of π_old, which the rollout has."""
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
    weights: Float[Tensor, "rows time"]
    """Of each token in the losses of the policy (`answer_weights`)."""

    @classmethod
    def over(
        cls,
        batch: TokenBatch,
        rows: Sequence[int],
        rollout: Rollout,
        credit: Credit,
        models: ActorCritic,
        config: PPOConfig,
        trains_policy: bool = True,
        mean_length: float = 1.0,
        values: Float[Tensor, "rows time"] | None = None,
    ) -> "Pass":
        """A forward pass over `batch`, the given rows, with a graph of the policy only where it is trained.
        `mean_length`: of the minibatch's answers, in tokens. `values`: those of the critic, where its pass is done
        already."""

        def read(predictions: Predictions) -> tuple[Tensor, Tensor | None, Tensor | None]:
            entropy, kl = None, None
            if config.entropy_coef:
                logprobs, entropy = logprobs_and_entropy(predictions, batch.response_tokens, config.temperature)
            else:
                logprobs = action_logprobs(predictions, batch.response_tokens, config.temperature)
            if config.kl.penalty == "loss" and config.kl.estimator == "full":
                kl = models.read_reference(batch, lambda other: exact_kl(predictions, other, config.temperature))
            return logprobs, entropy, kl

        (logprobs, entropy, kl), values = models.read(batch, read, trains_policy, values)
        old, reference, engine, old_values, advantages, returns = (
            table[rows, : batch.time]
            for table in (
                *(rollout.old_logprobs, rollout.ref_logprobs, rollout.engine_logprobs, rollout.old_values),
                *(credit.weights, credit.returns),
            )
        )
        lengths = batch.mask.sum(dim=1, keepdim=True)
        return cls(
            batch=batch,
            logprobs=batch.spread(logprobs),
            entropy=rollout.old_entropy[rows, : batch.time] if entropy is None else batch.spread(entropy),
            exact_kl=None if kl is None else batch.spread(kl),
            values=values,
            old_logprobs=old,
            ref_logprobs=reference,
            engine_logprobs=engine,
            old_values=old_values,
            advantages=advantages,
            returns=returns,
            scale=credit.scale,
            weights=batch.mask * answer_weights(config.loss_average, lengths, mean_length, config.max_new_tokens),
        )


def answer_weights(
    average: LossAverage, lengths: Float[Tensor, "*rows"], mean_length: float, longest: int
) -> Float[Tensor, "*rows"]:
    """What the tokens of each answer weigh in a sum that is then divided by the tokens of the minibatch, whose answers
    have `mean_length` tokens on average.

    `answer_sums` is the mean over answers of each one's sum, divided by the constant `longest` (the length limit): the
    published gradient in the scale of the other averages, so that the limit of its norm has the same meaning for all
    methods (rule 30). Adam is invariant to such a constant.
    """
    if average == "tokens":
        return lengths * 0 + 1
    return mean_length / lengths.clamp(min=1) if average == "answer_means" else lengths * 0 + mean_length / longest


def losses_of(
    forward: Pass,
    config: PPOConfig,
    kl_coef: float,
    trains_policy: bool = True,
    reduction: Literal["sum", "none"] = "sum",
) -> dict[str, Tensor]:
    """`total_loss` and its parts, each summed over the real tokens of the rows, or of each token; the policy's parts
    with the weights of their tokens. `kl_coef` is β, used where the KL penalty is in the loss. Without `trains_policy`
    the total is that of the critic, whose values are then not clipped (rule 20)."""
    mask, weights = forward.batch.mask, forward.weights
    if config.importance_cap is not None:
        weights = weights * importance_weights(
            forward.old_logprobs, forward.engine_logprobs, config.importance_cap, mask
        )
    losses = compute_ppo_total_loss(
        forward.logprobs,
        forward.old_logprobs,
        forward.advantages,
        forward.values,
        forward.returns,
        None,
        config.clip_ratio,
        config.vf_coef if config.has_critic else 0.0,
        config.entropy_coef,
        mask=mask,
        old_values=forward.old_values,
        clip_value=config.critic.clip_value and trains_policy,
        value_clip_ratio=config.critic.value_clip,
        entropy=forward.entropy,
        clip_ratio_high=config.clip_ratio_high,
        ratio=config.ratio,
        dual_clip=config.dual_clip,
        weights=weights,
        reduction=reduction,
    )
    if config.kl.penalty == "loss":
        kind, kl = config.kl.estimator, forward.exact_kl
        if kl is None and kind != "full" and kind != "k1":
            kl = compute_kl_loss(
                forward.logprobs, forward.old_logprobs, forward.ref_logprobs, kind, mask, reduction="none"
            )
        assert kl is not None, kind
        weighted = forward.weights * kl
        losses["kl_loss"] = weighted.sum() if reduction == "sum" else weighted
        losses["total_loss"] = losses["total_loss"] + kl_coef / forward.scale * losses["kl_loss"]
    if not trains_policy:
        losses["total_loss"] = config.vf_coef * losses["value_loss"]
    return losses
