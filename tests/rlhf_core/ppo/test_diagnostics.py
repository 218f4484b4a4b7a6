"""`diagnostics.py`: every column by its definition, and none of them sees padding."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.ppo.advantages import compute_gae, reward_to_go
from rlhf_core.ppo.diagnostics import repeated_ngram_share, step_row
from rlhf_core.ppo.health import Monitor
from rlhf_core.ppo.plan import StepPlan
from rlhf_core.ppo.rollout import Credit, Rollout, Scores, to_rows
from rlhf_core.ppo.statistics import UpdateStatistics, explained_variance
from tests.rlhf_core.conftest import tiny_ppo_values

CPU = torch.device("cpu")
RESPONSES = [[11, 12, 1], [13]]
MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
CONFIG = PPOConfig(**tiny_ppo_values())


def table(first: list[float], second: list[float], padding: float) -> torch.Tensor:
    rows = to_rows([first, second], 3, CPU)
    return torch.where(MASK.bool(), rows, padding)


def row(padding: float = 0.0, gold: list[float] | None = None, **parts: list[float]) -> dict[str, Any]:
    """A step on known numbers. On padding the models' outputs are `padding`, and the credit is 0."""
    rollout = Rollout(
        prompts=[[], []],
        prompt_ids=[[3], [3]],
        response_ids=RESPONSES,
        texts=["a", "b"],
        ended=torch.tensor([True, False]),
        mask=MASK,
        engine_logprobs=table([-1.0, -2.0, -3.0], [-1.5], padding),
        old_logprobs=table([-1.0, -2.0, -3.2], [-1.5], padding),
        ref_logprobs=table([-1.5, -2.0, -3.0], [-2.5], padding),
        ref_kl=table([0.25, 0.5, 0.125], [1.0], 0.0),
        old_entropy=table([1.0, 2.0, 2.5], [0.5], padding),
        old_values=table([0.0, 1.0, 2.0], [3.0], padding),
    )
    credit = Credit(
        kl=table([0.5, 0.0, -0.2], [1.0], 0.0),
        rewards=table([-0.05, 0.0, 2.02], [-1.1], 0.0),
        advantages=table([1.0, -1.0, 2.0], [-4.0], 0.0),
        returns=table([1.0, 2.0, 2.0], [3.0], 0.0),
        weights=table([9.0, 9.0, 9.0], [9.0], 0.0),
        scale=1.0,
        trained=torch.tensor([True, True]),
    )
    scores = Scores(raw=torch.tensor([10.0, 20.0]), used=torch.tensor([2.0, -1.0]), gold=gold, parts=parts)
    statistics = UpdateStatistics(
        sums={"entropy": 6.0, "clip_fraction": 2.0}, tokens=4.0, ratio_max=1.5, optimizer_steps=3
    )
    statistics.grad_norms["policy"] += [1.0, 2.0]
    plan = StepPlan(step=6, trains_policy=True, epochs=1, minibatches=1)
    return step_row(CONFIG, plan, rollout, scores, credit, statistics, 1e-4, 0.1)


def test_rewards_and_scores_by_hand() -> None:
    found = row(gold=[1.0, 4.0])
    assert (found["step"], found["kl_coef"], found["learning_rate"]) == (7, 0.1, 1e-4)
    assert found["reward_raw"] == 15.0
    assert found["score"] == 0.5
    assert found["reward_shaped"] == pytest.approx((1.97 - 1.1) / 2)
    assert found["min_token_reward"] == pytest.approx(-1.1)
    assert found["gold"] == 2.5
    assert row(gold=None)["gold"] is None


def test_parts_are_means_and_the_judging_model_has_its_correlation() -> None:
    found = row(std=[0.5, 1.0], judge=[3.0, 1.0])
    assert (found["reward/std"], found["reward/judge"], found["judge_correlation"]) == (0.75, 2.0, pytest.approx(-1))
    assert row(judge=[1.0, 1.0])["judge_correlation"] is None
    assert not {"judge_correlation", "reward/judge"} & row(std=[0.5, 1.0]).keys()


def test_rule_08_failure_06_kl_is_per_sequence_with_every_estimator() -> None:
    """k1, k2, k3 and the exact one side by side."""
    found = row()
    assert found["kl_k1"] == pytest.approx((0.3 + 1.0) / 2)
    assert found["kl_k2"] == pytest.approx((0.5**2 + 0.2**2 + 1.0) / 2 / 2)
    assert found["kl"] == pytest.approx((0.875 + 1.0) / 2)
    k3 = [math.exp(-d) - 1 + d for d in (0.5, 0.0, -0.2, 1.0)]
    assert found["kl_k3"] == pytest.approx((sum(k3[:3]) + k3[3]) / 2, abs=1e-6)


def test_lengths_and_ends_by_hand() -> None:
    found = row()
    assert found["response_tokens_mean"] == 2.0
    assert found["response_tokens_max"] == 3
    assert found["missing_eos_share"] == 0.5


def test_rule_07_the_engine_mismatch_is_measured() -> None:
    found = row()
    assert found["engine_mismatch_max"] == pytest.approx(0.2, abs=1e-6)
    assert found["engine_mismatch_k3"] == pytest.approx((math.exp(-0.2) - 1 + 0.2) / 4, abs=1e-6)


def test_credit_and_update_by_hand() -> None:
    found = row()
    assert found["advantage_abs"] == 2.0
    to_go, values = torch.tensor([1.97, 2.02, 2.02, -1.1]), torch.tensor([0.0, 1.0, 2.0, 3.0])
    expected = 1 - (to_go - values).var(unbiased=False) / to_go.var(unbiased=False)
    assert found["explained_variance"] == pytest.approx(expected.item())
    assert found["entropy"] == 1.5
    assert found["grad_norm_policy"] == 1.5
    assert (found["ratio_max"], found["optimizer_steps"]) == (1.5, 3)


@pytest.mark.parametrize("padding", [1.0, 1e30, math.nan, math.inf])
def test_rule_18_failure_13_no_statistic_includes_padding(padding: float) -> None:
    assert row(padding) == row(0.0)


def test_repeated_ngrams_by_hand() -> None:
    """1 2 3 | 2 3 1 | 3 1 2 | 1 2 3 again; nothing counts across responses."""
    assert repeated_ngram_share([[1, 2, 3, 1, 2, 3]]) == 0.25
    assert repeated_ngram_share([[1, 2, 3], [1, 2, 3]]) == 0.0
    assert repeated_ngram_share([[1, 1, 1, 1, 1], [1, 2]]) == pytest.approx(2 / 3)
    assert repeated_ngram_share([[1, 1]]) == 0.0
    assert repeated_ngram_share([[1, 1, 2]], n=1) == pytest.approx(1 / 3)


@pytest.mark.parametrize("lam", [0.95, 1.0])
def test_rule_28_a_critic_of_random_numbers_explains_nothing_and_is_reported(
    lam: float, ppo_values: Callable[..., dict[str, Any]]
) -> None:
    """One random number per answer of 384 tokens. The returns of λ < 1 contain the critic's own values: against them it
    would explain 94%, and no run could be reported as diverging."""
    torch.manual_seed(3)
    rows, time = 64, 384
    mask = torch.ones(rows, time)
    values = torch.randn(rows, 1).expand(rows, time).contiguous()
    rewards = torch.zeros(rows, time)
    rewards[:, -1] = torch.randn(rows)
    advantages, returns = compute_gae(rewards, torch.nn.functional.pad(values, (0, 1)), 1.0, lam, mask)
    explained = explained_variance(values, reward_to_go(rewards, mask), mask).item()
    assert explained < -0.5
    if lam < 1:
        assert explained_variance(values, returns, mask).item() > 0.5
    zeros = torch.zeros(rows, time)
    rollout = Rollout(
        [[]] * rows, [[3]] * rows, [[11] * time] * rows, [""] * rows, mask[:, 0].bool(), mask,
        *[zeros] * 5, old_values=values,
    )  # fmt: skip
    credit = Credit(zeros, rewards, advantages, returns, advantages, 1.0, mask[:, 0].bool())
    scores = Scores(rewards[:, -1], rewards[:, -1], None)
    plan = StepPlan(step=6, trains_policy=True, epochs=1, minibatches=1)
    update = UpdateStatistics(1.0, {"entropy": 1.0, "clip_fraction": 0.1})
    update.grad_norms |= {"policy": [1.0], "critic": [1.0]}
    found = step_row(CONFIG, plan, rollout, scores, credit, update, 1e-4, 0.1)
    assert found["explained_variance"] == pytest.approx(explained)
    monitor = Monitor(PPOConfig.model_validate(ppo_values()))
    for step in range(1, 61):
        monitor.observe({**found, "step": step, "value_loss": 1.0 if step <= 30 else 1e3})
    assert "diverging_critic" in [alert.name for alert in monitor.alerts]
