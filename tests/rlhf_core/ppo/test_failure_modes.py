"""Runs of tiny models with a failure mode each, and a healthy one: every detector finds its own failure mode, and none
finds one in the healthy run."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from transformers import PreTrainedModel

from rlhf_core.data.scorer import Answers, Scored
from rlhf_core.models.sampling import Sampled
from rlhf_core.ppo.engines import Engine, Key, LeashEngine, Prompts
from rlhf_core.ppo.health import DETECTORS, SLOW_GENERATION, Alert, Monitor
from rlhf_core.ppo.trainer import PPOTrainer

MakeTrainer = Callable[..., PPOTrainer]


@dataclass(frozen=True)
class VarietyJudge:
    """Counts the different letters of an answer: repeated tokens lower the score."""

    name: str = "variety"

    def __call__(self, answers: Answers) -> Scored:
        return Scored([float(len(set(text))) for text in answers.texts])


HEALTHY: dict[str, Any] = {
    "steps": 1000,
    "batch_size": 100,
    "micro_batch_size": 50,
    "max_new_tokens": 8,
    "learning_rate": 1e-3,
    "entropy_coef": 0.0,
    "kl": {"coef": 1.0, "horizon": 1000},
    "critic": {"learning_rate": 3e-3},
    "optimizer": {"decay": "none"},
    "score": {"missing_eos_penalty": 0.0},
    "normalisation": (0.02, 0.1),
    "judge": VarietyJudge(),
    "same_reference": True,
}
"""The scorer of the tests rewards token 10; β = 1 keeps the policy near its reference."""

NO_KL_PENALTY = {"kl": {"coef": 0.0}, "learning_rate": 1e-2, "score": {"normalise": False, "clip": 100.0}}
"""β = 0 and a learning rate ten times too high: token 10 and nothing else, step after step."""

TOO_LONG = {
    "scorer": lambda answers: [float(len(ids)) for ids in answers.response_ids],
    "normalisation": (4.0, 1.0),
    "kl": {"coef": 0.0},
    "learning_rate": 1e-2,
    "max_new_tokens": 40,
}
"""Every token is paid for, and the end of an answer is not."""

TOO_SHORT = TOO_LONG | {
    "scorer": lambda answers: [-float(len(ids)) for ids in answers.response_ids],
    "normalisation": (-8.0, 4.0),
}


@dataclass
class WithOutlier:
    """The share of token 10; from the tenth call on, the first answer of a call has a million more."""

    calls: int = 0

    def __call__(self, answers: Answers) -> list[float]:
        self.calls += 1
        shares = [ids.count(10) / len(ids) for ids in answers.response_ids]
        return [shares[0] + 1e6 * (self.calls >= 10), *shares[1:]]


FAILING: dict[str, tuple[str, int, dict[str, Any]]] = {
    "reward_hacking": ("no KL penalty, a judge with other preferences", 22, NO_KL_PENALTY),
    "entropy_collapse": ("no KL penalty, a judge with other preferences", 22, NO_KL_PENALTY),
    "repetition": ("no KL penalty, a judge with other preferences", 22, NO_KL_PENALTY),
    "kl_spike": ("the learning rate times 100", 2, {"learning_rate": 0.1}),
    "diverging_critic": (
        "the critic's learning rate times 1000, rising",
        18,
        {"critic": {"learning_rate": 3.0}, "optimizer": {"warmup_steps": 12}},
    ),
    "frozen_reward": ("a clip of a hundredth of a percent", 11, {"clip_ratio": 1e-4, "learning_rate": 1e-4}),
    "stale_data": ("eight epochs on a rollout, lr times 5", 5, {"ppo_epochs": 8, "learning_rate": 5e-3}),
    "length_drift": ("no KL penalty, a score against length", 20, TOO_SHORT),
    "missing_ends": ("no KL penalty, a score for length", 20, TOO_LONG),
    "exploding_gradient": (
        "single answers have a huge score, and none is clipped",
        14,
        {"scorer": WithOutlier(), "score": {"normalise": False, "clip": 1e9}, "learning_rate": 1e-4},
    ),
    "huge_penalty": ("a KL coefficient times 100", 6, {"kl": {"coef": 100.0}, "learning_rate": 1e-2}),
    "engine_mismatch": ("an engine that samples at another temperature", 2, {"engine_temperature": 1.5}),
    SLOW_GENERATION: (
        "an engine that waits a second before it samples",
        8,
        {"engine_wait_s": 1.0, "batch_size": 8, "micro_batch_size": 8, "ppo_epochs": 1, "minibatches": 1},
    ),
}  # fmt: skip
"""By detector: cause, steps, and the settings that differ from the healthy run."""


@dataclass(frozen=True)
class WaitingEngine:
    """Waits before it samples. Long answers would do too, but then a busy machine decides what the phases take."""

    engine: Engine
    seconds: float

    def __call__(self, policy: PreTrainedModel, prompts: Prompts, keys: Sequence[Key]) -> Sampled:
        time.sleep(self.seconds)
        return self.engine(policy, prompts, keys)


@dataclass
class Watched:
    """A run with its monitor, and the alerts of the clock, which the monitor does not keep."""

    trainer: PPOTrainer
    monitor: Monitor
    slow: list[Alert] = field(default_factory=list)

    def go(self, steps: int) -> "Watched":
        for _ in range(steps):
            self.monitor.observe(self.trainer.step())
            self.slow += self.monitor.observe_seconds(self.trainer.seconds, self.trainer.steps_done)
        return self

    @property
    def names(self) -> set[str]:
        return {alert.name for alert in [*self.monitor.alerts, *self.slow]}


def watched(make_trainer: MakeTrainer, **changes: Any) -> Watched:
    """The one place that builds these runs."""
    merged = dict(HEALTHY)
    for key, value in changes.items():
        merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) else value
    temperature, wait_s = merged.pop("engine_temperature", None), merged.pop("engine_wait_s", None)
    trainer = make_trainer(**merged)
    if temperature is not None:
        assert isinstance(trainer.engine, LeashEngine)
        trainer.engine = LeashEngine(replace(trainer.engine.rules, temperature=temperature))
    if wait_s is not None:
        trainer.engine = WaitingEngine(trainer.engine, wait_s)
    return Watched(trainer, Monitor(trainer.config))


def test_every_detector_has_a_failing_run() -> None:
    assert FAILING.keys() == {*DETECTORS, SLOW_GENERATION}


def test_the_healthy_run_gives_no_alert(make_trainer: MakeTrainer) -> None:
    run = watched(make_trainer).go(20)
    assert run.names == set()


@pytest.fixture(scope="module")
def runs() -> dict[str, Watched]:
    """Failing runs by their cause; some have several failure modes."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAILING)
def test_the_failing_run_gives_the_alert(name: str, make_trainer: MakeTrainer, runs: dict[str, Watched]) -> None:
    how, steps, changes = FAILING[name]
    if how not in runs:
        runs[how] = watched(make_trainer, **changes).go(steps)
    assert name in runs[how].names, f"{how}: {sorted(runs[how].names)}"


@pytest.mark.slow
def test_reward_hacking_is_found_without_a_judge(make_trainer: MakeTrainer) -> None:
    run = watched(make_trainer, **NO_KL_PENALTY, judge=None).go(15)
    (alert,) = [alert for alert in run.monitor.alerts if alert.name == "reward_hacking"]
    assert "there is no judge" in alert.message


def test_rule_19_a_resumed_run_gives_the_same_alerts(make_trainer: MakeTrainer) -> None:
    """A failing run, interrupted between its first and its second alert."""
    whole, first, second = (watched(make_trainer, **FAILING["kl_spike"][2]) for _ in range(3))
    whole.go(6)
    first.go(3)
    second.trainer.load_state_dict(first.trainer.state_dict())
    second.monitor.load_state_dict(first.monitor.state_dict())
    second.go(3)
    before, after = (alert.step for alert in whole.monitor.alerts)
    assert before <= 3 < after, "which step it is depends on the type of CPU"
    assert second.monitor.alerts == whole.monitor.alerts
    assert second.monitor.state_dict() == whole.monitor.state_dict()
