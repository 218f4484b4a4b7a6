"""Stage `hybrid`: PPO that starts from the rejection-sampling model, on a leash to the SFT model."""

from tasks.training.variants import run_variant

if __name__ == "__main__":
    run_variant("hybrid", start="models/rejection_sft")
