"""Stage `grpo`: the policy gradient with advantages in deviations of the prompt's group (Shao et al. 2024)."""

from tasks.params.variant import VariantParams
from tasks.stage.stage import Stage
from tasks.training.variants import train_variant


def execute(stage: Stage[VariantParams]) -> None:
    """Make models/grpo, plots/grpo.csv and metrics/grpo.json."""
    train_variant(stage)
