"""The update of a step: the gradient of the one big batch, counted steps, clipping per model, and the stops that
refuse to go on."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rlhf_core.errors import NonFiniteError
from rlhf_core.models import token_logprobs
from rlhf_core.models.batch import predict, state_values
from rlhf_core.models.token_logprobs import logprobs_and_entropy
from rlhf_core.ppo.losses import compute_ppo_total_loss
from rlhf_core.ppo.rollout import Credit, Rollout
from rlhf_core.ppo.statistics import UpdateStatistics
from rlhf_core.ppo.trainer import FIRST_RATIO_TOLERANCE, PPOTrainer, RatioError, require_same_policy
from tests.rlhf_core.ppo.stepping import credit_of, first_gradients, passes, update

MakeTrainer = Callable[..., PPOTrainer]


def experience(trainer: PPOTrainer) -> tuple[Rollout, Credit]:
    rollout = trainer.rollout()
    return rollout, credit_of(trainer, rollout)


def test_gradients_are_computed_with_strictly_deterministic_kernels(make_trainer: MakeTrainer) -> None:
    """Those of attention on CUDA have no equal bytes where torch would only warn."""
    trainer, strict = make_trainer(), []
    for parameter in trainer.models.policy.parameters():
        parameter.register_hook(lambda _: strict.append(not torch.is_deterministic_algorithms_warn_only_enabled()))
    rollout, credit = experience(trainer)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        update(trainer, rollout, credit)
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert strict
    assert all(strict)


def older(rollout: Rollout, change: float = 0.3) -> Rollout:
    """The rollout as if the policy and the critic had moved since: some ratios and values are clipped."""
    torch.manual_seed(0)
    noise, other = (change * torch.randn_like(rollout.mask) * rollout.mask for _ in range(2))
    return replace(rollout, old_logprobs=rollout.old_logprobs + noise, old_values=rollout.old_values + other)


def gradient(model: PreTrainedModel) -> torch.Tensor:
    found = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(found)


def weights(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def of_the_big_batch(trainer: PPOTrainer, rollout: Rollout, credit: Credit) -> dict[str, torch.Tensor]:
    """The same, from one forward pass over the rows in another order and a mean over all real tokens."""
    config = trainer.config
    rows = [i for part in passes(trainer, rollout)[0] for i in part][::-1]
    for model in (trainer.models.policy, trainer.models.critic):
        model.zero_grad()
    batch = rollout.batch(rows, trainer.pad_id)
    found = logprobs_and_entropy(predict(trainer.models.policy, batch), batch.response_tokens)
    logprobs, entropy = map(batch.spread, found)
    compute_ppo_total_loss(
        logprobs,
        rollout.old_logprobs[rows, : batch.time],
        credit.weights[rows, : batch.time],
        state_values(trainer.models.critic, batch),
        credit.returns[rows, : batch.time],
        None,
        config.clip_ratio,
        config.vf_coef,
        config.entropy_coef,
        mask=batch.mask,
        old_values=rollout.old_values[rows, : batch.time],
        value_clip_ratio=config.critic.value_clip,
        entropy=entropy,
    )["total_loss"].backward()
    return {"policy": gradient(trainer.models.policy), "critic": gradient(trainer.models.critic)}


def test_rule_13_micro_batches_give_the_gradient_of_the_one_big_batch(kind: str, make_trainer: MakeTrainer) -> None:
    """Also known failure 10: no mean of means."""
    trainer = make_trainer(kind, batch_size=16)
    rollout, credit = experience(trainer)
    assert len(set(rollout.lengths)) > 1
    rollout = older(rollout)
    expected = of_the_big_batch(trainer, rollout, credit)
    for micro in (1, 3, 8):
        found = first_gradients(trainer, rollout, credit, micro_batch_size=micro)
        for name, reference in expected.items():
            assert (found[name] - reference).norm() / reference.norm() <= 1e-5, (name, micro)


@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 1), (2, 4), (3, 2)])
def test_rule_14_failure_02_optimizer_steps_are_epochs_times_minibatches(
    make_trainer: MakeTrainer, epochs: int, minibatches: int
) -> None:
    trainer = make_trainer(ppo_epochs=epochs, minibatches=minibatches, micro_batch_size=1)
    counts = dict.fromkeys(trainer.optimizers, 0)

    def counter(name: str) -> Callable[..., None]:
        def count(*_: Any) -> None:
            counts[name] += 1

        return count

    for name, optimizer in trainer.optimizers.items():
        optimizer.register_step_post_hook(counter(name))
    row = trainer.step()
    assert counts == {"policy": epochs * minibatches, "critic": epochs * minibatches}
    assert row["optimizer_steps"] == epochs * minibatches


def test_gradients_do_not_leak_into_the_next_minibatch(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    trainer.step()
    assert all(p.grad is None for model in (trainer.models.policy, trainer.models.critic) for p in model.parameters())


def norms_at_steps(trainer: PPOTrainer) -> dict[str, list[float]]:
    """The gradient norms that the optimisers will see, noted as they step."""
    seen: dict[str, list[float]] = {"policy": [], "critic": []}

    def note(name: str, model: PreTrainedModel) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            seen[name].append(gradient(model).norm().item())

        return hook

    for name, model in (("policy", trainer.models.policy), ("critic", trainer.models.critic)):
        trainer.optimizers[name].register_step_pre_hook(note(name, model))
    return seen


def test_rule_16_gradients_are_clipped_by_their_norm(make_trainer: MakeTrainer) -> None:
    """The diagnostics show the norm before."""
    trainer = make_trainer(optimizer={"max_grad_norm": 1e-2})
    seen = norms_at_steps(trainer)
    row = trainer.step()
    for name, norms in seen.items():
        assert norms == pytest.approx([1e-2] * 4, rel=1e-3)
        assert (row[f"grad_norm_{name}"] or 0) > 2e-2
    assert row["grad_clipped_share"] == 1.0


def test_rule_16_each_model_is_clipped_by_its_own_norm(make_trainer: MakeTrainer) -> None:
    """A critic with an enormous gradient takes nothing from the policy's."""
    trainer = make_trainer(vf_coef=1e6, optimizer={"max_grad_norm": 50.0})
    seen = norms_at_steps(trainer)
    row = trainer.step()
    assert (row["grad_norm_critic"] or 0) > 1000
    assert seen["critic"] == pytest.approx([50.0] * 4, rel=1e-3)
    assert sum(seen["policy"]) / 4 == pytest.approx(row["grad_norm_policy"], rel=1e-5)
    assert 0.01 < max(seen["policy"]) < 50
    assert row["grad_clipped_share"] == 0.0, "the share is of the policy's steps"
    warming = make_trainer(critic={"warmup_steps": 1})
    assert (warming.step()["grad_clipped_share"], warming.step()["grad_clipped_share"]) == (None, 1.0)


def test_rule_16_the_value_clip_has_a_key_of_its_own(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(ppo_epochs=1, minibatches=1)
    rollout, credit = experience(trainer)
    rollout = replace(rollout, old_values=(rollout.old_values + 0.25) * rollout.mask)
    shares = {}
    for clip in (0.2, 0.3):
        critic = trainer.config.critic.model_copy(update={"value_clip": clip})
        fresh = make_trainer(ppo_epochs=1, minibatches=1)
        shares[clip] = update(fresh, rollout, credit, critic=critic)["value_clip_fraction"]
    assert shares == {0.2: 1.0, 0.3: 0.0}


@pytest.mark.parametrize("average", ["answer_means", "answer_sums"])
def test_rule_18_the_entropy_is_per_token_however_the_loss_is_averaged(make_trainer: MakeTrainer, average: str) -> None:
    settings = {"ppo_epochs": 1, "minibatches": 1, "whiten_advantages": False}  # whitened, the loss of tokens is 0
    rows = [make_trainer(loss_average=kind, **settings).step() for kind in ("tokens", average)]
    assert rows[1]["entropy"] == pytest.approx(rows[0]["entropy"], rel=1e-5)
    assert rows[1]["policy_loss"] != pytest.approx(rows[0]["policy_loss"], rel=1e-2)


@pytest.mark.parametrize("micro", [1, 3, 8])
def test_rule_18_statistics_are_means_over_real_tokens(make_trainer: MakeTrainer, micro: int) -> None:
    """Every ratio is e^0.3, whatever the padding: so are all statistics of it. The entropy is that of the logits."""
    trainer = make_trainer(ppo_epochs=1, minibatches=1, micro_batch_size=micro)
    rollout, credit = experience(trainer)
    assert len(set(rollout.lengths)) > 1
    batch = rollout.batch(range(8), trainer.pad_id)
    with torch.no_grad():
        entropy = logprobs_and_entropy(predict(trainer.models.policy, batch), batch.response_tokens)[1]
    moved = replace(rollout, old_logprobs=(rollout.old_logprobs - 0.3) * rollout.mask)
    credit = replace(credit, weights=rollout.mask)
    means = update(trainer, moved, credit, check_ratio=False)
    assert means["clip_fraction"] == 1.0
    assert means["approx_kl"] == pytest.approx(math.exp(0.3) - 1.3, abs=1e-4)
    assert means["ratio_max"] == pytest.approx(math.exp(0.3), abs=1e-4)
    assert means["entropy"] == pytest.approx((entropy.sum() / batch.mask.sum()).item(), rel=1e-5)
    squares = (rollout.old_values - credit.returns) ** 2
    assert means["value_loss"] == pytest.approx((squares.sum() / rollout.mask.sum()).item(), rel=1e-4)


def test_rule_18_the_entropy_is_that_of_the_policy_that_sampled(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is a term of the loss or not; where it is none, no pass of the update computes it."""
    counted: list[float] = []
    entropy_of = token_logprobs.entropy_of
    monkeypatch.setattr(token_logprobs, "entropy_of", lambda *args: counted.append(1.0) or entropy_of(*args))
    rows, calls = [], []
    for coef in (0.0, 0.5):
        counted.clear()
        trainer = make_trainer(learning_rate=0.05, ppo_epochs=3, minibatches=1, entropy_coef=coef)
        expected = trainer.rollout()
        calls.append(len(counted))
        rows.append(trainer.step(expected)["entropy"])
        calls.append(len(counted))
        mean = (expected.old_entropy.sum() / expected.mask.sum()).item()
        assert rows[-1] == pytest.approx(mean, rel=1e-6)
    assert rows[0] == rows[1]
    assert calls[0] == calls[1], "without a weight the update computes no entropy"
    assert calls[2] < calls[3]


def test_rule_07_failure_07_the_first_ratio_is_1(kind: str, make_trainer: MakeTrainer) -> None:
    """To the bit: log π_old was read in the micro-batches of the first epoch."""
    trainer = make_trainer(kind, temperature=0.7)
    rollout, _ = experience(trainer)
    for rows in (rows for minibatch in passes(trainer, rollout) for rows in minibatch):
        batch = rollout.batch(rows, trainer.pad_id)
        predictions = predict(trainer.models.policy, batch)
        now = batch.spread(logprobs_and_entropy(predictions, batch.response_tokens, 0.7)[0])
        assert torch.equal(now.detach(), rollout.old_logprobs[rows, : batch.time])


def test_rule_07_other_weights_stop_the_run(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    rollout, credit = experience(trainer)
    before = weights(trainer.models.critic)
    with torch.no_grad():
        trainer.models.policy.get_input_embeddings().weight.mul_(1.01)
    with pytest.raises(RatioError, match="before the first update"):
        update(trainer, rollout, credit)
    assert torch.equal(weights(trainer.models.critic), before)
    update(trainer, rollout, credit, check_ratio=False)


def test_rule_07_another_temperature_stops_the_run(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    rollout, credit = experience(trainer)
    with pytest.raises(RatioError):
        update(trainer, rollout, credit, temperature=1.01)


def test_rule_07_dropout_stops_the_run(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer("gpt2")
    for module in trainer.models.policy.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    trainer.step()
    trainer.models.policy.train()
    with pytest.raises(RatioError, match="dropout"):
        trainer.step()


def test_rule_07_the_check_looks_at_real_tokens_only() -> None:
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    old = torch.tensor([[-1.0, -2.0, math.nan]])
    require_same_policy(old + 0.9 * FIRST_RATIO_TOLERANCE, old, mask)
    for change in (1.1 * FIRST_RATIO_TOLERANCE, -1.1 * FIRST_RATIO_TOLERANCE, math.nan, math.inf):
        with pytest.raises(RatioError if math.isfinite(change) else NonFiniteError):
            require_same_policy(old + torch.tensor([[0.0, change, 0.0]]), old, mask)


def test_a_loss_that_is_not_finite_makes_no_step(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    rollout, credit = experience(trainer)
    before = weights(trainer.models.policy), weights(trainer.models.critic)
    corrupt = replace(credit, weights=credit.weights * math.nan)
    with pytest.raises(NonFiniteError, match="lower the learning rate"):
        update(trainer, rollout, corrupt)
    assert torch.equal(weights(trainer.models.policy), before[0])
    assert torch.equal(weights(trainer.models.critic), before[1])


def test_a_gradient_that_is_not_finite_makes_no_step(make_trainer: MakeTrainer) -> None:
    """Of neither model, though only the critic's is."""
    trainer = make_trainer()
    before = weights(trainer.models.policy), weights(trainer.models.critic)
    trainer.models.critic.score.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(NonFiniteError, match="gradient norm of the critic"):
        trainer.step()
    assert torch.equal(weights(trainer.models.policy), before[0])
    assert torch.equal(weights(trainer.models.critic), before[1])


@pytest.mark.parametrize("epochs", [1, 3])
def test_the_last_epoch_is_counted_by_itself(
    epochs: int, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`clip_fraction_last_epoch` is the token-weighted mean over the last epoch's two minibatches, of two to six."""
    found: list[tuple[float, float]] = []
    reduce = UpdateStatistics.all_reduce

    def recorded(self: UpdateStatistics, *arguments: Any) -> None:
        reduce(self, *arguments)
        found.append((self.sums["clip_fraction"], self.tokens))

    monkeypatch.setattr(UpdateStatistics, "all_reduce", recorded)
    row = make_trainer(ppo_epochs=epochs, minibatches=2, learning_rate=3e-2).step()
    assert len(found) == 2 * epochs
    clipped, tokens = (sum(column) for column in zip(*found[-2:], strict=True))
    assert row["clip_fraction_last_epoch"] == pytest.approx(clipped / tokens)
    assert clipped > 0
    if epochs > 1:
        assert row["clip_fraction_last_epoch"] > row["clip_fraction"]
