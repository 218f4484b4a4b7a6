"""Alerts of a PPO run: `Monitor` runs the detectors after each step and reports a failure mode once."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.ppo import detectors
from rlhf_core.ppo.detectors import COLUMNS, WINDOW, Detector, Row, Settings


@dataclass(frozen=True)
class Alert:
    """A failure mode, the PPO step (from 1) at which it was found, its figures, and the remedy."""

    name: str
    step: int
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.name} at step {self.step}: {self.message}. What helps: {self.remedy}"


DETECTORS: dict[str, Detector] = {
    "reward_hacking": detectors.reward_hacking,
    "kl_spike": detectors.kl_spike,
    "entropy_collapse": detectors.entropy_collapse,
    "diverging_critic": detectors.diverging_critic,
    "frozen_reward": detectors.frozen_reward,
    "stale_data": detectors.stale_data,
    "repetition": detectors.repetition,
    "length_drift": detectors.length_drift,
    "missing_ends": detectors.missing_ends,
    "exploding_gradient": detectors.exploding_gradient,
    "huge_penalty": detectors.huge_penalty,
    "engine_mismatch": detectors.engine_mismatch,
}
"""The detectors whose results are equal in equal runs."""

SLOW_GENERATION = "slow_generation"
"""The detector that depends on the machine; it stops no run and is in no output."""

REMEDIES = {
    "reward_hacking": "raise β (kl.coef), retrain the reward model on the new failure cases, or both",
    "kl_spike": "narrow ε (clip_ratio: 0.1 instead of 0.2), drop learning_rate by an order of magnitude, raise β "
    "(kl.coef), or let it adapt (kl.controller: adaptive), which raises it when KL is high",
    "entropy_collapse": "raise entropy_coef, widen ε (clip_ratio) so that fewer tokens are clipped, or "
    "sample rollouts at a higher temperature",
    "diverging_critic": "standardise advantages (whiten_advantages), clip the value loss (critic.clip_value), lower "
    "critic.learning_rate, and check that the KL penalty makes no huge negative token rewards (min_token_reward)",
    "frozen_reward": "widen ε (clip_ratio), or warm up with the plain policy gradient (policy_gradient_steps) before "
    "the clip is on",
    "stale_data": "fewer ppo_epochs (1 to 4 are usual: more of them overfit to stale data), or a lower learning_rate",
    "repetition": "raise entropy_coef; if the reward model likes repetition, raise β (kl.coef) or retrain it on such "
    "answers",
    "length_drift": "compare the reward model's correlation with length (metrics/ppo.json), train it on pairs of "
    "equal length, or raise β (kl.coef)",
    "missing_ends": "raise score.missing_eos_penalty, or max_new_tokens where good answers need more room",
    "exploding_gradient": "lower learning_rate (of the critic: critic.learning_rate), clip the score (score.clip), and "
    "read the samples of this step",
    "huge_penalty": "lower the learning rate so that no token becomes that unlikely under the reference, check the "
    "tokenizer and stop tokens, or lower β (kl.coef)",
    "engine_mismatch": "use engine: leash and precision: float32 to find the cause, or weigh tokens with "
    "importance_cap: 2",
    SLOW_GENERATION: "use a fast inference engine for the rollouts, compute reference and old log-probabilities once a "
    "rollout, and consider whether DPO would do, with one forward pass a sample",
}
"""The advice of each alert, with keys of params.yaml."""


class Monitor:
    """The alerts of one run. Call `observe` after every step. A failure mode gives another alert only after a window
    without it."""

    def __init__(self, config: PPOConfig) -> None:
        prompts = config.batch_size // config.samples_per_prompt
        self.settings = Settings(prompts, config.ppo_epochs)
        self.alerts: list[Alert] = []
        """All alerts so far."""
        self._rows: list[dict[str, float | None]] = []
        self._unseen: dict[str, int] = {}
        self._seconds: list[dict[str, float]] = []
        self._slow: dict[str, int] = {}

    @property
    def active(self) -> list[str]:
        """Failure modes of the last window, slow generation included."""
        return sorted({*self._unseen, *self._slow})

    def observe(self, row: Row) -> list[Alert]:
        """Add the diagnostics of a step; returns new alerts. Raises KeyError where a column of COLUMNS is missing."""
        self._rows.append({name: row[name] for name in COLUMNS})
        seen = {name: detect(self._rows, self.settings) for name, detect in DETECTORS.items()}
        new = self._new(seen, self._unseen, int(detectors.value(row, "step")))
        self.alerts += new
        return new

    def observe_seconds(self, seconds: Mapping[str, float], step: int) -> list[Alert]:
        """Add the seconds of each phase of a step; returns new alerts, which are not stored, since they depend on the
        machine. The window starts again after a resume."""
        self._seconds = [*self._seconds, dict(seconds)][-WINDOW:]
        return self._new({SLOW_GENERATION: detectors.slow_generation(self._seconds, self.settings)}, self._slow, step)

    def _new(self, seen: Mapping[str, str | None], unseen: dict[str, int], step: int) -> list[Alert]:
        alerts = []
        for name, message in seen.items():
            if message is not None:
                if name not in unseen:
                    alerts.append(Alert(name, step, message, REMEDIES[name]))
                unseen[name] = 0
            elif name in unseen:
                unseen[name] += 1
                if unseen[name] >= self.settings.window:
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
