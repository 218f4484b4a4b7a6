"""`trainer.py`: the rules of PPO on whole steps of tiny models."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.data.chat import Conversation
from rlhf_core.data.scorer import Answers, Scored
from rlhf_core.data.tokenizer import encode_prompt
from rlhf_core.models.batch import pad_batch, response_logits, state_values
from rlhf_core.ppo import trainer as trainer_module
from rlhf_core.ppo.actor_critic import ActorCritic
from rlhf_core.ppo.engines import engine_of
from rlhf_core.ppo.kl import estimate_kl
from rlhf_core.ppo.plan import prompts_of_step
from rlhf_core.ppo.trainer import PPOTrainer
from rlhf_core.training import state as checkpoint
from rlhf_core.training.checkpoints import Checkpoints
from tests.rlhf_core.ppo.stepping import credit_of

MakeTrainer = Callable[..., PPOTrainer]


@dataclass(frozen=True)
class LetterJudge:
    """Counts the letter e."""

    name: str = "letters"

    def __call__(self, answers: Answers) -> Scored:
        return Scored([float(text.count("e")) for text in answers.texts])


def fixed(*scores: float) -> Callable[[Answers], list[float]]:
    """A scorer that gives these scores, whatever was answered."""
    return lambda answers: [scores[i % len(scores)] for i in range(len(answers.texts))]


def copy_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(one: Any, two: Any) -> bool:
    """Bit-equality of nested state."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(equal(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(equal, one, two))
    return bool(one == two)


# rollout


def test_rule_02_sampled_ids_are_trained_on_as_they_are(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is encoded after the prompts; many of these random answers would come back as other ids."""
    trainer = make_trainer(batch_size=16)
    tokenizer = trainer.tokenizer
    seen: list[Answers] = []
    trainer.scoring.source.scorer = lambda answers: seen.append(answers) or Scored([0.0] * len(answers.texts))
    monkeypatch.setattr(trainer_module, "encode_prompt", None)
    rollout = trainer.rollout()
    trainer.score(rollout)
    again = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in rollout.texts]
    assert sum(a != b for a, b in zip(again, rollout.response_ids, strict=True)) >= 4
    batch = rollout.batch(range(16), trainer.pad_id)
    for ids, length, response in zip(batch.actions.tolist(), rollout.lengths, rollout.response_ids, strict=True):
        assert ids[:length] == response
    assert seen[0].response_ids == rollout.response_ids
    assert seen[0].prompt_ids == rollout.prompt_ids


def test_failure_14_the_prompts_of_a_step_are_conversations_in_their_order(
    make_trainer: MakeTrainer, prompts: Sequence[Conversation], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Through the chat template."""
    rollout = make_trainer(seed=3).rollout()
    expected = [prompts[i] for i in prompts_of_step(0, 8, len(prompts), 3)]
    assert rollout.prompts == expected
    assert rollout.prompt_ids == [encode_prompt(tokenizer, prompt) for prompt in expected]


def test_rule_03_micro_batches_change_no_sample(make_trainer: MakeTrainer) -> None:
    responses = [make_trainer(micro_batch_size=micro).rollout().response_ids for micro in (1, 8)]
    assert responses[0] == responses[1]


def test_rule_03_seed_and_step_change_the_samples(make_trainer: MakeTrainer) -> None:
    """Of the same prompts: one prompt, eight times."""

    def responses(seed: int, step: int) -> list[list[int]]:
        trainer = make_trainer(seed=seed)
        trainer.prompts, trainer.prompt_ids = trainer.prompts[:1], trainer.prompt_ids[:1]
        trainer.steps_done = step
        return trainer.rollout().response_ids

    base = responses(5, 0)
    assert base == responses(5, 0)
    assert len({tuple(response) for response in base}) > 4
    for other in (responses(6, 0), responses(5, 1)):
        assert sum(a != b for a, b in zip(base, other, strict=True)) > 4


def test_rule_05_all_logprobs_use_the_sampling_temperature(kind: str, make_trainer: MakeTrainer) -> None:
    """log π_old and log π_ref against unpadded forward passes divided by 0.6."""
    trainer = make_trainer(kind, temperature=0.6)
    rollout = trainer.rollout()
    for model, found in (
        (trainer.models.policy, rollout.old_logprobs),
        (trainer.models.reference, rollout.ref_logprobs),
    ):
        for row, (prompt, response) in enumerate(zip(rollout.prompt_ids, rollout.response_ids, strict=True)):
            batch = pad_batch([prompt], [response], trainer.pad_id)
            logprobs = (response_logits(model, batch) / 0.6).log_softmax(-1)
            picked = logprobs.gather(-1, batch.response_tokens[:, None])[:, 0]
            assert (found[row, : len(response)] - picked).abs().max() <= 2e-5
    assert (rollout.old_logprobs - rollout.ref_logprobs).abs().max() > 0.1


def test_rule_09_old_values_are_those_of_each_sequence_alone(kind: str, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(kind)
    rollout = trainer.rollout()
    for row, (prompt, response) in enumerate(zip(rollout.prompt_ids, rollout.response_ids, strict=True)):
        alone = state_values(trainer.models.critic, pad_batch([prompt], [response], trainer.pad_id))[0]
        assert (rollout.old_values[row, : len(response)] - alone).abs().max() <= 1e-5
    assert rollout.old_values[rollout.mask == 0].abs().sum() == 0


def test_failure_06_sampling_from_the_policy_gives_the_kl_without_bias(make_trainer: MakeTrainer) -> None:
    """The means of k1 and k3 over 1,500 sampled tokens against the exact KL in the states they were sampled in."""
    trainer = make_trainer(batch_size=256, micro_batch_size=64, temperature=1.3)
    rollout = trainer.rollout()
    batch = rollout.batch(range(256), trainer.pad_id)
    real = rollout.mask.bool()
    with torch.no_grad():
        logits = [response_logits(model, batch) / 1.3 for model in (trainer.models.policy, trainer.models.reference)]
    exact = estimate_kl(*logits, "full")
    for estimator in ("k1", "k3"):
        error = estimate_kl(rollout.old_logprobs, rollout.ref_logprobs, estimator)[real] - exact
        assert abs(error.mean()) < 4 * error.std() / len(error) ** 0.5, estimator
    row = trainer.step()
    assert row["kl"] > 0
    assert row["kl_k3"] > 0


# reward and advantage


def test_rule_12_normalise_then_clip_then_penalise(make_trainer: MakeTrainer) -> None:
    """Raw scores stay as they are. (30 − 10) / 2 is clipped to 5, and only then lowered by 1."""
    trainer = make_trainer(scorer=fixed(30.0, 30.0, 11.0, -90.0), normalisation=(10.0, 2.0))
    rollout = replace(trainer.rollout(), ended=torch.tensor([True, False] * 4))
    scores = trainer.score(rollout)
    assert scores.raw.tolist() == [30.0, 30.0, 11.0, -90.0] * 2
    assert scores.used.tolist() == [5.0, 4.0, 0.5, -6.0] * 2


def test_rule_12_scores_that_are_not_normalised_are_still_clipped(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(scorer=fixed(7, 1), normalisation=(10.0, 2.0), score={"normalise": False})
    rollout = replace(trainer.rollout(), ended=torch.tensor([True, True, False, False] * 2))
    assert trainer.score(rollout).used.tolist() == [5.0, 1.0, 4.0, 0.0] * 2


def test_rule_04_a_missing_end_lowers_the_score_of_a_truncated_response(make_trainer: MakeTrainer) -> None:
    """All T tokens of it count."""
    trainer = make_trainer(batch_size=16, scorer=fixed(0.0), score={"missing_eos_penalty": 2.5})
    rollout = trainer.rollout()
    ended = [response[-1] == 1 for response in rollout.response_ids]
    assert {True, False} == set(ended)
    assert all(len(r) == 7 for r, e in zip(rollout.response_ids, ended, strict=True) if not e)
    assert rollout.mask.sum(dim=1).tolist() == rollout.lengths
    assert trainer.score(rollout).used.tolist() == [0.0 if e else -2.5 for e in ended]


def test_failure_03_the_penalty_uses_the_tokenizers_own_stop_token(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(batch_size=32, scorer=fixed(0.0))
    trainer.tokenizer = copy.deepcopy(trainer.tokenizer)
    trainer.tokenizer.eos_token = trainer.tokenizer.convert_ids_to_tokens(12)
    trainer.engine = engine_of(trainer.config, trainer.tokenizer, frozenset({12}))
    rollout = trainer.rollout()
    closed = [response[-1] == 12 for response in rollout.response_ids]
    assert any(closed)
    assert trainer.score(rollout).used.tolist() == [0.0 if c else -1.0 for c in closed]


def test_rule_08_rewards_sum_to_the_score_less_the_price_of_the_kl(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(kl={"coef": 0.3}, scorer=fixed(0.1, 0.4))
    rollout = trainer.rollout()
    scores = trainer.score(rollout)
    credit = credit_of(trainer, rollout)
    k1 = rollout.old_logprobs - rollout.ref_logprobs
    torch.testing.assert_close(credit.rewards.sum(1), scores.used - 0.3 * k1.sum(1))
    last = rollout.mask.sum(1).long() - 1
    at_the_end = credit.rewards.gather(1, last[:, None])[:, 0]
    price = k1.gather(1, last[:, None])[:, 0]
    torch.testing.assert_close(at_the_end, scores.used - 0.3 * price)
    assert credit.rewards[rollout.mask == 0].abs().sum() == 0


def test_rule_10_returns_are_advantages_plus_values_before_whitening(make_trainer: MakeTrainer) -> None:
    """With λ = 1 and γ = 1 the return is the sum of the rewards to come; truncated or not, V after the end is 0."""
    trainer = make_trainer(lam=1.0)
    rollout = trainer.rollout()
    credit = credit_of(trainer, rollout)
    to_come = credit.rewards.flip(1).cumsum(1).flip(1) * rollout.mask
    torch.testing.assert_close(credit.returns, to_come, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(credit.advantages, credit.returns - rollout.old_values, rtol=1e-4, atol=1e-4)


def test_rule_11_whitening_is_over_all_real_tokens_of_the_batch(make_trainer: MakeTrainer) -> None:
    """Also known failure 10: not over a minibatch or micro-batch."""
    weights = []
    for micro, minibatches in ((1, 4), (8, 1)):
        trainer = make_trainer(micro_batch_size=micro, minibatches=minibatches)
        rollout = trainer.rollout()
        credit = credit_of(trainer, rollout)
        real = credit.weights[rollout.mask.bool()]
        assert real.mean().item() == pytest.approx(0.0, abs=1e-5)
        assert real.std(unbiased=False).item() == pytest.approx(1.0, abs=1e-4)
        assert credit.weights[rollout.mask == 0].abs().sum() == 0
        assert credit.advantages[rollout.mask.bool()].std() > 1.1
        weights.append(credit.weights)
    torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-4)


def test_advantages_are_used_as_they_are_where_whitening_is_off(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(whiten_advantages=False)
    rollout = trainer.rollout()
    credit = credit_of(trainer, rollout)
    assert torch.equal(credit.weights, credit.advantages)


@pytest.mark.parametrize("garbage", [1.0, 1e30, math.nan])
def test_rule_18_garbage_on_padding_changes_no_credit(make_trainer: MakeTrainer, garbage: float) -> None:
    trainer = make_trainer()
    rollout = trainer.rollout()
    assert (rollout.mask == 0).any()
    names = ("old_logprobs", "ref_logprobs", "old_values", "engine_logprobs")
    corrupt = replace(
        rollout, **{name: torch.where(rollout.mask.bool(), getattr(rollout, name), garbage) for name in names}
    )
    assert equal(vars(credit_of(trainer, rollout)), vars(credit_of(trainer, corrupt)))
    assert trainer.step(corrupt) == make_trainer().step()


def test_failure_11_a_scorer_of_text_is_enough(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(scorer=lambda answers: [float(len(text)) for text in answers.texts], judge=LetterJudge())
    row = trainer.step()
    assert row["reward_raw"] > 0
    assert row["gold"] is not None
    assert make_trainer().step()["gold"] is None


# controller and schedule


def test_rule_17_rule_23_the_adaptive_controller_follows_the_exact_kl_of_a_sequence(make_trainer: MakeTrainer) -> None:
    """By the exact KL (rule 23), with a target at which the error is not cut off. A row shows the β of its step."""
    kl = make_trainer().step()["kl"]
    target = kl / 1.1
    trainer = make_trainer(kl={"controller": "adaptive", "coef": 0.1, "target": target, "horizon": 40})
    first, second = trainer.step(), trainer.step()
    assert first["kl"] == kl
    assert abs(first["kl_k1"] - kl) > 0.1
    assert first["kl_coef"] == 0.1
    assert second["kl_coef"] == pytest.approx(0.1 * (1 + 0.1 * 8 / 40))


def test_a_fixed_controller_stays(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    assert [trainer.step()["kl_coef"] for _ in range(2)] == [0.1, 0.1]


def test_rule_16_learning_rates_warm_up_and_decay_each_its_own(make_trainer: MakeTrainer) -> None:
    """Policy 1e-3, critic 2e-3; one step of warm-up, then linearly towards 0 after the fourth step."""
    trainer = make_trainer()
    critic, rows = [], []
    for _ in range(4):
        critic.append(trainer.optimizers["critic"].param_groups[0]["lr"])
        rows.append(trainer.step()["learning_rate"])
    assert rows == pytest.approx([5e-4, 1e-3, 2e-3 / 3, 1e-3 / 3])
    assert critic == pytest.approx([2 * rate for rate in rows])


def test_rule_16_adams_settings_are_the_configurations(make_trainer: MakeTrainer) -> None:
    for optimizer in make_trainer(optimizer={"betas": [0.8, 0.9], "eps": 1e-3}).optimizers.values():
        assert optimizer.defaults["betas"] == (0.8, 0.9)
        assert optimizer.defaults["eps"] == 1e-3


# whole steps


def test_only_policy_and_critic_are_trained(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    models = (trainer.models.policy, trainer.models.critic, trainer.models.reference)
    before = [copy_of(model) for model in models]
    trainer.step()
    assert [equal(copy_of(model), old) for model, old in zip(models, before, strict=True)] == [False, False, True]
    assert not any(parameter.requires_grad for parameter in trainer.models.reference.parameters())
    assert not trainer.models.policy.training


def test_a_policy_that_is_its_own_reference_is_refused(make_trainer: MakeTrainer) -> None:
    """The reference is frozen: the policy would silently learn nothing."""
    made = make_trainer()
    with pytest.raises(ValueError, match="two models"):
        ActorCritic(made.config, made.models.policy, made.models.policy, made.models.critic)


def test_no_prompts_get_no_answers(make_trainer: MakeTrainer) -> None:
    assert make_trainer().answer([]) == []


def test_rule_18_values_on_padding_are_removed(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer()
    expected = trainer.rollout().old_values
    values = ActorCritic.values

    def noisy(models: ActorCritic, batch: Any) -> Any:
        return values(models, batch).masked_fill(batch.mask == 0, float("nan"))

    monkeypatch.setattr(ActorCritic, "values", noisy)
    assert torch.equal(trainer.rollout().old_values, expected)


COLUMNS = {
    "step reward_raw score reward_shaped gold kl kl_k1 kl_k2 kl_k3 entropy clip_fraction value_clip_fraction",
    "advantage_abs policy_loss value_loss explained_variance grad_norm_policy grad_norm_critic response_tokens_mean",
    "response_tokens_max missing_eos_share ratio_max approx_kl kl_coef learning_rate engine_mismatch_max",
    "engine_mismatch_k3 min_token_reward repeated_ngram_share optimizer_steps tokens_trained "
    "stopped_early grad_clipped_share",
    "clip_fraction_last_epoch update_kl repeating_answer_share",
}


def test_every_step_has_all_diagnostics(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(judge=LetterJudge())
    row = trainer.step()
    assert set(row) == set(" ".join(COLUMNS).split())
    assert all(math.isfinite(value) for value in row.values())
    assert set(trainer.seconds) == {"rollout", "scoring", "update"}
    assert all(seconds > 0 for seconds in trainer.seconds.values())


def test_ppo_learns_a_trivial_reward(make_trainer: MakeTrainer) -> None:
    """The share of one token among 60."""
    settings = {
        "steps": 20,
        "batch_size": 32,
        "micro_batch_size": 32,
        "ppo_epochs": 3,
        "learning_rate": 5e-3,
        "kl": {"coef": 0.02},
        "optimizer": {"decay": "none"},
        "score": {"missing_eos_penalty": 0.0},
    }
    trainer = make_trainer(same_reference=True, normalisation=(0.0, 0.3), **settings)
    rows = [trainer.step() for _ in range(20)]
    assert rows[0]["reward_raw"] < 0.1
    assert sum(row["reward_raw"] for row in rows[-3:]) / 3 > 0.7
    assert rows[-1]["kl"] > 1.0


def test_a_larger_kl_coefficient_keeps_the_policy_nearer(make_trainer: MakeTrainer) -> None:
    """For the same reward."""
    far = {}
    for coef in (0.0, 5.0):
        sizes = {"batch_size": 32, "micro_batch_size": 32, "steps": 100, "learning_rate": 5e-3}
        trainer = make_trainer(same_reference=True, kl={"coef": coef}, **sizes)
        far[coef] = sum([trainer.step()["kl_k3"] for _ in range(8)][-4:])
    assert far[5.0] < 0.6 * far[0.0]


def test_held_out_answers_change_no_state(make_trainer: MakeTrainer, prompts: Sequence[Conversation]) -> None:
    trainer = make_trainer(judge=LetterJudge())
    trainer.step()
    before = copy.deepcopy(trainer.state_dict())
    rows = trainer.answer(prompts[:3])
    assert [row["prompt"] for row in rows] == prompts[:3]
    assert {row["step"] for row in rows} == {1}
    assert [row["gold"] for row in rows] == [float(row["response"].count("e")) for row in rows]
    assert rows == trainer.answer(prompts[:3])
    assert equal(trainer.state_dict(), before)


# state


def test_rule_19_failure_01_k_steps_and_a_resume_are_n_steps(
    make_trainer: MakeTrainer, tmp_path: Path, prompts: Sequence[Conversation]
) -> None:
    """Byte for byte: weights, optimisers, schedulers, β, history and samples."""
    options: dict[str, Any] = {"kl": {"controller": "adaptive", "target": 50.0}, "judge": LetterJudge()}
    whole = make_trainer(**options)
    expected = [whole.step() for _ in range(4)]

    first = make_trainer(**options)
    history = [first.step() for _ in range(2)]
    checkpoint.save(Checkpoints(tmp_path), 2, {"trainer": first.state_dict(), "history": history})
    torch.manual_seed(1234)
    state = checkpoint.load(Checkpoints(tmp_path))
    assert state is not None
    second = make_trainer(**options)
    second.load_state_dict(state["trainer"])
    history = state["history"] + [second.step() for _ in range(2)]

    assert history == expected
    assert [row["step"] for row in history] == [1, 2, 3, 4]
    assert equal(second.state_dict(), whole.state_dict())
    assert second.answer(prompts[:4]) == whole.answer(prompts[:4])


def test_rule_19_a_state_holds_every_part(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(kl={"controller": "adaptive"})
    fresh = trainer.state_dict()
    fresh = copy.deepcopy(fresh)
    trainer.step()
    changed = {name for name, part in trainer.state_dict().items() if not equal(part, fresh[name])}
    parts = {f"{kind}_{model}" for kind in ("optimizer", "scheduler") for model in ("policy", "critic")}
    assert changed == {"steps_done", "models", "controller"} | parts


def test_failure_09_equal_seeds_give_equal_runs(make_trainer: MakeTrainer) -> None:
    one, two = make_trainer(), make_trainer()
    torch.manual_seed(1)
    first = one.step()
    torch.manual_seed(2)
    assert first == two.step()
    assert equal(one.state_dict(), two.state_dict())
