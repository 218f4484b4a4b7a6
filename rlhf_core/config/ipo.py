"""Settings of the stage `ipo`."""

from rlhf_core.config.block import PositiveNumber
from rlhf_core.config.dpo import PairConfig


class IPOConfig(PairConfig):
    """Azar et al. 2023, on the reward model's pairs; the SFT model is start and reference."""

    tau: PositiveNumber = 0.1
    """Strength of the KL regularisation: the target of each pair's log-ratio margin is 1/(2τ) nats."""
