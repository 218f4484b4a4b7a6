"""PPO with the settings of params.yaml reaches the known optimum of small problems, and errors in rewards or losses are
detected: `pytest -k optimum`."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.ppo import credit as credit_module
from rlhf_core.ppo.kl import estimate_kl
from tasks.params.variant import VariantParams
from tests.rlhf_core.ppo.optimum.exact import Forces, optimum, probabilities, resting_point, total_variation
from tests.rlhf_core.ppo.optimum.gradient import gradient_bias
from tests.rlhf_core.ppo.optimum.problems import Problem, build_models, forced, merged, nested, problems
from tests.rlhf_core.ppo.optimum.run import build_trainer, train

ROOT = Path(__file__).resolve().parents[3]
PARAMS: dict[str, Any] = YAML(typ="safe", pure=True).load(ROOT / "params.yaml")
CANONICAL = {
    "steps": 40,
    "samples_per_prompt": 1,
    "lam": 1.0,
    "temperature": 1.0,
    "entropy_coef": 0.0,
    "optimizer.decay": "linear",
    "score.normalise": False,
    "kl.penalty": "reward",
    "kl.estimator": "k1",
}
SEED = 1
BANDIT, TWO, THREE = range(3)


def block(**changes: Any) -> PPOConfig:
    """The demo's settings with one answer to each prompt, raw scores, no entropy bonus, λ = 1; `changes` have `__` for
    a dot."""
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    return PPOConfig.model_validate(merged(PARAMS["ppo"], nested({**CANONICAL, **dotted})))


@cache
def canonical(name: str) -> dict[str, Any]:
    """What training on a problem ends with."""
    (problem,) = [problem for problem in problems(block()) if problem.name == name]
    return train(block(), problem, SEED)


def away_from_reference(config: PPOConfig, problem: Problem) -> Any:
    """A trainer whose policy differs from its reference by random noise."""
    trainer = build_trainer(config, problem, SEED)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.models.policy.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return trainer


def in_place_of_k1(kind: str) -> Callable[..., torch.Tensor]:
    """`estimate_kl` with another estimator than the requested one."""
    return lambda logprobs, reference, requested, mask=None: estimate_kl(logprobs, reference, kind, mask)  # type: ignore[arg-type]


def at_the_last_column(scores: Any, kl: Any, mask: Any, kl_coef: float) -> torch.Tensor:
    """`shape_rewards` with the score at `[:, -1]`, which may be padding (known failure 3)."""
    rewards = -kl_coef * kl * mask
    rewards[:, -1] += scores
    return rewards


# the optimum


@pytest.mark.slow
@pytest.mark.chosen("bandit", "two_tokens")
@pytest.mark.parametrize("problem", ["bandit", "two_tokens", "three_tokens"])
def test_ppo_ends_at_the_closed_form_optimum(problem: str) -> None:
    found = canonical(problem)
    assert found["total_variation"] <= 0.02
    assert found["total_variation_of_reference"] > 0.2, "there was something to learn"
    assert found["most_likely_of_optimum"] < 0.9, "the optimum is no single response"
    assert found["kl"] == pytest.approx(found["kl_of_optimum"], abs=0.05)
    assert found["total_variation_between"] == pytest.approx(0, abs=1e-6), "the resting point without entropy bonus"


@pytest.mark.slow
@pytest.mark.chosen("bandit", "two_tokens")
@pytest.mark.parametrize("problem", ["bandit", "two_tokens", "three_tokens"])
def test_rule_08_k1_in_the_reward_has_an_unbiased_gradient(problem: str) -> None:
    for place in ("reference", "half_way"):
        for critic in ("critic", "exact_critic"):
            assert canonical(problem)["gradient_bias"][place][critic]["relative_l2"] <= 1e-4


# errors that are detected


@pytest.mark.parametrize(
    ("function", "wrong"),
    [
        ("estimate_kl", in_place_of_k1("k2")),
        ("estimate_kl", in_place_of_k1("k3")),
        ("shape_rewards", at_the_last_column),
    ],
    ids=["k2 in the reward", "k3 in the reward", "score on padding"],
)
def test_a_wrong_reward_biases_the_gradient(
    function: str, wrong: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = block()
    trainer = away_from_reference(config, problems(config)[TWO])
    assert gradient_bias(trainer, problems(config)[TWO])["critic"].relative_l2 <= 1e-4
    monkeypatch.setattr(credit_module, function, wrong)
    assert gradient_bias(trainer, problems(config)[TWO])["critic"].relative_l2 > 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"advantage": "reinforce"},
        {"advantage": "rloo", "samples_per_prompt": 4},
        {"advantage": "grpo", "samples_per_prompt": 4},
        {"critic__kind": "shared"},
    ],
    ids=["reinforce", "rloo", "grpo", "shared critic"],
)
def test_the_gradient_of_every_baseline_is_unbiased(changes: dict[str, Any]) -> None:
    config = block(**changes, whiten_advantages=False)
    bias = gradient_bias(away_from_reference(config, problems(config)[TWO]), problems(config)[TWO])
    assert bias["critic"].relative_l2 <= 1e-4


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_baseline_from_other_answers_reaches_the_same_optimum() -> None:
    """With sampled groups, which the expected gradient does not contain."""
    config = block(advantage="rloo", samples_per_prompt=4, whiten_advantages=False)
    assert train(config, problems(config)[BANDIT], SEED)["total_variation"] <= 0.02


@pytest.mark.slow
@pytest.mark.chosen("one ratio")
@pytest.mark.parametrize(
    "changes",
    [
        {"clip_ratio_high": 0.28},
        {"ratio": "sequence", "loss_average": "answer_means"},
    ],
    ids=["wider clip", "one ratio"],
)
def test_what_group_methods_add_leaves_the_optimum_where_it_is(changes: dict[str, Any]) -> None:
    """On answers of one token: a mean over longer answers has GRPO's bias by length. `skip_equal_groups` is not among
    them: what it leaves out has no penalty either, and the distance is 0.022."""
    config = block(advantage="rloo", samples_per_prompt=4, whiten_advantages=False, **changes)
    assert train(config, problems(config)[BANDIT], SEED)["total_variation"] <= 0.02


@pytest.mark.slow
@pytest.mark.chosen("1-rloo")
@pytest.mark.parametrize("name", ["rloo", "reinforce"])
@pytest.mark.parametrize("place", [BANDIT, TWO, THREE])
def test_published_methods_reach_their_optimum(name: str, place: int) -> None:
    """One optimizer step on each rollout, no whitening, sums over answers."""
    samples = 4 if name == "rloo" else 1
    variant = VariantParams(enabled=True, settings={"samples_per_prompt": samples})
    config = variant.applied_to(block(), name)
    assert train(config, problems(config)[place], SEED)["total_variation"] <= 0.02


@pytest.mark.slow
def test_published_grpo_rests_beside_the_optimum() -> None:
    """Its k3 follows the other KL, and the deviation of a group scales the score: no resting point is known."""
    config = VariantParams(enabled=True, settings={"samples_per_prompt": 4}).applied_to(block(), "grpo")
    found = train(config, problems(config)[BANDIT], SEED)
    assert found["total_variation_to_resting_point"] is None
    assert found["total_variation"] > 0.02


def test_lambda_below_1_is_biased_by_the_critic_alone() -> None:
    config = block(lam=0.5)
    problem = problems(config)[THREE]
    bias = gradient_bias(away_from_reference(config, problem), problem)
    assert bias["critic"].relative_l2 > 0.01
    assert bias["exact_critic"].relative_l2 <= 1e-4


def test_the_kl_in_the_loss_is_exact_on_one_token_and_not_on_two() -> None:
    """In the loss the KL of later tokens does not count for a token."""
    config = block(kl__penalty="loss", kl__estimator="rho_k1")
    one, two = (gradient_bias(away_from_reference(config, problems(config)[i]), problems(config)[i]) for i in (0, 1))
    assert one["exact_critic"].relative_l2 <= 1e-4
    assert two["exact_critic"].relative_l2 > 0.01


# exact quantities


@pytest.mark.parametrize(("place", "count"), [(BANDIT, 16), (TWO, 1 + 6 * 7), (THREE, 1 + 4 + 16 * 5)])
def test_the_list_of_responses_is_complete(place: int, count: int) -> None:
    problem = problems(block())[place]
    assert len(set(problem.responses)) == count
    for temperature in (1.0, 0.7):
        policy = probabilities(build_models(problem)[0], problem, temperature)
        assert policy.sum().item() == pytest.approx(1, abs=1e-6)


def test_optimum_without_kl_penalty_is_the_best_response() -> None:
    reference = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    scores = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
    assert optimum(reference, scores, 0.0).tolist() == [0.0, 0.5, 0.5]
    assert total_variation(optimum(reference, scores, 1e-3), optimum(reference, scores, 0.0)) < 1e-6


@pytest.mark.parametrize("entropy", [0.0, 0.05])
def test_resting_point_of_one_state(entropy: float) -> None:
    """Q − β·log(π/π_ref) − c·log π is equal for all arms."""
    problem = problems(block())[BANDIT]
    reference = build_models(problem)[0]
    scores = torch.tensor([problem.scores[response] for response in problem.responses], dtype=torch.float64)
    policy = resting_point(reference, problem, 1.0, scores, Forces(0.1, entropy, 1.0, future_kl=True))
    log_ratio = policy.log() - probabilities(reference, problem, 1.0).log()
    balance = scores - 0.1 * log_ratio - entropy * policy.log()
    assert (balance - balance[0]).abs().max().item() < 1e-6


def test_resting_point_of_the_kl_in_the_loss_is_not_the_optimum() -> None:
    problem = problems(block())[TWO]
    reference = build_models(problem)[0]
    scores = torch.tensor([problem.scores[response] for response in problem.responses], dtype=torch.float64)
    star = optimum(probabilities(reference, problem, 1.0), scores, 0.1)
    forces = Forces(0.1, 0.0, 1.0, future_kl=True)
    assert total_variation(resting_point(reference, problem, 1.0, scores, forces), star) < 1e-6
    without = resting_point(reference, problem, 1.0, scores, replace(forces, future_kl=False))
    assert total_variation(without, star) > 0.01


# other settings


@pytest.mark.slow
def test_grpo_with_the_kl_in_the_loss_ends_at_its_resting_point() -> None:
    """β is then per unit of the normalised advantage: σ·β in units of the score."""
    config = block(
        advantage="grpo", samples_per_prompt=4, whiten_advantages=False, kl__penalty="loss", kl__estimator="full"
    )
    found = train(config, problems(config)[BANDIT], SEED)
    assert found["total_variation_between"] > 0.3
    assert found["total_variation_to_resting_point"] <= 0.1
    assert found["gradient_bias"]["reference"]["critic"]["cosine"] > 0.999
    assert found["gradient_bias"]["half_way"]["critic"]["relative_l2"] > 0.1


@pytest.mark.parametrize(("minibatches", "epochs"), [(1, 1), (3, 2), (16, 4), (600, 1)])
def test_any_division_of_the_batch_fits(minibatches: int, epochs: int) -> None:
    config = block(batch_size=minibatches * 2, minibatches=minibatches, ppo_epochs=epochs)
    for problem in problems(config):
        assert forced(config, problem).minibatches == minibatches
