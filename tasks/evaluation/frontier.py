"""The reward–KL frontier: the concave majorant of PPO's points, and the other models at their KL."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_core.evaluation import majorant
from rlhf_core.evaluation.frontier import lead_at_equal_kl
from rlhf_core.evaluation.intervals import Estimate, bounds
from tasks.datasets.jsonl import Row
from tasks.evaluation.evaluator import PROXIES, Evaluator
from tasks.evaluation.results import Bootstrap, PerPrompt, Results, wins_over, with_interval
from tasks.training.scorer import JUDGING_MODEL

Models = Mapping[str, dict[str, Any]]
SCORES = ("gold", "reward", "win_rate")
MAIN = {"scores": "gold", "pairs": "win_rate", JUDGING_MODEL: "win_rate", **dict.fromkeys(PROXIES, "reward")}
"""The score that decides between models, by the kind of judge."""
POLICY, SFT = "policy", "sft"


@dataclass(frozen=True)
class Point:
    """A model on the frontier, with each prompt's KL and scores."""

    name: str
    """`sft`, `policy`, `step 12` or `eta 0.65`; for another model its own name."""
    kls: PerPrompt | None
    """Exact KL, nats per answer; None if not measured."""
    scores: dict[str, PerPrompt | None]
    """By name of the score; None if unknown."""

    @property
    def kl(self) -> float:
        """The mean over prompts."""
        assert self.kls is not None
        return float(self.kls.mean())

    def mean(self, score: str) -> float | None:
        """The mean over prompts."""
        values = self.scores[score]
        return None if values is None else float(values.mean())


def kl_by_step(table: Path) -> dict[int, float | None]:
    """The KL (nats per answer) of each snapshot, from plots/select.csv; None if not measured."""
    with table.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if float(row["eta"]) == 1.0]
    return {int(row["step"]): float(row["kl"]) if row["kl"] else None for row in rows}


def chosen_snapshots(kls: Mapping[int, float | None], selected: Row, most: int) -> list[int]:
    """The steps of at most `most` snapshots for the frontier.

    The policy's, the first, the last, and those with the best scores of judge and reward model; then repeatedly the one
    farthest in √KL from those chosen. Without known KLs the distance is in steps. With `most` 0 the policy's alone,
    which has been sampled, or none where the policy is interpolated.
    """
    if most == 0:
        return [selected["step"]] if selected["eta"] == 1 else []
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
    """PPO's points and the other models of a run."""

    evaluator: Evaluator
    results: Mapping[str, Results]
    snapshots: Mapping[int, Results]
    """By step; the policy's own has all sampling seeds, the others the first."""
    models: Models
    """Each model's figures."""
    bootstrap: Bootstrap
    interpolated: Mapping[float, Results] = field(default_factory=dict)
    """Between SFT model and policy, by η."""

    @cached_property
    def start(self) -> Point:
        """The SFT model with all its answers."""
        return self._point(self.results[SFT], SFT)

    @cached_property
    def steps(self) -> dict[int, Point]:
        """PPO's snapshots by step."""
        policy = self.results.get(POLICY)
        return {
            step: self._point(each, POLICY if each is policy else f"step {step}")
            for step, each in sorted(self.snapshots.items())
        }

    @cached_property
    def etas(self) -> dict[float, Point]:
        """The interpolated policies by η."""
        return {eta: self._point(each, f"eta {eta:g}") for eta, each in sorted(self.interpolated.items())}

    @cached_property
    def curve(self) -> list[Point]:
        """All points that PPO's frontier is read from: SFT, snapshots, interpolated policies and the policy."""
        points = [self.start, *self.steps.values(), *self.etas.values()]
        policy = self.results.get(POLICY)
        if policy is not None and not any(each is policy for each in self.snapshots.values()):
            points.append(self._point(policy, POLICY))
        return points

    def figures(self) -> dict[str, Any]:
        """`frontier`: PPO's frontier (`lead_at_equal_kl`) against every other model at that model's KL, and the gaps;
        None beyond PPO's KL."""
        found: dict[str, Any] = {}
        for name, results in self.results.items():
            if name in (SFT, POLICY):
                continue
            kl, other = self.models[name]["kl"], self._point(results, name)
            main = MAIN[self.evaluator.judged_by] if other.scores["gold"] is None else "gold"
            figures = {"kl": kl, "between": None if kl is None else between(kl, self.curve, main)}
            for score in SCORES:
                gap = None if kl is None else lead(kl, other, self.curve, score, self.bootstrap)
                mean = other.mean(score)
                figures |= {
                    score: mean,
                    f"policy_{score}": None if gap is None or mean is None else mean + gap.mean,
                    f"{score}_gap": None if gap is None else gap.mean,
                    **bounds(f"{score}_gap", None if gap is None else gap.interval),
                }
            found[name] = figures
        return {"frontier": found}

    def stopping(self, selected: Row) -> dict[str, Any] | None:
        """The snapshot with the judge's best score on the validation prompts (0: the SFT model) minus the last one, on
        the test prompts and paired by prompt. None without a judge."""
        best, last = selected["best_judge_step"], selected["last_step"]
        points = {0: self.start, **self.steps}
        if best not in points or last not in points or self.evaluator.judged_by in PROXIES:
            return None
        score = MAIN[self.evaluator.judged_by]
        ours, theirs = points[best].scores[score], points[last].scores[score]
        assert ours is not None
        assert theirs is not None
        found = self.bootstrap.of_prompts(ours - theirs)
        return {
            "best_step": best,
            "last_step": last,
            "score": score,
            "difference": found.mean,
            **bounds("difference", found.interval),
        }

    def rows(self) -> list[Row]:
        """The rows of plots/frontier.csv. The policy is a point of `ppo` where it is a snapshot."""

        def row(family: str, place: float, kl: float | None, scores: Row) -> Row:
            root = None if kl is None else max(0.0, kl) ** 0.5
            return {"family": family, "point": place, "kl": kl, "sqrt_kl": root, **scores}

        rows, own = list[Row](), any(point.name == POLICY for point in self.steps.values())
        for name in self.results:
            if name == POLICY and own:
                continue
            figures = self.models[name]
            scores = {key: figures[key] for score in SCORES for key in (score, f"{score}_low", f"{score}_high")}
            best_of = name.startswith("best_of_")
            place = figures["samples_per_answer"] if best_of else 0
            rows.append(row("best_of_n" if best_of else name, place, figures["kl"], scores))
        points: list[tuple[str, float, Point]] = [("ppo", step, point) for step, point in self.steps.items()]
        points += [("interpolated", eta, point) for eta, point in self.etas.items()]
        for family, place, point in points:
            scores = {}
            for score, values in point.scores.items():
                scores |= with_interval(score, None if values is None else self.bootstrap.of_prompts(values))
            rows.append(row(family, place, point.kl, scores))
        return rows

    def _point(self, results: Results, name: str) -> Point:
        """The scores of a model's answers; the win rate is against the SFT model."""
        tables = {
            "gold": results.table("gold"),
            "reward": results.table("rewards"),
            "win_rate": wins_over(self.evaluator, results, self.results[SFT]),
        }
        scores = {score: None if table is None else results.per_prompt(table) for score, table in tables.items()}
        kl = results.table("kl")
        return Point(name, None if kl is None else results.per_prompt(kl), scores)


def lead(kl: float, other: Point, curve: list[Point], score: str, bootstrap: Bootstrap) -> Estimate | None:
    """PPO's frontier at the model's KL minus the model's score; None if the score is unknown or the KL beyond PPO's."""
    ours, theirs = [point.scores[score] for point in curve], other.scores[score]
    if theirs is None or any(scores is None for scores in ours):
        return None
    kls = np.full(len(theirs), kl) if other.kls is None else other.kls
    curve_kls = np.array([point.kls for point in curve])
    return lead_at_equal_kl(curve_kls, np.array(ours), kls, theirs, bootstrap.resamples, bootstrap.seed)


def between(kl: float, curve: list[Point], score: str) -> list[str] | None:
    """The names of the vertices of the majorant next below and above a KL, with all prompts; the last vertex twice
    where the majorant is flat. None beyond the points' KL, or where a score is unknown."""
    values = [point.mean(score) for point in curve]
    known = [value for value in values if value is not None]
    found = majorant.neighbours(kl, [point.kl for point in curve], known) if len(known) == len(values) else None
    return None if found is None else [curve[place].name for place in found]
