"""The reward–KL frontier: PPO's snapshots as a curve, and the other models at their KL."""

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_core.evaluation.frontier import lead_at_equal_kl
from rlhf_core.evaluation.intervals import Estimate
from rlhf_core.evaluation.overoptimisation import Fit, fit_best_of_n, fit_rl
from tasks.datasets.jsonl import Row
from tasks.evaluation.evaluator import Evaluator
from tasks.evaluation.results import Bootstrap, PerPrompt, Results, wins_over

Models = Mapping[str, dict[str, Any]]
SCORES = ("gold", "reward", "win_rate")
FITTED = ("gold", "reward")


@dataclass(frozen=True)
class Point:
    """A model on the frontier, with each prompt's KL and scores."""

    step: int
    kls: PerPrompt | None
    """Nats per answer; None if not measured."""
    scores: dict[str, PerPrompt | None]
    """By name of the score; None if unknown."""

    @property
    def kl(self) -> float:
        """The mean over prompts; a negative estimate counts as zero."""
        assert self.kls is not None
        return max(0.0, float(self.kls.mean()))

    def mean(self, score: str) -> float | None:
        """The mean over prompts."""
        values = self.scores[score]
        return None if values is None else float(values.mean())


def point_of(evaluator: Evaluator, results: Results, sft: Results, step: int = 0) -> Point:
    """The scores of a model's answers; the win rate is against `sft`."""
    gold, rewards, kl = (results.table(name) for name in ("gold", "rewards", "k1"))
    scores = {
        "gold": None if gold is None else results.per_prompt(gold),
        "reward": None if rewards is None else results.per_prompt(rewards),
        "win_rate": results.per_prompt(wins_over(evaluator, results, sft)),
    }
    return Point(step, None if kl is None else results.per_prompt(kl), scores)


def kl_by_step(table: Path) -> dict[int, float | None]:
    """The KL (nats per answer) of each snapshot, from plots/select.csv; None if not measured."""
    with table.open(encoding="utf-8", newline="") as file:
        rows = [(int(row["step"]), row["kl"]) for row in csv.DictReader(file)]
    return {step: float(kl) if kl else None for step, kl in rows if step > 0}


def chosen_snapshots(kls: Mapping[int, float | None], selected: Row, most: int) -> list[int]:
    """The steps of at most `most` snapshots for the frontier.

    The policy's, the first, the last, and those with the best scores of judge and reward model; then repeatedly the one
    farthest in √KL from those chosen, since the frontier is linear in √KL. Without known KLs the distance is in steps.
    """
    known = None not in kls.values()
    places = {step: max(0.0, kl) ** 0.5 if known and kl is not None else float(step) for step, kl in kls.items()}
    named = (selected["step"], min(kls), max(kls), selected["best_judge_step"], selected["best_proxy_step"])
    chosen = [step for step in dict.fromkeys(named) if step in places]
    while len(chosen) < min(most, len(places)):
        rest = [step for step in places if step not in chosen]
        chosen.append(max(rest, key=lambda step: min(abs(places[step] - places[other]) for other in chosen)))
    return sorted(chosen)


@dataclass(frozen=True)
class Frontier:
    """PPO's curve and the other models of a run."""

    evaluator: Evaluator
    results: Mapping[str, Results]
    snapshots: Mapping[int, Results]
    """By step; answers of the first sampling seed."""
    models: Models
    """Each model's figures."""
    bootstrap: Bootstrap

    @cached_property
    def curve(self) -> list[Point]:
        """The SFT model with all its answers (step 0) and PPO's snapshots, by rising KL."""
        sft = self.results["sft"]
        first = Results.of(sft.columns[:1])
        points = [point_of(self.evaluator, each, first, step) for step, each in self.snapshots.items()]
        return sorted([point_of(self.evaluator, sft, sft), *points], key=lambda point: point.kl)

    def figures(self) -> dict[str, Any]:
        """`frontier`: PPO against every other model at that model's KL. `fits`: the curves of Gao et al. 2022."""
        others = {
            name: self._at_equal_kl(self.models[name]["kl"], point_of(self.evaluator, each, self.results["sft"]))
            for name, each in self.results.items()
            if name not in ("sft", "policy")
        }
        return {"frontier": others, "fits": fits(self.curve, self.models)}

    def stopping(self, selected: Row) -> dict[str, Any] | None:
        """The snapshot with the judge's best score on the validation prompts (0: the SFT model) minus the last one, on
        the test prompts and paired by prompt. None without a judge."""
        best, last = selected["best_judge_step"], selected["last_step"]
        points = {point.step: point for point in self.curve}
        if best not in points or last not in points or self.evaluator.judged_by == "reward model":
            return None
        score = "gold" if self.evaluator.judged_by == "scores" else "win_rate"
        ours, theirs = points[best].scores[score], points[last].scores[score]
        assert ours is not None
        assert theirs is not None
        found = self.bootstrap.of_prompts(ours - theirs)
        return {
            "best_step": best,
            "last_step": last,
            "score": score,
            "difference": found.mean,
            "difference_ci95": found.interval,
        }

    def rows(self) -> list[Row]:
        """The rows of plots/frontier.csv; snapshots have the answers of the first sampling seed only."""
        points = {point.step: point for point in self.curve}
        rows = [model_row(name, self.models[name]) for name in self.results if name != "policy"]
        return rows + [snapshot_row(points[step], self.bootstrap) for step in self.snapshots]

    def _at_equal_kl(self, kl: float | None, other: Point) -> dict[str, Any]:
        """PPO's scores at a model's KL, linear in √KL between snapshots, and the gaps; None beyond PPO's KL."""
        figures: dict[str, Any] = {"kl": kl, "between": None if kl is None else neighbours(kl, self.curve)}
        for score in SCORES:
            gap = None if kl is None else lead(kl, other, self.curve, score, self.bootstrap)
            mean = other.mean(score)
            figures |= {
                score: mean,
                f"policy_{score}": None if gap is None or mean is None else mean + gap.mean,
                f"{score}_gap": None if gap is None else gap.mean,
                f"{score}_gap_ci95": None if gap is None else gap.interval,
            }
        return figures


def lead(kl: float, other: Point, curve: list[Point], score: str, bootstrap: Bootstrap) -> Estimate | None:
    """PPO's score at the model's KL minus the model's; None if the score is unknown or the KL is beyond PPO's."""
    ours, theirs = [point.scores[score] for point in curve], other.scores[score]
    if theirs is None or any(scores is None for scores in ours):
        return None
    kls = np.full(len(theirs), kl) if other.kls is None else other.kls
    curve_kls = np.array([point.kls for point in curve])
    return lead_at_equal_kl(curve_kls, np.array(ours), kls, theirs, bootstrap.resamples, bootstrap.seed)


def neighbours(kl: float, curve: list[Point]) -> list[int] | None:
    """The steps of the snapshots next below and above a KL; None outside the curve."""
    below = [point.step for point in curve if point.kl <= max(0.0, kl)]
    above = [point.step for point in curve if point.kl >= max(0.0, kl)]
    return [below[-1], above[0]] if below and above else None


def fits(curve: list[Point], models: Models) -> dict[str, Any]:
    """By name of the curve: its parameters and its start; None if it cannot be fitted. Scores are relative to SFT."""
    best = [row for name, row in models.items() if name.startswith("best_of_")]
    start = models.get("best_of_1", models["sft"])
    found: dict[str, Any] = {}
    for score in FITTED:
        found[f"ppo_{score}"] = _fitted(
            fit_rl,
            [p.kl for p in curve],
            [p.mean(score) for p in curve],
            next(p for p in curve if p.step == 0).mean(score),
        )
        found[f"best_of_n_{score}"] = _fitted(
            fit_best_of_n, [row["kl"] for row in best], [row[score] for row in best], start[score]
        )
    return found


Fitting = Callable[[list[float], list[float]], Fit | None]


def _fitted(fit: Fitting, kls: list[float], scores: list[float | None], start: float | None) -> dict[str, Any] | None:
    known = [score for score in scores if score is not None]
    if start is None or len(known) < len(scores):
        return None
    found = fit(kls, [score - start for score in known])
    if found is None:
        return None
    return {"start": start, "alpha": found.alpha, "beta": found.beta, "r2": found.r2, "points": found.points}


def model_row(name: str, figures: dict[str, Any]) -> Row:
    """The row of a model."""
    n = figures["samples_per_answer"] if name.startswith("best_of_") else None
    family, place = (name, 0) if n is None else ("best_of_n", n)
    return _row(family, place, figures["kl"], {score: (figures[score], figures[f"{score}_ci95"]) for score in SCORES})


def snapshot_row(point: Point, bootstrap: Bootstrap) -> Row:
    """The row of a snapshot."""
    found: dict[str, Estimate | None] = {
        score: None if values is None else bootstrap.of_prompts(values) for score, values in point.scores.items()
    }
    ends = {score: (None, None) if e is None else (e.mean, e.interval) for score, e in found.items()}
    return _row("ppo", point.step, point.kl, ends)


def _row(family: str, place: int, kl: float | None, scores: dict[str, Any]) -> Row:
    row: Row = {"family": family, "point": place, "kl": kl, "sqrt_kl": None if kl is None else max(0.0, kl) ** 0.5}
    for score, (mean, ends) in scores.items():
        low, high = ends or (None, None)
        row |= {score: mean, f"{score}_low": low, f"{score}_high": high}
    return row
