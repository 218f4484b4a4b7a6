"""The scorers of the run: what PPO, its variants, rejection sampling and best-of-n maximise, and the reward model that
only judges."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from rlhf_core.data.scorer import Scorer, WeightedSum
from rlhf_core.data.tokenizer import end_ids, other_ends
from rlhf_core.functions.process import RewardFunction
from rlhf_core.models.ensemble import JUDGE, Ensemble, EnsembleScorer, member_folders
from rlhf_core.models.scorers import REWARD_MODEL_NAME, RewardModelScorer
from tasks.datasets.jsonl import Row
from tasks.params.loader import parse
from tasks.params.runtime import FunctionParams
from tasks.params.scorer import FOLDER, REWARD_MODEL, ScorerParams, Term, functions, is_reward_model, uses_reward_model
from tasks.stage.trust import trusts
from tasks.training.scalar_models import ScalarModels

if TYPE_CHECKING:  # `leash trace` has no stage, and needs neither DVC nor MLflow
    from tasks.stage.stage import Stage

REWARD = "models/reward"
SFT = "models/sft"
JUDGING_MODEL = "judging reward model"
"""Name of the reward model that PPO is not trained on (`reward.judge_share`)."""
EXTRA = "extra"
"""Column of a dataset of prompts: the further columns of the user's data, one object a row."""


def scorer_of(
    stage: "Stage[Any]", tokenizer: PreTrainedTokenizerBase, batch_size: int, models: ScalarModels | None = None
) -> Scorer:
    """The scorer of the block `scorer`; None: its models on the default device, in the run's precision."""
    models = models or ScalarModels(trusts(stage), stage.precision, log=stage.log)
    return build_scorer(stage.root, terms_of(stage), stage.runtime.functions, tokenizer, batch_size, models)


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
    models: ScalarModels,
) -> Scorer:
    """The reward model, or all its members, which read the very tokens that were sampled; or the weighted sum of the
    terms."""
    scorers: dict[str, Scorer] = {
        file: RewardFunction(root / FOLDER, file, limits.timeout_seconds, limits.memory_mb) for file in functions(terms)
    }
    if uses_reward_model(terms):
        scorers[REWARD_MODEL] = _reward_model(root, root / REWARD, tokenizer, batch_size, models)
    if is_reward_model(terms):
        return scorers[REWARD_MODEL]
    return WeightedSum({term.term: (term.weight, scorers[term.term]) for term in terms})


def judging_scorer_of(
    root: Path, tokenizer: PreTrainedTokenizerBase, batch_size: int, models: ScalarModels
) -> Scorer | None:
    """The reward model that PPO is not trained on; None in a run without one (`reward.judge_share`)."""
    folder = root / REWARD / JUDGE
    return _reward_model(root, folder, tokenizer, batch_size, models, JUDGING_MODEL) if folder.is_dir() else None


def _reward_model(
    root: Path,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
    models: ScalarModels,
    name: str = REWARD_MODEL_NAME,
) -> Scorer:
    """The model in the folder, or several as one. The SFT model names the tokens that end answers."""
    pad_id, sft = int(tokenizer.pad_token_id), root / SFT
    settings = GenerationConfig.from_pretrained(str(sft)) if (sft / GENERATION_CONFIG_NAME).is_file() else None
    ends = other_ends(tokenizer, end_ids(tokenizer, settings))
    members = [
        RewardModelScorer(models.frozen(path), pad_id, batch_size, ends, name) for path in member_folders(folder)
    ]
    ensemble = Ensemble.read(folder)
    return members[0] if ensemble is None else EnsembleScorer(members, ensemble, name)


def extras_of(rows: Sequence[Row]) -> list[Mapping[str, object]]:
    """The further columns of each row, for functions; empty where it has none."""
    return [row.get(EXTRA) or {} for row in rows]
