"""`benchmarks/gradient_variance.py`: its running sums are the covariance, and a baseline does what it is for."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from rlhf_core.ppo.trainer import PPOTrainer
from tests.conftest import benchmark

MakeTrainer = Callable[..., PPOTrainer]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return benchmark("gradient_variance")


def test_running_sums_are_mean_and_covariance(script: ModuleType) -> None:
    vectors = torch.randn(12, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 2.0
    moments = script.Moments()
    for vector in vectors:
        moments.add(vector)
    assert moments.mean_square == pytest.approx(vectors.mean(dim=0).square().sum().item())
    assert moments.trace == pytest.approx(torch.cov(vectors.T).trace().item())


def test_baselines_lower_the_variance_of_rewards_that_are_far_from_0(
    script: ModuleType, make_trainer: MakeTrainer
) -> None:
    """All answers get about 5; the differences are small. With mean 0 a baseline gains nothing."""
    settings = {"samples_per_prompt": 4, "batch_size": 32, "kl": {"coef": 0.0}}
    settings |= {"score": {"normalise": False, "missing_eos_penalty": 0.0}}
    for offset, helps in ((5.0, True), (0.0, False)):

        def score(answers: object, offset: float = offset) -> list[float]:
            return [offset + (-1.0) ** i for i in range(len(answers.texts))]  # type: ignore[attr-defined]

        trainer = make_trainer(scorer=score, **settings)
        rollout = trainer.rollout()
        found = script.compare(trainer, rollout, script.advantages_of(trainer, rollout))
        assert found["no baseline"]["variance"] == 1.0
        assert (found["REINFORCE"]["variance"] < 0.2) == helps
        assert (found["RLOO"]["variance"] < 0.3) == helps


def test_the_mean_of_all_gradients_is_the_gradient_of_the_batch(script: ModuleType, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(samples_per_prompt=2)
    rollout = trainer.rollout()
    weights = script.advantages_of(trainer, rollout)
    parameters = trainer.models.trained()["policy"]
    rows = range(len(rollout.response_ids))
    single = sum(script.gradients(trainer, rollout, row, weights)["RLOO"] for row in rows)
    batch = rollout.batch(list(rows), trainer.pad_id)
    predictions, _ = trainer.models.read(batch, lambda p: p)
    chosen = predictions.logits().log_softmax(dim=-1).gather(1, batch.response_tokens[:, None])[:, 0]
    whole = torch.autograd.grad(-(weights["RLOO"] * batch.spread(chosen)).sum(), parameters)
    assert torch.allclose(single, torch.cat([g.flatten() for g in whole]), atol=1e-3)
