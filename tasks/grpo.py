"""Stage `grpo`: the policy gradient with advantages in deviations of the prompt's group (Shao et al. 2024)."""

from tasks.training.variants import run_variant

if __name__ == "__main__":
    run_variant("grpo")
