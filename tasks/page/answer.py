"""The verdicts at the top of the page, each with its figure and interval. An interval that includes no difference is no
evidence either way."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks.evaluation.comparison_table import label, models_of
from tasks.page.inputs import Run, finite, interval
from tasks.page.wording import MISSING, count, number, percent, percent_interval, points

YES, NO, OPEN = "Yes", "No", "No evidence either way"
KINDS = {"gold": "gold score", "win_rate": "win rate against SFT", "reward": "proxy score"}


@dataclass(frozen=True)
class Finding:
    """A row of the table of verdicts."""

    question: str
    verdict: str
    figure: str
    """With its 95% interval, as printed."""
    measured: str
    """What the figure is."""
    equal_kl: str = ""
    """The same where PPO's snapshots are as far from SFT as the other model; empty where that is not known."""


def findings(run: Run) -> list[Finding]:
    """Against SFT, against every other model, and whether to stop earlier; without the rows that have no figures."""
    found = [against_sft(run), *against_others(run), stop_earlier(run)]
    return [finding for finding in found if finding is not None]


def against_sft(run: Run) -> Finding:
    """The win rate of the policy against SFT."""
    ends = interval(run.evaluation.get("win_rate_ci95"))
    shown = "no interval" if ends is None else percent_interval(list(ends))
    return Finding(
        "Better than SFT?",
        _verdict(ends, 0.5),
        f"{percent(run.evaluation['win_rate'])} ({shown})",
        f"win rate of the policy, judged by {run.judge}",
    )


def against_others(run: Run) -> list[Finding]:
    """The policy less every other model, paired by prompt, the model that is furthest ahead first."""
    key, even = ("gold_minus_policy", 0.0) if run.has_judge else ("win_rate_vs_policy", 0.5)
    rows = []
    for name, figures in models_of(run.evaluation).items():
        value, ends = finite(figures.get(key)), interval(figures.get(f"{key}_ci95"))
        if name not in ("sft", "policy") and value is not None and ends is not None:
            rows.append((name, even - value, (even - ends[1], even - ends[0])))
    measured = (
        "gold score of the policy less the other’s" if run.has_judge else "win rate of the policy against it, less 50%"
    )
    kind = "gold" if run.has_judge else "win_rate"
    return [
        Finding(
            f"Better than {label(name)}?", _verdict(ends), _figure(kind, value, ends), measured, _equal_kl(run, name)
        )
        for name, value, ends in sorted(rows, key=lambda row: row[1])
    ]


def stop_earlier(run: Run) -> Finding | None:
    """The snapshot that is best on the validation prompts less the last one, on the test prompts. Only a judge's choice
    is tested there; without a judge the reward model's choice is named."""
    selected, stopping = run.metrics["select"], run.evaluation.get("stopping") or {}
    best, last, by = selected.get("best_judge_step"), selected.get("last_step"), run.judge
    if best is None:
        best, by, stopping = selected.get("best_proxy_step"), "the reward model, which PPO optimises", {}
    if not isinstance(last, int) or not isinstance(best, int) or not selected.get("prompts"):
        return None
    on = f"best by {by} on {count(selected['prompts'])} validation prompts"
    question = "Better to stop earlier?"
    if best == last:
        return Finding(question, NO, MISSING, f"the last snapshot, step {last}, is {on}")
    value, ends = finite(stopping.get("difference")), interval(stopping.get("difference_ci95"))
    who = "the SFT model" if best == 0 else f"step {best}"
    measured = f"{who} ({on}) less step {last}, the last one"
    if value is None or ends is None or stopping.get("score") not in KINDS:
        return Finding(question, OPEN, MISSING, measured)
    figure = _figure(stopping["score"], value, ends)
    return Finding(question, _verdict(ends), figure, f"{KINDS[stopping['score']]} on the test prompts: {measured}")


def prompts(run: Run) -> str:
    """How many held-out prompts were answered, as printed."""
    return count(run.evaluation.get("prompts", len(run.samples)))


def _equal_kl(run: Run, name: str) -> str:
    """PPO's lead at the other model's KL; says where no snapshot is as near to SFT."""
    figures: Mapping[str, Any] = (run.evaluation.get("frontier") or {}).get(name) or {}
    gap, ends = finite(figures.get(f"{run.score}_gap")), interval(figures.get(f"{run.score}_gap_ci95"))
    if gap is None or ends is None:
        return ""
    between = figures.get("between") or []
    note = f", interpolated between SFT and step {max(between)}" if 0 in between and any(between) else ""
    return _figure(run.score, gap, ends) + note


def _verdict(ends: tuple[float, float] | None, even: float = 0.0) -> str:
    if ends is None or ends[0] <= even <= ends[1]:
        return OPEN
    return YES if ends[0] > even else NO


def _figure(kind: str, value: float, ends: tuple[float, float]) -> str:
    shown = [points(each) if kind == "win_rate" else number(each, sign=True) for each in (value, *ends)]
    return f"{shown[0]} ({shown[1]} to {shown[2]})"
