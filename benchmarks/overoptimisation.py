"""PPO against a weak reward model: what an ensemble of reward models changes, and which signals warn without a judge.

    cp examples/overoptimise.yaml params.yaml
    git commit --all --message "over-optimisation"
    python benchmarks/overoptimisation.py --seeds 1,2,3,4,5

Each arm of each seed is a `leash study`; a quarter of the prompts trains a reward model that PPO does not see
(`reward.judge_share`). A killed benchmark continues with the same command; `--show` runs nothing, and its tables are of
what is finished. They are Markdown.
"""

import argparse
import csv
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flows import isolated
from flows.commands.study.study import prepare, study
from flows.commands.study.tables import summarise
from flows.commands.study.trials import Call
from flows.environment import find_root
from rlhf_core.errors import UserError
from rlhf_core.ppo.detectors import HACKING_KL, Settings, reward_hacking

MEMBERS = 4
ARMS = {
    "one reward model": {"reward.members": 1},
    "mean": {"reward.members": MEMBERS, "reward.combine": "mean"},
    "min": {"reward.members": MEMBERS, "reward.combine": "min"},
    "mean − σ": {"reward.members": MEMBERS, "reward.combine": "mean_minus_std"},
    "mean, β = 0.1": {"reward.members": MEMBERS, "reward.combine": "mean", "ppo.kl.coef": 0.1},
}
"""What each arm sets; all have β = 0, the last one excepted."""
HEALTHY = "mean, β = 0.1"
SAME = (
    "++reward.judge_share=0.25", "best_of_n.enabled=false", "select.rule=last", "evaluate.seeds=[1]",
    "evaluate.max_prompts=200",
)  # fmt: skip
WINDOW = 5
"""Steps of a mean."""
PROMPTS = 128
"""Of a step, in examples/overoptimise.yaml."""


@dataclass(frozen=True)
class Run:
    """The steps of one PPO run."""

    arm: str
    seed: int
    rows: list[dict[str, float]]

    def means(self, name: str) -> list[float]:
        """The mean of every window of a column."""
        values = [float(row[name]) for row in self.rows]
        return [fmean(values[i : i + WINDOW]) for i in range(len(values) - WINDOW + 1)]

    def step(self, window: int) -> int:
        """The last step of a window, from 1: the first at which a detector can give an alert."""
        return window + WINDOW

    @property
    def peak(self) -> int:
        """The window with the highest gold score."""
        gold = self.means("gold")
        return gold.index(max(gold))

    def gold_lost(self, window: int) -> float:
        """Gold at its peak less that of a window."""
        return self.means("gold")[self.peak] - self.means("gold")[window]


def main() -> None:
    """Run what is asked for, and print the tables."""
    options = arguments().parse_args()
    root = find_root()
    runs: list[Run] = []
    for seed in options.seeds:
        for arm, settings in ARMS.items():
            call = call_of(settings, seed, options.set)
            if not options.show:
                study(root, call, name_of(arm, seed), "HEAD", None)
            runs += finished(root, arm, seed, call)
    print(f"{ensembles(runs)}\n\n{warnings(runs)}")


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 3, 4, 5])
    parser.add_argument("--show", action="store_true", help="run nothing")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a parameter of every run")
    return parser


def name_of(arm: str, seed: int) -> str:
    """The name of the study."""
    return f"over-{list(ARMS).index(arm) + 1}-{seed}"


def call_of(settings: dict[str, Any], seed: int, more: Sequence[str]) -> Call:
    """What `leash study` is called with."""
    return Call((f"seed={seed}", *(f"{name}={value}" for name, value in settings.items()), *SAME, *more))


def finished(root: Path, arm: str, seed: int, call: Call) -> list[Run]:
    """The trial, if it is finished."""
    made = prepare(root, call, name_of(arm, seed), "HEAD")
    found = [(job, isolated.find(root, made.commit, job.name)) for job in made.trials]
    return [
        Run(arm, seed, rows_of(isolated.read(root, experiment)[0]["plots/ppo.csv"]))
        for job, experiment in found
        if experiment is not None
    ]


def rows_of(content: bytes) -> list[dict[str, float]]:
    """The rows of a CSV, without empty cells."""
    rows = csv.DictReader(content.decode("utf-8").splitlines())
    return [{name: float(text) for name, text in row.items() if text} for row in rows]


def ensembles(runs: Sequence[Run]) -> str:
    """Gold, KL and reward at gold's peak and at the end: means of five steps."""
    columns: dict[str, Callable[[Run], float]] = {
        "gold at its peak": lambda run: run.means("gold")[run.peak],
        "step of the peak": lambda run: run.step(run.peak) - WINDOW // 2,
        "KL there": lambda run: run.means("kl")[run.peak],
        "gold at the end": lambda run: run.means("gold")[-1],
        "KL at the end": lambda run: run.means("kl")[-1],
    }
    lines = [f"| reward | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for arm in ARMS:
        of_arm = [run for run in runs if run.arm == arm]
        if of_arm:
            cells = [cell([value(run) for run in of_arm]) for value in columns.values()]
            lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(values: Sequence[float]) -> str:
    """The mean with its interval over seeds, and the value of each seed."""
    found = summarise(values, [None] * len(values))
    assert found is not None
    digits = 0 if all(value == int(value) for value in values) else 2
    ends = "" if found.low is None else f" ({found.low:.{digits}f} – {found.high:.{digits}f})"
    return f"{found.mean:.{digits}f}{ends} [{', '.join(f'{value:.{digits}f}' for value in values)}]".replace("-", "−")


Signal = Callable[[Run], list[float]]
"""A value after each window, from the first; higher is worse."""


def against_start(name: str, sign: float = 1.0) -> Signal:
    """A column's change since the first window."""
    return lambda run: [sign * (mean - run.means(name)[0]) for mean in run.means(name)]


def below_best(name: str) -> Signal:
    """How far a column is below its highest value so far."""
    return lambda run: [max(run.means(name)[: i + 1]) - mean for i, mean in enumerate(run.means(name))]


def per_token(run: Run) -> list[float]:
    """KL to SFT in nats per token."""
    return [nats / tokens for nats, tokens in zip(run.means("kl"), run.means("response_tokens_mean"), strict=True)]


def gap(run: Run) -> list[float]:
    """How much more the reward has risen since the first window than the other reward model's score."""
    both = against_start("reward_raw")(run), against_start("reward/judge")(run)
    return [mine - other for mine, other in zip(*both, strict=True)]


def unconfirmed(run: Run) -> list[float]:
    """The share of the reward's rise that the other reward model's score has not; 0 before a rise by a nat."""
    rises = against_start("reward_raw")(run)
    return [between / rise if rise > 1 else 0.0 for between, rise in zip(gap(run), rises, strict=True)]


SIGNALS: dict[str, Signal] = {
    "standard deviation of the members, rise": against_start("reward/std"),
    "KL per token": per_token,
    "length, rise": against_start("response_tokens_mean"),
    "share of repeated 3-grams, rise": against_start("repeated_ngram_share"),
    "answers that repeat two tokens in a row, rise": against_start("repeating_answer_share"),
    "entropy, fall": against_start("entropy", -1.0),
    "the other reward model's score, below its best": below_best("reward/judge"),
    "correlation with the other reward model, fall": against_start("judge_correlation", -1.0),
    "rise of the reward less that of the other reward model's score": gap,
    "the same, as a share of the reward's rise": unconfirmed,
}
"""The signals without a judge that are compared."""


DETECTORS: dict[str, float | None] = {
    **{f"`reward_hacking` without a judge, above {limit} nats": limit for limit in (4.0, HACKING_KL, 6.0, 10.0)},
    "`reward_hacking` with the gold score": None,
}
"""The detector that ships, with its limit of the KL in nats per token; None: with the gold score."""


def warnings(runs: Sequence[Run]) -> str:
    """For each signal its false alerts, how many of the other runs it finds, how many steps before gold's peak, and how
    much of the peak's gold is lost by then."""
    columns = ("false alerts", "found", "steps before gold's peak: median, lowest, highest", "gold lost: median")
    lines = [f"| signal | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    rows = {name: alerts(signal, runs) for name, signal in SIGNALS.items()}
    rows |= {name: [(run, shipped(run, limit)) for run in runs] for name, limit in DETECTORS.items()}
    for name, found in rows.items():
        false = [at for run, at in found if run.arm == HEALTHY]
        others = [(run, at) for run, at in found if run.arm != HEALTHY]
        known = [(run, at) for run, at in others if at is not None]
        leads = sorted(run.peak - at for run, at in known)
        spread = f"{median(leads):g}, {leads[0]}, {leads[-1]}" if known else "–"
        lost = f"{median(run.gold_lost(at) for run, at in known):.2f}" if known else "–"
        shares = f"{len(false) - false.count(None)} of {len(false)} | {len(known)} of {len(others)}"
        lines.append(f"| {name} | {shares} | {spread.replace('-', '−')} | {lost} |")
    return "\n".join(lines)


def alerts(signal: Signal, runs: Sequence[Run]) -> list[tuple[Run, int | None]]:
    """The window of the alert of each run that has the signal, None without one. The threshold for a seed is the
    highest value in the healthy runs of the other seeds: no run has a part in its own threshold."""
    with_values = []
    for run in runs:
        with suppress(KeyError):  # a run without the signal's columns
            with_values.append((run, signal(run)))
    highest = {run.seed: max(values) for run, values in with_values if run.arm == HEALTHY}
    found = []
    for run, values in with_values:
        others = [value for seed, value in highest.items() if seed != run.seed]
        if others:
            found.append((run, next((i for i, value in enumerate(values) if value > max(others)), None)))
    return found


def shipped(run: Run, limit: float | None) -> int | None:
    """The window in which the detector `reward_hacking` gives its alert: with this limit of the KL, or with the gold
    score."""
    settings, highest = Settings(prompts_per_step=PROMPTS, epochs=1), limit or HACKING_KL
    rows = [{**row, "gold": row["gold"] if limit is None else None} for row in run.rows]
    ends = range(WINDOW, len(rows) + 1)
    return next((end - WINDOW for end in ends if reward_hacking(rows[:end], settings, highest)), None)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
