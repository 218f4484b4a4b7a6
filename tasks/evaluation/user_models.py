"""The user's models: models/extra/ for the comparison, models/judges/ for judges."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_core.data.chat import Conversation
from rlhf_core.data.tokenizer import load_tokenizer
from rlhf_core.errors import UserError
from rlhf_core.evaluation.judge_model import LanguageModelJudge
from rlhf_core.evaluation.pair_judges import CachedPairJudge, PairJudge
from rlhf_core.models.hf import load_causal_lm, place
from tasks.params.judge import JudgeParams
from tasks.stage.stage import Stage
from tasks.stage.trust import trusts

EXTRA = "models/extra"
JUDGES = "models/judges"


def folder_of(stage: Stage[Any], place: str, name: str, key: str) -> Path:
    """The Hugging Face folder `name` below `place`. Raises UserError with the parameter `key` if it is missing."""
    folder = stage.root / place / name
    if not (folder / "config.json").is_file():
        raise UserError(f"{key}: {place}/{name} is no Hugging Face folder (no config.json); put one there")
    return folder


def pair_judge_of(
    stage: Stage[Any], prompts: Sequence[Conversation], max_new_tokens: int, batch_size: int
) -> PairJudge | None:
    """The language model that compares answers; None if `judge.model` is not set. Raises UserError if its context is
    too short for two answers to each of the prompts."""
    settings = stage.block("judge", JudgeParams)
    if settings.model is None:
        return None
    folder = folder_of(stage, JUDGES, settings.model, "judge.model")
    model = place(load_causal_lm(folder, trust_remote_code=trusts(stage)))
    tokenizer = load_tokenizer(folder, trust_remote_code=trusts(stage))
    judge = LanguageModelJudge(model, tokenizer, name=settings.model, batch_size=batch_size)
    judge.require_room(prompts, max_new_tokens)
    return CachedPairJudge(judge)
