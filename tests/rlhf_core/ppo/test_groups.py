"""What methods that compare the answers to one prompt add to PPO: a wider clip upwards, groups of equal scores and
answers without an end left out, one ratio for an answer, and terms of the score compared apart."""

import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.data.scorer import Answers, Observed, Scored, WeightedSum, term_weights
from rlhf_core.ppo.advantages import compute_gdpo_advantages, compute_group_advantages, equal_groups, whiten
from rlhf_core.ppo.health import Monitor
from rlhf_core.ppo.losses import compute_ppo_loss, policy_ratio
from rlhf_core.ppo.rollout import Rollout
from rlhf_core.ppo.statistics import clip_fraction
from rlhf_core.ppo.trainer import PPOTrainer
from tests.rlhf_core.ppo.stepping import credit_of, first_gradients
from tests.rlhf_core.ppo.test_losses import Batch, batches

MakeTrainer = Callable[..., PPOTrainer]
properties = settings(max_examples=50, derandomize=True)
GROUPS = {"advantage": "grpo", "samples_per_prompt": 4, "entropy_coef": 0.0}
SKIP = {**GROUPS, "skip_equal_groups": True, "kl": {"coef": 0.0}}
SEQUENCE = {**GROUPS, "ratio": "sequence", "loss_average": "answer_means"}
NO_PENALTY = {"score": {"missing_eos_penalty": 0.0}}


def weights(trainer: PPOTrainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.models.policy.parameters()])


class Term:
    """A scorer with a function of each answer's tokens."""

    def __init__(self, score: Callable[[Sequence[int]], float]) -> None:
        self.name, self.score = "term", score

    def __call__(self, answers: Answers) -> Scored:
        return Scored([self.score(ids) for ids in answers.response_ids])


def share_of_10(ids: Sequence[int]) -> float:
    return sum(token == 10 for token in ids) / len(ids)


# the clip


@properties
@given(batches(), st.floats(0.05, 0.5), st.floats(0.05, 2.0))
def test_rule_15_the_clip_has_two_sides(batch: Batch, low: float, high: float) -> None:
    terms, clipped = [], []
    for new, old, advantage in zip(*map(batch.real, (batch.logprobs, *batch.old())), strict=True):
        ratio = math.exp(new - old)
        terms.append(-min(ratio * advantage, max(1 - low, min(ratio, 1 + high)) * advantage))
        clipped.append(ratio > 1 + high if advantage > 0 else ratio < 1 - low)
    found = compute_ppo_loss(batch.logprobs, *batch.old(), low, batch.mask, clip_ratio_high=high)
    assert found.item() == pytest.approx(sum(terms) / len(terms), abs=1e-9)
    share = clip_fraction(batch.logprobs, *batch.old(), low, batch.mask, clip_ratio_high=high)
    assert share.item() == pytest.approx(sum(clipped) / len(clipped))


@properties
@given(batches(), st.floats(0.05, 0.5))
def test_without_a_second_side_the_clip_is_symmetric(batch: Batch, clip: float) -> None:
    for function in (compute_ppo_loss, clip_fraction):
        found = [
            function(batch.logprobs, *batch.old(), clip, batch.mask, **options)  # type: ignore[operator]
            for options in ({}, {"clip_ratio_high": clip}, {"ratio": "token"})
        ]
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])


def test_rule_15_the_upper_clip_reaches_the_loss(make_trainer: MakeTrainer) -> None:
    """With a learning rate that clips many tokens, a wide upper side clips fewer of them."""
    fast = {"learning_rate": 3e-2, "clip_ratio": 0.05, "optimizer": {"warmup_steps": 0}}
    both, wide = (make_trainer(**fast, clip_ratio_high=high).step()["clip_fraction"] for high in (None, 10.0))
    assert 0 < (wide or 0.0) < (both or 0.0)


# one ratio for an answer


@properties
@given(batches(), st.floats(0.01, 0.5))
def test_rule_15_the_ratio_of_an_answer_is_the_geometric_mean_of_its_tokens(batch: Batch, clip: float) -> None:
    """GSPO, equations 5 to 7, with one advantage for an answer: the loss and its gradient."""
    advantages = batch.advantages.detach()[:, :1].expand(batch.shape)
    losses, gradients = [], torch.zeros(batch.shape, dtype=torch.float64)
    for row, real in enumerate(batch.mask):
        length, advantage = int(real.sum()), advantages[row, 0].item()
        changes = (batch.logprobs - batch.old_logprobs).detach()[row, :length]
        ratio = math.exp(changes.sum().item() / length)
        losses.append(-min(ratio * advantage, max(1 - clip, min(ratio, 1 + clip)) * advantage))
        if (ratio - 1) * math.copysign(1, advantage) <= clip:
            gradients[row, :length] = -ratio * advantage / length / len(batch.mask)
    tokens = compute_ppo_loss(
        batch.logprobs, batch.old_logprobs.detach(), advantages, clip, batch.mask, ratio="sequence", reduction="none"
    )
    found = (tokens.sum(dim=1) / batch.mask.sum(dim=1)).mean()
    assert found.item() == pytest.approx(sum(losses) / len(losses), abs=1e-9)
    (gradient,) = torch.autograd.grad(found, batch.logprobs)
    assert torch.allclose(gradient, gradients, atol=1e-9)


def test_an_answer_of_one_token_has_the_ratio_of_its_token() -> None:
    new, old = torch.tensor([[-1.0], [-2.0]]), torch.tensor([[-1.5], [-1.0]])
    assert torch.equal(policy_ratio(new, old, "sequence"), policy_ratio(new, old))
    assert policy_ratio(
        torch.tensor([[0.4, 0.0, 9.9]]), torch.zeros(1, 3), "sequence", torch.tensor([[1, 1, 0]])
    ).tolist() == [pytest.approx([math.exp(0.2)] * 3)]


def test_rule_15_the_first_step_of_gspo_is_that_of_grpo_and_its_clip_is_of_answers(make_trainer: MakeTrainer) -> None:
    """At ratio 1 both have the gradient A·(mean of ∇log π); later the clip takes whole answers."""
    gspo, grpo = make_trainer(**SEQUENCE), make_trainer(**GROUPS, loss_average="answer_means")
    rollout = gspo.rollout()
    first, other = (first_gradients(one, rollout, credit_of(one, rollout))["policy"] for one in (gspo, grpo))
    assert (first - other).norm() <= 1e-5 * other.norm()
    row = make_trainer(**SEQUENCE, clip_ratio=1e-5, optimizer={"warmup_steps": 0}).step()
    assert (row["clip_fraction_last_epoch"] or 0.0) > 0.2


# groups of equal scores


@given(st.integers(2, 4), st.integers(1, 4), st.data())
def test_a_group_is_equal_where_it_has_one_score(k: int, groups: int, data: st.DataObject) -> None:
    scores = data.draw(st.lists(st.integers(0, 2), min_size=k * groups, max_size=k * groups))
    expected = [len({*scores[i - i % k : i - i % k + k]}) == 1 for i in range(len(scores))]
    assert equal_groups(torch.tensor(scores, dtype=torch.float32), k).tolist() == expected


def first_prompts_differ(answers: Answers) -> list[float]:
    """The share of token 10, and one score for all answers to prompts of an odd number of words."""
    words = [len(prompt[-1]["content"].split()) for prompt in answers.prompts]
    return [0.5 if n % 2 else share_of_10(ids) for n, ids in zip(words, answers.response_ids, strict=True)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"advantage": "rloo", "whiten_advantages": False},
        {"advantage": "dr_grpo", "loss_average": "answer_sums"},
        {"kl": {"penalty": "loss", "estimator": "k3", "coef": 0.1}},
    ],
    ids=["whitened", "rloo", "sums", "KL in the loss"],
)
def test_rule_12_the_step_is_that_of_the_other_groups_alone(make_trainer: MakeTrainer, options: dict[str, Any]) -> None:
    """Gradient and figures of the update are as if the answers of equal groups had not been sampled."""
    shared = {
        **GROUPS,
        "minibatches": 1,
        "scorer": first_prompts_differ,
        "score": {"missing_eos_penalty": 0.0},
    } | options
    trainer = make_trainer(**{"kl": {"coef": 0.0}, **shared}, skip_equal_groups=True)
    rollout = trainer.rollout()
    credit = credit_of(trainer, rollout)
    rows = credit.trained.nonzero()[:, 0].tolist()
    assert 0 < len(rows) < len(rollout.texts)
    assert credit.weights[~credit.trained].abs().sum() == 0
    found = first_gradients(trainer, rollout, credit)["policy"]

    alone, others = make_trainer(**{"kl": {"coef": 0.0}, **shared}), only(rollout, rows)
    expected = first_gradients(alone, others, credit_of(alone, others))["policy"]
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    figures = [trainer.step(rollout), alone.step(others)]
    for name in ("policy_loss", "tokens_trained", "grad_norm_policy", "approx_kl", "clip_fraction"):
        assert figures[0][name] == pytest.approx(figures[1][name], rel=1e-3, abs=1e-6), name


def only(rollout: Rollout, rows: list[int]) -> Rollout:
    """The given answers of a rollout."""
    unused = ("rows", "fixed_logprobs", "fixed_kl")
    columns = {field.name: getattr(rollout, field.name) for field in fields(rollout) if field.name not in unused}
    return Rollout(**{n: c[rows] if isinstance(c, torch.Tensor) else [c[r] for r in rows] for n, c in columns.items()})


def test_a_step_of_equal_groups_makes_no_update_and_says_so(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**SKIP, scorer=lambda answers: [1.0] * len(answers.texts), **NO_PENALTY)
    before = weights(trainer)
    rows = [trainer.step(), trainer.step()]
    for row in rows:
        assert row["equal_groups_share"] == 1.0
        assert row["optimizer_steps"] == row["tokens_trained"] == 0
        assert row["policy_loss"] is row["clip_fraction"] is row["clip_fraction_last_epoch"] is None
        assert row["update_kl"] == pytest.approx(0, abs=1e-6)
    assert torch.equal(weights(trainer), before)
    other = make_trainer(**SKIP).step()
    assert rows[0].keys() == other.keys(), "a table has the columns of its first row"
    monitor = Monitor(trainer.config)
    for row in [*rows * 10, {**other, "step": 21}]:
        assert not [alert for alert in monitor.observe(row) if alert.name in ("frozen_reward", "stale_data")]


def test_rule_07_the_first_ratio_is_1_in_other_micro_batches_than_those_of_the_rollout(
    make_trainer: MakeTrainer,
) -> None:
    for precision in ("float32", "bfloat16"):
        options = {"precision": precision, "batch_size": 32, "minibatches": 1, "micro_batch_size": 16}
        trainer = make_trainer(**SKIP, **options, scorer=first_prompts_differ, **NO_PENALTY)
        assert trainer.step()["optimizer_steps"] == 2


def test_the_share_of_equal_groups_is_logged_for_methods_of_groups_only(make_trainer: MakeTrainer) -> None:
    row = make_trainer(**GROUPS, scorer=first_prompts_differ, **NO_PENALTY).step()
    assert 0 < (row["equal_groups_share"] or 0.0) < 1
    assert row["tokens_trained"] == pytest.approx(2 * 8 * (row["response_tokens_mean"] or 0.0)), "nothing is left out"
    assert "equal_groups_share" not in make_trainer(samples_per_prompt=4).step()


# answers without an end


@pytest.mark.parametrize("options", [{}, GROUPS], ids=["gae", "grpo"])
def test_rule_04_neither_policy_nor_critic_learns_from_answers_that_were_cut_off(
    make_trainer: MakeTrainer, options: dict[str, Any]
) -> None:
    trainer = make_trainer(**options, truncated="mask", max_new_tokens=4, batch_size=32, **NO_PENALTY)
    rollout = trainer.rollout()
    assert 0 < rollout.ended.sum() < 32
    credit, seen = credit_of(trainer, rollout), list[int]()
    assert torch.equal(credit.trained, rollout.ended)
    row = trainer.step(rollout, watch=lambda number, of, *_: seen.extend(of))
    assert set(seen) == set(rollout.ended.nonzero()[:, 0].tolist())
    assert row["missing_eos_share"] == pytest.approx(1 - rollout.ended.float().mean().item())
    assert row["tokens_trained"] == 2 * sum(
        length for length, ended in zip(rollout.lengths, rollout.ended, strict=True) if ended
    )


def test_where_no_answer_ends_nothing_is_trained(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(truncated="mask", **NO_PENALTY)
    with torch.no_grad():
        trainer.models.policy.get_output_embeddings().weight[list(trainer.stop_ids)] = 0
        trainer.models.policy.get_output_embeddings().weight[10] = 0
    before, row = weights(trainer), None
    rollout = trainer.rollout()
    rollout.ended[:] = False
    row = trainer.step(rollout)
    assert row["optimizer_steps"] == 0
    assert row["value_loss"] is None
    assert torch.equal(weights(trainer), before)


# terms compared apart


@given(st.integers(2, 4), st.integers(1, 3), st.data())
def test_rule_12_gdpo_compares_each_term_by_its_own_mean_and_deviation(
    k: int, groups: int, data: st.DataObject
) -> None:
    n = k * groups
    columns = [data.draw(st.lists(st.integers(-5, 5), min_size=n, max_size=n)) for _ in range(2)]
    expected = [0.0] * n
    for weight, column in zip((2.0, -0.5), columns, strict=True):
        for i, value in enumerate(column):
            own = column[i - i % k : i - i % k + k]
            mean = sum(own) / k
            expected[i] += weight * (value - mean) / (sum((g - mean) ** 2 for g in own) / k + 1e-8) ** 0.5
    terms = [(w, torch.tensor(c, dtype=torch.float64)) for w, c in zip((2.0, -0.5), columns, strict=True)]
    assert compute_gdpo_advantages(terms, k).tolist() == pytest.approx(expected, abs=1e-6)
    scaled = [(weight, 100 * values + 3) for weight, values in terms]
    assert torch.allclose(compute_gdpo_advantages(scaled, k), compute_gdpo_advantages(terms, k), atol=1e-3)


def test_gdpo_tells_combinations_apart_that_grpo_does_not() -> None:
    """The paper's example: two binary rewards; (0, 1) and (0, 2) have the same advantages in GRPO."""
    one, two = torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0])
    grpo = [compute_group_advantages(one + each * two, "grpo", 2) for each in (0, 1)]
    assert torch.allclose(grpo[0], grpo[1], atol=1e-4)
    gdpo = [compute_gdpo_advantages([(1.0, one), (1.0, each * two)], 2) for each in (0, 1)]
    assert torch.allclose(gdpo[1], 2 * gdpo[0], atol=1e-4)
    with pytest.raises(ValueError, match="needs the terms"):
        compute_gdpo_advantages([], 2)


def gdpo_trainer(make_trainer: MakeTrainer, **options: Any) -> PPOTrainer:
    trainer = make_trainer(**{**GROUPS, "advantage": "gdpo", "kl": {"coef": 0.0}, **options})
    terms = {
        "a.py": (1.0, Term(share_of_10)),
        "b.py": (0.01, Term(lambda ids: 1e3 * len(ids))),
        "c.py": (0.0, Term(len)),
    }
    trainer.scoring.source.scorer = Observed(WeightedSum(terms | {"d.py": (1.0, Term(lambda ids: 1.0))}), {})
    return trainer


def test_rule_12_the_terms_of_the_scorer_reach_gdpo(make_trainer: MakeTrainer) -> None:
    """With their weights, without those that are only logged, and with the penalty for a missing end as one more."""
    trainer = gdpo_trainer(make_trainer)
    rollout = trainer.rollout()
    scores = trainer.score(rollout)
    assert {name: weight for name, (weight, _) in scores.terms.items()} == {
        **{"a.py": 1.0, "b.py": 0.01, "d.py": 1.0, "end": 1.0}
    }
    share = torch.tensor([share_of_10(ids) for ids in rollout.response_ids])
    length, ended = torch.tensor(rollout.lengths, dtype=torch.float32), rollout.ended.float()
    parts = [compute_group_advantages(one, "grpo", 4) for one in (share, length, ended)]
    expected = parts[0] + 0.01 * parts[1] + parts[2]
    credit = credit_of(trainer, rollout)
    assert torch.allclose(credit.advantages, expected[:, None] * rollout.mask, atol=1e-4)
    assert torch.allclose(credit.weights, whiten(credit.advantages, rollout.mask))
    row = trainer.step()
    assert row["equal_groups_share/d.py"] == 1.0, "a term that does not vary"
    assert row["equal_groups_share/a.py"] < 1.0
    assert row["equal_groups_share"] <= row["equal_groups_share/a.py"]


def test_weights_are_those_of_terms_only() -> None:
    assert term_weights(Term(len)) == {}
    assert term_weights(Observed(WeightedSum({"a.py": (2.0, Term(len))}), {"judge": Term(len)})) == {"a.py": 2.0}


@pytest.mark.parametrize("value", [57.3, 1000.1, 12345.67])
@pytest.mark.parametrize("size", [3, 8])
def test_a_term_that_does_not_vary_in_a_group_adds_exactly_nothing(value: float, size: int) -> None:
    """Rounding of the mean, divided by the floor of the deviation, would be an advantage of up to 1."""
    assert torch.equal(compute_gdpo_advantages([(1.0, torch.full((size,), value))], size), torch.zeros(size))


# each of them trains


@pytest.mark.parametrize(
    "options",
    [
        {"clip_ratio_high": 0.28},
        {"skip_equal_groups": True, "kl": {"coef": 0.0}, **NO_PENALTY},
        {"truncated": "mask", **NO_PENALTY},
        {"ratio": "sequence", "loss_average": "answer_means", "clip_ratio": 3e-2},
        {"advantage": "gdpo"},
    ],
    ids=["wider clip", "equal groups left out", "cut answers left out", "one ratio", "terms apart"],
)
def test_the_reward_rises(make_trainer: MakeTrainer, options: dict[str, Any]) -> None:
    shared = {
        **GROUPS,
        "steps": 20,
        "batch_size": 64,
        "learning_rate": 3e-3,
        "kl": {"coef": 0.0},
        "micro_batch_size": 64,
    }
    make = gdpo_trainer if options.get("advantage") == "gdpo" else (lambda make, **settings: make(**settings))
    trainer = make(make_trainer, **{**shared, **options})
    rewards = [share_of(trainer.step(), options) for _ in range(20)]
    assert sum(rewards[-3:]) / 3 > 2 * sum(rewards[:3]) / 3


def share_of(row: dict[str, float | None], options: dict[str, Any]) -> float:
    """The share of token 10, the reward of every run."""
    return float(row["reward/a.py" if options.get("advantage") == "gdpo" else "reward_raw"] or 0.0)


# what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"skip_equal_groups": True},
            "skip_equal_groups compares the answers to one prompt, and advantage gae does not",
        ),
        ({**SKIP, "kl": {"coef": 0.1}}, "skip_equal_groups with the KL in the reward would leave answers"),
        ({"truncated": "mask"}, "truncated: mask leaves answers without an end out"),
        ({"ratio": "sequence"}, "ratio: sequence has one ratio for an answer, and advantage gae"),
        ({**GROUPS, "ratio": "sequence"}, "set loss_average to answer_means"),
        ({**SEQUENCE, "importance_cap": 2.0}, "importance_cap weighs tokens"),
        ({**GROUPS, "advantage": "gdpo"}, "set kl.penalty to loss with estimator k3, or kl.coef to 0"),
        ({**GROUPS, "advantage": "gdpo", "kl": {"coef": 0.0}, "whiten_advantages": False}, "ends with whitening"),
        ({"advantage": "gdpo", "kl": {"coef": 0.0}}, "advantage gdpo compares answers to one prompt"),
        ({"clip_ratio_high": 0.0}, "greater than 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    changes: dict[str, Any], message: str, ppo_values: Callable[..., dict[str, Any]]
) -> None:
    with pytest.raises(ValueError, match=message):
        PPOConfig(**ppo_values(**changes))
