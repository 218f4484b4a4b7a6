"""The pictures of the report, one function for each, in the order of the page. A picture without numbers is left
out."""

import math
from collections.abc import Callable

import numpy as np
from matplotlib.ticker import MultipleLocator

from tasks.page.canvas import (
    INK,
    JUDGE,
    MUTED,
    POLICY,
    PROXY,
    SFT,
    canvas,
    curve,
    label_axes,
    legend,
    percent_tick,
    png,
    styled,
)
from tasks.page.comparison_figures import frontier, logprobs, overoptimisation
from tasks.page.inputs import Run, finite, interval
from tasks.page.picture import STEP, Picture, known, line_alt, lines_picture
from tasks.page.reward_figures import reward_margins
from tasks.page.wording import count, number, percent


def draw(run: Run) -> list[Picture]:
    """All pictures that the run has numbers for, in the order of the page."""
    with styled():
        drawn = [make(run) for make in PICTURES]
    return [picture for picture in drawn if picture is not None]


def score_distribution(run: Run) -> Picture | None:
    """How the held-out answers of both models are scored."""
    kind, unit = ("gold", "gold score") if run.has_judge else ("reward", "reward-model score (raw)")
    both = {name: known([row.get(f"{kind}_{name}") for row in run.samples]) for name in ("sft", "policy")}
    if not both["sft"] or not both["policy"]:
        return None
    figure, (axes,) = canvas(f"Held-out answers by {unit}")
    edges = np.histogram_bin_edges(both["sft"] + both["policy"], bins=20)
    for name, label, colour in (("sft", "SFT", SFT), ("policy", "policy", POLICY)):
        shares = np.histogram(both[name], bins=edges)[0] / len(both[name])
        axes.stairs(shares, edges, fill=True, color=colour, alpha=0.30)
        axes.stairs(shares, edges, color=colour, linewidth=1.6, label=label)
    label_axes(axes, "share of answers", unit, share=True)
    legend(axes)
    means = {name: sum(values) / len(values) for name, values in both.items()}
    return Picture(
        "score_distribution",
        "answer",
        png(figure),
        f"Histogram of the {unit} of {count(len(both['sft']))} held-out answers: mean {number(means['sft'])} for SFT, "
        f"{number(means['policy'])} for the policy.",
        f"The {unit} of every held-out answer. A better policy moves the whole hill, not only its best answers.",
    )


def scores(run: Run) -> Picture | None:
    """Judge's against reward model's score while PPO runs; the reward model's alone where there is no judge."""
    ppo = run.curves["ppo"]
    gold = ppo.get("gold", []) if run.has_judge else []
    panels = [("gold score", gold, JUDGE), ("reward-model score (raw)", ppo.get("reward_raw", []), PROXY)]
    panels = [panel for panel in panels if known(panel[1])]
    if not panels:
        return None
    both = len(panels) == 2
    figure, grid = canvas(
        "Gold against proxy score" if both else f"{panels[0][0].capitalize()} during PPO",
        panels=(1, 1) if both else (1,),
    )
    for axes, (name, values, colour) in zip(grid, panels, strict=True):
        curve(axes, ppo["step"], values, name, colour)
        label_axes(axes, name.replace(" score (raw)", "\nscore (raw)"), STEP if axes is grid[-1] else "")
    unjudged = (
        f"This shows only what is climbed; {run.judge} gives no scores, see the win rate of the snapshots."
        if run.is_judged
        else "Without another judge, nothing here shows whether the policy is exploiting it."
    )
    caption = (
        "The gold score is the aim, and no model sees it; the reward model's score is the proxy that PPO climbs. "
        "Where the proxy rises and gold falls, the policy exploits the reward model."
        if both
        else "Mean raw reward-model score of the sampled answers, the proxy that PPO climbs. " + unjudged
    )
    return Picture(
        "scores", "ppo", png(figure), line_alt([(name, values, 2, "") for name, values, _ in panels]), caption
    )


def ppo_kl(run: Run) -> Picture | None:
    """KL to the reference, and the coefficient where it moves."""
    ppo = run.curves["ppo"]
    kl, beta = ppo.get("kl", []), ppo.get("kl_coef", [])
    if not known(kl):
        return None
    adaptive = len(set(known(beta))) > 1
    figure, grid = canvas("KL divergence from SFT", panels=(3, 2) if adaptive else (1,))
    curve(grid[0], ppo["step"], kl, "k1", POLICY)
    curve(grid[0], ppo["step"], ppo.get("kl_k3", [math.nan] * len(kl)), "k3", MUTED, dashed=True)
    label_axes(grid[0], "nats per answer", "" if adaptive else STEP)
    legend(grid[0])
    said = [("KL", kl, 2, "nats per answer")]
    if adaptive:
        curve(grid[1], ppo["step"], beta, "β", INK)
        label_axes(grid[1], "coef. β", STEP)
        said.append(("β", beta, 4, ""))
    return Picture(
        "ppo_kl",
        "ppo",
        png(figure),
        line_alt(said),
        "How far the policy has moved from SFT: two estimators of the same quantity, summed over an answer. "
        + (
            "Below, the adaptive coefficient β that pulls it back."
            if adaptive
            else "They should agree; k1 must not stay below zero."
        ),
    )


def response_length(run: Run) -> Picture | None:
    """Length of the sampled answers and the share that was cut off."""
    ppo = run.curves["ppo"]
    mean = ppo.get("response_tokens_mean", [])
    if not known(mean):
        return None
    figure, (axes, below) = canvas("Response length", panels=(3, 2))
    curve(axes, ppo["step"], ppo.get("response_tokens_max", [math.nan] * len(mean)), "longest", POLICY, dashed=True)
    curve(axes, ppo["step"], mean, "mean", POLICY)
    before = finite(run.evaluation.get("response_tokens_sft"))
    if before is not None:
        axes.axhline(before, color=SFT, linewidth=1.5, label="SFT, held-out mean")
    axes.set_ylim(bottom=0)
    label_axes(axes, "tokens")
    legend(axes)
    missing = ppo.get("missing_eos_share", [math.nan] * len(mean))
    curve(below, ppo["step"], missing, "without end of sequence", INK)
    below.set_ylim(bottom=0, top=max([0.02, *known(missing)]) * 1.1)
    label_axes(below, "without\neos", STEP, share=True)
    said = [("mean length", mean, 1, "tokens")]
    return Picture(
        "response_length",
        "ppo",
        png(figure),
        line_alt(said),
        "Reward models often like length: an answer that only grows is a warning. Below, the share of answers cut off "
        "at the limit without an end of sequence.",
    )


def health(run: Run) -> Picture | None:
    """Entropy, clip fraction and explained variance, one panel each."""
    ppo = run.curves["ppo"]
    panels = [
        ("entropy", "entropy,\nnats per token", False),
        ("clip_fraction", "clip fraction", True),
        ("explained_variance", "explained\nvariance", False),
    ]
    panels = [panel for panel in panels if known(ppo.get(panel[0], []))]
    if not panels:
        return None
    figure, grid = canvas("Health of PPO", panels=[1.0] * len(panels))
    for axes, (name, unit, share) in zip(grid, panels, strict=True):
        curve(axes, ppo["step"], ppo[name], name.replace("_", " "), POLICY)
        label_axes(axes, unit, STEP if axes is grid[-1] else "", share=share)
    return Picture(
        "health",
        "ppo",
        png(figure),
        line_alt([(name.replace("_", " "), ppo[name], 3, "") for name, _, _ in panels]),
        "Entropy that collapses to zero: the policy repeats itself. Clip fraction near zero: steps are too small; "
        "above a third: too large. Explained variance of 1: the critic predicts the return; 0: only its mean.",
    )


def reward_training(run: Run) -> Picture | None:
    """Loss and accuracy of the reward model while it trains, with its held-out accuracy."""
    table, metrics = run.curves["reward"], run.metrics["reward"]
    if not known(table.get("loss", [])) or not known(table.get("accuracy", [])):
        return None
    figure, (axes, above) = canvas("Reward model: loss and accuracy", panels=(4, 5))
    curve(axes, table["step"], table["loss"], "training loss", PROXY)
    label_axes(axes, "loss, nats\nper pair")
    curve(above, table["step"], table["accuracy"], "training batch", PROXY)
    held_out, ends = finite(metrics.get("heldout_accuracy")), interval(metrics.get("heldout_accuracy_ci95"))
    if held_out is not None:
        above.axhline(held_out, color=INK, linewidth=1.4, label="held-out")
    if ends is not None:
        above.axhspan(*ends, color=INK, alpha=0.12, linewidth=0)
    above.axhline(0.5, color=MUTED, linewidth=1, linestyle=(0, (2, 3)))
    above.set_ylim(top=1.02)
    label_axes(above, "pairs ranked\nright", "training step", share=True)
    legend(above)
    said = line_alt(
        [("training loss", table["loss"], 3, "nats per pair"), ("training accuracy", table["accuracy"], 2, "")]
    )
    return Picture(
        "reward_training",
        "reward",
        png(figure),
        f"{said} Held-out accuracy {percent(held_out)}.",
        f"Held-out accuracy {percent(held_out)}, on pairs of prompts that were not trained on; "
        "the band is its 95% interval. Dotted: a coin.",
    )


def reward_calibration(run: Run) -> Picture | None:
    """Predicted against observed preference, and how many pairs stand behind each point."""
    table = run.curves["reward_calibration"]
    keys = ("predicted", "observed", "pairs", "bin_low", "bin_high")
    rows = [
        row
        for row in zip(*(table.get(key, []) for key in keys), strict=True)
        if not any(map(math.isnan, row)) and row[2] > 0
    ]
    if not rows:
        return None
    figure, (axes, below) = canvas("Reward model: calibration", panels=(5, 2))
    low = min(row[3] for row in rows)
    axes.plot((low, 1), (low, 1), color=MUTED, linewidth=1, linestyle=(0, (3, 3)), label="perfect")
    axes.plot(
        [row[0] for row in rows], [row[1] for row in rows], "o-", color=PROXY, markersize=4.5, label="held-out pairs"
    )
    label_axes(axes, "favourite chosen", share=True)
    legend(axes)
    below.bar(
        [row[3] for row in rows],
        [row[2] for row in rows],
        [row[4] - row[3] for row in rows],
        align="edge",
        color=PROXY,
        alpha=0.45,
        edgecolor="white",
        linewidth=1,
    )
    label_axes(below, "pairs", "predicted probability of its favourite")
    below.xaxis.set_major_locator(MultipleLocator(0.1))
    below.xaxis.set_major_formatter(percent_tick)
    error = number(run.metrics["reward"].get("expected_calibration_error"), 3)
    return Picture(
        "reward_calibration",
        "reward",
        png(figure),
        f"Calibration of the reward model in {len(rows)} bins; expected calibration error {error}.",
        "How often the model's favourite of a pair is the chosen answer, by how sure it is. On the dashed line it is "
        f"right as often as it says; below, it is too sure. Expected calibration error: {error}.",
    )


def sft_loss(run: Run) -> Picture | None:
    """Training and held-out loss of the supervised stage."""
    lines = [("train_loss", "training", SFT, False), ("validation_loss", "held-out", INK, True)]
    return lines_picture(
        "sft_loss",
        "sft",
        "SFT loss",
        run.curves["sft"],
        lines,
        "nats per token",
        "Loss on response tokens only. Training stops early when the held-out loss no longer falls.",
        x="training step",
    )


PICTURES: tuple[Callable[[Run], Picture | None], ...] = (
    frontier,
    overoptimisation,
    logprobs,
    score_distribution,
    scores,
    ppo_kl,
    response_length,
    health,
    reward_training,
    reward_calibration,
    reward_margins,
    sft_loss,
)
