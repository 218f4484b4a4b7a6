"""The judge of pairs that `judge` in params.yaml names: a language model of the user's."""

from collections.abc import Sequence
from typing import Any

from rlhf_core.chat import Conversation
from rlhf_core.judge_model import LanguageModelJudge
from rlhf_core.models import load_causal_lm, place
from rlhf_core.pair_judges import PairJudge, Remembering
from rlhf_core.tokenizer import load_tokenizer
from tasks.extra_models import JUDGES, folder_of
from tasks.params.judge import JudgeParams
from tasks.params.loader import parse, read_yaml
from tasks.stage import Stage
from tasks.trust import trusts


def pair_judge_of(
    stage: Stage[Any], prompts: Sequence[Conversation], max_new_tokens: int, batch_size: int
) -> PairJudge | None:
    """The language model that compares answers, or None where the data's own judge or the reward model does. Raises
    UserError, before anybody has answered, where its context is too short for two answers to each of the prompts."""
    settings = parse(JudgeParams, read_yaml().get("judge"), "judge")
    if settings.model is None:
        return None
    folder = folder_of(stage, JUDGES, settings.model, "judge.model")
    model = place(load_causal_lm(folder, trust_remote_code=trusts(stage)))
    tokenizer = load_tokenizer(folder, trust_remote_code=trusts(stage))
    judge = LanguageModelJudge(model, tokenizer, name=settings.model, batch_size=batch_size)
    judge.require_room(prompts, max_new_tokens)
    return Remembering(judge)
