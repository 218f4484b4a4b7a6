"""Stage `reinforce`: the policy gradient with the batch's mean as its baseline (Williams 1992)."""

from tasks.params.variant import VariantParams
from tasks.stage.stage import Stage
from tasks.training.variants import train_variant


def execute(stage: Stage[VariantParams]) -> None:
    """Make models/reinforce, plots/reinforce.csv and metrics/reinforce.json."""
    train_variant(stage)
