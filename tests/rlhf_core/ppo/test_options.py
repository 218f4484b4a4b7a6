"""The options of the update on whole PPO steps of tiny models: each has its documented effect."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import PreTrainedModel

from rlhf_core.data.scorer import Answers
from rlhf_core.models.batch import TokenBatch, pad_batch, response_logits, state_values
from rlhf_core.models.hf import map_scalar
from rlhf_core.ppo.advantages import compute_group_advantages
from rlhf_core.ppo.kl import estimate_kl
from rlhf_core.ppo.objective import Pass, losses_of
from rlhf_core.ppo.plan import StepPlan
from rlhf_core.ppo.scoring import ScoreNormalisation
from rlhf_core.ppo.statistics import approx_kl, explained_variance
from rlhf_core.ppo.trainer import PPOTrainer, RatioError
from tasks.params.variant import PUBLISHED
from tests.rlhf_core.ppo.stepping import credit_of, first_gradients, update

MakeTrainer = Callable[..., PPOTrainer]
ONE = {"ppo_epochs": 1, "minibatches": 1}
AVERAGES = ("tokens", "answer_means", "answer_sums")


def weights(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def forward_of(trainer: PPOTrainer, rows: list[int]) -> Pass:
    rollout = trainer.rollout()
    credit = credit_of(trainer, rollout)
    return Pass.over(rollout.batch(rows, trainer.pad_id), rows, rollout, credit, trainer.models, trainer.config)


def chosen_logprobs(trainer: PPOTrainer, batch: TokenBatch) -> torch.Tensor:
    """log π of the sampled tokens [B, T], at temperature 1."""
    logprobs = trainer.models.read_policy(batch, lambda p: p.logits()).log_softmax(dim=-1)
    return batch.spread(logprobs.gather(1, batch.response_tokens[:, None])[:, 0])


@torch.no_grad()
def exact_kl(trainer: PPOTrainer) -> float:
    """KL(π ‖ π_ref) in nats per token, over samples of the current policy."""
    rollout = trainer.rollout()
    batch = rollout.batch(range(len(rollout.texts)), trainer.pad_id)
    logits = [response_logits(model, batch) for model in (trainer.models.policy, trainer.models.reference)]
    return (estimate_kl(*logits, "full").sum() / batch.mask.sum()).item()


def policy_after(trainer: PPOTrainer, steps: int = 1) -> torch.Tensor:
    for _ in range(steps):
        trainer.step()
    return weights(trainer.models.policy)


def test_rule_15_the_plain_policy_gradient_warm_up_is_one_epoch_and_one_minibatch(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(policy_gradient_steps=1)
    assert trainer.step()["optimizer_steps"] == 1
    assert trainer.step()["optimizer_steps"] == 4


def test_the_plain_policy_gradient_makes_the_step_of_ppo_without_a_second_look(make_trainer: MakeTrainer) -> None:
    """One epoch of one minibatch of PPO never leaves ratio 1."""
    plain = policy_after(make_trainer(policy_gradient_steps=1))
    ppo = policy_after(make_trainer(**ONE))
    assert torch.allclose(plain, ppo, atol=1e-6)
    assert not torch.equal(plain, weights(make_trainer().models.policy))


@pytest.mark.parametrize("kind", ["separate", "shared"])
def test_rule_15_in_the_critic_warm_up_only_the_critic_learns(kind: str, make_trainer: MakeTrainer) -> None:
    """Of a shared critic that is its head."""
    trainer = make_trainer(critic={"warmup_steps": 2, "kind": kind})
    learns = trainer.models.critic or trainer.models.head
    policy, critic = weights(trainer.models.policy), weights(learns)
    row = trainer.step()
    trainer.step()
    assert torch.equal(weights(trainer.models.policy), policy)
    assert not torch.equal(weights(learns), critic)
    assert (row["grad_norm_policy"], row["optimizer_steps"]) == (0.0, 4.0)
    trainer.step()
    assert not torch.equal(weights(trainer.models.policy), policy)


def test_the_warm_up_of_the_critic_takes_nothing_from_that_of_the_policy(make_trainer: MakeTrainer) -> None:
    """The critic first, in all its epochs; then the plain policy gradient; then PPO."""
    trainer = make_trainer(critic={"warmup_steps": 1}, policy_gradient_steps=1)
    rows = [trainer.step() for _ in range(3)]
    assert [row["optimizer_steps"] for row in rows] == [4.0, 1.0, 4.0]
    assert [(row["grad_norm_policy"] or 0) > 0 for row in rows] == [False, True, True]


def test_rule_21_the_warm_up_of_the_critic_uses_none_of_the_policys_schedule(make_trainer: MakeTrainer) -> None:
    """The policy's learning rates after two steps of the critic alone are those of a shorter run without them."""
    optimizer = {"warmup_steps": 2}
    alone = make_trainer(steps=4, optimizer=optimizer)
    after = make_trainer(steps=6, optimizer=optimizer, critic={"warmup_steps": 2})
    expected = [alone.step()["learning_rate"] for _ in range(4)]
    assert [after.step()["learning_rate"] for _ in range(6)] == [0.0, 0.0, *expected]


def test_rule_20_values_are_not_clipped_while_the_critic_warms_up(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(critic={"warmup_steps": 2})
    forward = forward_of(trainer, [0, 1])
    moved = replace(forward, values=forward.old_values + 9.0, returns=forward.old_values + 9.0)
    losses = [
        losses_of(moved, trainer.config, trainer.controller.coef, trains)["value_loss"] for trains in (False, True)
    ]
    assert losses[0].item() == 0
    assert losses[1].item() > 0


@pytest.mark.parametrize("kind", ["separate", "shared"])
def test_rule_20_the_gradient_of_a_warm_up_step_is_that_without_the_value_clip(
    kind: str, make_trainer: MakeTrainer
) -> None:
    """Of values that moved by 9 since the rollout, where the clip takes a part of the gradient."""
    found = {}
    for name, critic in {"warm-up": {"warmup_steps": 1}, "unclipped": {"clip_value": False}, "clipped": {}}.items():
        trainer = make_trainer(critic={"kind": kind, **critic})
        rollout = trainer.rollout()
        moved = replace(rollout, old_values=(rollout.old_values - 9.0) * rollout.mask)
        found[name] = first_gradients(trainer, moved, credit_of(trainer, rollout))
    assert torch.allclose(found["warm-up"]["critic"], found["unclipped"]["critic"], rtol=1e-5, atol=1e-7)
    assert (found["unclipped"]["critic"] - found["clipped"]["critic"]).norm() > 1
    assert not found["warm-up"]["policy"].any()
    assert found["unclipped"]["policy"].any()


def test_rule_22_the_kl_of_a_step_is_that_after_its_update(make_trainer: MakeTrainer) -> None:
    """With one optimizer step the KL before it is 0; the one after it is that of the new weights."""
    trainer = make_trainer(**ONE)
    rollout = trainer.rollout()
    means = update(trainer, rollout)
    batch = rollout.batch(range(len(rollout.texts)), trainer.pad_id)
    with torch.no_grad():
        new = chosen_logprobs(trainer, batch)
    expected = approx_kl(new, rollout.old_logprobs, rollout.mask).item()
    assert means["approx_kl"] == pytest.approx(0.0, abs=1e-9)
    assert means["update_kl"] == pytest.approx(expected, rel=1e-3)
    assert expected > 1e-6


def test_one_token_of_a_large_ratio_hardly_changes_the_kl_of_an_update(make_trainer: MakeTrainer) -> None:
    """k3 has ρ itself: a token that has become 270 times as likely would count for 263 nats."""
    trainer = make_trainer(**ONE)
    rollout, plan = trainer.rollout(), StepPlan.of(trainer.config, 0)
    real = sum(rollout.lengths)
    assert trainer.measure_kl(rollout, plan) == pytest.approx(0.0, abs=1e-9)
    rollout.old_logprobs[0, 0] -= math.log(270)
    assert 0 < trainer.measure_kl(rollout, plan) * real < 10
    rollout.old_logprobs[0, 0] += 2 * math.log(270)  # a token that has become rare counts in full
    assert trainer.measure_kl(rollout, plan) * real == pytest.approx(math.log(270) - 1, abs=0.01)


@pytest.mark.parametrize(("answers", "measured"), [(40, slice(0, 32)), (256, slice(0, 256, 8))])
def test_rule_22_the_kl_of_a_large_batch_is_measured_on_every_eighth_answer(
    answers: int, measured: slice, make_trainer: MakeTrainer
) -> None:
    """At least on 32 answers."""
    trainer = make_trainer(**ONE, batch_size=answers, micro_batch_size=64)
    rollout = trainer.rollout()
    with torch.no_grad():
        trainer.models.policy.get_input_embeddings().weight.mul_(1.1)
        batch = rollout.batch(range(answers), trainer.pad_id)
        kl = estimate_kl(rollout.old_logprobs, chosen_logprobs(trainer, batch), "k3", rollout.mask)
    expected = kl[measured].sum() / rollout.mask[measured].sum()
    found = trainer.measure_kl(rollout, StepPlan.of(trainer.config, 0))
    assert found == pytest.approx(expected.item(), rel=1e-4)


def test_rule_20_a_perfect_critic_in_the_unit_of_the_score_explains_the_returns(
    make_trainer: MakeTrainer, build_scalar: Callable[..., PreTrainedModel]
) -> None:
    """β = 0, γ = λ = 1, and a reward model that sees the score one token early: as it is, it is worse than a constant;
    in PPO's unit its explained variance is 1 at the last token."""
    critic = build_scalar(seed=3)

    def scorer(answers: Answers) -> list[float]:
        batch = pad_batch(answers.prompt_ids, answers.response_ids, pad_id=0)
        last = batch.mask.sum(dim=1).long() - 1
        return (5.0 + 3.0 * state_values(critic, batch)).gather(1, last[:, None])[:, 0].tolist()

    found = {}
    for unit in ("raw", "score"):
        trainer = make_trainer(
            scorer=scorer,
            normalisation=(7.0, 0.5),
            kl={"coef": 0.0},
            lam=1.0,
            score={"missing_eos_penalty": 0.0, "clip": 1e9},
        )
        map_scalar(trainer.models.critic, 3.0, 5.0)
        if unit == "score":
            map_scalar(trainer.models.critic, *ScoreNormalisation(7.0, 0.5).unit(trainer.config.score))
        rollout = trainer.rollout()
        credit = credit_of(trainer, rollout)
        ends = torch.nn.functional.pad(rollout.mask, (0, 1))[:, 1:] < rollout.mask
        found[unit] = explained_variance(rollout.old_values, credit.returns, ends).item()
    assert found["score"] == pytest.approx(1.0, abs=1e-4)
    assert found["raw"] < 0.8


@pytest.mark.parametrize("average", AVERAGES)
def test_the_average_of_the_loss_is_that_of_its_formula(make_trainer: MakeTrainer, average: str) -> None:
    """The gradient of one minibatch, for two sizes of micro-batches, against the formula on single answers."""
    found = []
    for micro in (3, 8):
        trainer = make_trainer(**ONE, loss_average=average, micro_batch_size=micro, entropy_coef=0.0, vf_coef=0.0)
        rollout = trainer.rollout()
        credit = credit_of(trainer, rollout)
        found.append(first_gradients(trainer, rollout, credit)["policy"])
    assert len(set(rollout.lengths)) > 1
    trainer.models.policy.zero_grad()
    answers = []
    for row, length in enumerate(rollout.lengths):
        batch = rollout.batch([row], trainer.pad_id)
        logprobs = chosen_logprobs(trainer, batch)[0]
        divisor = {"tokens": 1, "answer_means": length, "answer_sums": trainer.config.max_new_tokens}[average]
        answers.append(-(logprobs * credit.weights[row, :length]).sum() / divisor)
    total = torch.stack(answers).sum() / (sum(rollout.lengths) if average == "tokens" else len(answers))
    total.backward()
    expected = torch.cat([p.grad.flatten() for p in trainer.models.policy.parameters() if p.grad is not None])
    for gradient in found:
        assert torch.linalg.norm(gradient - expected) <= 1e-5 * torch.linalg.norm(expected)


def test_the_critic_learns_a_mean_over_tokens_however_the_policys_loss_is_averaged(make_trainer: MakeTrainer) -> None:
    norms = [make_trainer(**ONE, loss_average=average).step()["grad_norm_critic"] for average in AVERAGES]
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)


def test_grpo_takes_k3_in_the_loss_and_the_others_do_not(make_trainer: MakeTrainer) -> None:
    kl = {"penalty": "loss", "estimator": "k3"}
    trainer = make_trainer(advantage="grpo", samples_per_prompt=4, whiten_advantages=False, kl=kl)
    forward = forward_of(trainer, [0, 3])
    losses = losses_of(forward, trainer.config, trainer.controller.coef)
    expected = estimate_kl(forward.logprobs, forward.ref_logprobs, "k3", forward.batch.mask).sum()
    assert losses["kl_loss"].item() == pytest.approx(expected.item(), rel=1e-6)
    with pytest.raises(ValidationError, match="only advantage grpo"):
        make_trainer(kl=kl)


def test_rule_17_no_price_moves_while_the_policy_stands_still(make_trainer: MakeTrainer) -> None:
    """β stays in the critic's warm-up."""
    adaptive = {"controller": "adaptive", "target": 1e6, "horizon": 8}
    trainer = make_trainer(kl=adaptive, critic={"warmup_steps": 2})
    rows = [trainer.step() for _ in range(4)]
    assert [row["kl_coef"] for row in rows[:3]] == [0.1] * 3
    assert rows[3]["kl_coef"] < 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"critic": {"warmup_steps": 4}}, "takes all 4 steps"),
        *(
            (changes, "Extra inputs are not permitted")
            for changes in (
                {"objective": "kl_penalty"},
                {"step_price": {"coef": 1.0}},
                {"max_ratio": 2.0},
                {"whiten_rewards": True},
                {"score": {"scale": "running"}},
                {"kl": {"placement": "sequence_end"}},
            )
        ),
    ],
)
def test_settings_that_would_do_nothing_or_are_gone_are_refused(
    changes: dict[str, Any], message: str, make_trainer: MakeTrainer
) -> None:
    with pytest.raises(ValidationError, match=message):
        make_trainer(**changes)


def test_a_batch_without_differences_leaves_the_price_of_the_kl_alone(make_trainer: MakeTrainer) -> None:
    """Whitening divides the KL in the loss as it divides the advantages; by nothing where these are all equal."""
    options = {"advantage": "reinforce", "kl": {"penalty": "loss", "estimator": "k2"}, "scorer": lambda a: [1.0] * 8}
    norms = {
        white: make_trainer(whiten_advantages=white, score={"missing_eos_penalty": 0.0}, **options).step()[
            "grad_norm_policy"
        ]
        for white in (True, False)
    }
    assert norms[True] == pytest.approx(norms[False], rel=1e-3)


def test_rule_14_a_step_that_went_too_far_ends_early_and_is_marked(make_trainer: MakeTrainer) -> None:
    far = {"ppo_epochs": 4, "learning_rate": 0.03}
    whole = make_trainer(**far).step()
    assert (whole["optimizer_steps"], whole["stopped_early"]) == (8.0, 0.0)
    row = make_trainer(stop_kl=0.01, **far).step()
    assert row["stopped_early"] == 1.0
    assert 1 <= (row["optimizer_steps"] or 0) < 8
    assert (row["approx_kl"] or 0) < (whole["approx_kl"] or 0)


def test_rule_15_kl_in_the_loss_leaves_the_reward_alone(make_trainer: MakeTrainer) -> None:
    """Σ r = R, and the row still reports k1."""
    row = make_trainer(kl={"penalty": "loss", "estimator": "rho_k3", "coef": 0.5}).step()
    assert row["reward_shaped"] == pytest.approx(row["score"], abs=1e-5)
    assert (row["kl"] or 0) > 0.1
    assert (row["kl_loss"] or 0) > 0


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["rho_k1", "rho_k3", "k2", "full"])
def test_rule_15_kl_in_the_loss_pulls_to_the_reference(make_trainer: MakeTrainer, estimator: str) -> None:
    """With constant rewards only the KL penalty acts."""
    options: dict[str, Any] = {"scorer": lambda answers: [0.0] * len(answers.texts), "whiten_advantages": False}
    options |= {"entropy_coef": 0.0, "score": {"missing_eos_penalty": 0.0}, "learning_rate": 3e-3, "batch_size": 32}
    options |= {"steps": 100, "micro_batch_size": 32}
    trainer = make_trainer(kl={"penalty": "loss", "estimator": estimator, "coef": 1.0}, **options)
    before = exact_kl(trainer)
    for _ in range(20):
        trainer.step()
    assert exact_kl(trainer) < 0.85 * before


def test_rule_15_kl_in_the_loss_is_divided_by_the_deviation_of_the_advantages(make_trainer: MakeTrainer) -> None:
    for whitened in (True, False):
        trainer = make_trainer(kl={"penalty": "loss", "estimator": "full"}, whiten_advantages=whitened)
        forward = forward_of(trainer, [0, 3, 5])
        assert (forward.scale == 1.0) != whitened
        losses, without = (losses_of(forward, trainer.config, coef) for coef in (0.7, 0.0))
        added = losses["total_loss"] - without["total_loss"]
        reference = response_logits(trainer.models.reference, forward.batch)
        exact = estimate_kl(trainer.models.read_policy(forward.batch, lambda p: p.logits()), reference, "full").sum()
        assert losses["kl_loss"].item() == pytest.approx(exact.item(), rel=1e-5)
        assert added.item() == pytest.approx(0.7 * exact.item() / forward.scale, rel=1e-3)


def test_rule_07_the_cap_weighs_tokens_of_an_engine_that_differs(make_trainer: MakeTrainer) -> None:
    """Our own engine samples from π itself: there the weights are 1 and nothing changes."""
    plain, capped = (policy_after(make_trainer(importance_cap=cap)) for cap in (None, 2.0))
    assert torch.allclose(plain, capped, atol=1e-4)
    trainer = make_trainer(importance_cap=2.0)
    forward = forward_of(trainer, [0, 1, 2])
    mismatch = replace(forward, engine_logprobs=(forward.old_logprobs - 5.0) * forward.batch.mask)
    usual, doubled = (losses_of(f, trainer.config, trainer.controller.coef) for f in (forward, mismatch))
    assert doubled["policy_loss"].item() == pytest.approx(2 * usual["policy_loss"].item(), rel=1e-4)
    assert doubled["value_loss"].item() == usual["value_loss"].item()


def test_rule_15_the_dual_clip_reaches_the_loss(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(dual_clip=1.5)
    forward = forward_of(trainer, [0, 1])
    moved = replace(forward, old_logprobs=(forward.old_logprobs - 2.0) * forward.batch.mask)
    moved = replace(moved, advantages=-torch.ones_like(moved.advantages) * forward.batch.mask)
    losses = losses_of(moved, trainer.config, trainer.controller.coef)
    assert losses["policy_loss"].item() == pytest.approx(1.5 * forward.batch.mask.sum().item())


def test_rule_15_the_clip_ratio_reaches_the_loss(make_trainer: MakeTrainer) -> None:
    """A token of advantage 1 that has become e² times as likely counts 1 + ε."""
    trainer = make_trainer(clip_ratio=0.3)
    forward = forward_of(trainer, [0, 1])
    moved = replace(forward, old_logprobs=(forward.old_logprobs - 2.0) * forward.batch.mask)
    moved = replace(moved, advantages=forward.batch.mask)
    losses = losses_of(moved, trainer.config, trainer.controller.coef)
    assert losses["policy_loss"].item() == pytest.approx(-1.3 * forward.batch.mask.sum().item())


def test_rule_15_the_coefficients_weigh_the_parts_of_the_loss(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(vf_coef=0.7, entropy_coef=0.3)
    losses = losses_of(forward_of(trainer, [0, 3]), trainer.config, trainer.controller.coef)
    parts = losses["policy_loss"] + 0.7 * losses["value_loss"] - 0.3 * losses["entropy"]
    assert losses["total_loss"].item() == pytest.approx(parts.item(), rel=1e-5)


def test_rule_16_the_value_clip_can_be_switched_off(make_trainer: MakeTrainer) -> None:
    """Values that moved by 9 against returns that moved by as much: only the clip sees an error."""
    found = {}
    for clipped in (True, False):
        trainer = make_trainer(critic={"clip_value": clipped})
        forward = forward_of(trainer, [0, 1])
        moved = replace(forward, values=forward.old_values + 9.0, returns=forward.old_values + 9.0)
        losses = losses_of(moved, trainer.config, trainer.controller.coef)
        found[clipped] = losses["value_loss"].item() / forward.batch.mask.sum().item()
    assert found == {True: pytest.approx((9.0 - 0.3) ** 2, rel=1e-4), False: 0.0}


def test_rule_07_the_ratio_check_can_be_switched_off(make_trainer: MakeTrainer) -> None:
    for checked in (True, False):
        trainer = make_trainer(check_ratio=checked)
        rollout = trainer.rollout()
        credit = credit_of(trainer, rollout)
        other = replace(rollout, old_logprobs=(rollout.old_logprobs - 0.1) * rollout.mask)
        if checked:
            with pytest.raises(RatioError):
                update(trainer, other, credit)
        else:
            assert update(trainer, other, credit)["optimizer_steps"] == 4


def test_rule_03_samples_per_prompt_are_different_answers_side_by_side(make_trainer: MakeTrainer) -> None:
    rollout = make_trainer(samples_per_prompt=4).rollout()
    texts = [prompt[0]["content"] for prompt in rollout.prompts]
    assert texts == [texts[0]] * 4 + [texts[4]] * 4
    assert texts[0] != texts[4]
    for group in (rollout.response_ids[:4], rollout.response_ids[4:]):
        assert len({tuple(response) for response in group}) >= 3


def test_rule_30_published_methods_have_the_gradient_scale_of_ppo(make_trainer: MakeTrainer) -> None:
    """Up to a factor of 2, where the sums of whole answers would differ by their length; each row has the share of
    clipped steps."""
    limit = 2 * make_trainer().step()["grad_norm_policy"]
    rows = {}
    for name, settings in PUBLISHED.items():
        changes = {**settings, "samples_per_prompt": 4, "optimizer": {"max_grad_norm": limit}}
        rows[name] = make_trainer(**changes).step()
        assert rows[name]["grad_norm_policy"] < limit, name
        assert rows[name]["grad_clipped_share"] == 0.0
    clipped = make_trainer(**PUBLISHED["rloo"], samples_per_prompt=4, optimizer={"max_grad_norm": 1e-3}).step()
    assert clipped["grad_clipped_share"] == 1.0


@pytest.mark.parametrize("kind", ["reinforce", "rloo", "grpo", "dr_grpo"])
def test_rule_12_each_baseline_reaches_every_token(make_trainer: MakeTrainer, kind: Any) -> None:
    """The whole return less its baseline, the same for all tokens of an answer."""
    trainer = make_trainer(advantage=kind, samples_per_prompt=4, whiten_advantages=False)
    rollout = trainer.rollout()
    credit = credit_of(trainer, rollout)
    expected = compute_group_advantages(credit.rewards.sum(dim=1), kind, 4)
    assert expected.abs().min() > 0
    assert torch.equal(credit.weights, expected[:, None] * rollout.mask)


def test_rule_10_gamma_and_lambda_are_those_of_the_settings(make_trainer: MakeTrainer) -> None:
    """λ = 0: A_t = r_t + γ·V(s_{t+1}) − V(s_t)."""
    trainer = make_trainer(gamma=0.5, lam=0.0, whiten_advantages=False)
    rollout = trainer.rollout()
    credit = credit_of(trainer, rollout)
    following = torch.nn.functional.pad(rollout.old_values, (0, 1))[:, 1:]
    expected = (credit.rewards + 0.5 * following - rollout.old_values) * rollout.mask
    assert torch.allclose(credit.weights, expected, atol=1e-6)


def test_rule_04_responses_end_at_max_new_tokens(make_trainer: MakeTrainer) -> None:
    rollout = make_trainer(max_new_tokens=3).rollout()
    assert max(rollout.lengths) == 3
    assert not any(ended for ended, ids in zip(rollout.ended, rollout.response_ids, strict=True) if ids[-1] != 1)
