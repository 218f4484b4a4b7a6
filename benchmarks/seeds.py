"""The graph for several seeds, each in a fresh clone of the commit, and tables of the results.

    python benchmarks/seeds.py --seeds 1 2 3
    python benchmarks/seeds.py --seeds 1 2 3 --params examples/overoptimise.yaml --keep ../seeds

Prints Markdown: a row for each seed; the gold score of each model; PPO's lead over the alternatives; and the fall of
the gold score from PPO's best snapshot to its last. For a run with the committed parameters it also prints whether
dvc.lock is the committed one.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import clones
from clones import ROOT, Metrics, Result, markdown, text
from frontier_points import snapshot_rows

Column = Callable[[Metrics], Any]

COLUMNS: dict[str, Column] = {
    "reward model accuracy": lambda m: m["reward"]["heldout_accuracy"],
    "its 95% interval": lambda m: m["reward"].get("heldout_accuracy_ci95"),
    "gold SFT": lambda m: m["evaluate"]["gold_sft"],
    "gold policy": lambda m: m["evaluate"]["gold_policy"],
    "win rate": lambda m: m["evaluate"]["win_rate"],
    "95% interval": lambda m: m["evaluate"]["win_rate_ci95"],
    "KL, nats": lambda m: m["evaluate"]["kl_exact_per_sequence"],
    "without eos": lambda m: m["evaluate"]["missing_eos_share"],
    "prompts": lambda m: m["evaluate"]["prompts"],
    "alerts": lambda m: ", ".join(f"{a['name']} ({a['step']})" for a in m["ppo"]["alerts"]) or "none",
}

BASELINES = ("best_of_4", "rejection_sft")
"""The cheaper methods that PPO is compared with."""

Runs = dict[int, Result]
"""The result of each seed."""


def main() -> None:
    """Run every seed and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--params", type=Path, default=ROOT / "params.yaml", help="another parameter file")
    parser.add_argument("--keep", type=Path, help="folder for metrics/*.json and plots/*.csv of each run")
    options = parser.parse_args()
    params = clones.read_params(options.params)
    runs = {seed: run_seed(seed, params, options.keep) for seed in options.seeds}
    print(report(runs))


def run_seed(seed: int, params: dict[str, Any], keep: Path | None) -> Result:
    """One `dvc repro` from nothing with both seeds set."""
    with tempfile.TemporaryDirectory(prefix="leash-seed-") as folder:
        clone = Path(folder) / "clone"
        clones.clone(clone)
        wanted = clones.with_seed(params, seed, {})
        seconds = clones.reproduce(clone, wanted)
        if not clones.differs(clone, "params.yaml"):
            same = "differs from" if clones.differs(clone, "dvc.lock") else "is byte for byte"
            print(f"seed {seed}: its dvc.lock {same} the committed one", file=sys.stderr)
        print(f"seed {seed}: {seconds:.0f} s", file=sys.stderr, flush=True)
        if keep:
            clones.keep(clone, wanted, seconds, keep / f"seed-{seed}")
        return clones.result(clone, wanted, seconds)


def report(runs: Runs) -> str:
    """All tables, the ones without a row left out."""
    tables = (seed_table(runs), model_table(runs), verdict_table(runs), fall_table(runs))
    return "\n\n".join(table for table in tables if table)


def seed_table(runs: Runs) -> str:
    """A row a seed."""
    rows = [
        [str(seed), *(text(read(run.metrics)) for read in COLUMNS.values()), f"{run.seconds:.0f}"]
        for seed, run in runs.items()
    ]
    return markdown(["seed", *COLUMNS, "seconds"], rows)


def model_table(runs: Runs) -> str:
    """Gold score of each model, a row a model that any run has, a column a seed, and the mean; empty without any."""
    names = _in_order(name for run in runs.values() for name in models(run))
    found = {name: [models(run).get(name, {}).get("gold") for run in runs.values()] for name in names}
    rows = [[name, *map(text, values), text(mean(values))] for name, values in found.items()]
    return markdown(["gold score", *(f"seed {seed}" for seed in runs), "mean"], rows) if rows else ""


def verdict_table(runs: Runs) -> str:
    """The lead of PPO's policy over the baselines: positive where PPO is better. Empty without baselines."""
    rows = []
    for name in BASELINES:
        leads = [lead(run, name) for run in runs.values()]
        if any(value is not None for value, _ in leads):
            row = [_with_interval(value, ends) for value, ends in leads]
            rows.append([f"policy − {name}, gold", *row, text(mean([value for value, _ in leads]), signed=True)])
    found = [frontier(run).get(BASELINES[0], {}) for run in runs.values()]
    gaps = [row.get("gold_gap") for row in found]
    if any(gap is not None for gap in gaps):
        row = [_with_interval(gap, each.get("gold_gap_ci95")) for gap, each in zip(gaps, found, strict=True)]
        rows.append([f"PPO − {BASELINES[0]}, gold, at its KL", *row, text(mean(gaps), signed=True)])
    head = ["lead of PPO (95% interval over prompts)", *(f"seed {seed}" for seed in runs), "mean"]
    return markdown(head, rows) if rows else ""


def lead(run: Result, name: str) -> tuple[float | None, list[float] | None]:
    """Gold score of the policy minus that of the model, and its interval, paired by prompt: −1 times evaluate's
    `gold_minus_policy`."""
    model = models(run).get(name, {})
    difference, ends = model.get("gold_minus_policy"), model.get("gold_minus_policy_ci95")
    return (
        None if difference is None else -float(difference),
        None if ends is None else [-float(ends[1]), -float(ends[0])],
    )


def fall_table(runs: Runs) -> str:
    """Over-optimisation: PPO's snapshot with the highest gold score on held-out prompts and the last one, a row for
    each seed. The maximum is biased upwards, so the fall is never below 0; the difference for the snapshot with the
    judge's best score on the validation prompts is unbiased. Empty where no run has snapshots with a gold score."""
    rows = []
    for seed, run in runs.items():
        scored = [row for row in snapshot_rows(run) if isinstance(row["gold"], float)]
        if scored:
            best, last = max(scored, key=lambda row: row["gold"]), scored[-1]
            cells = [each[name] for name in ("point", "gold", "reward", "kl") for each in (best, last)]
            steps, scores = [f"{step:g}" for step in cells[:2]], [text(value) for value in cells[2:]]
            fall = text(best["gold"] - last["gold"], signed=True)
            rows.append([str(seed), *steps, *scores, fall, stopped(run), alert_step(run), selected_step(run)])
    head = [f"{name}, {which}" for name in ("step", "gold", "proxy", "KL") for which in ("best", "last")]
    head = ["seed", *head, "fall of gold", "best on validation − last", "alert at step", "selected step"]
    return markdown(head, rows) if rows else ""


def stopped(run: Result) -> str:
    """The difference on held-out prompts between the best snapshot on validation prompts and the last one."""
    found = run.metrics["evaluate"].get("stopping") or {}
    return _with_interval(found.get("difference"), found.get("difference_ci95"))


def alert_step(run: Result) -> str:
    """The PPO step of the first alert `reward_hacking`."""
    steps = [alert["step"] for alert in run.metrics["ppo"]["alerts"] if alert["name"] == "reward_hacking"]
    return str(min(steps)) if steps else "none"


def selected_step(run: Result) -> str:
    """The step of the snapshot that `select` chose."""
    return text(run.metrics.get("select", {}).get("step"))


def models(run: Result) -> dict[str, dict[str, Any]]:
    """`models` of metrics/evaluate.json."""
    return dict(run.metrics["evaluate"].get("models") or {})


def frontier(run: Result) -> dict[str, dict[str, Any]]:
    """`frontier` of metrics/evaluate.json, without models outside PPO's KL."""
    found = run.metrics["evaluate"].get("frontier") or {}
    return {name: row for name, row in found.items() if row is not None}


def mean(values: list[float | None]) -> float | None:
    """Over the seeds; None when one of them has no value."""
    known = [float(value) for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def _with_interval(value: float | None, ends: list[float] | None) -> str:
    return text(value, signed=True) + (f" ({text(ends, signed=True)})" if ends else "")


def _in_order(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


if __name__ == "__main__":
    main()
