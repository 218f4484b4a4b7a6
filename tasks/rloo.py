"""Stage `rloo`: the policy gradient with the prompt's other answers as its baseline (Ahmadian et al. 2024)."""

from tasks.params.variant import VariantParams
from tasks.stage.stage import Stage
from tasks.training.variants import train_variant


def execute(stage: Stage[VariantParams]) -> None:
    """Make models/rloo, plots/rloo.csv and metrics/rloo.json."""
    train_variant(stage)
