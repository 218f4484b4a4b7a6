"""PPO's snapshots and the alternatives as points of KL and score, PPO's lead at equal KL, and the samples and tokens
that each point took."""

from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean

from clones import Result, Table, markdown, text

from rlhf_core.evaluation.majorant import majorant_at

PPO_FAMILIES = {"sft", "ppo", "interpolated", "policy"}
"""Families of plots/frontier.csv that PPO's frontier is read from."""
Runs = dict[tuple[int, float], Result]
"""Results by seed and β; the first β of a seed has the alternatives."""


def gap_table(runs: Runs) -> str:
    """PPO's gold score minus that of each alternative at the alternative's KL: a row for each β and alternative, a
    column for each seed, and the mean. A dash: the alternative's KL is outside that of PPO's snapshots."""
    seeds, betas = list(dict.fromkeys(seed for seed, _ in runs)), list(dict.fromkeys(beta for _, beta in runs))
    names = list(dict.fromkeys(name for seed in seeds for name in points(runs, seed)))
    rows = []
    for beta in betas:
        for name in names:
            gaps = [gap(runs, seed, beta, name) for seed in seeds]
            known = [value for value in gaps if value is not None]
            mean = fmean(known) if known and len(known) == len(gaps) else None
            rows.append([f"{beta:g}", name, *(text(value, signed=True) for value in [*gaps, mean])])
    return markdown(["β of PPO", "PPO less, at its KL", *(f"seed {seed}" for seed in seeds), "mean"], rows)


def gap(runs: Runs, seed: int, beta: float, name: str) -> float | None:
    """PPO's gold score at the KL of an alternative, minus the alternative's; None where either is not known. For the
    run with the alternatives it is in `frontier` of metrics/evaluate.json, cross-fitted; for another β only means over
    prompts are kept, and it is read from the majorant of the means, which is above the truth by a little."""
    point, run = points(runs, seed).get(name), runs.get((seed, beta))
    if point is None or run is None:
        return None
    if run is first_run(runs, seed):
        own = (run.metrics["evaluate"].get("frontier") or {}).get(name) or {}
        return None if own.get("gold_gap") is None else float(own["gold_gap"])
    own = frontier_points(run, "gold")
    reached = majorant_at(point[0], [kl for kl, _ in own], [gold for _, gold in own])
    return None if reached is None else reached - point[1]


def points(runs: Runs, seed: int, score: str = "gold") -> dict[str, tuple[float, float]]:
    """KL (nats an answer) and score of each alternative, best-of-n with n ≥ 2, from the first run of the seed."""
    first = first_run(runs, seed)
    found = {}
    for row in [] if first is None else first.tables.get("frontier", []):
        family, kl, value = row["family"], row["kl"], row[score]
        if (
            family not in PPO_FAMILIES
            and (family, row["point"]) != ("best_of_n", 1)
            and isinstance(kl, float)
            and isinstance(value, float)
        ):
            name = f"best_of_{row['point']:g}" if family == "best_of_n" else str(family)
            found[name] = (kl, value)
    return found


def snapshots(run: Result, score: str) -> list[tuple[float, float]]:
    """KL (nats an answer) and score of SFT and of PPO's snapshots, in the order of the steps."""
    return [
        (kl, value)
        for row in snapshot_rows(run)
        if isinstance(kl := row["kl"], float) and isinstance(value := row[score], float)
    ]


def frontier_points(run: Result, score: str) -> list[tuple[float, float]]:
    """KL (nats an answer) and score of the points that PPO's frontier is the majorant of."""
    rows = [row for row in run.tables.get("frontier", []) if row["family"] in PPO_FAMILIES]
    return [(kl, v) for row in rows if isinstance(kl := row["kl"], float) and isinstance(v := row[score], float)]


def optimum(run: Result, score: str) -> list[tuple[float, float]]:
    """KL (nats an answer) and score of the optimum against the run's reward model; empty where it is not known."""
    rows = run.metrics["evaluate"].get("optimum") or []
    return [(row["kl"], row[score]) for row in rows if row.get(score) is not None]


def sft_score(runs: Runs, seed: int, score: str) -> float:
    """The mean score of a seed's SFT model."""
    return next(snapshots(run, score)[0][1] for (other, _), run in runs.items() if other == seed)


def snapshot_rows(run: Result) -> Table:
    """The rows of SFT and of PPO's snapshots, in the order of the steps."""
    rows = [row for row in run.tables.get("frontier", []) if row["family"] in {"sft", "ppo"}]
    return sorted(rows, key=lambda row: (row["family"] != "sft", row["point"] or 0))


@dataclass(frozen=True)
class Cost:
    """A gold score, and the cost of training: responses sampled, and response tokens in backward passes."""

    gold: float
    samples: float
    tokens: float


def snapshot_costs(run: Result) -> list[Cost]:
    """The cost of SFT and of each of PPO's snapshots, in the order of the steps."""
    tokens = accumulate(float(row["tokens_trained"] or 0) for row in run.tables.get("ppo", []))
    spent = [0.0, *tokens]
    return [
        Cost(gold, step * run.params["ppo"]["batch_size"], spent[step])
        for row in snapshot_rows(run)
        if isinstance(gold := row["gold"], float) and (step := int(row["point"] or 0)) < len(spent)
    ]


def model_costs(run: Result) -> dict[str, Cost]:
    """The cost of each trained alternative; best-of-n trains nothing."""
    models = run.metrics["evaluate"].get("models") or {}
    return {
        name: Cost(row["gold"], row["samples_generated"], row["tokens_trained"])
        for name, row in models.items()
        if name not in {"sft", "policy"}
        and not name.startswith("best_of_")
        and None not in (row["gold"], row["samples_generated"], row["tokens_trained"])
    }


def first_run(runs: Runs, seed: int) -> Result | None:
    """The run of a seed with the alternatives."""
    return next((run for (other, _), run in runs.items() if other == seed), None)
