"""The reward–KL frontier: PPO's snapshots as a curve, and where every other model lies beside it. Gold is the judge's
score, reward the reward model's; R in the fitted curves is relative to the SFT model."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from rlhf_core.evaluation.overoptimisation import Fit, at_kl, fit_best_of_n, fit_rl
from tasks.exam import Exam
from tasks.jsonl import Row
from tasks.results import Bootstrap, PerPrompt, Results

Models = Mapping[str, dict[str, Any]]
SCORES = {"gold": "gold", "reward": "rewards"}
"""Figures, and the tables of answers they are means of."""


def curve_of(results: Mapping[str, Results], snapshots: Mapping[int, Results]) -> tuple[list[float], list[Results]]:
    """KL (nats an answer) and answers along PPO's run, from the SFT model on, by rising KL."""
    sft = Results.of(results["sft"].marks[:1])
    points = [(0.0, sft), *((kl_of(of_step), of_step) for of_step in snapshots.values())]
    points.sort(key=lambda point: point[0])
    return [kl for kl, _ in points], [each for _, each in points]


def kl_of(results: Results) -> float:
    """Mean k1 of the answers; a hair below zero, which noise can make of a KL, counts as zero."""
    table = results.table("k1")
    assert table is not None  # snapshots have the SFT model's tokenizer
    return max(0.0, float(results.per_prompt(table).mean()))


def frontier_figures(
    results: Mapping[str, Results], snapshots: Mapping[int, Results], models: Models, bootstrap: Bootstrap
) -> dict[str, Any]:
    """`frontier`: PPO against every other model at that model's KL. `fits`: the curves of Gao et al. 2022."""
    curve = curve_of(results, snapshots)
    others = [name for name in models if name not in ("sft", "policy")]
    return {
        "frontier": {name: at_equal_kl(name, results[name], curve, models, bootstrap) for name in others},
        "fits": fits(curve, models),
    }


def at_equal_kl(
    name: str, other: Results, curve: tuple[list[float], list[Results]], models: Models, bootstrap: Bootstrap
) -> dict[str, Any]:
    """PPO's score at the model's KL, linear in √KL between snapshots, less the model's own; null beyond PPO's KL."""
    kl = models[name]["kl"]
    figures: dict[str, Any] = {"kl": kl, "gold": models[name]["gold"], "reward": models[name]["reward"]}
    for score, column in SCORES.items():
        ours = per_prompt_at(kl, curve, column)
        theirs = other.table(column)
        gap = None if ours is None or theirs is None else bootstrap.of_prompts(ours - other.per_prompt(theirs))
        figures |= {
            f"policy_{score}": None if ours is None else float(ours.mean()),
            f"{score}_gap": None if gap is None else gap.mean,
            f"{score}_gap_ci95": None if gap is None else [gap.low, gap.high],
        }
    return figures


def per_prompt_at(kl: float | None, curve: tuple[list[float], list[Results]], column: str) -> PerPrompt | None:
    """Each prompt's score under PPO at a KL; None outside the run, or where the score is not known."""
    tables = [each.table(column) for each in curve[1]]
    shares = None if kl is None else shares_at(kl, curve[0])
    if shares is None or any(table is None for table in tables):
        return None
    scores = [each.per_prompt(table) for each, table in zip(curve[1], tables, strict=True) if table is not None]
    total: PerPrompt = np.tensordot(shares, np.array(scores), axes=1)
    return total


def shares_at(kl: float, curve: list[float]) -> Float[np.ndarray, "points"] | None:
    """How much each snapshot counts for the curve at a KL: the interpolation of the unit vectors."""
    rows = [at_kl(kl, curve, unit.tolist()) for unit in np.eye(len(curve))]
    return None if None in rows else np.array(rows, dtype=np.float64)


def fits(curve: tuple[list[float], list[Results]], models: Models) -> dict[str, Any]:
    """By name of the curve: its parameters, or null where the points do not carry it."""
    best = [row for name, row in models.items() if name.startswith("best_of_")]
    found: dict[str, Fit | None] = {}
    for score, column in SCORES.items():
        means = [_mean(each, column) for each in curve[1]]
        start = models["sft"][score]
        found[f"ppo_{score}"] = _fitted(fit_rl, curve[0], means, start)
        found[f"best_of_n_{score}"] = _fitted(fit_best_of_n, [r["kl"] for r in best], [r[score] for r in best], start)
    return {
        name: None if fit is None else {"alpha": fit.alpha, "beta": fit.beta, "r2": fit.r2, "points": fit.points}
        for name, fit in found.items()
    }


def _fitted(fit: Any, kls: list[float], scores: list[Any], start: float | None) -> Fit | None:
    if start is None or any(score is None for score in scores):
        return None
    found: Fit | None = fit(kls, [score - start for score in scores])
    return found


def _mean(results: Results, column: str) -> float | None:
    table = results.table(column)
    return None if table is None else float(results.per_prompt(table).mean())


def frontier_rows(
    exam: Exam, results: Mapping[str, Results], snapshots: Mapping[int, Results], models: Models, bootstrap: Bootstrap
) -> list[Row]:
    """plots/frontier.csv: a row a point; snapshots have the answers of the first sampling seed, models all."""
    rows = [model_row(name, row) for name, row in models.items() if name != "policy"]
    return rows + [snapshot_row(exam, step, of_step, results["sft"], bootstrap) for step, of_step in snapshots.items()]


def model_row(name: str, figures: dict[str, Any]) -> Row:
    """A model of the table as a point."""
    n = int(name.removeprefix("best_of_")) if name.startswith("best_of_") else None
    family, point = (name, 0) if n is None else ("best_of_n", n)
    return _point(family, point, figures["kl"], {score: _ends(figures, score) for score in SCORES}, figures["win_rate"])


def snapshot_row(exam: Exam, step: int, results: Results, sft: Results, bootstrap: Bootstrap) -> Row:
    """The policy after a step as a point."""
    found = {score: bootstrap.of(results, results.table(column)) for score, column in SCORES.items()}
    ends = {score: (None, None, None) if e is None else (e.mean, e.low, e.high) for score, e in found.items()}
    won = exam.compare(results.marks[0], sft.marks[0])
    return _point("ppo", step, kl_of(results), ends, float(np.mean(won)))


def _ends(figures: dict[str, Any], score: str) -> tuple[float | None, float | None, float | None]:
    low, high = figures[f"{score}_ci95"] or (None, None)
    return figures[score], low, high


def _point(family: str, point: int, kl: float | None, scores: dict[str, Any], win_rate: float | None) -> Row:
    row: Row = {"family": family, "point": point, "kl": kl, "sqrt_kl": None if kl is None else max(0.0, kl) ** 0.5}
    for score, (mean, low, high) in scores.items():
        row |= {score: mean, f"{score}_low": low, f"{score}_high": high}
    return row | {"win_rate": win_rate}
