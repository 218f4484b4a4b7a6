"""Stage `dpo`: the SFT model trained on the preference pairs by direct preference optimisation, without a reward
model."""

from rlhf_core.config.dpo import DPOConfig
from rlhf_core.dpo import dpo_objective
from tasks.stage.stage import Stage
from tasks.training.preference_training import train_policy_on_pairs


def execute(stage: Stage[DPOConfig]) -> None:
    """Make models/dpo, plots/dpo.csv and metrics/dpo.json."""
    train_policy_on_pairs(stage, dpo_objective)
