"""Scores of responses: the scorer's, as PPO uses them (rule 12), and the judge's, which are only logged."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_core.config.ppo import ScoreConfig
from rlhf_core.data.judge import Judge
from rlhf_core.errors import NonFiniteError
from rlhf_core.models.scorers import Answers, Scorer
from rlhf_core.ppo.processes import Processes
from rlhf_core.ppo.rewards import RunningScale, normalise_scores, penalise_missing_eos
from rlhf_core.ppo.rollout import Rollout, Scores
from rlhf_core.training.memory import Halving


@dataclass(frozen=True)
class ScoreNormalisation:
    """Mean and standard deviation of the scorer on reference responses, frozen before the first step."""

    mean: float
    std: float


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

        def work(rows: list[int]) -> list[tuple[float, float | None]]:
            fitting = partial(self._score, rollout)
            return self.halving.in_pieces(rows, self.batch_size, fitting, processes.gather)

        scored = processes.map(range(len(rollout.response_ids)), work)
        require_numbers([score for score, _ in scored])
        raw = torch.tensor([score for score, _ in scored], dtype=torch.float32, device=rollout.mask.device)
        gold = [g for _, g in scored if g is not None]
        used = penalise_missing_eos(self._use(raw), rollout.ended, self.config.missing_eos_penalty)
        return Scores(raw, used, gold if self.source.judge else None)

    def raw(self, answers: Answers, processes: Processes) -> list[float]:
        """The scorer's raw scores of all answers, in every process. Raises NonFiniteError for NaN or infinity."""

        def work(rows: list[int]) -> list[float]:
            return self.source.scorer(answers.at(rows)) if rows else []

        found = self.halving.in_pieces(range(len(answers.texts)), self.batch_size, work, processes.gather)
        require_numbers(found)
        return found

    def _score(self, rollout: Rollout, rows: list[int]) -> list[tuple[float, float | None]]:
        prompts, texts = [rollout.prompts[i] for i in rows], [rollout.texts[i] for i in rows]
        ids = [rollout.prompt_ids[i] for i in rows], [rollout.response_ids[i] for i in rows]
        scores = self.source.scorer(Answers(prompts, texts, *ids)) if rows else []
        gold = self.source.judge.score(prompts, texts) if self.source.judge and rows else [None] * len(rows)
        return list(zip(scores, gold, strict=True))

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
