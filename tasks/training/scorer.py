"""The scorers of the run: what PPO, its variants, rejection sampling and best-of-n maximise, and the reward model that
only judges."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_core.config.precision import Precision
from rlhf_core.models.ensemble import JUDGE, Ensemble, EnsembleScorer, member_folders
from rlhf_core.models.hf import default_device, load_scalar_model, place
from rlhf_core.models.scorers import FunctionScorer, RewardModelScorer, Scorer, WeightedSum
from tasks.datasets.jsonl import Row
from tasks.params.loader import parse
from tasks.params.runtime import FunctionParams
from tasks.params.scorer import REWARD_MODEL, ScorerParams, Term, is_reward_model, uses_reward_model
from tasks.stage.trust import trusts
from tasks.training.functions import reward_functions

if TYPE_CHECKING:  # `leash trace` has no stage, and needs neither DVC nor MLflow
    from tasks.stage.stage import Stage

REWARD = "models/reward"
EXTRA = "extra"
"""Column of a dataset of prompts: the further columns of the user's data, one object a row."""


def scorer_of(
    stage: "Stage[Any]", tokenizer: PreTrainedTokenizerBase, batch_size: int, device: torch.device | None = None
) -> Scorer:
    """The scorer of the block `scorer`, its models on `device` (None: the default one)."""
    return build_scorer(
        stage.root,
        terms_of(stage),
        stage.runtime.functions,
        tokenizer,
        batch_size,
        trusts(stage),
        device,
        stage.precision,
    )


def terms_of(stage: "Stage[Any]") -> list[Term]:
    """The block `scorer` of the stage. Raises ValueError when dvc.yaml does not declare it."""
    if "scorer" not in stage.blocks:
        raise ValueError(f"scorer is not among the params of {stage.name} in dvc.yaml")
    return parse(ScorerParams, {"scorer": stage.blocks["scorer"]}).scorer


def build_scorer(
    root: Path,
    terms: list[Term],
    limits: FunctionParams,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
    trust_remote_code: bool,
    device: torch.device | None = None,
    precision: Precision = "float32",
) -> Scorer:
    """The reward model, or all its members, which read the very tokens that were sampled; or the weighted sum of the
    terms."""
    scorers: dict[str, Scorer] = {
        name: FunctionScorer(function) for name, function in reward_functions(root, terms, limits).items()
    }
    if uses_reward_model(terms):
        scorers[REWARD_MODEL] = _reward_model(
            root / REWARD, tokenizer, batch_size, trust_remote_code, device, precision
        )
    if is_reward_model(terms):
        return scorers[REWARD_MODEL]
    return WeightedSum({term.term: (term.weight, scorers[term.term]) for term in terms})


def judging_scorer_of(
    root: Path,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
    trust_remote_code: bool,
    device: torch.device | None = None,
    precision: Precision = "float32",
) -> Scorer | None:
    """The reward model that PPO is not trained on, on `device` (None: the default one); None in a run without one
    (`reward.judge_share`)."""
    folder = root / REWARD / JUDGE
    if not folder.is_dir():
        return None
    return _reward_model(folder, tokenizer, batch_size, trust_remote_code, device, precision)


def _reward_model(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
    trust_remote_code: bool,
    device: torch.device | None,
    precision: Precision,
) -> Scorer:
    """The model in the folder, or several as one."""
    members: list[Scorer] = []
    device = device or default_device()
    for path in member_folders(folder):
        model = load_scalar_model(path, trust_remote_code=trust_remote_code, frozen=precision, device=device)
        members.append(RewardModelScorer(place(model, device), int(tokenizer.pad_token_id), batch_size))
    ensemble = Ensemble.read(folder)
    return members[0] if ensemble is None else EnsembleScorer(members, ensemble)


def extras_of(rows: Sequence[Row]) -> list[Mapping[str, object]]:
    """The further columns of each row, for functions; empty where it has none."""
    return [row.get(EXTRA) or {} for row in rows]
