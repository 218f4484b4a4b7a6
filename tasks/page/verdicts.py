"""The table of verdicts at the top of the page. An interval that includes zero difference is no evidence."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks.page.comparison_table import label
from tasks.page.inputs import Run, finite, interval
from tasks.page.wording import MISSING, count, number, percent, percent_interval, points
from tasks.summary import BASELINES, not_better_than

YES, NO, OPEN, UNMEASURED = "Yes", "No", "No evidence either way", "Not measured"
KINDS = {"gold": "gold score", "win_rate": "win rate against SFT"}
FEW_PROMPTS = 100
"""With fewer, and one answer to each, the 95% interval of a win rate near one half is wider than ±10 points."""


@dataclass(frozen=True)
class Finding:
    """A row of the table."""

    question: str
    verdict: str
    figure: str
    """With its 95% interval."""
    measured: str
    """What the figure measures."""
    equal_kl: str = ""
    """The difference at the other model's KL; empty if unknown."""
    equal_kl_verdict: str = ""
    other: str = ""
    """The other model's name in the files; empty if it is SFT or a snapshot."""


def findings(run: Run) -> list[Finding]:
    """Policy against SFT, policy against each other model, and whether an earlier snapshot is better."""
    ends, earlier = interval(run.evaluation, "win_rate"), stop_earlier(run)
    shown = "no interval" if ends is None else percent_interval(ends)
    against_sft = Finding(
        "Better than SFT?",
        _verdict(ends, 0.5),
        f"{percent(run.evaluation['win_rate'])} ({shown})",
        f"win rate of the policy, by {run.judge}{_trained_by(run)}",
    )
    return [against_sft, *against_others(run), *([earlier] if earlier else [])]


def alternatives(run: Run) -> dict[str, str]:
    """The verdicts on the other models, as trained and at equal KL, each with the models it holds for; empty without
    other models. What a model that is not beaten costs at inference is in brackets."""
    told = {"Better than the alternatives": "verdict", "At equal KL": "equal_kl_verdict"}
    sentences = {}
    for heading, key in told.items():
        named: dict[str, list[str]] = {YES: [], OPEN: [], NO: []}
        for finding in against_others(run):
            if verdict := getattr(finding, key):
                samples = finite(run.models[finding.other].get("samples_per_answer")) or 1
                costly = key == "verdict" and verdict != YES and samples > 1
                cost = f" ({count(samples)} samples per answer)" if costly else ""
                named[verdict].append(label(finding.other, run.models) + cost)
        sentences[heading] = "; ".join(f"{verdict.lower()} for {', '.join(n)}" for verdict, n in named.items() if n)
    return {heading: text for heading, text in sentences.items() if text}


def doubts(run: Run) -> list[str]:
    """Why the figures of this run mean little; empty if nothing is known against them. A reward model whose accuracy
    has an interval with one half in it is not shown to be better than chance."""
    reward, prompts, models = run.metrics["reward"], run.evaluation["prompts"], [("reward model", "heldout_accuracy")]
    if run.judged_by == "judging reward model":
        models.append((run.judged_by, "judge_accuracy"))
    found = []
    for name, key in models:
        ends = interval(reward, key)
        if ends is not None and ends[0] <= 0.5:
            right = f"{percent(reward.get(key))} ({percent_interval(ends)})"
            pairs = f"{right} of {count(reward.get('heldout_pairs'))} held-out pairs ranked correctly"
            found.append(f"the {name} is not shown to be better than chance, {pairs}")
    if run.has_reward_model and (other := not_better_than(reward)) in BASELINES.values():
        name = next(key for key, label in BASELINES.items() if label == other)
        ahead, ends = points(reward[f"ahead_of_{name}"]), interval(reward, f"ahead_of_{name}")
        theirs = percent(reward[f"{name}_accuracy"])
        shown = f"{percent(reward.get('heldout_accuracy'))} of the held-out pairs against {theirs}"
        between = "" if ends is None else f" ({points(ends[0])} to {points(ends[1])})"
        found.append(f"the reward model is not shown to be better than {other}, {shown}, {ahead}{between}")
    if prompts < FEW_PROMPTS:
        found.append(f"only {count(prompts)} held-out prompts, fewer than {FEW_PROMPTS}")
    return found


def against_others(run: Run) -> list[Finding]:
    """The policy minus each other model, paired by prompt; the strongest model first. Best-of-1 is SFT and left out."""
    if run.has_judge:
        kind, key, even, measured = "gold", "gold_minus_policy", 0.0, "gold score of the policy less the other’s"
    else:
        kind, key, even = "win_rate", "win_rate_vs_policy", 0.5
        measured = "win rate of the policy against it, less 50%"
    rows = []
    for name, figures in run.models.items():
        value, ends = finite(figures.get(key)), interval(figures, key)
        if name not in ("sft", "policy", "best_of_1") and value is not None and ends is not None:
            rows.append((name, even - value, (even - ends[1], even - ends[0])))
    return [
        Finding(
            f"Better than {label(name, run.models)}?", _verdict(ends), _figure(kind, value, ends), measured,
            *_equal_kl(run, name), name,
        )
        for name, value, ends in sorted(rows, key=lambda row: row[1])
    ]  # fmt: skip


def stop_earlier(run: Run) -> Finding | None:
    """The snapshot that is best on the validation prompts minus the last one, on the test prompts. Without a judge the
    reward model's choice is shown, and not tested."""
    selected, stopping = run.metrics["select"], run.evaluation.get("stopping") or {}
    if not selected.get("prompts"):
        return None
    last, best, by = selected["last_step"], selected["best_judge_step"], run.judge
    if best is None:
        best, by = selected["best_proxy_step"], f"the {run.proxy}, which PPO optimises"
    question, on = "Better to stop earlier?", f"best by {by} on {count(selected['prompts'])} validation prompts"
    if best == last:
        return Finding(question, NO, MISSING, f"the last snapshot, step {last}, is {on}")
    earlier = "the SFT model" if best == 0 else f"step {best}"
    measured = f"{earlier} ({on}) less step {last}, the last one"
    ends = interval(stopping, "difference")
    if ends is None and selected["best_judge_step"] is not None and not run.evaluation.get("stopping"):
        return Finding(question, UNMEASURED, MISSING, f"{measured}; evaluate.snapshots measures it on the test prompts")
    if ends is None:
        return Finding(question, OPEN, MISSING, measured)
    kind = stopping["score"]
    figure = _figure(kind, stopping["difference"], ends)
    return Finding(question, _verdict(ends), figure, f"{KINDS[kind]} on the test prompts: {measured}")


def _trained_by(run: Run) -> str:
    """A note on what the policy was trained by, where that is not shown to be better than a baseline."""
    other = not_better_than(run.metrics["reward"]) if run.has_reward_model else None
    return "" if other is None else f"; trained by a reward model that is not shown to be better than {other}"


def _equal_kl(run: Run, name: str) -> tuple[str, str]:
    """PPO's frontier minus the other model at that model's KL, with a note where the line starts at SFT; the verdict.
    Both are empty where the frontier does not reach that KL."""
    figures: Mapping[str, Any] = (run.evaluation.get("frontier") or {}).get(name) or {}
    gap, ends = finite(figures.get(f"{run.score}_gap")), interval(figures, f"{run.score}_gap")
    if gap is None or ends is None:
        return "", ""
    below, above = figures.get("between") or ("", "")
    note = f", between SFT and {above.replace('eta ', 'η = ')}" if below == "sft" != above else ""
    return _figure(run.score, gap, ends) + note, _verdict(ends)


def _verdict(ends: tuple[float, float] | None, even: float = 0.0) -> str:
    if ends is None or ends[0] <= even <= ends[1]:
        return OPEN
    return YES if ends[0] > even else NO


def _figure(kind: str, value: float, ends: tuple[float, float]) -> str:
    shown = [points(each) if kind == "win_rate" else number(each, sign=True) for each in (value, *ends)]
    return f"{shown[0]} ({shown[1]} to {shown[2]})"
