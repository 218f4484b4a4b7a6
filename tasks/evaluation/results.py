"""Computes a model's figures from its scored answers.

An ordinary model has one answer for each prompt and sampling seed, with equal weights. Best-of-n has all samples of the
SFT model, with the weights of the unbiased estimator.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Float

from rlhf_core.evaluation.intervals import Estimate, bounds, estimate, estimate_difference
from rlhf_core.evaluation.wins import length_controlled_win_rate
from tasks.evaluation.evaluator import Evaluator, ScoredAnswers, ScoresOf

RATED_BY: dict[str, ScoresOf] = {"reward_model": "rewards", "judging_model": "judging"}
"""Ends of the names of win rates by reward models, and the scores behind them."""

Table = Float[np.ndarray, "prompts answers"]
PerPrompt = Float[np.ndarray, "prompts"]
TERM = "reward/"
"""Beginning of the name of a figure of one term of the scorer."""


@dataclass(frozen=True)
class Results:
    """One model's answers."""

    columns: list[ScoredAnswers]
    """One for each repetition or sample."""
    weights: Table
    """Weight of each answer; a row sums to 1."""
    best_of: int = 1
    """n of best-of-n; 1: the columns are repetitions of equal weight."""

    @staticmethod
    def of(columns: Sequence[ScoredAnswers]) -> "Results":
        """Results of repetitions with equal weight."""
        return Results(list(columns), np.full((len(columns[0].texts), len(columns)), 1.0 / len(columns)))

    def column(self, answer: int) -> ScoredAnswers:
        """The answers that column `answer` of another model is compared with."""
        return self.columns[answer % len(self.columns)]

    def table(self, name: str) -> Table | None:
        """`rewards`, `gold`, `tokens`, or a field of the divergence; None if unknown."""
        owners = [scored if hasattr(scored, name) else scored.divergence for scored in self.columns]
        columns = [None if owner is None else getattr(owner, name) for owner in owners]
        if any(column is None for column in columns):
            return None
        return np.array(columns, dtype=np.float64).T

    def term(self, name: str) -> Table:
        """The scores of one term of the scorer."""
        return np.array([scored.terms[name] for scored in self.columns], dtype=np.float64).T

    def per_prompt(self, values: Table) -> PerPrompt:
        """The weighted mean of each prompt's answers."""
        means: PerPrompt = (self.weights * values).sum(axis=1)
        return means

    def repetitions(self) -> list[list[str]]:
        """Sets of one answer for each prompt: the columns, or the best of every n samples."""
        starts = range(0, len(self.columns) - self.best_of + 1, self.best_of)
        return [pick(self.columns[start : start + self.best_of]).texts for start in starts]


def pick(columns: list[ScoredAnswers]) -> ScoredAnswers:
    """For each prompt the answer with the highest reward, the first of equal ones."""
    best = [max(range(len(columns)), key=lambda k: columns[k].rewards[i]) for i in range(len(columns[0].texts))]
    gold, judging = [column.gold for column in columns], [column.judging for column in columns]
    return ScoredAnswers(
        responses=[columns[k].responses[i] for i, k in enumerate(best)],
        ended=[columns[k].ended[i] for i, k in enumerate(best)],
        texts=[columns[k].texts[i] for i, k in enumerate(best)],
        rewards=[columns[k].rewards[i] for i, k in enumerate(best)],
        gold=None if gold[0] is None else [gold[k][i] for i, k in enumerate(best)],  # type: ignore[index]
        tokens=[columns[k].tokens[i] for i, k in enumerate(best)],
        divergence=None,
        judging=None if judging[0] is None else [judging[k][i] for i, k in enumerate(best)],  # type: ignore[index]
    )


@dataclass(frozen=True)
class Bootstrap:
    """Bootstrap intervals."""

    resamples: int
    seed: int

    def of(self, results: Results, values: Table | None) -> Estimate | None:
        """Mean and interval over prompts, and the spread over repetitions."""
        if values is None:
            return None
        table = values if results.best_of == 1 else results.per_prompt(values)[:, None]
        return estimate(table, self.resamples, self.seed)

    def of_prompts(self, values: PerPrompt) -> Estimate:
        """Mean and interval of one value for each prompt."""
        return estimate(values[:, None], self.resamples, self.seed)


def own_figures(results: Results, bootstrap: Bootstrap) -> dict[str, Any]:
    """The figures that need no other model. KL is the exact one, in nats per answer."""
    tokens = results.table("tokens")
    assert tokens is not None
    ended = np.array([scored.ended for scored in results.columns], dtype=np.float64).T
    sets = results.repetitions()
    terms: dict[str, Any] = {}
    for name in results.columns[0].terms:
        terms |= with_interval(f"{TERM}{name}", bootstrap.of(results, results.term(name)))
    return {
        "answers": len(sets) * len(ended),
        **with_interval("gold", bootstrap.of(results, results.table("gold")), spread=True),
        **with_interval("reward", bootstrap.of(results, results.table("rewards")), spread=True),
        **terms,
        **with_interval("kl", bootstrap.of(results, results.table("kl"))),
        **with_interval("response_tokens", bootstrap.of(results, tokens)),
        **with_interval("missing_eos_share", bootstrap.of(results, 1.0 - ended)),
        "distinct_2": float(np.mean([distinct_bigrams(texts) for texts in sets])),
    }


def distinct_bigrams(texts: Sequence[str]) -> float:
    """Distinct bigrams of words over all bigrams of words of all texts (Li et al. 2016); 0 without any.

    It falls with the number of texts, so that only equal numbers of answers can be compared.
    """
    bigrams = [pair for text in texts for pair in pairwise(text.casefold().split())]
    return len(set(bigrams)) / len(bigrams) if bigrams else 0.0


def win_rate_figures(results: Results, sft: Results, won: Table | None, bootstrap: Bootstrap) -> dict[str, Any]:
    """Win rate over the SFT model, ties, and the rate at equal length; None values without `won` (½ for a tie)."""
    controlled = None
    if won is not None:
        lengths, others = results.table("tokens"), np.array([sft.column(i).tokens for i in range(won.shape[1])]).T
        assert lengths is not None
        controlled = length_controlled_win_rate(
            won, lengths - others, bootstrap.resamples, bootstrap.seed, weights=results.weights
        )
    return {
        **with_interval("win_rate", bootstrap.of(results, won), spread=True),
        **with_interval("ties", bootstrap.of(results, None if won is None else (won == 0.5).astype(np.float64))),
        "win_rate_controlled": None if controlled is None else controlled.mean,
        **bounds("win_rate_controlled", None if controlled is None else controlled.interval),
    }


def wins_over(evaluator: Evaluator, results: Results, other: Results, by: ScoresOf | None = None) -> Table:
    """How much each answer is preferred to the other model's, in [0, 1]; `by` as in `Evaluator.compare`."""
    return np.array([evaluator.compare(scored, other.column(i), by) for i, scored in enumerate(results.columns)]).T


def rates_by_reward_models(
    evaluator: Evaluator, results: Results, sft: Results, bootstrap: Bootstrap
) -> dict[str, Any]:
    """The win rate over the SFT model, and that at equal length, by PPO's reward model and by the judging one, whatever
    judge there is. Empty in a run without a judging reward model; None values for the SFT model."""
    found: dict[str, Any] = {}
    for name, column in RATED_BY.items() if evaluator.judging else ():
        won = None if results is sft else wins_over(evaluator, results, sft, column)
        figures = win_rate_figures(results, sft, won, bootstrap)
        for rate in ("win_rate", "win_rate_controlled"):
            found |= {f"{rate}_by_{name}{end}": figures[f"{rate}{end}"] for end in ("", "_low", "_high")}
    return found


def difference(results: Results, other: Results, column: str, bootstrap: Bootstrap) -> Estimate | None:
    """The difference of the means of a table, `results` minus `other`, paired by prompt."""
    mine, theirs = results.table(column), other.table(column)
    if mine is None or theirs is None:
        return None
    return estimate_difference(other.per_prompt(theirs), results.per_prompt(mine), bootstrap.resamples, bootstrap.seed)


def with_interval(name: str, found: Estimate | None, spread: bool = False) -> dict[str, Any]:
    """A figure with its interval, and with `spread` its standard deviation over repetitions; None if unknown."""
    figures: dict[str, Any] = {
        name: None if found is None else found.mean,
        **bounds(name, None if found is None else found.interval),
    }
    return figures | ({f"{name}_spread": None if found is None else found.spread} if spread else {})
