"""Stage `reward`: the Bradley-Terry reward model, its further members and the reward model that only judges (see
tasks/training/reward_models.py); nothing where `scorer` has no reward model."""

from rlhf_core.config.reward import RewardConfig
from tasks.params.scorer import REWARD_MODEL
from tasks.stage.run import quiet_libraries, run
from tasks.stage.stage import Stage
from tasks.stage.switched_off import NO_REWARD_MODEL, write_switched_off
from tasks.stage.workers import requested_processes, start_workers

TABLES = {
    "plots/reward.csv": ("step", "loss", "accuracy"),
    "plots/reward_calibration.csv": ("bin_low", "bin_high", "predicted", "observed", "pairs"),
    "plots/reward_margins.csv": ("low", "high", "accuracy", "accuracy_low", "accuracy_high", "pairs"),
    "plots/reward_scores.csv": ("low", "high", "chosen", "rejected"),
}
"""Columns of each table."""


def execute(stage: Stage[RewardConfig]) -> None:
    """Make models/reward, metrics/reward.json and the tables of plots; empty where `scorer` has no reward model."""
    if not stage.blocks[REWARD_MODEL]:
        write_switched_off(stage, TABLES, NO_REWARD_MODEL)
        return
    # Imported late: a stage that is switched off does not load torch.
    from tasks.training.reward_models import train_all

    quiet_libraries()
    train_all(stage)


if __name__ == "__main__":
    start_workers("tasks.reward", requested_processes("reward"))
    run("reward", RewardConfig, execute)
