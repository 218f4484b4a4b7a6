"""`config/`: settings that are refused, and the reasons."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from rlhf_core.config.base import ScratchConfig
from rlhf_core.config.ppo import OptimizerConfig, PPOConfig

Values = Callable[..., dict[str, Any]]


def test_the_settings_of_the_tests_are_taken(ppo_values: Values) -> None:
    config = PPOConfig(**ppo_values())
    assert config.kl.estimator == "k1"
    assert config.check_ratio


@pytest.mark.parametrize(
    ("key", "value"),
    [("top_k", 50), ("top_p", 0.9), ("min_p", 0.1), ("min_new_tokens", 5), ("repetition_penalty", 1.1)],
)
def test_rule_01_what_changes_the_sampling_is_refused_with_the_reason(
    ppo_values: Values, key: str, value: float
) -> None:
    """Known failure 6: elsewhere the KL estimate turned negative."""
    with pytest.raises(ValidationError, match=rf"{key} is refused in rollouts: .* no longer is one of KL\(π‖π_ref\)"):
        PPOConfig(**ppo_values(), **{key: value})


@pytest.mark.parametrize("estimator", ["k2", "k3", "full", "rho_k1", "rho_k3"])
def test_rule_08_only_k1_is_allowed_in_the_reward(ppo_values: Values, estimator: str) -> None:
    reason = "is refused: .* ρ is 1" if estimator.startswith("rho") else "moves the optimum"
    with pytest.raises(ValidationError, match=rf"estimator {estimator} in the reward {reason}"):
        PPOConfig(**ppo_values(kl={"estimator": estimator}))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_rule_15_diagnostics_are_refused_as_losses(ppo_values: Values, estimator: str) -> None:
    with pytest.raises(ValidationError, match=rf"estimator {estimator} in the loss has .* use rho_k1, rho_k3, k2"):
        PPOConfig(**ppo_values(kl={"penalty": "loss", "estimator": estimator}))


def test_rule_15_kl_losses_that_are_allowed(ppo_values: Values) -> None:
    for estimator in ("rho_k1", "rho_k3", "k2", "full"):
        PPOConfig(**ppo_values(kl={"penalty": "loss", "estimator": estimator}))


def test_rule_17_an_adaptive_batch_beyond_the_horizon_is_refused(ppo_values: Values) -> None:
    """A fixed β has no horizon to exceed."""
    with pytest.raises(ValidationError, match=r"must not exceed kl\.horizon"):
        PPOConfig(**ppo_values(kl={"controller": "adaptive", "horizon": 7}))
    PPOConfig(**ppo_values(kl={"controller": "adaptive", "horizon": 8}))
    PPOConfig(**ppo_values(kl={"horizon": 7}))


def test_rule_17_an_adaptive_coefficient_of_0_is_refused(ppo_values: Values) -> None:
    """β is multiplied: it would stay 0. A fixed 0 switches the penalty off."""
    with pytest.raises(ValidationError, match="coef"):
        PPOConfig(**ppo_values(kl={"controller": "adaptive", "coef": 0.0}))
    PPOConfig(**ppo_values(kl={"coef": 0.0}))


def test_minibatches_must_divide_the_batch(ppo_values: Values) -> None:
    with pytest.raises(ValidationError, match="multiple of minibatches"):
        PPOConfig(**ppo_values(minibatches=3))


@pytest.mark.parametrize(
    "changes",
    [
        {"clip_ratio": -1},
        {"clip_ratio": 0},
        {"clip_ratio": 1},
        {"temperature": 0},
        {"learning_rate": float("nan")},
        {"learning_rate": float("inf")},
        {"batch_size": 0},
        {"batch_size": 8.0},
        {"steps": "4"},
        {"whiten_advantages": 1},
        {"gamma": 1.1},
        {"lam": -0.1},
        {"kl": {"coef": -0.1}},
        {"kl": {"placement": "token"}},
        {"critic": {"init": "policy"}},
        {"critic": {"value_clip": 0}},
        {"optimizer": {"betas": [0.9]}},
        {"optimizer": {"betas": [0.9, 1.0]}},
        {"optimizer": {"decay": "cosine"}},
        {"score": {"clip": 0}},
        {"score": {"missing_eos_penalty": -1}},
        {"score": {"whiten": True}},
        {"unknown": 1},
    ],
)
def test_impossible_wrong_and_unknown_values_are_refused(ppo_values: Values, changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        PPOConfig(**ppo_values(**changes))


def test_settings_cannot_change_later(ppo_values: Values) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        PPOConfig(**ppo_values()).steps = 9  # type: ignore[misc]


def test_whole_numbers_pass_for_numbers(ppo_values: Values) -> None:
    assert PPOConfig(**ppo_values(temperature=1)).temperature == 1.0


@pytest.mark.parametrize(("hidden", "heads"), [(32, 5), (30, 6)])
def test_heads_that_do_not_fit_are_refused(hidden: int, heads: int) -> None:
    with pytest.raises(ValidationError, match="must be heads × an even number"):
        ScratchConfig(vocabulary=300, context=8, layers=1, hidden=hidden, intermediate=8, heads=heads)


@pytest.mark.parametrize(
    "refused",
    [
        {"engine": "vllm"},
        {"lora": {"rank": 4, "quantize": "nf4"}},
    ],
    ids=["vllm", "nf4"],
)
def test_divided_models_are_refused_where_whole_weights_are_kept(ppo_values: Values, refused: dict[str, Any]) -> None:
    PPOConfig(**ppo_values(**refused))
    with pytest.raises(ValidationError, match="sharding fsdp divides float32 weights"):
        PPOConfig(**ppo_values(**refused), sharding="fsdp")


def test_no_reference_moves_where_models_are_divided(ppo_values: Values) -> None:
    PPOConfig(**ppo_values(reference_ema=0.01, lora={"rank": 4}))
    with pytest.raises(ValidationError, match="reference_ema moves whole weights, and sharding fsdp divides them"):
        PPOConfig(**ppo_values(reference_ema=0.01), sharding="fsdp")


def test_rule_32_adams_default_eps_leaves_a_pretrained_models_step_whole(ppo_values: Values) -> None:
    """A gradient of norm 0.1 in a million weights; 1e-5 leaves 9% of the first step out, and half for norm 0.01."""
    values = {name: value for name, value in ppo_values()["optimizer"].items() if name != "eps"}
    weights = torch.nn.Parameter(torch.zeros(10**6))
    weights.grad = torch.full_like(weights, 0.1 / 10**3)
    torch.optim.Adam([weights], lr=1.0, eps=OptimizerConfig(**values).eps).step()
    assert -weights.mean().item() == pytest.approx(1.0, abs=1e-3)
