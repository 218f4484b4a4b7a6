"""Sentences on the settings that change the optimum, or how well it is reached."""

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_core.config.ppo import PPOConfig


def remarks(config: PPOConfig, found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A sentence for each such setting."""
    return [*_moved(config), *_meaning(config, found), *_noise(config)]


def _moved(config: PPOConfig) -> Iterator[str]:
    """Settings with another fixed point than π*."""
    if config.entropy_coef > 0:
        yield (
            f"entropy_coef {config.entropy_coef:g} draws the policy towards uniform, away from π*; "
            "the resting point takes it into account"
        )
    if config.kl.penalty == "loss" and config.kl.estimator == "k3":
        yield (
            "kl.estimator k3 in the loss, as GRPO is published, follows the gradient of KL(π_ref ‖ π): responses come "
            "to rest beside π*"
        )
    elif config.kl.penalty == "loss":
        yield (
            "kl.penalty loss: a token does not pay for the KL of the tokens after it, so that responses of several "
            "tokens come to rest beside π*; on one token it is exact"
        )
    if config.advantage == "grpo":
        yield "advantage grpo: the deviation of each prompt's answers scales its score, and so the meaning of β"
    if config.loss_average == "answer_means":
        yield "loss_average answer_means: the tokens of long responses weigh less than those of short ones"
    if config.gamma < 1:
        yield f"gamma {config.gamma:g} discounts the score of longer responses; 1 leaves π* where it is"


def _meaning(config: PPOConfig, found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Settings that define R, β and π of the optimum."""
    if config.score.normalise:
        sharpness = f", R/β {1 / config.kl.coef:.3g}" if config.kl.coef else ""
        yield f"score.normalise: under the reference R has standard deviation 1{sharpness}"
    if config.score.missing_eos_penalty > 0:
        yield (
            f"score.missing_eos_penalty {config.score.missing_eos_penalty:g} is part of R: π* avoids responses "
            "without an end"
        )
    if config.temperature != 1:
        yield (
            f"temperature {config.temperature:g}: π, π_ref and π* are softmax(logits / {config.temperature:g}); "
            "at another temperature the trained model is not optimal"
        )
    if config.kl.controller == "adaptive":
        ended = ", ".join(f"{one['kl_coef']:.3g} ({name})" for name, one in found.items())
        yield f"kl.controller adaptive: π* is that of the β at the end: {ended}; it began at {config.kl.coef:g}"
    elif config.kl.coef == 0:
        yield "kl.coef 0: no leash; π* is the reference on the responses of the highest score"


def _noise(config: PPOConfig) -> Iterator[str]:
    """Settings that do not move the optimum and change how well it is reached."""
    if config.lam < 1:
        yield f"lam {config.lam:g}: the gradient is biased by the critic's errors, and less as the critic learns"
    if config.optimizer.decay == "none":
        yield "optimizer.decay none: the last steps are as large as the first, and the policy keeps wandering"
    if config.whiten_advantages and config.optimizer.decay == "none":
        yield "whiten_advantages: noise is scaled up to deviation 1 near the optimum, where advantages vanish"
