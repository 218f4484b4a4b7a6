"""The list of the report's pictures, and those of PPO and SFT. A picture without numbers is left out."""

import math
from collections.abc import Callable

import numpy as np

from tasks.page.canvas import INK, JUDGE, MUTED, POLICY, PROXY, SFT, canvas, curve, label_axes, legend, png, styled
from tasks.page.comparison_figures import frontier, logprobs, overoptimisation
from tasks.page.inputs import Run, finite
from tasks.page.picture import STEP, Picture, known, line_alt
from tasks.page.reward_figures import reward_calibration, reward_margins, reward_training
from tasks.page.wording import count, number


def draw(run: Run) -> list[Picture]:
    """All pictures that the run has numbers for, in the order of the page."""
    with styled():
        drawn = [make(run) for make in PICTURES]
    return [picture for picture in drawn if picture is not None]


def score_distribution(run: Run) -> Picture | None:
    """How the held-out answers of both models are scored."""
    kind, unit = ("gold", "gold score") if run.has_judge else ("reward", f"{run.proxy_score} (raw)")
    both = {name: known(row.get(kind) for row in run.answers if row["model"] == name) for name in ("sft", "policy")}
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
        f"The {unit} of all {count(len(both['policy']))} held-out answers of each model, with every sampling seed: the "
        "means are those of the table. A better policy shifts the whole distribution.",
    )


def scores(run: Run) -> Picture | None:
    """Gold and proxy score during PPO; the proxy alone without a judge."""
    ppo = run.curves["ppo"]
    gold = ppo.get("gold", []) if run.has_judge else []
    panels = [("gold score", gold, JUDGE), (f"{run.proxy_score} (raw)", ppo.get("reward_raw", []), PROXY)]
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
    unjudged = {
        "scores": "For the judge's score see that of the snapshots.",
        "pairs": "The judge gives no scores; see the win rate of the snapshots.",
        "judging reward model": "For the judge see the win rate of the snapshots.",
    }.get(run.judged_by, "Without another judge, this does not show whether the policy exploits it.")
    caption = (
        f"No model is trained on the gold score; the {run.proxy}'s score is the proxy that PPO maximises. Where the "
        f"proxy rises and gold falls, the policy exploits the {run.proxy}."
        if both
        else f"Mean {run.proxy_score} (raw) of the sampled answers, the proxy that PPO maximises. " + unjudged
    )
    return Picture(
        "scores", "ppo", png(figure), line_alt([(name, values, 2, "") for name, values, _ in panels]), caption
    )


def disagreement(run: Run) -> Picture | None:
    """The disagreement of several reward models on PPO's samples."""
    ppo = run.curves["ppo"]
    std = ppo.get("reward/std", [])
    if not known(std):
        return None
    figure, (axes,) = canvas("Disagreement of the reward models")
    curve(axes, ppo["step"], std, "PPO’s samples", PROXY)
    before = finite(run.metrics["reward"].get("disagreement"))
    if before is not None:
        axes.axhline(before, color=INK, linewidth=1.4, label="held-out pairs")
    axes.set_ylim(bottom=0)
    label_axes(axes, "nats", STEP)
    legend(axes)
    return Picture(
        "disagreement",
        "ppo",
        png(figure),
        line_alt([("standard deviation of the members’ scores", std, 2, "nats")]),
        "The standard deviation of the members’ scores of an answer, the mean over the samples of a step. Where it "
        "rises above its value on held-out pairs, PPO has left the answers that the reward models were trained on.",
    )


def ppo_kl(run: Run) -> Picture | None:
    """KL to the reference, and the coefficient if it is adaptive."""
    ppo = run.curves["ppo"]
    kl, beta = ppo.get("kl_full", []), ppo.get("kl_coef", [])
    if not known(kl):
        return None
    adaptive = len(set(known(beta))) > 1
    figure, grid = canvas("KL divergence from SFT", panels=(3, 2) if adaptive else (1,))
    curve(grid[0], ppo["step"], kl, "exact", POLICY)
    curve(grid[0], ppo["step"], ppo.get("kl", [math.nan] * len(kl)), "k1, of the samples", MUTED, dashed=True)
    label_axes(grid[0], "nats per answer", "" if adaptive else STEP)
    legend(grid[0])
    lines = [("KL", kl, 2, "nats per answer")]
    if adaptive:
        curve(grid[1], ppo["step"], beta, "β", INK)
        label_axes(grid[1], "coef. β", STEP)
        lines.append(("β", beta, 4, ""))
    return Picture(
        "ppo_kl",
        "ppo",
        png(figure),
        line_alt(lines),
        "How far the policy has moved from SFT: the exact KL of each token, summed over an answer, and "
        "its estimate k1 from the sampled tokens. "
        + ("Below, the adaptive coefficient β of the KL penalty." if adaptive else "They should agree."),
    )


def response_length(run: Run) -> Picture | None:
    """Length of the sampled answers and the share without end of sequence."""
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
    lines = [("mean length", mean, 1, "tokens")]
    return Picture(
        "response_length",
        "ppo",
        png(figure),
        line_alt(lines),
        "Reward models often prefer long answers: growing length is a warning. Below, the share of answers cut off at "
        "the limit without an end of sequence.",
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
        "Entropy near zero: the policy repeats itself. Clip fraction near zero: updates are too small; above a third: "
        "too large. Explained variance of 1: the critic predicts the return; 0: only its mean.",
    )


def sft_loss(run: Run) -> Picture | None:
    """Training and held-out loss of the supervised stage."""
    table, unit = run.curves["sft"], "nats per token"
    columns = (("train_loss", "training", SFT, False), ("validation_loss", "held-out", INK, True))
    lines = [line for line in columns if known(table.get(line[0], []))]
    if not lines:
        return None
    figure, (axes,) = canvas("SFT loss")
    for column, label, colour, dashed in lines:
        curve(axes, table["step"], table[column], label, colour, dashed)
    label_axes(axes, unit, "training step")
    legend(axes)
    return Picture(
        "sft_loss",
        "sft",
        png(figure),
        line_alt([(label, table[column], 3, unit) for column, label, _, _ in lines]),
        "Loss on response tokens only. Training stops early when the held-out loss no longer falls.",
    )


PICTURES: tuple[Callable[[Run], Picture | None], ...] = (
    frontier,
    overoptimisation,
    logprobs,
    score_distribution,
    scores,
    disagreement,
    ppo_kl,
    response_length,
    health,
    reward_training,
    reward_calibration,
    reward_margins,
    sft_loss,
)
