"""The judge of pairs that `judge` in params.yaml names: a language model of the user's."""

from collections.abc import Sequence
from typing import Any

from rlhf_core.data.chat import Conversation
from rlhf_core.data.tokenizer import load_tokenizer
from rlhf_core.evaluation.judge_model import LanguageModelJudge
from rlhf_core.evaluation.pair_judges import CachedPairJudge, PairJudge
from rlhf_core.models.hf import load_causal_lm, place
from tasks.evaluation.extra_models import JUDGES, folder_of
from tasks.params.judge import JudgeParams
from tasks.stage.stage import Stage
from tasks.stage.trust import trusts


def pair_judge_of(
    stage: Stage[Any], prompts: Sequence[Conversation], max_new_tokens: int, batch_size: int
) -> PairJudge | None:
    """The language model that compares answers, or None where the data's own judge or the reward model does. Raises
    UserError, before anybody has answered, where its context is too short for two answers to each of the prompts."""
    settings = stage.block("judge", JudgeParams)
    if settings.model is None:
        return None
    folder = folder_of(stage, JUDGES, settings.model, "judge.model")
    model = place(load_causal_lm(folder, trust_remote_code=trusts(stage)))
    tokenizer = load_tokenizer(folder, trust_remote_code=trusts(stage))
    judge = LanguageModelJudge(model, tokenizer, name=settings.model, batch_size=batch_size)
    judge.require_room(prompts, max_new_tokens)
    return CachedPairJudge(judge)
