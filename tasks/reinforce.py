"""Stage `reinforce`: the policy gradient with the batch's mean as its baseline (Williams 1992)."""

from tasks.training.variants import run_variant

if __name__ == "__main__":
    run_variant("reinforce")
