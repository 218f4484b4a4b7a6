"""Many answers of the SFT model to each prompt, with the score of each: what rejection sampling and
best-of-n choose from. What is done with the choice is defined in their stages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.data.scorer import Answers
from rlhf_core.data.tokenizer import closed, decode_response, stop_ids
from rlhf_core.models.hf import default_device
from rlhf_core.models.precision import autocast
from rlhf_core.models.sampling import SamplingSettings, sample
from rlhf_core.models.scorers import require_room
from tasks.datasets.jsonl import Row
from tasks.stage.stage import Stage
from tasks.training.scorer import extras_of, scorer_of

Kept = Sequence[tuple[Row, list[int]]]
"""Rows, each with the token ids of its prompt."""
Key = Callable[[int, int], tuple[int, ...]]
"""What decides the randomness of an answer: (place of the prompt, which of its answers) → key of `sample`."""


@dataclass(frozen=True)
class Candidate:
    """One answer."""

    response: list[int]
    """Token ids as they were sampled, the stop token included."""
    ended: bool
    text: str
    reward: float
    """Raw score."""
    terms: dict[str, float] = field(default_factory=dict)
    """What the score was made from, by term; empty where it is the reward model's."""


def draw_candidates(
    stage: Stage[Any],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    kept: Kept,
    count: int,
    settings: SamplingSettings,
    key: Key,
) -> list[list[Candidate]]:
    """`count` answers of `model` to each prompt with their scores, in the order of the prompts. Batches that an earlier
    process has sampled are not sampled again."""
    scorer = scorer_of(stage, tokenizer, settings.batch_size)
    require_room(scorer, [row["prompt"] for row, _ in kept], settings.max_new_tokens)
    stops, pad_id = stop_ids(tokenizer, model, settings.stop_tokens), int(tokenizer.pad_token_id)
    model.to(default_device()).eval()  # autocast keeps the cast weights only of parameters with a gradient
    jobs = [(prompt, k) for prompt in range(len(kept)) for k in range(count)]

    def work(part: Sequence[tuple[int, int]]) -> list[tuple[list[int], bool]]:
        with autocast(stage.precision, model.device):
            sampled = sample(
                model,
                [kept[prompt][1] for prompt, _ in part],
                [key(prompt, k) for prompt, k in part],
                max_new_tokens=settings.max_new_tokens,
                temperature=settings.temperature,
                stop_ids=stops,
                pad_id=pad_id,
                batch_size=settings.batch_size,
            )
        return list(zip(sampled.responses, sampled.ended, strict=True))

    batches = [jobs[start : start + settings.batch_size] for start in range(0, len(jobs), settings.batch_size)]
    drawn = stage.resumed("samples", batches, work)
    texts = [decode_response(tokenizer, response, stops) for response, _ in drawn]
    responses, ended = [response for response, _ in drawn], [end for _, end in drawn]
    answers = Answers(
        [kept[prompt][0]["prompt"] for prompt, _ in jobs],
        texts,
        [kept[prompt][1] for prompt, _ in jobs],
        closed(responses, ended, int(tokenizer.eos_token_id)),
        extras_of([kept[prompt][0] for prompt, _ in jobs]),
    )
    scored = scorer(answers).by_answer()
    found = [
        Candidate(response, end, text, reward, terms)
        for response, end, text, (reward, terms) in zip(responses, ended, texts, scored, strict=True)
    ]
    return [found[start : start + count] for start in range(0, len(found), count)]


def reward_figures(candidates: Sequence[Sequence[Candidate]], best: Sequence[Candidate]) -> dict[str, float | int]:
    """How many answers were sampled, their mean score, and the mean score of the best of each prompt."""
    rewards = [candidate.reward for group in candidates for candidate in group]
    return {
        "prompts": len(best),
        "samples_generated": len(rewards),
        "reward_mean": sum(rewards) / len(rewards),
        "reward_best": sum(candidate.reward for candidate in best) / len(best),
    }
