"""Scores of responses: the scorer's, as PPO uses them (rule 12), and the judge's, which are only logged."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, pstdev
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.config.ppo import PPOConfig, ScoreConfig
from rlhf_core.config.precision import Precision
from rlhf_core.data.chat import Conversation
from rlhf_core.data.scorer import Answers, Scored, Scorer, correlation, term_weights
from rlhf_core.data.tokenizer import closed, decode_response, encode_prompt, stop_ids
from rlhf_core.determinism import permutation
from rlhf_core.errors import NonFiniteError, UserError
from rlhf_core.models.precision import autocast
from rlhf_core.models.sampling import sample
from rlhf_core.models.scorers import models_of
from rlhf_core.models.sharding import whole
from rlhf_core.ppo.plan import REFERENCE
from rlhf_core.ppo.rewards import normalise_scores, penalise_missing_eos
from rlhf_core.ppo.rollout import Rollout, Scores
from rlhf_core.training.processes import Processes

REFERENCE_ANSWERS = 512
"""Answers of the reference that the scores are normalised with."""
REFERENCE_BATCH = 128
"""Most of them that are sampled side by side: progress is shown, and kept, after each batch."""

InBatches = Callable[[Sequence[Sequence[int]], Callable[[Sequence[int]], list[Any]]], list[Any]]
"""Runs a function on one batch of numbers after another, and returns one value a number, in their order; may show
progress, and take values (plain types, as JSON has them) from an earlier process."""


@dataclass(frozen=True)
class ScoreNormalisation:
    """Mean and standard deviation of the scorer on reference responses, frozen before the first step."""

    mean: float
    std: float

    def unit(self, config: ScoreConfig) -> tuple[float, float]:
        """Scale and shift from the raw score to the score that PPO uses, before any clip: what a critic that starts as
        the reward model needs (rule 20)."""
        scale = 1.0 / self.std if self.std > 0 else 1.0
        return (scale, -self.mean * scale) if config.normalise else (1.0, 0.0)


@dataclass(frozen=True)
class ReferenceScores:
    """What is kept of the reference's answers: one number for each."""

    scores: list[float]
    """Raw."""
    lengths: list[int]
    """Tokens."""
    ended: list[bool]
    gold: list[float] | None
    """By the judge; None without one."""

    @property
    def normalisation(self) -> ScoreNormalisation:
        """Mean and standard deviation."""
        return ScoreNormalisation(fmean(self.scores), pstdev(self.scores))

    @property
    def figures(self) -> dict[str, float | None]:
        """Mean and standard deviation of the scores, and their correlation with length and with the judge's scores;
        None where one side does not vary, or without a judge."""
        return {
            "score_mean": self.normalisation.mean,
            "score_std": self.normalisation.std,
            "length_correlation": correlation(self.scores, self.lengths),
            "gold_correlation": None if self.gold is None else correlation(self.scores, self.gold),
        }


def reference_scores(
    config: PPOConfig,
    reference: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    scorer: Scorer,
    prompts: Sequence[Conversation],
    seed: int,
    rows: Sequence[Mapping[str, object]] | None = None,
    judge: Scorer | None = None,
    processes: Processes | None = None,
    in_batches: InBatches | None = None,
    precision: Precision = "float32",
) -> ReferenceScores:
    """Scores of the reference's answers to the prompts of PPO, which the reward model was not trained on, sampled as
    PPO samples (rule 12): 512 answers, to each prompt as many as to any other, or one more. With several processes each
    makes its share. Raises NonFiniteError for a score that is NaN or infinite. `rows`: the rows of the data behind the
    prompts."""
    order = permutation(len(prompts), seed, REFERENCE)
    stops = stop_ids(tokenizer, reference, config.stop_tokens)
    at_once = min(config.sampler_rows or config.batch_size, REFERENCE_BATCH)

    def work(numbers: Sequence[int]) -> list[list[float]]:
        chosen = [order[number % len(prompts)] for number in numbers]
        asked, ids = [prompts[i] for i in chosen], [encode_prompt(tokenizer, prompts[i]) for i in chosen]
        with autocast(precision, reference.device):  # as the policy samples
            sampled = sample(
                reference,
                ids,
                [(seed, REFERENCE, i, number // len(prompts)) for i, number in zip(chosen, numbers, strict=True)],
                max_new_tokens=config.max_new_tokens,
                temperature=config.temperature,
                stop_ids=stops,
                pad_id=int(tokenizer.pad_token_id),
                batch_size=at_once,
            )
        texts = [decode_response(tokenizer, response, stops) for response in sampled.responses]
        responses = closed(sampled.responses, sampled.ended, int(tokenizer.eos_token_id))
        answers = Answers(asked, texts, ids, responses, rows and [rows[i] for i in chosen])
        scores = scorer(answers).total
        require_numbers(scores)
        gold = judge(answers).total if judge else [0.0] * len(texts)
        return [list(row) for row in zip(scores, map(len, responses), map(float, sampled.ended), gold, strict=True)]

    numbers: Sequence[int] = range(REFERENCE_ANSWERS)
    mine = numbers if processes is None else processes.share(numbers)
    batches = [mine[start : start + at_once] for start in range(0, len(mine), at_once)]
    with whole([reference, *models_of(scorer)]):
        found = in_batches(batches, work) if in_batches else [row for batch in batches for row in work(batch)]
        found = found if processes is None else processes.gather(found)
    scores, lengths, ended, gold = map(list, zip(*found, strict=True))
    return ReferenceScores(scores, list(map(int, lengths)), list(map(bool, ended)), gold if judge else None)


@dataclass
class RewardSource:
    """Scorer, its normalisation, and judge of a run."""

    scorer: Scorer
    normalisation: ScoreNormalisation
    judge: Scorer | None = None
    """Logged, never trained on; None where the data have none."""


@dataclass
class Scoring:
    """The scorer with normalisation, clip and penalty."""

    config: ScoreConfig
    source: RewardSource
    eos_id: int
    """The tokenizer's; see `closed`."""

    def __call__(self, rollout: Rollout, processes: Processes) -> Scores:
        """Score whole answers; each process scores its share. Raises NonFiniteError for NaN or infinity."""
        ids = closed(rollout.response_ids, rollout.ended.tolist(), self.eos_id)
        answers = Answers(rollout.prompts, rollout.texts, rollout.prompt_ids, ids, rollout.rows)
        scorer, judge = self.source.scorer, self.source.judge

        def score(rows: list[int]) -> list[tuple[Any, float | None]]:
            """Total and parts of each answer, or the error of the scorer, so that all processes end; and the gold
            score."""
            mine, found = answers.at(rows), list[Any]()
            try:
                found += scorer(mine).by_answer() if rows else []
            except UserError as error:
                found += [error] * len(rows)
            return list(zip(found, judge(mine).total if judge and rows else [None] * len(rows), strict=True))

        with whole(models_of(scorer)):
            found, gold = zip(*processes.map(range(len(rollout.texts)), score), strict=True)
        for one in found:
            if isinstance(one, UserError):
                raise one
        scored = Scored.joined(found)
        require_numbers(scored.total)
        raw = torch.tensor(scored.total, dtype=torch.float32, device=rollout.mask.device)
        if self.config.normalise:
            mean, std = self.source.normalisation.mean, self.source.normalisation.std
            used = normalise_scores(raw, mean, std, self.config.clip)
        else:
            used = raw.clamp(-self.config.clip, self.config.clip)
        used = penalise_missing_eos(used, rollout.ended, self.config.missing_eos_penalty)
        values = {name: (weight, raw.new_tensor(scored.parts[name])) for name, weight in term_weights(scorer).items()}
        terms = {name: term for name, term in values.items() if term[0]} or {"score": (1.0, raw)}
        if self.config.missing_eos_penalty:
            terms["end"] = (self.config.missing_eos_penalty, rollout.ended.to(raw.dtype))
        return Scores(raw, used, list(gold) if judge else None, scored.parts, terms)

    def raw(self, answers: Answers) -> list[float]:
        """The scorer's raw scores of all answers, in every process. Raises NonFiniteError for NaN or infinity."""
        with whole(models_of(self.source.scorer)):
            found = self.source.scorer(answers).total
        require_numbers(found)
        return found

    def state_dict(self) -> dict[str, Any]:
        """What the next score depends on."""
        return {"normalisation": asdict(self.source.normalisation)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self.source.normalisation = ScoreNormalisation(**state["normalisation"])


def require_numbers(scores: Sequence[float]) -> None:
    """Raise NonFiniteError when an answer's raw score is NaN or infinite."""
    if bad := [score for score in scores if not math.isfinite(score)]:
        raise NonFiniteError(
            f"the reward model scores {len(bad)} of {len(scores)} answers with {bad[0]}; "
            "train it again with a lower reward.learning_rate"
        )
