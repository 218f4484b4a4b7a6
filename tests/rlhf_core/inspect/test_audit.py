"""The audit: PPO reaches the known optimum, and errors in rewards or losses are detected."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from ruamel.yaml import YAML
from typer.testing import CliRunner

from flows.cli import app
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.inspect.audit import problems as problems_module
from rlhf_core.inspect.audit import refused as refused_module
from rlhf_core.inspect.audit import run as run_module
from rlhf_core.inspect.audit.exact import Forces, optimum, probabilities, resting_point, total_variation
from rlhf_core.inspect.audit.gradient import gradient_bias
from rlhf_core.inspect.audit.problems import Problem, build_models, changed_keys, forced, merged, nested, problems
from rlhf_core.inspect.audit.refused import Bandit, refused_combinations
from rlhf_core.inspect.audit.run import audit, audit_problem, build_trainer
from rlhf_core.ppo import credit as credit_module
from rlhf_core.ppo.kl import estimate_kl
from tasks.params.variant import VariantParams

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


@pytest.fixture(scope="module")
def canonical() -> dict[str, Any]:
    return audit(block(), SEED)


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


# results of the audit


@pytest.mark.slow
@pytest.mark.parametrize("problem", ["bandit", "two_tokens", "three_tokens"])
def test_ppo_ends_at_the_closed_form_optimum(canonical: dict[str, Any], problem: str) -> None:
    found = canonical["problems"][problem]
    assert found["total_variation"] <= 0.02
    assert found["total_variation_of_reference"] > 0.2, "there was something to learn"
    assert found["most_likely_of_optimum"] < 0.9, "the optimum is no single response"
    assert found["kl"] == pytest.approx(found["kl_of_optimum"], abs=0.05)


@pytest.mark.slow
def test_the_headline_is_the_worst_problem(canonical: dict[str, Any]) -> None:
    assert canonical["total_variation"] == max(one["total_variation"] for one in canonical["problems"].values())


@pytest.mark.slow
@pytest.mark.parametrize("problem", ["bandit", "two_tokens", "three_tokens"])
def test_rule_08_k1_in_the_reward_has_an_unbiased_gradient(canonical: dict[str, Any], problem: str) -> None:
    for place in ("reference", "half_way"):
        for critic in ("critic", "exact_critic"):
            assert canonical["problems"][problem]["gradient_bias"][place][critic]["relative_l2"] <= 1e-4


@pytest.mark.slow
def test_without_entropy_or_discount_the_resting_point_is_the_optimum(canonical: dict[str, Any]) -> None:
    for found in canonical["problems"].values():
        assert found["total_variation_between"] == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
def test_the_audit_is_plain_json(canonical: dict[str, Any]) -> None:
    assert json.loads(json.dumps(canonical)) == canonical


# errors that the audit detects


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


def test_a_baseline_from_other_answers_reaches_the_same_optimum() -> None:
    """With sampled groups, which the expected gradient does not contain."""
    config = block(advantage="rloo", samples_per_prompt=4, whiten_advantages=False)
    assert audit_problem(config, problems(config)[BANDIT], SEED, lambda *_: None)["total_variation"] <= 0.02


@pytest.mark.slow
@pytest.mark.chosen("1-rloo", "2-reinforce")
@pytest.mark.parametrize("name", ["rloo", "reinforce"])
@pytest.mark.parametrize("place", [BANDIT, TWO, THREE])
def test_published_methods_reach_their_optimum(name: str, place: int) -> None:
    """One optimizer step on each rollout, no whitening, sums over answers."""
    samples = 4 if name == "rloo" else 1
    variant = VariantParams(enabled=True, settings={"samples_per_prompt": samples})
    config = variant.applied_to(block(), name)
    assert audit_problem(config, problems(config)[place], SEED, lambda *_: None)["total_variation"] <= 0.02


@pytest.mark.slow
def test_published_grpo_rests_beside_the_optimum_and_says_why() -> None:
    """Its k3 follows the other KL, and the deviation of a group scales the score: no resting point is known."""
    config = VariantParams(enabled=True, settings={"samples_per_prompt": 4}).applied_to(block(), "grpo")
    found = audit_problem(config, problems(config)[BANDIT], SEED, lambda *_: None)
    assert found["total_variation_to_resting_point"] is None
    assert found["total_variation"] > 0.02
    words = " ".join(run_module.remarks(config, {}))
    assert all(key in words for key in ("kl.estimator k3", "advantage grpo", "loss_average answer_means"))


def test_the_command_audits_methods_of_ppos_loop_only() -> None:
    done = CliRunner().invoke(app, ["audit", "--params", str(ROOT / "params.yaml"), "--method", "dpo"])
    assert done.exit_code == 2
    assert "--method dpo: the audit is for ppo, hybrid, reinforce, rloo, grpo" in done.stderr


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


# changed settings, and refused ones


def test_only_what_a_small_problem_forces_is_changed() -> None:
    config = block(batch_size=128, kl__horizon=200, optimizer__warmup_steps=100, critic__warmup_steps=30)
    assert set(changed_keys(config)) == {
        "steps",
        "batch_size",
        "micro_batch_size",
        "micro_batch_tokens",
        "learning_rate",
        "max_new_tokens",
        "kl.horizon",
        "critic.learning_rate",
        "critic.warmup_steps",
        "optimizer.warmup_steps",
        "score.missing_eos_penalty",
    }
    penalties = changed_keys(config)["score.missing_eos_penalty"]
    assert penalties == {"yours": 1.0, "audit": {"bandit": 0.0, "two_tokens": 1.0, "three_tokens": 1.0}}


def test_what_the_tiny_models_do_not_have_is_replaced() -> None:
    """Names of layers of the user's architecture, and an engine that needs a GPU."""
    config = block(lora={"rank": 2, "target_modules": ["q_proj"]}, engine="transformers_continuous")
    problem = problems(config)[TWO]
    assert build_trainer(config, problem, SEED).models.adapters
    changed = changed_keys(config)
    assert {"lora.target_modules", "engine"} <= set(changed)


@pytest.mark.slow
def test_grpo_with_the_kl_in_the_loss_ends_at_its_resting_point() -> None:
    """β is then per unit of the normalised advantage: σ·β in units of the score."""
    config = block(
        advantage="grpo", samples_per_prompt=4, whiten_advantages=False, kl__penalty="loss", kl__estimator="full"
    )
    found = audit_problem(config, problems(config)[BANDIT], SEED, lambda *_: None)
    assert found["total_variation_between"] > 0.3
    assert found["total_variation_to_resting_point"] <= 0.1
    assert found["gradient_bias"]["reference"]["critic"]["cosine"] > 0.999
    assert found["gradient_bias"]["half_way"]["critic"]["relative_l2"] > 0.1


@pytest.mark.parametrize(("minibatches", "epochs"), [(1, 1), (3, 2), (16, 4), (600, 1)])
def test_any_division_of_the_batch_fits(minibatches: int, epochs: int) -> None:
    config = block(batch_size=minibatches * 2, minibatches=minibatches, ppo_epochs=epochs)
    for problem in problems(config):
        assert forced(config, problem).minibatches == minibatches


@pytest.mark.slow
def test_rule_08_refused_combinations_are_the_configurations_own(canonical: dict[str, Any]) -> None:
    refused = canonical["refused"]
    for one in refused:
        with pytest.raises(ValidationError) as caught:
            PPOConfig.model_validate(merged(PARAMS["ppo"], nested(one["combination"])))
        assert one["reason"] in str(caught.value)
    kinds = [tuple(one["combination"].values()) for one in refused]
    assert {("reward", "k2"), ("reward", "k3"), ("reward", "full"), ("loss", "k1"), ("loss", "k3")} <= set(kinds)
    assert not {("reward", "k1"), ("loss", "rho_k1"), ("loss", "rho_k3"), ("loss", "k2"), ("loss", "full")} & set(kinds)
    assert {"top_k", "top_p", "min_p", "min_new_tokens", "repetition_penalty"} <= {
        key for one in refused for key in one["combination"]
    }


def test_a_combination_that_is_allowed_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refused_module, "combinations", lambda: [{"kl.estimator": "k1"}, {"kl.estimator": "k2"}])
    assert [one["combination"] for one in refused_combinations(block())] == [{"kl.estimator": "k2"}]


@pytest.mark.slow
def test_refused_combinations_miss_the_optimum_and_k1_does_not(canonical: dict[str, Any]) -> None:
    measured = {tuple(one["combination"].values()): one["measured"] for one in canonical["refused"]}
    allowed = Bandit().measure({"kl.penalty": "reward", "kl.estimator": "k1"})
    assert allowed is not None
    assert allowed["total_variation"] < 0.002
    assert allowed["gradient_bias"] < 1e-9
    for kind in ("k2", "k3", "full"):
        assert measured["reward", kind]["total_variation"] > 0.14
        assert measured["reward", kind]["gradient_bias"] > 0.5
    for kind in ("k1", "k3"):
        assert measured["loss", kind]["total_variation"] > 0.14


def test_settings_that_move_the_optimum_are_named() -> None:
    config = block(entropy_coef=0.01, temperature=0.7, gamma=0.9, lam=0.9, score__normalise=True)
    words = " ".join(run_module.remarks(config, {}))
    for key in ("entropy_coef 0.01", "temperature 0.7", "gamma 0.9", "lam 0.9", "score.normalise"):
        assert key in words
    assert not run_module.remarks(block(score__missing_eos_penalty=0.0), {})


# the command


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two PPO steps a problem, and two updates of the bandit."""
    monkeypatch.setattr(refused_module, "STEPS", 2)
    monkeypatch.setattr(problems_module, "FEWEST_STEPS", 2)
    monkeypatch.setattr(problems_module, "MOST_STEPS", 2)


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_the_command_prints_one_json_object() -> None:
    done = CliRunner().invoke(app, ["audit", "--json", "--params", str(ROOT / "params.yaml")])
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert {"total_variation", "gradient_bias", "problems", "refused", "changed_keys", "remarks"} <= set(found)
    assert "three_tokens step 2/2" in done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_the_command_prints_the_same_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    done = CliRunner().invoke(app, ["audit", "--params", str(ROOT / "params.yaml")])
    assert done.exit_code == 0, done.stderr
    for words in ("total variation to π*", "gradient bias", "kl.penalty: reward, kl.estimator: k2", "max_new_tokens"):
        assert words in done.stdout


def test_a_bad_parameter_file_is_one_line_and_exit_2(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    text = (ROOT / "params.yaml").read_text(encoding="utf-8")
    bad.write_text(text.replace("clip_ratio: 0.2", "clip_ratio: -1"), encoding="utf-8")
    for path, words in ((bad, "ppo.clip_ratio"), (tmp_path / "nowhere.yaml", "file not found")):
        done = CliRunner().invoke(app, ["audit", "--params", str(path)])
        assert done.exit_code == 2
        assert done.stdout == ""
        assert words in done.stderr
        assert str(path) in done.stderr
        assert done.stderr.count("\n") == 1
