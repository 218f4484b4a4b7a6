"""The scorers of the run: what PPO, its variants, rejection sampling and best-of-n maximise, and the reward model that
only judges."""

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_core.models.ensemble import JUDGE, Ensemble, EnsembleScorer, member_folders
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
    """The reward model of the run, or all its members, which read the very tokens that were sampled, on `device` (None:
    the default one)."""
    folder = root / REWARD
    members = [_scorer(path, tokenizer, batch_size, trust_remote_code, device) for path in member_folders(folder)]
    ensemble = Ensemble.read(folder)
    return members[0] if ensemble is None else EnsembleScorer(members, ensemble)


def judging_scorer_of(
    root: Path, tokenizer: PreTrainedTokenizerBase, batch_size: int, trust_remote_code: bool
) -> Scorer | None:
    """The reward model that PPO is not trained on, on the default device; None in a run without one
    (`reward.judge_share`)."""
    folder = root / REWARD / JUDGE
    return _scorer(folder, tokenizer, batch_size, trust_remote_code, None) if folder.is_dir() else None


def _scorer(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
    trust_remote_code: bool,
    device: torch.device | None,
) -> RewardModelScorer:
    model = place(load_scalar_model(folder, trust_remote_code=trust_remote_code), device)
    return RewardModelScorer(model, int(tokenizer.pad_token_id), batch_size)
