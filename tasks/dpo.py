"""Stage `dpo`: the SFT model trained on the preference pairs by direct preference optimisation, without a reward
model."""

from typing import TYPE_CHECKING

from rlhf_core.config.dpo import DPOConfig
from tasks.stage.run import run
from tasks.stage.stage import Stage
from tasks.stage.workers import requested_processes, start_workers
from tasks.training.preference_training import train_policy_on_pairs

if TYPE_CHECKING:
    from rlhf_core.dpo import PairObjective


def execute(stage: Stage[DPOConfig]) -> None:
    """Make models/dpo, plots/dpo.csv and metrics/dpo.json."""
    train_policy_on_pairs(stage, objective)


def objective(config: DPOConfig) -> "PairObjective":
    """DPO's loss over the pairs."""
    from rlhf_core.dpo import dpo_objective  # imports torch, which a stage that is switched off does not need

    return dpo_objective(config)


if __name__ == "__main__":
    start_workers("tasks.dpo", requested_processes("dpo"))
    run("dpo", DPOConfig, execute)
