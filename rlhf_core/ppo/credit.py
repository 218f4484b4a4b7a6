"""The advantage of each token from the score of each response: KL penalty in the reward, advantage estimator, and
whitening."""

import torch

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
    kl = estimate_kl(rollout.old_logprobs, rollout.ref_logprobs, "k1", mask)
    rewards = shape_rewards(scores.used, kl, mask, kl_coef if config.kl.penalty == "reward" else 0.0)
    if config.advantage == "gae":
        values = torch.nn.functional.pad(rollout.old_values, (0, 1))
        advantages, returns = compute_gae(rewards, values, config.gamma, config.lam, mask)
    else:
        whole = rewards.sum(dim=1)
        of_answers = compute_group_advantages(whole, config.advantage, config.samples_per_prompt)
        advantages, returns = (torch.where(mask.bool(), each[:, None], 0) for each in (of_answers, whole))
    if not config.whiten_advantages:
        return Credit(kl, rewards, advantages, returns, advantages, scale=1.0)
    varies = masked_var(advantages, mask) > VARIANCE_FLOOR
    scale = deviation(advantages, mask).item() if varies else 1.0
    return Credit(kl, rewards, advantages, returns, whiten(advantages, mask), scale)
