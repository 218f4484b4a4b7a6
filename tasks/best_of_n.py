"""Stage `best_of_n`: many answers of the SFT model to each evaluation prompt, scored by the reward model."""

from collections.abc import Sequence

from rlhf_core.data.tokenizer import load_tokenizer
from rlhf_core.models.hf import context_length
from tasks.datasets.jsonl import Row
from tasks.evaluation.prompts import evaluation_prompts, source_of
from tasks.params.best_of_n import BestOfNParams
from tasks.params.evaluate import EvaluateParams
from tasks.params.loader import parse
from tasks.stage.long_rows import fitting_prompts
from tasks.stage.models import load_frozen, set_numerics
from tasks.stage.stage import Stage
from tasks.stage.trust import trusts
from tasks.training.candidates import Candidate, Kept, draw_candidates, reward_figures

SFT = "models/sft"
SAMPLES = "data/best_of_n/samples.jsonl"
SALT = 2**32
"""First number of every key; larger than any seed, so that no other stage uses the same random numbers."""


def execute(stage: Stage[BestOfNParams]) -> None:
    """Make data/best_of_n/samples.jsonl and metrics/best_of_n.json."""
    set_numerics(stage)
    settings = parse(EvaluateParams, stage.blocks["answers"], "evaluate")
    tokenizer = load_tokenizer(stage.root / SFT, trust_remote_code=trusts(stage))
    model = load_frozen(stage, stage.root / SFT)
    kept, too_long = fitting_prompts(
        *(stage, source_of(settings), evaluation_prompts(stage, settings), tokenizer, context_length(model)),
        *(settings.max_new_tokens, settings.max_prompt_tokens),
    )
    count = max(stage.params.n)
    candidates = draw_candidates(
        stage, model, tokenizer, kept, count, settings, lambda prompt, k: (SALT, stage.seed, prompt, k)
    )
    best = [max(group, key=lambda candidate: candidate.reward) for group in candidates]
    stage.outputs.write_jsonl(SAMPLES, sample_rows(kept, candidates))
    stage.write_metrics({"enabled": True, **reward_figures(candidates, best), "prompts_too_long": too_long})


def sample_rows(kept: Kept, candidates: Sequence[Sequence[Candidate]]) -> list[Row]:
    """One row for each answer, in the order of prompts and draws."""
    return [
        {
            "prompt_id": row["prompt_id"],
            "prompt": row["prompt"],
            "sample": k,
            "response": candidate.text,
            "response_ids": candidate.response,
            "tokens": len(candidate.response),
            "ended": candidate.ended,
            "reward": candidate.reward,
            **({"terms": candidate.terms} if candidate.terms else {}),
        }
        for (row, _), group in zip(kept, candidates, strict=True)
        for k, candidate in enumerate(group)
    ]
