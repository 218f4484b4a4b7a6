"""`leash study --leaderboard`: rows for a leaderboard, from a study of the demo."""

from collections.abc import Sequence
from datetime import UTC, datetime
from statistics import fmean

from flows.commands.study import tables
from flows.commands.study.picture import PPO_FAMILIES
from flows.commands.study.trials import Trial
from rlhf_core.errors import UserError
from rlhf_core.evaluation.majorant import majorant_at
from tasks.page.comparison_table import label
from tasks.page.inputs import interval
from tasks.params.methods import WITH_MODEL

NATS, TOKENS, SEEDS = 2.8, 650_000, 3
"""The budget of a row: KL to SFT in nats per answer, response tokens that the method was trained on, and training
seeds."""
HEADING = ["method", "setting", f"gold at ≤ {NATS} nats", "seeds", "trained tokens", "commit", "command", "date"]
POLICY = "policy"


def rows(trials: Sequence[Trial], commit: str, command: str) -> str:
    """The table, best method first: for each setting and each method with a model the gold score within the budget, as
    the mean over seeds. It is read from the majorant of the method's points and SFT, flat from its highest point; the
    part of its interval that is over prompts is that of the method's last model. A method over the budget of tokens has
    no row.

    Raises UserError for a setting with less than three finished trials.
    """
    found: list[tuple[float, list[str]]] = []
    for name, group in tables.by_setting(trials).items():
        if len(group) < SEEDS:
            raise UserError(f"--leaderboard: {name} has {len(group)} finished trials, and a row needs {SEEDS} seeds")
        for method in (POLICY, *(one.name for one in WITH_MODEL)):
            golds = [gold for trial in group if (gold := gold_within(trial, method)) is not None]
            figures = [(trial.metrics["evaluate"].get("models") or {}).get(method) or {} for trial in group]
            tokens = [count for each in figures if (count := each.get("tokens_trained")) is not None]
            if not len(golds) == len(tokens) == len(group) or max(tokens) > TOKENS:
                continue
            mean = tables.summarise(golds, [tables.standard_error(interval(each, "gold")) for each in figures])
            when = f"{datetime.now(UTC):%Y-%m-%d}"
            cells = [label(method), name, tables.text(mean, ".2f"), str(len(group)), f"{max(tokens):,}"]
            found.append((fmean(golds), [*cells, commit[:12], f"`{command}`", when]))
    return tables.markdown([HEADING, *(cells for _, cells in sorted(found, key=lambda one: -one[0]))])


def gold_within(trial: Trial, method: str) -> float | None:
    """Gold at the budget of KL, or at the method's largest KL if that is less; None without the method."""
    families = PPO_FAMILIES if method == POLICY else {"sft", method}
    points = [row for row in trial.frontier if row["family"] in families]
    if len(points) < 2:
        return None
    kls, golds = [row["kl"] for row in points], [row["gold"] for row in points]
    return majorant_at(min(NATS, max(kls)), kls, golds)


def require_the_demo(trials: Sequence[Trial]) -> None:
    """Raise UserError for other data, another judge, or fewer held-out prompts or samples than the demo has, and for
    less than three seeds; before anything runs."""
    for trial in trials:
        ingest, evaluate = trial.params["ingest"], trial.params["evaluate"]
        wrong = {
            "ingest.source": ingest["source"] != "demo" or bool(ingest.get("demo")),
            "judge": (trial.params.get("judge") or {}).get("kind", "data") != "data",
            "evaluate.max_prompts": evaluate.get("max_prompts", 300) < 400,
            "evaluate.seeds": len(evaluate.get("seeds", [1])) < 3,
            "evaluate.temperature": evaluate.get("temperature", 1.0) != 1.0,
        }
        if keys := [key for key, is_wrong in wrong.items() if is_wrong]:
            raise UserError(
                f"--leaderboard: {trial.name} differs from examples/demo.yaml in {keys[0]}; rows are of the demo"
            )
    if (seeds := len({trial.params["seed"] for trial in trials})) < SEEDS:
        raise UserError(f"--leaderboard: a row needs {SEEDS} training seeds, not {seeds}; add -S seed=1,2,3")
