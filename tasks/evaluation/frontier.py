"""The reward–KL frontier: PPO's snapshots as a curve, and where every other model lies beside it. Gold is the judge's
score, reward the reward model's, the win rate is against the SFT model; R in the fitted curves is relative to SFT."""

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_core.evaluation.frontier import lead_at_equal_kl
from rlhf_core.evaluation.intervals import Estimate
from rlhf_core.evaluation.overoptimisation import Fit, fit_best_of_n, fit_rl
from tasks.datasets.jsonl import Row
from tasks.evaluation.evaluator import Evaluator
from tasks.evaluation.results import Bootstrap, PerPrompt, Results

Models = Mapping[str, dict[str, Any]]
SCORES = ("gold", "reward", "win_rate")
FITTED = ("gold", "reward")


@dataclass(frozen=True)
class Point:
    """A model on the frontier: where it is, and each prompt's scores."""

    step: int
    kls: PerPrompt | None
    """Nats an answer; None where it is not measured."""
    scores: dict[str, PerPrompt | None]
    """By name of the score; None where nobody gives it."""

    @property
    def kl(self) -> float:
        """Over the prompts; a hair below zero, which noise can make of a KL, counts as zero."""
        assert self.kls is not None  # every snapshot's is measured
        return max(0.0, float(self.kls.mean()))

    def mean(self, score: str) -> float | None:
        """Over the prompts."""
        values = self.scores[score]
        return None if values is None else float(values.mean())


def point_of(evaluator: Evaluator, results: Results, sft: Results, step: int = 0) -> Point:
    """The scores of a model's answers, beside the SFT model's."""
    gold, rewards, kl = (results.table(name) for name in ("gold", "rewards", "k1"))
    won = np.array([evaluator.compare(mark, sft.column(i)) for i, mark in enumerate(results.columns)]).T
    scores = {
        "gold": None if gold is None else results.per_prompt(gold),
        "reward": None if rewards is None else results.per_prompt(rewards),
        "win_rate": results.per_prompt(won),
    }
    return Point(step, None if kl is None else results.per_prompt(kl), scores)


def curve_of(evaluator: Evaluator, sft: Results, snapshots: Mapping[int, Results]) -> list[Point]:
    """PPO's run from the SFT model on, by rising KL; snapshots answered with the first sampling seed only."""
    first = Results.of(sft.columns[:1])
    points = [
        point_of(evaluator, sft, sft),
        *(point_of(evaluator, each, first, step) for step, each in snapshots.items()),
    ]
    return sorted(points, key=lambda point: point.kl)


def kl_by_step(table: Path) -> dict[int, float | None]:
    """From plots/select.csv: the KL (nats an answer) of each snapshot on the validation prompts; None where `select`
    compared nothing."""
    with table.open(encoding="utf-8", newline="") as file:
        rows = [(int(row["step"]), row["kl"]) for row in csv.DictReader(file)]
    return {step: float(kl) if kl else None for step, kl in rows if step > 0}


def chosen_snapshots(kls: Mapping[int, float | None], selected: Row, most: int) -> list[int]:
    """The steps of at most `most` snapshots for the frontier.

    The policy's, the first, the last, and those that judge and reward model like best; then, as long as there is room,
    the one that is farthest in √KL from all chosen, since the frontier is linear in √KL between them. Without known KLs
    the distance is in steps.
    """
    known = None not in kls.values()
    places = {step: max(0.0, kl) ** 0.5 if known and kl is not None else float(step) for step, kl in kls.items()}
    named = (selected["step"], min(kls), max(kls), selected["best_judge_step"], selected["best_proxy_step"])
    chosen = [step for step in dict.fromkeys(named) if step in places]
    while len(chosen) < min(most, len(places)):
        rest = [step for step in places if step not in chosen]
        chosen.append(max(rest, key=lambda step: min(abs(places[step] - places[other]) for other in chosen)))
    return sorted(chosen)


def frontier_figures(
    evaluator: Evaluator,
    results: Mapping[str, Results],
    snapshots: Mapping[int, Results],
    models: Models,
    bootstrap: Bootstrap,
) -> dict[str, Any]:
    """`frontier`: PPO against every other model at that model's KL. `fits`: the curves of Gao et al. 2022."""
    sft = results["sft"]
    curve = curve_of(evaluator, sft, snapshots)
    others = {
        name: at_equal_kl(models[name]["kl"], point_of(evaluator, each, sft), curve, bootstrap)
        for name, each in results.items()
        if name not in ("sft", "policy")
    }
    return {"frontier": others, "fits": fits(curve, models)}


def at_equal_kl(kl: float | None, other: Point, curve: list[Point], bootstrap: Bootstrap) -> dict[str, Any]:
    """PPO's scores at a model's KL, linear in √KL between snapshots, less the model's own; null beyond PPO's KL."""
    figures: dict[str, Any] = {"kl": kl, "between": None if kl is None else neighbours(kl, curve)}
    for score in SCORES:
        gap = None if kl is None else lead(kl, other, curve, score, bootstrap)
        mean = other.mean(score)
        figures |= {
            score: mean,
            f"policy_{score}": None if gap is None or mean is None else mean + gap.mean,
            f"{score}_gap": None if gap is None else gap.mean,
            f"{score}_gap_ci95": None if gap is None else gap.interval,
        }
    return figures


def lead(kl: float, other: Point, curve: list[Point], score: str, bootstrap: Bootstrap) -> Estimate | None:
    """PPO's score at the model's KL less the model's; None where nobody gives the score, or PPO is not that far."""
    ours, theirs = [point.scores[score] for point in curve], other.scores[score]
    if theirs is None or any(scores is None for scores in ours):
        return None
    kls = np.full(len(theirs), kl) if other.kls is None else other.kls
    curve_kls = np.array([point.kls for point in curve])
    return lead_at_equal_kl(curve_kls, np.array(ours), kls, theirs, bootstrap.resamples, bootstrap.seed)


def neighbours(kl: float, curve: list[Point]) -> list[int] | None:
    """The steps of the snapshots nearest to a KL from below and from above; None outside the curve."""
    below = [point.step for point in curve if point.kl <= max(0.0, kl)]
    above = [point.step for point in curve if point.kl >= max(0.0, kl)]
    return [below[-1], above[0]] if below and above else None


def fits(curve: list[Point], models: Models) -> dict[str, Any]:
    """By name of the curve: its parameters and where it starts, or null where the points do not carry it."""
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


def stopping(
    evaluator: Evaluator,
    results: Mapping[str, Results],
    snapshots: Mapping[int, Results],
    selected: Row,
    bootstrap: Bootstrap,
) -> dict[str, Any] | None:
    """The snapshot that the judge liked best on the validation prompts (0: the SFT model) against the last one, on the
    test prompts and paired by prompt. None where no judge has chosen."""
    best, last = selected["best_judge_step"], selected["last_step"]
    points = {point.step: point for point in curve_of(evaluator, results["sft"], snapshots)}
    if best not in points or last not in points or evaluator.judged_by == "reward model":
        return None
    score = "gold" if evaluator.judged_by == "scores" else "win_rate"
    ours, theirs = points[best].scores[score], points[last].scores[score]
    assert ours is not None  # this judge gives it
    assert theirs is not None
    found = bootstrap.of_prompts(ours - theirs)
    return {
        "best_step": best,
        "last_step": last,
        "score": score,
        "difference": found.mean,
        "difference_ci95": found.interval,
    }


def frontier_rows(
    evaluator: Evaluator,
    results: Mapping[str, Results],
    snapshots: Mapping[int, Results],
    models: Models,
    bootstrap: Bootstrap,
) -> list[Row]:
    """plots/frontier.csv: a row a point; snapshots have the answers of the first sampling seed, models all."""
    rows = [model_row(name, models[name]) for name in results if name != "policy"]
    first = Results.of(results["sft"].columns[:1])
    return rows + [snapshot_row(point_of(evaluator, each, first, step), bootstrap) for step, each in snapshots.items()]


def model_row(name: str, figures: dict[str, Any]) -> Row:
    """A model of the table as a point."""
    n = figures["samples_per_answer"] if name.startswith("best_of_") else None
    family, place = (name, 0) if n is None else ("best_of_n", n)
    return _row(family, place, figures["kl"], {score: (figures[score], figures[f"{score}_ci95"]) for score in SCORES})


def snapshot_row(point: Point, bootstrap: Bootstrap) -> Row:
    """The policy after a step as a point."""
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
