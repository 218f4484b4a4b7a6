"""Stage `rloo`: the policy gradient with the prompt's other answers as its baseline (Ahmadian et al. 2024)."""

from tasks.training.variants import run_variant

if __name__ == "__main__":
    run_variant("rloo")
