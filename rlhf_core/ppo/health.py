"""Detectors of sick PPO runs: what people look for by hand, automated. Each is a pure function of the diagnostics so
far; the `Monitor` asks them after every step and remembers which illness it has already told. What becomes of an alert
(log, tracking, files, the end of the run) is decided elsewhere; nothing here reads a clock or writes a file.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from statistics import fmean, median
from typing import Any

from rlhf_core.config.health import HealthConfig
from rlhf_core.config.ppo import PPOConfig

Row = Mapping[str, float | None]
"""Diagnostics of one step, as `diagnostics.step_row` makes them."""

COLUMNS = (
    "step",
    "reward_raw",
    "gold",
    "kl",
    "response_tokens_mean",
    "approx_kl",
    "entropy",
    "value_loss",
    "explained_variance",
    "clip_fraction",
    "clip_fraction_last_epoch",
    "repeated_ngram_share",
)
"""What the detectors look at."""


@dataclass(frozen=True)
class Alert:
    """An illness, when it was first seen (PPO step, from 1), by which figures, and what helps."""

    name: str
    step: int
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.name} at step {self.step}: {self.message}. What helps: {self.remedy}"


@dataclass(frozen=True)
class Limits:
    """Thresholds, with what they need to know of the run."""

    health: HealthConfig
    prompts_per_step: int
    epochs: int
    clips: bool = True
    """Whether the objective has a clip."""

    @property
    def burst(self) -> int:
        """The fewest steps that together have `prompts` prompts."""
        return math.ceil(self.health.prompts / self.prompts_per_step)

    @property
    def window(self) -> int:
        """Steps that a mean is taken over."""
        return max(self.health.window, self.burst)


Detector = Callable[[Sequence[Row], Limits], str | None]
"""Looks at the rows of all steps so far; says what it has seen, with figures, or None."""


def reward_hacking(rows: Sequence[Row], limits: Limits) -> str | None:
    """The proxy has risen since the judge liked the policy best, and the judge likes it less; without a judge, the
    proxy has risen since the start and the policy is further from its reference than is believed."""
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
    return f"since step {_value(rows[best], 'step'):.0f} the reward went {proxy} and the judge's score {gold}"


def _against_kl(rows: Sequence[Row], limits: Limits) -> str | None:
    width = limits.window
    proxy = Move.between(_column(rows, "reward_raw"), width)
    far = _kl_per_token(rows, width)[-1]
    if not (proxy.deviations > limits.health.hacking_deviations and far > limits.health.hacking_kl):
        return None
    return f"the reward went {proxy} at a KL of {far:.3g} nats per token, and no judge looks on; read the samples"


def kl_spike(rows: Sequence[Row], limits: Limits) -> str | None:
    """One update moved the policy too far, or its distance to the reference jumped."""
    moved = _value(rows[-1], "approx_kl")
    if moved > limits.health.update_kl:
        return f"one update moved the policy by {moved:.3g} nats per token"
    means = _kl_per_token(rows[-limits.window - 2 * limits.burst + 1 :], limits.burst)
    before, now = means[: -limits.burst], means[-1]
    if before and now - median(before) > limits.health.kl_jump:
        return f"KL to the reference went from {median(before):.3g} to {now:.3g} nats per token"
    return None


def entropy_collapse(rows: Sequence[Row], limits: Limits) -> str | None:
    """Little of the first step's entropy is left: the policy gives one response."""
    now, first = _recent(rows, "entropy", limits), _value(rows[0], "entropy")
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
    """The reward does not rise, and the clip bites on a large share of the tokens."""
    clipped = _recent(rows, "clip_fraction", limits) if limits.clips else None
    if clipped is None or clipped <= limits.health.clip_fraction or len(rows) < 2 * limits.window:
        return None
    reward = Move.between(_column(rows[-2 * limits.window :], "reward_raw"), limits.window)
    if reward.deviations > limits.health.frozen_deviations:
        return None
    return f"{clipped:.0%} of the tokens are clipped and the reward stands still, {reward}"


def stale_data(rows: Sequence[Row], limits: Limits) -> str | None:
    """By the last epoch of an update the policy has left the data behind: it mostly clips."""
    late = _recent(rows, "clip_fraction_last_epoch", limits)
    if not limits.clips or limits.epochs < 2 or late is None or late <= limits.health.late_clip_fraction:
        return None
    return f"{late:.0%} of the tokens are clipped in the last of {limits.epochs} epochs"


def repetition(rows: Sequence[Row], limits: Limits) -> str | None:
    """Answers repeat themselves more than they did at the start."""
    now, first = _recent(rows, "repeated_ngram_share", limits), _value(rows[0], "repeated_ngram_share")
    if now is None or now - first <= limits.health.repetition_rise:
        return None
    return f"the share of repeated 3-grams in an answer went from {first:.0%} to {now:.0%}"


def slow_generation(seconds: Sequence[Mapping[str, float]], limits: Limits) -> str | None:
    """The rollout takes most of the seconds (by phase) of the last steps."""
    recent = seconds[-limits.health.window :]
    total = sum(sum(step.values()) for step in recent)
    if len(recent) < limits.health.window or total <= 0:
        return None
    share = sum(step["rollout"] for step in recent) / total
    return f"generation takes {share:.0%} of the time" if share > limits.health.rollout_share else None


DETECTORS: dict[str, Detector] = {
    "reward_hacking": reward_hacking,
    "kl_spike": kl_spike,
    "entropy_collapse": entropy_collapse,
    "diverging_critic": diverging_critic,
    "frozen_reward": frozen_reward,
    "stale_data": stale_data,
    "repetition": repetition,
}
"""Those that look at what every run with the same inputs repeats."""

SLOW_GENERATION = "slow_generation"
"""The one that looks at seconds; it may stop nothing and stand in no out."""

REMEDIES = {
    "reward_hacking": "raise β (kl.coef), retrain the reward model on the new failure cases, or both",
    "kl_spike": "narrow ε (clip_ratio: 0.1 instead of 0.2), drop learning_rate by an order of magnitude, raise β "
    "(kl.coef), or let it follow (kl.controller: adaptive), which tightens when KL is high",
    "entropy_collapse": "raise entropy_coef, widen ε (clip_ratio) so that the clip stops biting on every token, or "
    "sample rollouts at a higher temperature",
    "diverging_critic": "standardise advantages (whiten_advantages), clip the value loss (critic.clip_value), lower "
    "critic.learning_rate, and check that the KL penalty makes no huge negative token rewards (min_token_reward)",
    "frozen_reward": "widen ε (clip_ratio), or warm up with the plain policy gradient (policy_gradient_steps) before "
    "the clip is on",
    "stale_data": "fewer ppo_epochs (1 to 4 are usual: more of them overfit to stale data), or a lower learning_rate",
    "repetition": "raise entropy_coef; if the reward model likes repetition, raise β (kl.coef) or retrain it on such "
    "answers",
    SLOW_GENERATION: "use a fast inference engine for the rollouts, read reference and old log-probabilities once a "
    "rollout, and consider whether DPO would do, with one forward pass a sample",
}
"""What practitioners advise, with the keys of this project."""


class Monitor:
    """Watches one run. `observe` after every step; it alerts once an illness, and again only after it was over."""

    def __init__(self, config: PPOConfig) -> None:
        prompts = config.batch_size // config.samples_per_prompt
        self.limits = Limits(config.health, prompts, config.ppo_epochs, clips=config.objective == "clip")
        self.alerts: list[Alert] = []
        """All so far, in their order."""
        self._rows: list[dict[str, float | None]] = []
        self._unseen: dict[str, int] = {}
        self._seconds: list[dict[str, float]] = []
        self._slow: dict[str, int] = {}

    @property
    def active(self) -> list[str]:
        """Illnesses that were seen within the last window, the one of the clock included."""
        return sorted({*self._unseen, *self._slow})

    def observe(self, row: Row) -> list[Alert]:
        """Take in the diagnostics of a step; what is newly wrong. Raises KeyError when a column of COLUMNS is
        missing."""
        self._rows.append({name: row[name] for name in COLUMNS})
        seen = {name: detect(self._rows, self.limits) for name, detect in DETECTORS.items()}
        new = self._new(seen, self._unseen, int(_value(row, "step")))
        self.alerts += new
        return new

    def observe_seconds(self, seconds: Mapping[str, float], step: int) -> list[Alert]:
        """Take in the seconds of each phase of a step. Its alerts are returned and kept nowhere: they differ from
        machine to machine. The window starts anew after a resume."""
        self._seconds = [*self._seconds, dict(seconds)][-self.limits.health.window :]
        return self._new({SLOW_GENERATION: slow_generation(self._seconds, self.limits)}, self._slow, step)

    def _new(self, seen: Mapping[str, str | None], unseen: dict[str, int], step: int) -> list[Alert]:
        alerts = []
        for name, message in seen.items():
            if message is not None:
                if name not in unseen:
                    alerts.append(Alert(name, step, message, REMEDIES[name]))
                unseen[name] = 0
            elif name in unseen:
                unseen[name] += 1
                if unseen[name] >= self.limits.window:
                    del unseen[name]
        return alerts

    def state_dict(self) -> dict[str, Any]:
        """What the next alert depends on (rule 19), in plain types; no seconds."""
        return {
            "rows": [dict(row) for row in self._rows],
            "unseen": dict(self._unseen),
            "alerts": [asdict(alert) for alert in self.alerts],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self._rows = [dict(row) for row in state["rows"]]
        self._unseen = dict(state["unseen"])
        self.alerts = [Alert(**alert) for alert in state["alerts"]]


@dataclass(frozen=True)
class Move:
    """From the mean of one window to that of another, and the standard errors between them."""

    before: float
    after: float
    deviations: float

    @classmethod
    def between(cls, values: Sequence[float], width: int) -> "Move":
        """From the first `width` values to the last; the noise of one value is read from successive differences, which
        a slow trend hardly touches (von Neumann 1941)."""
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
    return [_value(row, name) for row in rows]


def _value(row: Row, name: str) -> float:
    value = row[name]
    if value is None:
        raise ValueError(f"{name} is empty at step {row['step']}")
    return float(value)


def _kl_per_token(rows: Sequence[Row], width: int) -> list[float]:
    """KL to the reference in nats per token, of every window of `width` steps (of all rows, where they are fewer)."""
    width = min(width, len(rows))
    kl, tokens = (_means(_column(rows, name), width) for name in ("kl", "response_tokens_mean"))
    return [nats / length for nats, length in zip(kl, tokens, strict=True)]
