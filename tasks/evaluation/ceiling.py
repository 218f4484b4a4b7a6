"""The ceiling of the frontier: the optimum of the KL-regularised objective against the reward model, on the held-out
prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhf_core.evaluation.divergence import answer_logprobs
from rlhf_core.evaluation.optimum import Draws, Optimum, ceiling, share_of_optimum
from tasks.evaluation.evaluator import CandidateModel, Evaluator, ScoredAnswers
from tasks.evaluation.results import Results, Table
from tasks.select import interpolated

EXTRA_SEEDS = range(2**32, 2**32 + 5)
"""Sampling seeds of the policy's further answers; larger than any seed of the parameters."""
PROPOSAL_ETA = 0.8
"""Interpolated policies with an η of at least this are not sampled from here: they are close to the policy."""


@dataclass(frozen=True)
class Ceiling:
    """The optimum for several β, with the scores of the samples that it is estimated from."""

    points: list[Optimum]
    """By rising KL."""
    rewards: Table
    gold: Table | None
    start: float
    """Mean reward-model score of the SFT model."""

    def rows(self) -> list[dict[str, float | None]]:
        """`optimum` of metrics/evaluate.json. KL in nats per answer; `reward` is the raw score of the reward model."""
        return [
            {
                "beta": point.beta,
                "kl": point.kl,
                "reward": point.mean(self.rewards),
                "gold": None if self.gold is None else point.mean(self.gold),
                "effective_samples": point.effective_samples,
            }
            for point in self.points
        ]

    def share(self, reward: float, kl: float) -> float | None:
        """A model's gain in reward over the SFT model, as a share of the optimum's at the same KL (nats)."""
        gains = [point.mean(self.rewards) - self.start for point in self.points]
        return share_of_optimum(reward - self.start, kl, [point.kl for point in self.points], gains)


def add_shares(found: Ceiling, models: dict[str, dict[str, Any]]) -> list[dict[str, float | None]]:
    """Add `optimum_share` to the figures of every model; the rows of the ceiling. The share is None for the SFT model,
    for models of other tokens, and outside the KL of the ceiling."""
    for figures in models.values():
        kl = figures["kl_exact"]
        figures["optimum_share"] = None if kl is None else found.share(figures["reward"], kl)
    return found.rows()


def draw_ceiling(
    evaluator: Evaluator, policy: CandidateModel, results: dict[str, Results], etas: dict[float, Results]
) -> Ceiling:
    """The ceiling, from the answers of SFT model, best-of-n, policy and interpolated policies, and some more of the
    policy's: samples of the SFT model alone hardly contain answers of the optimum at a few nats.

    R is the reward model's score in standard deviations of the SFT model's evaluation answers, as PPO has it.
    """
    reference, sft, own = evaluator.reference, results["sft"].columns, results["policy"].columns
    most = max((each.best_of, name) for name, each in results.items() if name == "sft" or name.startswith("best_of_"))
    drawn = [] if most[1] == "sft" else results[most[1]].columns
    sets = [[*sft, *drawn], [*own, *evaluator.answer(policy, EXTRA_SEEDS)]]
    models = [reference, policy]
    for eta, found in etas.items():
        if eta == PROPOSAL_ETA:
            models.append(interpolated(reference, policy, eta))
            sets.append(found.columns)
    columns = [column for each in sets for column in each]
    logprobs = np.stack([_logprobs(evaluator, model, columns) for model in models], axis=-1)
    rewards = np.array([column.rewards for column in columns]).T
    scale = np.array([column.rewards for column in sft])
    scores = (rewards - scale.mean()) / (scale.std() or 1.0)
    draws = Draws(scores, logprobs - logprobs[..., :1], [len(each) for each in sets])
    gold = None if columns[0].gold is None else np.array([column.gold for column in columns], dtype=np.float64).T
    return Ceiling(ceiling(draws), rewards, gold, float(scale.mean()))


def _logprobs(evaluator: Evaluator, candidate: CandidateModel, columns: Sequence[ScoredAnswers]) -> Table:
    """log π of each answer at the sampling temperature, in nats; [prompts, columns]."""
    prompts = evaluator.prompt_ids(evaluator.reference)
    found = answer_logprobs(
        candidate.model,
        [prompt for _ in columns for prompt in prompts],
        [response for column in columns for response in column.responses],
        pad_id=int(evaluator.reference.tokenizer.pad_token_id),
        temperature=evaluator.temperature,
        batch_size=evaluator.batch_size,
    )
    return np.array(found).reshape(len(columns), len(prompts)).T
