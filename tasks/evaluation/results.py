"""From marked answers to figures: one model's row of the comparison. Only numbers live here; who is compared, and what
is asked of whom, is decided in evaluate.py.

An ordinary model gives one answer a sampling seed to each prompt, all with equal weight. Best-of-n has all samples of
the SFT model as its answers, with the weights of the unbiased estimator.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from rlhf_core.evaluation.diversity import distinct_n, mean_overlap
from rlhf_core.evaluation.intervals import Estimate, estimate, estimate_difference, estimate_ratio
from rlhf_core.evaluation.wins import length_controlled_win_rate
from tasks.evaluation.evaluator import ScoredAnswers

Table = Float[np.ndarray, "prompts answers"]
PerPrompt = Float[np.ndarray, "prompts"]


@dataclass(frozen=True)
class Results:
    """One model's answers: a column an answer, a row a prompt."""

    columns: list[ScoredAnswers]
    """A column each."""
    weights: Table
    """Of each answer; a row sums to 1."""
    best_of: int = 1
    """Of how many samples a given answer is the best; 1: all answers weigh the same, and columns are repetitions."""

    @staticmethod
    def of(columns: Sequence[ScoredAnswers]) -> "Results":
        """Repetitions of equal weight."""
        return Results(list(columns), np.full((len(columns[0].texts), len(columns)), 1.0 / len(columns)))

    def column(self, answer: int) -> ScoredAnswers:
        """The answers that the given column of another model is compared with."""
        return self.columns[answer % len(self.columns)]

    def table(self, name: str) -> Table | None:
        """`rewards`, `gold`, `tokens`, or a part of the divergence; None where it is not known."""
        columns = [getattr(mark, name, None) if hasattr(mark, name) else _part(mark, name) for mark in self.columns]
        if any(column is None for column in columns):
            return None
        return np.array(columns, dtype=np.float64).T

    def per_prompt(self, values: Table) -> PerPrompt:
        """The weighted mean of each prompt's answers."""
        means: PerPrompt = (self.weights * values).sum(axis=1)
        return means

    @property
    def equal(self) -> bool:
        """Whether all answers of a prompt weigh the same."""
        return self.best_of == 1

    def repetitions(self) -> list[list[str]]:
        """Whole sets of given answers, one a prompt: the columns, or the picks of as many samples as there are."""
        starts = range(0, len(self.columns) - self.best_of + 1, self.best_of)
        return [pick(self.columns[start : start + self.best_of]).texts for start in starts]


def _part(mark: ScoredAnswers, name: str) -> list[float] | None:
    return None if mark.divergence is None else getattr(mark.divergence, name)


def pick(columns: list[ScoredAnswers]) -> ScoredAnswers:
    """Of several answers to each prompt the one that the reward model likes best."""
    best = [max(range(len(columns)), key=lambda k: columns[k].rewards[i]) for i in range(len(columns[0].texts))]
    gold = [columns[k].gold for k in range(len(columns))]
    return ScoredAnswers(
        responses=[columns[k].responses[i] for i, k in enumerate(best)],
        ended=[columns[k].ended[i] for i, k in enumerate(best)],
        texts=[columns[k].texts[i] for i, k in enumerate(best)],
        rewards=[columns[k].rewards[i] for i, k in enumerate(best)],
        gold=None if gold[0] is None else [gold[k][i] for i, k in enumerate(best)],  # type: ignore[index]
        tokens=[columns[k].tokens[i] for i, k in enumerate(best)],
        divergence=None,
    )


@dataclass(frozen=True)
class Bootstrap:
    """How intervals are made."""

    resamples: int
    seed: int

    def of(self, results: Results, values: Table | None) -> Estimate | None:
        """Mean and interval over prompts, and the spread over repetitions."""
        if values is None:
            return None
        table = values if results.equal else results.per_prompt(values)[:, None]
        return estimate(table, self.resamples, self.seed)

    def of_sums(self, results: Results, above: Table, below: Table) -> Estimate:
        """A sum over all answers divided by another, such as nats over tokens."""
        return estimate_ratio(results.per_prompt(above), results.per_prompt(below), self.resamples, self.seed)

    def of_prompts(self, values: PerPrompt) -> Estimate:
        """Mean and interval of one value a prompt."""
        return estimate(values[:, None], self.resamples, self.seed)


def own_figures(results: Results, bootstrap: Bootstrap) -> dict[str, Any]:
    """What a model's answers show by themselves. KL in nats an answer, entropy in nats a token."""
    tokens = results.table("tokens")
    assert tokens is not None  # counted, never unknown
    ended = np.array([mark.ended for mark in results.columns], dtype=np.float64).T
    entropy = results.table("entropy")
    sets = results.repetitions()
    return {
        "answers": len(sets) * len(ended),
        **three("gold", bootstrap.of(results, results.table("gold")), spread=True),
        **three("reward", bootstrap.of(results, results.table("rewards")), spread=True),
        **three("kl", bootstrap.of(results, results.table("k1"))),
        **three("kl_k3", bootstrap.of(results, results.table("k3"))),
        **three("response_tokens", bootstrap.of(results, tokens)),
        **three("missing_eos_share", bootstrap.of(results, 1.0 - ended)),
        "distinct_1": float(np.mean([distinct_n(texts, 1) for texts in sets])),
        "distinct_2": float(np.mean([distinct_n(texts, 2) for texts in sets])),
        "overlap": mean_overlap(list(zip(*sets, strict=True))) if len(sets) > 1 else None,
        **three("entropy", None if entropy is None else bootstrap.of_sums(results, entropy, tokens)),
    }


def against(
    name: str, results: Results, other: Results, won: Table, bootstrap: Bootstrap, controlled: bool
) -> dict[str, Any]:
    """Win rate over another model; `won` is ½ for a tie. With `controlled` also as it would be at equal length."""
    figures: dict[str, Any] = three(name, bootstrap.of(results, won), spread=controlled)
    if not controlled:
        return figures
    lengths, others = results.table("tokens"), np.array([other.column(i).tokens for i in range(won.shape[1])]).T
    assert lengths is not None
    found = length_controlled_win_rate(
        won, lengths - others, bootstrap.resamples, bootstrap.seed, weights=results.weights
    )
    return {
        **figures,
        **three("ties", bootstrap.of(results, (won == 0.5).astype(np.float64))),
        f"{name}_controlled": found.mean,
        f"{name}_controlled_ci95": found.interval,
    }


def no_win_rate(name: str, controlled: bool) -> dict[str, Any]:
    """The keys of `against` for a model that would be compared with itself."""
    keys = [name, f"{name}_ci95"]
    if controlled:
        keys += [f"{name}_spread", "ties", "ties_ci95", f"{name}_controlled", f"{name}_controlled_ci95"]
    return dict.fromkeys(keys)


def difference(results: Results, other: Results, column: str, bootstrap: Bootstrap) -> Estimate | None:
    """Of the means of a column, paired by prompt."""
    mine, theirs = results.table(column), other.table(column)
    if mine is None or theirs is None:
        return None
    return estimate_difference(other.per_prompt(theirs), results.per_prompt(mine), bootstrap.resamples, bootstrap.seed)


def three(name: str, found: Estimate | None, spread: bool = False) -> dict[str, Any]:
    """A figure with its interval, and perhaps its spread over repetitions; null where it is not known."""
    figures: dict[str, Any] = {
        name: None if found is None else found.mean,
        f"{name}_ci95": None if found is None else found.interval,
    }
    return figures | ({f"{name}_spread": None if found is None else found.spread} if spread else {})
