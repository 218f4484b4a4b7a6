"""The scorer of the run: what PPO, its variants, rejection sampling and best-of-n maximise."""

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_core.models.hf import load_scalar_model, place
from rlhf_core.models.scorers import RewardModelScorer, Scorer

REWARD = "models/reward"


def scorer_of(
    root: Path,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
    trust_remote_code: bool,
    device: torch.device | None = None,
) -> Scorer:
    """The reward model of the run, which reads the very tokens that were sampled, on `device` (None: the default
    one)."""
    model = place(load_scalar_model(root / REWARD, trust_remote_code=trust_remote_code), device)
    return RewardModelScorer(model, int(tokenizer.pad_token_id), batch_size)
