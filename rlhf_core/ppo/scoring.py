"""Scores of responses: the scorer's, as PPO uses them (rule 12), and the judge's, which are only logged."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import fmean, pstdev
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.config.ppo import PPOConfig, ScoreConfig
from rlhf_core.data.chat import Conversation
from rlhf_core.data.judge import Judge
from rlhf_core.data.tokenizer import decode_response, encode_prompt, stop_ids
from rlhf_core.determinism import permutation
from rlhf_core.errors import NonFiniteError, UserError
from rlhf_core.models.sampling import sample
from rlhf_core.models.scorers import Answers, Scored, Scorer, models_of
from rlhf_core.models.sharding import whole
from rlhf_core.ppo.plan import REFERENCE
from rlhf_core.ppo.rewards import RunningScale, normalise_scores, penalise_missing_eos
from rlhf_core.ppo.rollout import Rollout, Scores
from rlhf_core.ppo.statistics import correlation
from rlhf_core.training.memory import Halving, Log
from rlhf_core.training.processes import Processes

NORMALISING = "ppo.sampler_rows, ppo.micro_batch_size or ppo.max_new_tokens"
"""The parameters to lower where the reference's answers do not fit into memory."""
REFERENCE_ANSWERS = 512
"""Answers of the reference that the scores are normalised with."""

Result = TypeVar("Result")
AnswerScore = tuple[float, dict[str, float]]
"""An answer's raw score, and the parts that it was made from."""


@dataclass(frozen=True)
class ScoreNormalisation:
    """Mean and standard deviation of the scorer on reference responses, frozen before the first step."""

    mean: float
    std: float

    def unit(self, config: ScoreConfig) -> tuple[float, float]:
        """Scale and shift from the raw score to the score that PPO uses, before any clip: what a critic that starts as
        the reward model needs (rule 20). A running scale starts near the deviation."""
        scale = 1.0 / self.std if self.std > 0 else 1.0
        if config.normalise:
            return scale, -self.mean * scale
        return (scale, 0.0) if config.scale == "running" else (1.0, 0.0)


@dataclass(frozen=True)
class ReferenceScores:
    """Answers of the reference, and their raw scores."""

    answers: Answers
    scores: list[float]

    @property
    def normalisation(self) -> ScoreNormalisation:
        """Mean and standard deviation."""
        return ScoreNormalisation(fmean(self.scores), pstdev(self.scores))

    def figures(self, judge: Judge | None) -> dict[str, float | None]:
        """Mean and standard deviation of the scores, and their correlation with length and with the judge's scores;
        None where one side does not vary, or without a judge."""
        gold = judge.score(self.answers.prompts, self.answers.texts) if judge else None
        return {
            "score_mean": self.normalisation.mean,
            "score_std": self.normalisation.std,
            "length_correlation": correlation(self.scores, [len(ids) for ids in self.answers.response_ids]),
            "gold_correlation": None if gold is None else correlation(self.scores, gold),
        }


def reference_scores(
    config: PPOConfig,
    reference: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    scorer: Scorer,
    prompts: Sequence[Conversation],
    seed: int,
    log: Log = print,
    rows: Sequence[Mapping[str, object]] | None = None,
) -> ReferenceScores:
    """The reference's answers to the prompts of PPO, which the reward model was not trained on, sampled as PPO samples
    (rule 12), with their raw scores: 512 answers, to each prompt as many as to any other, or one more. Raises
    NonFiniteError for a score that is NaN or infinite, UserError when half a batch does not fit into memory; `log` is
    called where a batch is halved. `rows`: the rows of the data behind the prompts."""
    order = permutation(len(prompts), seed, REFERENCE)
    turns = [divmod(number, len(prompts)) for number in range(REFERENCE_ANSWERS)]
    chosen, stops = [order[place] for _, place in turns], stop_ids(tokenizer, reference, config.stop_tokens)
    prompt_ids = [encode_prompt(tokenizer, prompts[i]) for i in chosen]

    def draw(rows: list[int]) -> list[list[int]]:
        return sample(
            reference,
            [prompt_ids[row] for row in rows],
            [(seed, REFERENCE, chosen[row], turns[row][0]) for row in rows],
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            stop_ids=stops,
            pad_id=int(tokenizer.pad_token_id),
            batch_size=at_once,
        ).responses

    halving = Halving("the answers that normalise the scores", NORMALISING, log)
    at_once = config.sampler_rows or config.batch_size
    with whole([reference]):
        responses = halving.in_pieces(range(len(chosen)), at_once, draw)
    texts = [decode_response(tokenizer, response, stops) for response in responses]
    behind = rows and [rows[i] for i in chosen]
    answers = Answers([prompts[i] for i in chosen], texts, prompt_ids, responses, behind)
    with whole(models_of(scorer)):
        scores = halving.in_pieces(
            range(len(chosen)), config.micro_batch_size, lambda part: scorer(answers.at(part)).total
        )
    require_numbers(scores)
    return ReferenceScores(answers, scores)


@dataclass
class RewardSource:
    """Scorer, its normalisation, and judge of a run."""

    scorer: Scorer
    normalisation: ScoreNormalisation
    judge: Judge | None = None
    """Logged, never trained on; None where the data have none."""


@dataclass
class Scoring:
    """The scorer with normalisation, clip and penalty."""

    config: ScoreConfig
    source: RewardSource
    halving: Halving
    batch_size: int
    """Answers in a call of the scorer."""
    scale: RunningScale = field(default_factory=RunningScale)

    def __call__(self, rollout: Rollout, processes: Processes) -> Scores:
        """Score whole answers; each process scores its share. Raises NonFiniteError for NaN or infinity."""

        def work(rows: list[int]) -> list[tuple[AnswerScore | UserError, float | None]]:
            fitting = partial(self._score, rollout)
            return self.halving.in_pieces(rows, self.batch_size, fitting, processes.gather)

        with whole(models_of(self.source.scorer)):
            scored = processes.map(range(len(rollout.response_ids)), work)
        found = Scored.joined(_raised(score for score, _ in scored))
        require_numbers(found.total)
        raw = torch.tensor(found.total, dtype=torch.float32, device=rollout.mask.device)
        gold = [g for _, g in scored if g is not None]
        used = penalise_missing_eos(self._use(raw), rollout.ended, self.config.missing_eos_penalty)
        return Scores(raw, used, gold if self.source.judge else None, found.parts)

    def raw(self, answers: Answers, processes: Processes) -> list[float]:
        """The scorer's raw scores of all answers, in every process. Raises NonFiniteError for NaN or infinity."""

        def work(rows: list[int]) -> list[float | UserError]:
            return [each if isinstance(each, UserError) else each[0] for each in self._scores(answers.at(rows))]

        with whole(models_of(self.source.scorer)):
            scored = self.halving.in_pieces(range(len(answers.texts)), self.batch_size, work, processes.gather)
        found = _raised(scored)
        require_numbers(found)
        return found

    def state_dict(self) -> dict[str, Any]:
        """What the next score depends on."""
        return {"scale": self.scale.state_dict(), "normalisation": asdict(self.source.normalisation)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self.scale.load_state_dict(state["scale"])
        self.source.normalisation = ScoreNormalisation(**state["normalisation"])

    def _score(self, rollout: Rollout, rows: list[int]) -> list[tuple[AnswerScore | UserError, float | None]]:
        prompts, texts = [rollout.prompts[i] for i in rows], [rollout.texts[i] for i in rows]
        ids = [rollout.prompt_ids[i] for i in rows], [rollout.response_ids[i] for i in rows]
        behind = rollout.rows and [rollout.rows[i] for i in rows]
        scores = self._scores(Answers(prompts, texts, *ids, behind))
        gold = self.source.judge.score(prompts, texts) if self.source.judge and rows else [None] * len(rows)
        return list(zip(scores, gold, strict=True))

    def _scores(self, answers: Answers) -> list[AnswerScore] | list[UserError]:
        """Raw scores and parts. A scorer that fails is a value for each answer: all processes receive it, and end
        together."""
        try:
            return self.source.scorer(answers).by_answer() if answers.texts else []
        except UserError as error:
            return [error] * len(answers.texts)

    def _use(self, raw: Float[Tensor, "batch"]) -> Float[Tensor, "batch"]:
        """Normalised or scaled, then clipped."""
        if self.config.normalise:
            return normalise_scores(
                raw, self.source.normalisation.mean, self.source.normalisation.std, self.config.clip
            )
        used = self.scale(raw) if self.config.scale == "running" else raw
        return used.clamp(-self.config.clip, self.config.clip)


def require_numbers(scores: Sequence[float]) -> None:
    """Raise NonFiniteError when an answer's raw score is NaN or infinite."""
    if bad := [score for score in scores if not math.isfinite(score)]:
        raise NonFiniteError(
            f"the reward model scores {len(bad)} of {len(scores)} answers with {bad[0]}; "
            "train it again with a lower reward.learning_rate"
        )


def _raised(values: Iterable[Result | UserError]) -> list[Result]:
    """The values; raises the first error among them."""
    found = []
    for value in values:
        if isinstance(value, UserError):
            raise value
        found.append(value)
    return found
