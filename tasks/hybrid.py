"""Stage `hybrid`: PPO that starts from the rejection-sampling model, on a leash to the SFT model."""

from tasks.params.variant import VariantParams
from tasks.stage.stage import Stage
from tasks.training.variants import train_variant


def execute(stage: Stage[VariantParams]) -> None:
    """Make models/hybrid, plots/hybrid.csv and metrics/hybrid.json."""
    train_variant(stage, start="models/rejection_sft")
