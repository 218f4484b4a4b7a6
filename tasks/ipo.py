"""Stage `ipo`: the SFT model trained on the preference pairs by identity preference optimisation (Azar et al. 2023)."""

from functools import partial

from rlhf_core.config.ipo import IPOConfig
from rlhf_core.dpo import PairObjective
from rlhf_core.pair_losses import ipo_loss
from tasks.stage.stage import Stage
from tasks.training.preference_training import train_policy_on_pairs


def execute(stage: Stage[IPOConfig]) -> None:
    """Make models/ipo, plots/ipo.csv and metrics/ipo.json."""
    train_policy_on_pairs(stage, objective)


def objective(config: IPOConfig) -> PairObjective:
    """The objective of IPO; the implicit margin is τ·h, as DPO's is β·h."""
    return PairObjective(config.tau, partial(ipo_loss, tau=config.tau))
