"""The judge of the block `judge` that compares two answers: a model in models/judges/, or one behind an endpoint."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_core.data.chat import Conversation
from rlhf_core.data.tokenizer import load_tokenizer
from rlhf_core.errors import UserError
from rlhf_core.evaluation.judge_model import QUESTION, LanguageModelJudge
from rlhf_core.evaluation.pair_judges import CachedPairJudge, PairJudge
from tasks.params.judge import LANGUAGE_MODELS, JudgeParams
from tasks.params.scorer import JUDGES
from tasks.stage.models import folder_of, load_frozen
from tasks.stage.stage import Stage
from tasks.stage.trust import trusts


def pair_judge_of(
    stage: Stage[Any], prompts: Sequence[Conversation], max_new_tokens: int, batch_size: int
) -> PairJudge | None:
    """The language model that compares answers; None with a `judge.kind` that scores single ones.

    Raises UserError for a missing model, template or key, and if the context of a local model is too short for two
    answers to each of the prompts.
    """
    params = stage.block("judge", JudgeParams)
    if params.model is None or params.kind not in LANGUAGE_MODELS:
        return None
    question = _question(stage.root, params.question)
    if params.kind == "api":
        from tasks.judging.endpoint import EndpointJudge  # its client takes a second to import

        return EndpointJudge(stage, params, question)
    folder = folder_of(stage, JUDGES, params.model, "judge.model")
    model = load_frozen(stage, folder)
    tokenizer = load_tokenizer(folder, trust_remote_code=trusts(stage))
    judge = LanguageModelJudge(model, tokenizer, name=params.model, batch_size=batch_size, question=question)
    judge.require_room(prompts, max_new_tokens)
    return CachedPairJudge(judge)


def _question(root: Path, name: str | None) -> str:
    """The text of the question."""
    if name is None:
        return QUESTION
    try:
        return (root / JUDGES / name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise UserError(f"judge.question: {JUDGES}/{name} cannot be read ({reason}); put the question there") from None
