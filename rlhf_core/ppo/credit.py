"""The advantage of each token from the score of each response: KL penalty in the reward, advantage estimator, and
whitening."""

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.models.masked import masked_var
from rlhf_core.ppo.advantages import VARIANCE_FLOOR, compute_gae, compute_group_advantages, deviation, whiten
from rlhf_core.ppo.kl import estimate_kl
from rlhf_core.ppo.rewards import shape_rewards
from rlhf_core.ppo.rollout import Credit, Rollout, Scores


def assign_credit(rollout: Rollout, scores: Scores, config: PPOConfig, kl_coef: float) -> Credit:
    """Token rewards, advantages and returns of a rollout; `kl_coef` is β, used where the KL penalty is in the
    reward."""
    mask = rollout.mask
    kl, rewards = token_rewards(rollout, scores, config, kl_coef)
    advantages, returns = estimate_advantages(rewards, rollout, config)
    if not config.whiten_advantages:
        return Credit(kl, rewards, advantages, returns, advantages, scale=1.0)
    varies = masked_var(advantages, mask) > VARIANCE_FLOOR
    scale = deviation(advantages, mask).item() if varies else 1.0
    return Credit(kl, rewards, advantages, returns, whiten(advantages, mask), scale)


def token_rewards(
    rollout: Rollout, scores: Scores, config: PPOConfig, kl_coef: float
) -> tuple[Float[Tensor, "batch time"], Float[Tensor, "batch time"]]:
    """k1 in nats, and the rewards, less the KL penalty where it is in the reward."""
    kl = estimate_kl(rollout.old_logprobs, rollout.ref_logprobs, "k1", rollout.mask)
    price = kl_coef if config.kl.penalty == "reward" else 0.0
    return kl, shape_rewards(scores.used, kl, rollout.mask, price, config.kl.placement)


def rewards_for_gae(
    rewards: Float[Tensor, "batch time"], mask: Float[Tensor, "batch time"], config: PPOConfig
) -> Float[Tensor, "batch time"]:
    """The rewards, or with `whiten_rewards` (r − μ)/σ + μ over real tokens (Huang et al. 2024)."""
    return whiten(rewards, mask, shift_mean=False) if config.whiten_rewards else rewards


def estimate_advantages(
    rewards: Float[Tensor, "batch time"], rollout: Rollout, config: PPOConfig
) -> tuple[Float[Tensor, "batch time"], Float[Tensor, "batch time"]]:
    """Advantages before whitening, and returns, the critic's targets."""
    if config.advantage == "gae":
        values = torch.nn.functional.pad(rollout.old_values, (0, 1))
        usable = rewards_for_gae(rewards, rollout.mask, config)
        return compute_gae(usable, values, config.gamma, config.lam, rollout.mask)
    whole = rewards.sum(dim=1)
    advantages = compute_group_advantages(whole, config.advantage, config.samples_per_prompt)
    real = rollout.mask.bool()
    return torch.where(real, advantages[:, None], 0), torch.where(real, whole[:, None], 0)
