"""Detectors of failure modes of PPO: functions of the diagnostics so far that return a message, or None.

Limits of a KL are in nats per answer: a policy that has moved by five nats has moved as far with answers of 400 tokens
as with answers of 20.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean, median

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


WINDOW = 5
"""PPO steps over which a figure is averaged. A failure mode that is not seen for this many steps has ended."""
PROMPTS = 100
"""Smallest number of prompts in a window; the window grows where `WINDOW` steps have fewer."""
HACKING_DEVIATIONS = 5.0
"""Reward hacking: standard errors by which a mean must move; below 5, long runs give alerts by chance."""
HACKING_KL = 5.0
"""Reward hacking without a judge: the reward rises and the KL to the reference is above this, in nats per answer."""
KL_JUMP = 4.0
"""KL spike: rise of the KL to the reference above the median of the window before, in nats per answer."""
UPDATE_KL = 3.0
"""KL spike: KL between the policy before and after one update, in nats per answer."""
ENTROPY_SHARE = 0.2
"""Entropy collapse: share of the first step's entropy that must remain."""
CRITIC_GROWTH = 4.0
"""Diverging critic: value loss as a multiple of its lowest value so far."""
CLIP_FRACTION, FROZEN_DEVIATIONS = 0.3, 2.0
"""Frozen reward: share of clipped tokens above which the reward must rise, by this many standard errors."""
LATE_CLIP_FRACTION = 0.4
"""Stale data: share of clipped tokens in the last epoch of an update."""
REPETITION_RISE = 0.2
"""Repetition: rise of one of `REPEATS` since the first step."""
LENGTH_FACTOR = 2.0
"""Length drift: answers are this many times longer or shorter than in the first step."""
MISSING_EOS_RISE = 0.2
"""Missing ends: rise of the share of answers that were cut off since the first step."""
GRADIENT_FACTOR = 20.0
"""Exploding gradient: norm of a gradient as a multiple of its median so far."""
LOWEST_TOKEN_REWARD = -10.0
"""Huge penalty: reward of a token, in units of the score."""
ENGINE_KL = 0.2
"""Engine mismatch: KL between sampler and trained model (`engine_mismatch_k3`), in nats per answer."""
ROLLOUT_SHARE = 0.7
"""Slow generation: share of a step's seconds that the rollout takes."""


@dataclass(frozen=True)
class Settings:
    """The settings of a run that the detectors need."""

    prompts_per_step: int
    epochs: int

    @property
    def shortest_window(self) -> int:
        """Steps that together have `PROMPTS` prompts."""
        return math.ceil(PROMPTS / self.prompts_per_step)

    @property
    def window(self) -> int:
        """Steps of a mean."""
        return max(WINDOW, self.shortest_window)


Detector = Callable[[Sequence[Row], Settings], str | None]
"""Rows of all steps so far → a message with figures, or None."""


def reward_hacking(rows: Sequence[Row], settings: Settings, highest_kl: float = HACKING_KL) -> str | None:
    """The reward has risen and the judge's score fallen since that score was highest; without a judge, the reward has
    risen since the start at a KL to the reference above `highest_kl`."""
    if len(rows) < 2 * settings.window:
        return None
    if all(row["gold"] is not None for row in rows):
        return _against_gold(rows, settings)
    proxy = Move.between(_column(rows, "reward_raw"), settings.window)
    far = fmean(_column(rows[-settings.window :], "kl"))
    if not (proxy.deviations > HACKING_DEVIATIONS and far > highest_kl):
        return None
    return f"the reward went {proxy} at a KL of {far:.3g} nats per answer, and there is no judge; read the samples"


def _against_gold(rows: Sequence[Row], settings: Settings) -> str | None:
    width = settings.window
    means = _means(_column(rows[:-width], "gold"), width)
    best = means.index(max(means))
    gold, proxy = (Move.between(_column(rows[best:], name), width) for name in ("gold", "reward_raw"))
    if not (proxy.deviations > HACKING_DEVIATIONS and gold.deviations < -HACKING_DEVIATIONS):
        return None
    return f"since step {value(rows[best], 'step'):.0f} the reward went {proxy} and the judge's score {gold}"


def kl_spike(rows: Sequence[Row], settings: Settings) -> str | None:
    """One update moved the policy too far, or its distance to the reference jumped."""
    moved = value(rows[-1], "update_kl") * value(rows[-1], "response_tokens_mean")
    if moved > UPDATE_KL:
        return f"one update moved the policy by {moved:.3g} nats per answer"
    width = settings.shortest_window
    kl = _column(rows[-settings.window - 2 * width + 1 :], "kl")
    means = _means(kl, min(width, len(kl)))
    before, now = means[:-width], means[-1]
    if before and now - median(before) > KL_JUMP:
        return f"KL to the reference went from {median(before):.3g} to {now:.3g} nats per answer"
    return None


def entropy_collapse(rows: Sequence[Row], settings: Settings) -> str | None:
    """Little of the first step's entropy is left: the policy tends to one response."""
    now, first = _recent(rows, "entropy", settings), value(rows[0], "entropy")
    if now is None or now >= ENTROPY_SHARE * first:
        return None
    return f"entropy went from {first:.3g} to {now:.3g} nats per token"


def diverging_critic(rows: Sequence[Row], settings: Settings) -> str | None:
    """The value loss is a multiple of what it was, and the critic predicts worse than a constant would."""
    rows = [row for row in rows if row["value_loss"] is not None]
    if not rows:  # there is no critic
        return None
    now, explained = _recent(rows, "value_loss", settings), _recent(rows, "explained_variance", settings)
    if now is None or explained is None or len(rows) < 2 * settings.window:
        return None
    lowest = min(_means(_column(rows[: -settings.window], "value_loss"), settings.window))
    if not (now > CRITIC_GROWTH * lowest and explained < 0):
        return None
    return f"the value loss went from {lowest:.3g} to {now:.3g}, its explained variance is {explained:.3g}"


def frozen_reward(rows: Sequence[Row], settings: Settings) -> str | None:
    """The reward does not rise, and a large share of the tokens is clipped."""
    clipped = _recent(rows, "clip_fraction", settings)
    if clipped is None or clipped <= CLIP_FRACTION or len(rows) < 2 * settings.window:
        return None
    reward = Move.between(_column(rows[-2 * settings.window :], "reward_raw"), settings.window)
    if reward.deviations > FROZEN_DEVIATIONS:
        return None
    return f"{clipped:.0%} of the tokens are clipped and the reward does not rise, {reward}"


def stale_data(rows: Sequence[Row], settings: Settings) -> str | None:
    """In the last epoch of an update most tokens are clipped: the policy is far from the one that sampled."""
    late = _recent(rows, "clip_fraction_last_epoch", settings)
    if settings.epochs < 2 or late is None or late <= LATE_CLIP_FRACTION:
        return None
    return f"{late:.0%} of the tokens are clipped in the last of {settings.epochs} epochs"


def repetition(rows: Sequence[Row], settings: Settings) -> str | None:
    """Answers repeat themselves more than they did at the start."""
    for name, meaning in REPEATS.items():
        now, first = _recent(rows, name, settings), value(rows[0], name)
        if now is not None and now - first > REPETITION_RISE:
            return f"the share of {meaning} went from {first:.0%} to {now:.0%}"
    return None


def length_drift(rows: Sequence[Row], settings: Settings) -> str | None:
    """Answers are much longer or shorter than at the start."""
    now, first = _recent(rows, "response_tokens_mean", settings), value(rows[0], "response_tokens_mean")
    if now is None or max(now / first, first / now) <= LENGTH_FACTOR:
        return None
    return f"the mean length of an answer went from {first:.3g} to {now:.3g} tokens"


def missing_ends(rows: Sequence[Row], settings: Settings) -> str | None:
    """More answers are cut off than at the start."""
    now, first = _recent(rows, "missing_eos_share", settings), value(rows[0], "missing_eos_share")
    if now is None or now - first <= MISSING_EOS_RISE:
        return None
    return f"the share of answers without an end went from {first:.0%} to {now:.0%}"


def exploding_gradient(rows: Sequence[Row], settings: Settings) -> str | None:
    """A model's gradient is many times larger than its median so far."""
    for name in ("policy", "critic"):
        norms = [float(norm) for row in rows if (norm := row[f"grad_norm_{name}"])]
        if len(norms) <= WINDOW or not rows[-1][f"grad_norm_{name}"]:
            continue
        usual = median(norms[:-1])
        if norms[-1] > GRADIENT_FACTOR * usual:
            return f"the gradient norm of the {name} is {norms[-1]:.3g}, its median {usual:.3g}"
    return None


def huge_penalty(rows: Sequence[Row], settings: Settings) -> str | None:
    """A token has a very negative reward, usually from the KL penalty."""
    lowest = value(rows[-1], "min_token_reward")
    return f"the lowest reward of a token is {lowest:.3g}" if lowest < LOWEST_TOKEN_REWARD else None


def engine_mismatch(rows: Sequence[Row], settings: Settings) -> str | None:
    """The sampler's probabilities differ from those of the trained model."""
    found = value(rows[-1], "engine_mismatch_k3") * value(rows[-1], "response_tokens_mean")
    if found <= ENGINE_KL:
        return None
    return f"the KL between sampler and trained model is {found:.3g} nats per answer"


def slow_generation(seconds: Sequence[Mapping[str, float]], settings: Settings) -> str | None:
    """The rollout takes most of the seconds (by phase) of the last steps."""
    recent = seconds[-WINDOW:]
    total = sum(sum(step.values()) for step in recent)
    if len(recent) < WINDOW or total <= 0:
        return None
    share = sum(step["rollout"] for step in recent) / total
    return f"generation takes {share:.0%} of the time" if share > ROLLOUT_SHARE else None


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


def _recent(rows: Sequence[Row], name: str, settings: Settings) -> float | None:
    """Mean of the last window; None before there is one, and where no step of it has a figure."""
    width = settings.window
    known = [row for row in rows[-width:] if row[name] is not None]
    return fmean(_column(known, name)) if known and len(rows) >= width else None


def _column(rows: Sequence[Row], name: str) -> list[float]:
    return [value(row, name) for row in rows]


def value(row: Row, name: str) -> float:
    """A number of a row. Raises ValueError where it is empty."""
    found = row[name]
    if found is None:
        raise ValueError(f"{name} is empty at step {row['step']}")
    return float(found)
