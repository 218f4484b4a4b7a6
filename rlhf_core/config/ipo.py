"""Settings of the stage `ipo`."""

from typing import Annotated

from pydantic import Field

from rlhf_core.config.dpo import PairConfig


class IPOConfig(PairConfig):
    """Identity preference optimisation (Azar et al. 2023) from the SFT model, which is the reference."""

    tau: Annotated[float, Field(gt=0)] = 0.1
    """Strength of the KL regularisation: training moves each pair's log-ratio margin to 1/(2τ) nats."""
