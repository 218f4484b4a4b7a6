"""Settings of the stage `ipo`."""

from rlhf_core.config.block import PositiveNumber
from rlhf_core.config.dpo import PairConfig


class IPOConfig(PairConfig):
    """Identity preference optimisation (Azar et al. 2023) from the SFT model, which is the reference."""

    tau: PositiveNumber = 0.1
    """Strength of the KL regularisation: training moves each pair's log-ratio margin to 1/(2τ) nats."""
