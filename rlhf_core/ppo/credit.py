"""The advantage of each token from the score of each response: KL penalty in the reward, advantage estimator, answers
that are left out, and whitening."""

import torch

from rlhf_core.config.ppo import OF_GROUPS, PPOConfig
from rlhf_core.models.masked import masked_var
from rlhf_core.ppo.advantages import (
    VARIANCE_FLOOR,
    compute_gae,
    compute_gdpo_advantages,
    compute_group_advantages,
    deviation,
    equal_groups,
    whiten,
)
from rlhf_core.ppo.kl import estimate_kl
from rlhf_core.ppo.rewards import shape_rewards
from rlhf_core.ppo.rollout import Credit, Rollout, Scores


def assign_credit(rollout: Rollout, scores: Scores, config: PPOConfig, kl_coef: float) -> Credit:
    """Token rewards, advantages and returns of a rollout; `kl_coef` is β, used where the KL penalty is in the
    reward. Answers that are left out (`skip_equal_groups`, `truncated: mask`) still count in the baseline of the others
    and not in the whitening."""
    mask, each = rollout.mask, config.samples_per_prompt
    kl = estimate_kl(rollout.old_logprobs, rollout.ref_logprobs, "k1", mask)
    rewards = shape_rewards(scores.used, kl, mask, kl_coef if config.kl.penalty == "reward" else 0.0)
    if config.advantage == "gae":
        values = torch.nn.functional.pad(rollout.old_values, (0, 1))
        advantages, returns = compute_gae(rewards, values, config.gamma, config.lam, mask)
    else:
        whole = rewards.sum(dim=1)
        if config.advantage == "gdpo":
            of_answers = compute_gdpo_advantages(list(scores.terms.values()), each)
        else:
            of_answers = compute_group_advantages(whole, config.advantage, each)
        advantages, returns = (torch.where(mask.bool(), one[:, None], 0) for one in (of_answers, whole))

    trained, shares = torch.ones_like(rollout.ended), dict[str, float]()
    if config.advantage in OF_GROUPS:
        equal = equal_groups(scores.used, each)
        if config.advantage == "gdpo":
            by_term = {name: equal_groups(values, each) for name, (_, values) in scores.terms.items()}
            shares = {f"equal_groups_share/{name}": found.float().mean().item() for name, found in by_term.items()}
            equal = torch.stack(list(by_term.values())).all(dim=0)
        shares = {"equal_groups_share": equal.float().mean().item()} | shares
        trained = trained & ~equal if config.skip_equal_groups else trained
    if config.truncated == "mask":
        trained = trained & rollout.ended

    mask = mask * trained[:, None]
    if not config.whiten_advantages:
        return Credit(kl, rewards, advantages, returns, advantages * trained[:, None], 1.0, trained, shares)
    varies = masked_var(advantages, mask) > VARIANCE_FLOOR
    scale = deviation(advantages, mask).item() if varies else 1.0
    return Credit(kl, rewards, advantages, returns, whiten(advantages, mask), scale, trained, shares)
