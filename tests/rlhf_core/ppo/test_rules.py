"""The rules of PPO (docs/rules.md) where they only show on whole phases, or need an argument of their own.

Every rule has a number, and every test of it has the number in its name: `pytest -k rule_07` runs them all. Most are in
the tests of a module (losses, advantages, sampling, batches …); tests/test_numbered.py checks that none is missing.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.data.scorer import Answers
from rlhf_core.models.batch import pad_batch, predict, response_logits, state_values
from rlhf_core.models.token_logprobs import logprobs_and_entropy
from rlhf_core.ppo.kl import KLKind, estimate_kl
from rlhf_core.ppo.rewards import shape_rewards
from rlhf_core.ppo.trainer import PPOTrainer
from rlhf_core.training import state as checkpoint
from rlhf_core.training.checkpoints import Checkpoints
from tests.rlhf_core.ppo.stepping import credit_of, passes

MakeTrainer = Callable[..., PPOTrainer]
Build = Callable[..., PreTrainedModel]
SaysPad = Callable[[PPOTrainer], PPOTrainer]
PAD = 0


def constant(score: float) -> Callable[[Answers], list[float]]:
    return lambda answers: [score] * len(answers.texts)


# rollout


def test_rule_00_a_sampled_pad_token_is_rewarded_and_trained_like_any_other(
    make_trainer: MakeTrainer, says_pad: SaysPad
) -> None:
    trainer = says_pad(make_trainer(batch_size=64))
    rollout = trainer.rollout()
    credit = credit_of(trainer, rollout)
    places = [(row, t) for row, ids in enumerate(rollout.response_ids) for t, token in enumerate(ids) if token == PAD]
    assert len(places) >= 10
    assert any(t < len(rollout.response_ids[row]) - 1 for row, t in places)
    assert rollout.mask.sum(dim=1).tolist() == rollout.lengths
    for table in (rollout.mask, rollout.old_logprobs, rollout.ref_logprobs, rollout.old_values, credit.rewards):
        assert all(table[place] != 0 for place in places)
    assert all(credit.weights[place] != 0 for place in places)


def test_rule_00_batch_size_counts_responses_whatever_the_minibatches(make_trainer: MakeTrainer) -> None:
    for minibatches, micro in ((1, 8), (2, 3), (4, 1)):
        trainer = make_trainer(minibatches=minibatches, micro_batch_size=micro)
        rollout = trainer.rollout()
        plan = passes(trainer, rollout, 0)
        assert len(rollout.response_ids) == 8
        assert sorted(row for minibatch in plan for rows in minibatch for row in rows) == list(range(8))


def test_rule_05_logits_are_made_for_response_positions_only(kind: str, build_lm: Build) -> None:
    """The output layer sees the positions that predict a response token, and no other."""
    model = build_lm(kind)
    seen: list[int] = []
    batch = pad_batch([[3, 9, 4], [3, 8, 7, 6, 5, 11, 12, 13, 4]], [[20, 21, 1], [30]], PAD)
    predict(model, batch)  # examines the model
    model.get_output_embeddings().register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[1]))
    assert response_logits(model, batch).shape == (4, model.config.vocab_size)
    assert seen == [4]


def gradient(model: PreTrainedModel, value: Tensor) -> Tensor:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(value, parameters, allow_unused=True)
    return torch.cat([g.flatten() for g in found if g is not None])


@pytest.mark.parametrize("more", [1, 5, 40])
def test_rule_06_the_amount_of_left_padding_changes_no_logprob_no_value_and_no_gradient(
    kind: str, more: int, build_lm: Build, build_scalar: Build
) -> None:
    """One response alone, and beside a prompt that is longer by so many tokens."""
    policy, critic = build_lm(kind), build_scalar(kind)
    prompt, response = [3, 9, 14, 4], [20, 21, 22, 23, 24, 1]
    long = [3, *range(5, 5 + more), *prompt[1:]]
    outcomes = []
    for prompts, responses in (([prompt], [response]), ([prompt, long], [response, [30]])):
        batch = pad_batch(prompts, responses, PAD)
        logprobs = logprobs_and_entropy(predict(policy, batch), batch.response_tokens)[0][: len(response)]
        values = state_values(critic, batch)[0]
        gradients = gradient(policy, logprobs.sum()), gradient(critic, values[: len(response)].sum())
        outcomes.append((logprobs, values, gradients))
    (alone, value_alone, slopes_alone), (together, value_together, slopes_together) = outcomes
    assert (together - alone).abs().max() <= 1e-5
    assert (value_together - value_alone).abs().max() <= 1e-5
    for one, other in zip(slopes_alone, slopes_together, strict=True):
        assert (one - other).norm() / one.norm() <= 1e-5


def test_rule_07_the_old_logprobs_stay_while_the_policy_moves(make_trainer: MakeTrainer) -> None:
    """Read once a step: after four optimiser steps they are what they were, and no longer the policy's."""
    trainer = make_trainer(learning_rate=1e-2)
    rollout = trainer.rollout()
    before = rollout.old_logprobs.clone()
    trainer.step(rollout)
    assert torch.equal(rollout.old_logprobs, before)
    batch = rollout.batch(range(8), trainer.pad_id)
    now = logprobs_and_entropy(predict(trainer.models.policy, batch), batch.response_tokens)[0]
    assert (batch.spread(now) - before).abs().max() > 1e-2


# reward and advantage


ARMS, BETA = 16, 0.5


def bandit() -> tuple[Tensor, Tensor, Tensor]:
    """Responses of one token: log π_ref, the score of each, and log π* = log π_ref + R/β − log Z."""
    generator = torch.Generator().manual_seed(8)
    reference = torch.randn(ARMS, generator=generator, dtype=torch.float64).log_softmax(0)
    scores = torch.randn(ARMS, generator=generator, dtype=torch.float64)
    return reference, scores, (reference + scores / BETA).log_softmax(0)


def expected_gradient(theta: Tensor, reference: Tensor, scores: Tensor, kind: KLKind) -> Tensor:
    """Of the plain policy gradient with the KL in the reward, over all responses, each with its probability."""
    logprobs = theta.log_softmax(0)
    if kind == "full":
        kl = estimate_kl(theta.detach(), reference, "full").expand(ARMS)
    else:
        kl = estimate_kl(logprobs.detach(), reference, kind)
    rewards = shape_rewards(scores, kl[:, None], torch.ones(ARMS, 1), BETA)
    shares = logprobs.detach().exp()[:, None]
    loss = -(shares * rewards * logprobs[:, None]).sum()
    return torch.autograd.grad(loss, theta)[0]


def test_rule_08_only_k1_in_the_reward_is_at_rest_at_the_optimum() -> None:
    """On a bandit of 16 arms, exactly: at π* = π_ref·exp(R/β)/Z the gradient is 0 with k1 and with no other."""
    reference, scores, optimum = bandit()
    slopes = {
        kind: expected_gradient(optimum.clone().requires_grad_(), reference, scores, kind).norm().item()
        for kind in ("k1", "k2", "k3", "full")
    }
    assert slopes["k1"] < 1e-12
    assert min(slopes[kind] for kind in ("k2", "k3", "full")) > 0.05


def test_rule_12_the_normalisation_is_frozen_and_raw_scores_are_shown(make_trainer: MakeTrainer) -> None:
    """The same raw score is the same reward at every step, however the policy and its other scores move."""
    trainer = make_trainer(
        scorer=constant(13.0), normalisation=(10.0, 2.0), learning_rate=1e-2, score={"missing_eos_penalty": 0.0}
    )
    rows = [trainer.step() for _ in range(3)]
    assert [row["reward_raw"] for row in rows] == [13.0] * 3
    assert [row["score"] for row in rows] == [1.5] * 3
    assert (trainer.scoring.source.normalisation.mean, trainer.scoring.source.normalisation.std) == (10.0, 2.0)


# update


def test_rule_15_plain_k1_has_no_expected_gradient_and_plain_k3_that_of_the_other_kl() -> None:
    """Why they are refused as losses: over all actions, exactly."""
    torch.manual_seed(5)
    theta, reference = torch.randn(2, 6, dtype=torch.float64).unbind()
    theta.requires_grad_()
    logprobs, ref_logprobs = theta.log_softmax(0), reference.log_softmax(0)
    shares = logprobs.detach().exp()

    def slope(value: Tensor) -> Tensor:
        return torch.autograd.grad(value, theta, retain_graph=True)[0]

    forward = slope((logprobs.exp() * (logprobs - ref_logprobs)).sum())
    backward = slope((ref_logprobs.exp() * (ref_logprobs - logprobs)).sum())
    k1, k3 = (slope((shares * estimate_kl(logprobs, ref_logprobs, kind)).sum()) for kind in ("k1", "k3"))
    assert k1.abs().max() < 1e-12
    assert torch.allclose(k3, backward, atol=1e-12)
    assert (forward - backward).norm() > 0.1


# state


RESUMED: dict[str, dict[str, Any]] = {
    "warm-ups": {"critic": {"warmup_steps": 1}, "policy_gradient_steps": 1},
    "adaptive": {"kl": {"controller": "adaptive", "target": 50.0}},
    "raw scores": {"score": {"normalise": False}},
    "full KL in the loss": {"kl": {"penalty": "loss", "estimator": "full"}},
    "stops": {"stop_kl": 1e-4, "dual_clip": 3.0, "importance_cap": 2.0},
}


@pytest.mark.chosen("warm-ups", "adaptive", "stops")
@pytest.mark.parametrize("options", RESUMED.values(), ids=RESUMED)
def test_rule_19_a_resume_after_any_step_ends_in_the_same_bytes(
    make_trainer: MakeTrainer, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Also where the models in memory are others than those that were saved, and the global generator has moved."""
    whole = make_trainer(**options)
    checkpoints, expected = [], []
    for step in (1, 2, 3):
        expected.append(whole.step())
        folder = tmp_path / str(step)
        folder.mkdir()
        checkpoint.save(Checkpoints(folder), step, whole.state_dict())
        checkpoints.append(folder)
    end = copy.deepcopy(whole.state_dict())
    for done, folder in enumerate(checkpoints[:2], start=1):
        torch.manual_seed(done)
        other = make_trainer(**options)
        with torch.no_grad():
            for parameter in (*other.models.policy.parameters(), *other.models.critic.parameters()):
                parameter.add_(1.0)
        other.load_state_dict(checkpoint.load(Checkpoints(folder)) or {})
        assert [other.step() for _ in range(3 - done)] == expected[done:]
        torch.testing.assert_close(other.state_dict(), end, rtol=0, atol=0)
