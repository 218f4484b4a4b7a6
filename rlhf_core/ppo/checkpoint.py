"""The state of a PPO run in a sealed checkpoint."""

from rlhf_core.training.state import STATE, load, save

__all__ = ["STATE", "load", "save"]
