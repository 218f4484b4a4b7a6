"""Adam and its learning-rate schedule, separate for policy and critic (rule 16)."""

import torch

from rlhf_core.config.ppo import PPOConfig


def build_optimizers(
    parameters: dict[str, list[torch.nn.Parameter]], config: PPOConfig
) -> dict[str, torch.optim.Optimizer]:
    """Adam for the parameters of each name; the critic has its own learning rate."""
    rates = {"policy": config.learning_rate, "critic": config.critic.learning_rate}
    (beta1, beta2), eps = config.optimizer.betas, config.optimizer.eps
    return {
        name: torch.optim.Adam(trained, lr=rates[name], betas=(beta1, beta2), eps=eps, fused=True)
        for name, trained in parameters.items()
    }


def schedule(name: str, optimizer: torch.optim.Optimizer, config: PPOConfig) -> torch.optim.lr_scheduler.LambdaLR:
    """The learning rate rises over the warm-up steps, then is constant or falls linearly to 0 after the last step. The
    policy's begins when the critic's warm-up is over (rule 21)."""
    alone = config.critic_warmup_steps if name == "policy" else 0
    warmup, steps, decay = config.optimizer.warmup_steps, config.steps - alone, config.optimizer.decay

    def factor(step: int) -> float:
        rising = (step + 1) / (warmup + 1) if step < warmup else 1.0
        falling = (steps - step) / max(1, steps - warmup) if decay == "linear" else 1.0
        return min(rising, falling)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
