"""The ceiling of the frontier: the optimum of the KL-regularised objective against the reward model, on the held-out
prompts."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhf_core.evaluation.optimum import Draws, Optimum, ceiling, share_of_optimum
from tasks.evaluation.evaluator import CandidateModel, Evaluator, ScoredAnswers
from tasks.evaluation.results import Results, Table

FIRST_SEED = 2**32
"""Of further answers; larger than any seed of the parameters."""


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


def add_shares(found: Ceiling | None, models: dict[str, dict[str, Any]]) -> list[dict[str, float | None]]:
    """Add `optimum_share` to the figures of every model; the rows of the ceiling, none without one. The share is None
    for the SFT model, for models of other tokens, outside the KL of the ceiling, and without one."""
    for figures in models.values():
        kl = figures["kl"]
        figures["optimum_share"] = None if found is None or kl is None else found.share(figures["reward"], kl)
    return [] if found is None else found.rows()


def draw_ceiling(evaluator: Evaluator, policy: CandidateModel, results: dict[str, Results], samples: int) -> Ceiling:
    """The ceiling, from `samples` answers to each prompt of the SFT model (those of best-of-n, too) and as many of the
    policy, which are sampled where they are not in `results`: answers of the SFT model alone hardly contain any of the
    optimum's at a few nats. With 8, on 40 prompts of the demo, the optimum's gain at 3 nats is 2% below an estimate
    from 512 answers of the SFT model, at 4.2 effective samples.

    R is the reward model's score in standard deviations of the SFT model's answers, as PPO has it.
    """
    start, own = results["sft"].columns, results["policy"].columns
    drawn = next((each.columns for name, each in results.items() if name.startswith("best_of_")), [])  # same for all n
    sft = [*start, *drawn][: max(samples, len(start))]
    sft += further(evaluator, evaluator.reference, "sft", samples - len(sft))
    more = further(evaluator, policy, "policy", samples - len(own))
    columns = [*sft, *own, *more]
    ratios = evaluator.log_ratios(policy, sft)
    for column in [*own, *more]:
        assert column.divergence is not None  # the policy has the SFT model's tokenizer
        ratios.append(column.divergence.log_ratio)
    of_policy = np.array(ratios).T
    rewards = np.array([column.rewards for column in columns]).T
    scale = np.array([column.rewards for column in start])
    draws = Draws(
        scores=(rewards - scale.mean()) / (scale.std() or 1.0),
        log_ratios=np.stack([np.zeros_like(of_policy), of_policy], axis=-1),
        counts=[len(sft), len(own) + len(more)],
    )
    gold = None if columns[0].gold is None else np.array([column.gold for column in columns], dtype=np.float64).T
    return Ceiling(ceiling(draws), rewards, gold, float(scale.mean()))


def further(evaluator: Evaluator, model: CandidateModel, name: str, count: int) -> list[ScoredAnswers]:
    """`count` more answers of a model to each prompt, with seeds that no parameter can name."""
    seeds = range(FIRST_SEED, FIRST_SEED + max(0, count))
    again = CandidateModel(f"{name}-again", model.model, model.tokenizer, name)
    return evaluator.answer(again, seeds) if seeds else []
