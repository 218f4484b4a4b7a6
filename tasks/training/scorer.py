"""The scorers of the run: what PPO, its variants, rejection sampling and best-of-n maximise, and the models that only
judge."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from rlhf_core.data.classifiers import model_folder, output_of
from rlhf_core.data.scorer import Scorer, WeightedSum
from rlhf_core.data.tokenizer import (
    classifier_tokenizer,
    continues_text,
    load_tokenizer,
    same_tokens,
)
from rlhf_core.functions.process import RewardFunction
from rlhf_core.models.ensemble import JUDGE, Ensemble, EnsembleScorer, member_folders
from rlhf_core.models.scorers import REWARD_MODEL_NAME, RewardModelScorer, TextScorer
from tasks.datasets.jsonl import Row
from tasks.params.loader import parse
from tasks.params.runtime import FunctionParams
from tasks.params.scorer import (
    FOLDER,
    JUDGES,
    REWARD_MODEL,
    ScorerParams,
    Term,
    TextModel,
    functions,
    is_reward_model,
    uses_reward_model,
)
from tasks.stage.trust import trusts
from tasks.training.scalar_models import ScalarModels

if TYPE_CHECKING:  # `leash trace` has no stage, and needs neither DVC nor MLflow
    from tasks.stage.stage import Stage

REWARD = "models/reward"
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
    continues: bool | None = None,
) -> Scorer:
    """The reward model, or all its members, which read the very tokens that were sampled; or the weighted sum of the
    terms. `tokenizer`: the policy's, not needed without the reward model where `continues` says whether the policy
    continues texts."""
    scorers: dict[str, Scorer] = {
        file: RewardFunction(root / FOLDER, file, limits.timeout_seconds, limits.memory_mb) for file in functions(terms)
    }
    if uses_reward_model(terms):
        scorers[REWARD_MODEL] = _reward_model(root / REWARD, tokenizer, batch_size, models)
    if is_reward_model(terms):
        return scorers[REWARD_MODEL]
    for term in terms:
        if term.model is not None:
            continues = continues_text(tokenizer) if continues is None else continues
            scorers[term.name] = text_scorer(root, term.model, term, "scorer", models, batch_size, continues)
    return WeightedSum({term.name: (term.weight, scorers[term.name]) for term in terms})


def text_scorer(
    root: Path, name: str, how: TextModel, key: str, models: ScalarModels, batch_size: int, continues: bool
) -> TextScorer:
    """The reward model or classifier `name` below models/judges/; `continues`: the policy continues texts. Raises
    UserError, naming the parameter `key`, for a missing folder, an unknown label, or without a chat template."""
    where = f"{key}: {JUDGES}/{name}"
    folder = model_folder(root / JUDGES / name, where)
    tokenizer, reads = classifier_tokenizer(folder, how.reads, continues, where, models.trusted)
    model = models.classifier(folder, how.precision)
    labels = [str(model.config.id2label[i]) for i in range(model.config.num_labels)]
    return TextScorer(model, tokenizer, name, reads, output_of(labels, how.label, where), batch_size)


def judging_scorer_of(
    root: Path, tokenizer: PreTrainedTokenizerBase, batch_size: int, models: ScalarModels
) -> Scorer | None:
    """The reward model that PPO is not trained on; None in a run without one (`reward.judge_share`)."""
    folder = root / REWARD / JUDGE
    return _reward_model(folder, tokenizer, batch_size, models, JUDGING_MODEL) if folder.is_dir() else None


def _reward_model(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
    models: ScalarModels,
    name: str = REWARD_MODEL_NAME,
) -> Scorer:
    """The model in the folder, or several as one. One with another tokenizer than the policy's reads the texts."""
    theirs = load_tokenizer(folder, trust_remote_code=models.trusted)
    own = None if same_tokens(theirs, tokenizer) else theirs
    pad_id, eos_id = int(theirs.pad_token_id), int(theirs.eos_token_id)
    members = [
        RewardModelScorer(models.frozen(path), pad_id, eos_id, batch_size, name, own) for path in member_folders(folder)
    ]
    ensemble = Ensemble.read(folder)
    return members[0] if ensemble is None else EnsembleScorer(members, ensemble, name)


def extras_of(rows: Sequence[Row]) -> list[Mapping[str, object]]:
    """The further columns of each row, for functions; empty where it has none."""
    return [row.get(EXTRA) or {} for row in rows]
