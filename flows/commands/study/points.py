"""Points of KL and score for the pictures of a study: PPO's snapshots, the alternatives, and what training has cost."""

from dataclasses import dataclass
from itertools import accumulate

from flows.commands.study.results import Table, Trial
from tasks.page.inputs import interval

PPO_FAMILIES = {"sft", "ppo", "interpolated", "policy"}
"""Families of plots/frontier.csv that PPO's frontier is read from."""
Runs = dict[tuple[int, str], Trial]
"""Finished trials by seed and setting; the alternatives that are drawn are those of the first setting."""


def lead(trial: Trial, name: str) -> tuple[float | None, tuple[float, float] | None]:
    """PPO's gold score minus that of an alternative at the alternative's KL, and its interval: `frontier` of
    metrics/evaluate.json, cross-fitted. None outside the KL of PPO's snapshots."""
    found = (trial.metrics.get("evaluate", {}).get("frontier") or {}).get(name) or {}
    return found.get("gold_gap"), interval(found, "gold_gap")


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


def snapshots(run: Trial, score: str) -> list[tuple[float, float]]:
    """KL (nats an answer) and score of SFT and of PPO's snapshots, in the order of the steps."""
    return [
        (kl, value)
        for row in snapshot_rows(run)
        if isinstance(kl := row["kl"], float) and isinstance(value := row[score], float)
    ]


def frontier_points(run: Trial, score: str) -> list[tuple[float, float]]:
    """KL (nats an answer) and score of the points that PPO's frontier is the majorant of."""
    rows = [row for row in run.tables.get("frontier", []) if row["family"] in PPO_FAMILIES]
    return [(kl, v) for row in rows if isinstance(kl := row["kl"], float) and isinstance(v := row[score], float)]


def optimum(run: Trial, score: str) -> list[tuple[float, float]]:
    """KL (nats an answer) and score of the optimum against the run's reward model; empty where it is not known."""
    rows = run.metrics["evaluate"].get("optimum") or []
    return [(row["kl"], row[score]) for row in rows if row.get(score) is not None]


def sft_score(runs: Runs, seed: int, score: str) -> float:
    """The mean score of a seed's SFT model."""
    return next(snapshots(run, score)[0][1] for (other, _), run in runs.items() if other == seed)


def snapshot_rows(run: Trial) -> Table:
    """The rows of SFT and of PPO's snapshots, in the order of the steps."""
    rows = [row for row in run.tables.get("frontier", []) if row["family"] in {"sft", "ppo"}]
    return sorted(rows, key=lambda row: (row["family"] != "sft", row["point"] or 0))


@dataclass(frozen=True)
class Cost:
    """A gold score, and the cost of training: responses sampled, and response tokens in backward passes."""

    gold: float
    samples: float
    tokens: float


def snapshot_costs(run: Trial) -> list[Cost]:
    """The cost of SFT and of each of PPO's snapshots, in the order of the steps."""
    tokens = accumulate(float(row["tokens_trained"] or 0) for row in run.tables.get("ppo", []))
    spent = [0.0, *tokens]
    return [
        Cost(gold, step * run.params["ppo"]["batch_size"], spent[step])
        for row in snapshot_rows(run)
        if isinstance(gold := row["gold"], float) and (step := int(row["point"] or 0)) < len(spent)
    ]


def model_costs(run: Trial) -> dict[str, Cost]:
    """The cost of each trained alternative; best-of-n trains nothing."""
    models = run.metrics["evaluate"].get("models") or {}
    return {
        name: Cost(row["gold"], row["samples_generated"], row["tokens_trained"])
        for name, row in models.items()
        if name not in {"sft", "policy"}
        and not name.startswith("best_of_")
        and None not in (row["gold"], row["samples_generated"], row["tokens_trained"])
    }


def first_run(runs: Runs, seed: int) -> Trial | None:
    """The run of a seed with the alternatives."""
    return next((run for (other, _), run in runs.items() if other == seed), None)
