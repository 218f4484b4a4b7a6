"""Detectors of failure modes of PPO: functions of the diagnostics so far that return a message, or None."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean, median

from rlhf_core.config.health import HealthConfig

Row = Mapping[str, float | None]
"""Diagnostics of one step (`diagnostics.step_row`)."""

COLUMNS = (
    "step",
    "reward_raw",
    "gold",
    "kl",
    "response_tokens_mean",
    "update_kl",
    "entropy",
    "value_loss",
    "explained_variance",
    "clip_fraction",
    "clip_fraction_last_epoch",
    "repeated_ngram_share",
    "repeating_answer_share",
    "missing_eos_share",
    "min_token_reward",
    "engine_mismatch_k3",
    "grad_norm_policy",
    "grad_norm_critic",
)
"""The columns that the detectors read."""

REPEATS = {
    "repeated_ngram_share": "repeated 3-grams in an answer",
    "repeating_answer_share": "answers that repeat two tokens in a row",
}
"""Columns of repetition, and what they count."""


@dataclass(frozen=True)
class Limits:
    """Thresholds, and the settings of the run that the detectors need."""

    health: HealthConfig
    prompts_per_step: int
    epochs: int
    clips: bool = True
    """Whether the objective has a clip."""

    @property
    def shortest_window(self) -> int:
        """Steps that together have `prompts` prompts."""
        return math.ceil(self.health.prompts / self.prompts_per_step)

    @property
    def window(self) -> int:
        """Steps of a mean."""
        return max(self.health.window, self.shortest_window)


Detector = Callable[[Sequence[Row], Limits], str | None]
"""Rows of all steps so far → a message with figures, or None."""


def reward_hacking(rows: Sequence[Row], limits: Limits) -> str | None:
    """The reward has risen and the judge's score fallen since that score was highest; without a judge, the reward has
    risen since the start at a KL to the reference above `hacking_kl`."""
    if len(rows) < 2 * limits.window:
        return None
    if all(row["gold"] is not None for row in rows):
        return _against_gold(rows, limits)
    return _against_kl(rows, limits)


def _against_gold(rows: Sequence[Row], limits: Limits) -> str | None:
    width = limits.window
    means = _means(_column(rows[:-width], "gold"), width)
    best = means.index(max(means))
    gold, proxy = (Move.between(_column(rows[best:], name), width) for name in ("gold", "reward_raw"))
    if not (
        proxy.deviations > limits.health.hacking_deviations and gold.deviations < -limits.health.hacking_deviations
    ):
        return None
    return f"since step {value(rows[best], 'step'):.0f} the reward went {proxy} and the judge's score {gold}"


def _against_kl(rows: Sequence[Row], limits: Limits) -> str | None:
    width = limits.window
    proxy = Move.between(_column(rows, "reward_raw"), width)
    far = _kl_per_token(rows, width)[-1]
    if not (proxy.deviations > limits.health.hacking_deviations and far > limits.health.hacking_kl):
        return None
    return f"the reward went {proxy} at a KL of {far:.3g} nats per token, and there is no judge; read the samples"


def kl_spike(rows: Sequence[Row], limits: Limits) -> str | None:
    """One update moved the policy too far, or its distance to the reference jumped."""
    moved = value(rows[-1], "update_kl")
    if moved > limits.health.update_kl:
        return f"one update moved the policy by {moved:.3g} nats per token"
    means = _kl_per_token(rows[-limits.window - 2 * limits.shortest_window + 1 :], limits.shortest_window)
    before, now = means[: -limits.shortest_window], means[-1]
    if before and now - median(before) > limits.health.kl_jump:
        return f"KL to the reference went from {median(before):.3g} to {now:.3g} nats per token"
    return None


def entropy_collapse(rows: Sequence[Row], limits: Limits) -> str | None:
    """Little of the first step's entropy is left: the policy tends to one response."""
    now, first = _recent(rows, "entropy", limits), value(rows[0], "entropy")
    if now is None or now >= limits.health.entropy_share * first:
        return None
    return f"entropy went from {first:.3g} to {now:.3g} nats per token"


def diverging_critic(rows: Sequence[Row], limits: Limits) -> str | None:
    """The value loss is a multiple of what it was, and the critic predicts worse than a constant would."""
    if rows[-1]["value_loss"] is None:  # there is no critic
        return None
    now, explained = _recent(rows, "value_loss", limits), _recent(rows, "explained_variance", limits)
    if now is None or explained is None or len(rows) < 2 * limits.window:
        return None
    lowest = min(_means(_column(rows[: -limits.window], "value_loss"), limits.window))
    if not (now > limits.health.critic_growth * lowest and explained < 0):
        return None
    return f"the value loss went from {lowest:.3g} to {now:.3g}, its explained variance is {explained:.3g}"


def frozen_reward(rows: Sequence[Row], limits: Limits) -> str | None:
    """The reward does not rise, and a large share of the tokens is clipped."""
    clipped = _recent(rows, "clip_fraction", limits) if limits.clips else None
    if clipped is None or clipped <= limits.health.clip_fraction or len(rows) < 2 * limits.window:
        return None
    reward = Move.between(_column(rows[-2 * limits.window :], "reward_raw"), limits.window)
    if reward.deviations > limits.health.frozen_deviations:
        return None
    return f"{clipped:.0%} of the tokens are clipped and the reward does not rise, {reward}"


def stale_data(rows: Sequence[Row], limits: Limits) -> str | None:
    """In the last epoch of an update most tokens are clipped: the policy is far from the one that sampled."""
    late = _recent(rows, "clip_fraction_last_epoch", limits)
    if not limits.clips or limits.epochs < 2 or late is None or late <= limits.health.late_clip_fraction:
        return None
    return f"{late:.0%} of the tokens are clipped in the last of {limits.epochs} epochs"


def repetition(rows: Sequence[Row], limits: Limits) -> str | None:
    """Answers repeat themselves more than they did at the start."""
    for name, meaning in REPEATS.items():
        now, first = _recent(rows, name, limits), value(rows[0], name)
        if now is not None and now - first > limits.health.repetition_rise:
            return f"the share of {meaning} went from {first:.0%} to {now:.0%}"
    return None


def length_drift(rows: Sequence[Row], limits: Limits) -> str | None:
    """Answers are much longer or shorter than at the start."""
    now, first = _recent(rows, "response_tokens_mean", limits), value(rows[0], "response_tokens_mean")
    if now is None or max(now / first, first / now) <= limits.health.length_factor:
        return None
    return f"the mean length of an answer went from {first:.3g} to {now:.3g} tokens"


def missing_ends(rows: Sequence[Row], limits: Limits) -> str | None:
    """More answers are cut off than at the start."""
    now, first = _recent(rows, "missing_eos_share", limits), value(rows[0], "missing_eos_share")
    if now is None or now - first <= limits.health.missing_eos_rise:
        return None
    return f"the share of answers without an end went from {first:.0%} to {now:.0%}"


def exploding_gradient(rows: Sequence[Row], limits: Limits) -> str | None:
    """A model's gradient is many times larger than its median so far."""
    for name in ("policy", "critic"):
        norms = [float(norm) for row in rows if (norm := row[f"grad_norm_{name}"])]
        if len(norms) <= limits.health.window or not rows[-1][f"grad_norm_{name}"]:
            continue
        usual = median(norms[:-1])
        if norms[-1] > limits.health.gradient_factor * usual:
            return f"the gradient norm of the {name} is {norms[-1]:.3g}, its median {usual:.3g}"
    return None


def huge_penalty(rows: Sequence[Row], limits: Limits) -> str | None:
    """A token has a very negative reward, usually from the KL penalty."""
    lowest = value(rows[-1], "min_token_reward")
    return f"the lowest reward of a token is {lowest:.3g}" if lowest < -limits.health.lowest_token_reward else None


def engine_mismatch(rows: Sequence[Row], limits: Limits) -> str | None:
    """The sampler's probabilities differ from those of the trained model."""
    found = value(rows[-1], "engine_mismatch_k3")
    if found <= limits.health.engine_kl:
        return None
    return f"the KL between sampler and trained model is {found:.3g} nats per token"


def slow_generation(seconds: Sequence[Mapping[str, float]], limits: Limits) -> str | None:
    """The rollout takes most of the seconds (by phase) of the last steps."""
    recent = seconds[-limits.health.window :]
    total = sum(sum(step.values()) for step in recent)
    if len(recent) < limits.health.window or total <= 0:
        return None
    share = sum(step["rollout"] for step in recent) / total
    return f"generation takes {share:.0%} of the time" if share > limits.health.rollout_share else None


@dataclass(frozen=True)
class Move:
    """The means of two windows, and their distance in standard errors."""

    before: float
    after: float
    deviations: float

    @classmethod
    def between(cls, values: Sequence[float], width: int) -> "Move":
        """From the first `width` values to the last. The noise is estimated from successive differences, which hardly
        depend on a slow trend (von Neumann 1941)."""
        before, after = fmean(values[:width]), fmean(values[-width:])
        differences = [(b - a) ** 2 for a, b in pairwise(values)]
        error = math.sqrt(fmean(differences) / width)  # of a difference of two means: 2σ²/width
        if error == 0:
            return cls(before, after, math.copysign(math.inf, after - before) if after != before else 0.0)
        return cls(before, after, (after - before) / error)

    def __str__(self) -> str:
        return f"from {self.before:.4g} to {self.after:.4g}"


def _means(values: Sequence[float], width: int) -> list[float]:
    """The mean of every window, by where it starts."""
    sums = [0.0, *accumulate(values)]
    return [(end - start) / width for start, end in zip(sums, sums[width:], strict=False)]


def _recent(rows: Sequence[Row], name: str, limits: Limits) -> float | None:
    """Mean of the last window; None before there is one."""
    width = limits.window
    return fmean(_column(rows[-width:], name)) if len(rows) >= width else None


def _column(rows: Sequence[Row], name: str) -> list[float]:
    return [value(row, name) for row in rows]


def value(row: Row, name: str) -> float:
    """A number of a row. Raises ValueError where it is empty."""
    found = row[name]
    if found is None:
        raise ValueError(f"{name} is empty at step {row['step']}")
    return float(found)


def _kl_per_token(rows: Sequence[Row], width: int) -> list[float]:
    """KL to the reference in nats per token, of every window of `width` steps (of all rows, where they are fewer)."""
    width = min(width, len(rows))
    kl, tokens = (_means(_column(rows, name), width) for name in ("kl", "response_tokens_mean"))
    return [nats / length for nats, length in zip(kl, tokens, strict=True)]
