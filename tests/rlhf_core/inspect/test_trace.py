"""`trace.py`: the numbers of a trace are those of the step that the trainer does."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from rlhf_core.inspect.trace import token_texts, trace_step
from rlhf_core.ppo.advantages import whiten
from rlhf_core.ppo.rewards import normalise_scores
from rlhf_core.ppo.trainer import PPOTrainer

MakeTrainer = Callable[..., PPOTrainer]
ALL = range(8)
SETTINGS: dict[str, dict[str, Any]] = {
    "gae": {},
    "large steps": {"learning_rate": 0.05, "critic": {"learning_rate": 0.05}, "minibatches": 1, "ppo_epochs": 3},
    "shared critic": {"critic": {"kind": "shared"}},
    "lora": {"lora": {"rank": 2, "alpha": 4.0}},
    "rloo": {"advantage": "rloo", "samples_per_prompt": 4},
    "grpo, not whitened": {"advantage": "grpo", "samples_per_prompt": 2, "whiten_advantages": False},
    "reinforce": {"advantage": "reinforce"},
    "kl in the loss": {"kl": {"penalty": "loss", "estimator": "k2"}},
    "whole kl in the loss": {"kl": {"penalty": "loss", "estimator": "full"}, "temperature": 0.7},
    "discount": {"gamma": 0.9, "lam": 0.5},
    "critic's warm-up": {"critic": {"warmup_steps": 1}},
    "plain policy gradient": {"policy_gradient_steps": 1},
    "two-sided clip": {"learning_rate": 0.05, "clip_ratio_high": 0.5},
    "dual clip": {"learning_rate": 0.05, "dual_clip": 1.5, "importance_cap": 2.0},
}


@pytest.fixture(params=list(SETTINGS))
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return SETTINGS[str(request.param)]


def close(one: float, two: float | None) -> bool:
    assert two is not None
    return math.isclose(one, two, rel_tol=1e-3, abs_tol=2e-5)


def test_the_step_is_the_one_that_the_trainer_does(make_trainer: MakeTrainer, settings: dict[str, Any]) -> None:
    """The same diagnostics to the bit, and the same weights."""
    traced, stepped = make_trainer(**settings), make_trainer(**settings)
    row = stepped.step()
    found = trace_step(traced, [3])[0].step
    assert {name: row[name] for name in found.diagnostics} == found.diagnostics
    for one, two in zip(traced.models.policy.parameters(), stepped.models.policy.parameters(), strict=True):
        assert torch.equal(one, two)


def test_the_tokens_add_up_to_the_diagnostics(make_trainer: MakeTrainer, settings: dict[str, Any]) -> None:
    """Sums over all tokens of all answers, at all passes."""
    trainer = make_trainer(**settings)
    traces = trace_step(trainer, ALL)
    row = traces[0].step.diagnostics
    passes = [reading for trace in traces for token in trace.tokens for reading in token.passes]

    def mean(values: list[float]) -> float:
        return sum(values) / len(passes)

    assert close(mean([reading.policy_loss for reading in passes]), row["policy_loss"])
    if trainer.config.minibatches == 1:  # the first pass is that of the policy that sampled
        first = [token.passes[0].entropy for trace in traces for token in trace.tokens]
        assert close(sum(first) / len(first), row["entropy"])
    assert close(max(reading.ratio for reading in passes), row["ratio_max"])
    if trainer.models.has_critic:
        assert close(mean([reading.value_loss for reading in passes]), row["value_loss"])
    else:
        assert {token.value for trace in traces for token in trace.tokens} == {None}
        assert {reading.value_loss for reading in passes} == {None}
    if trainer.config.kl.penalty == "loss":
        assert close(mean([reading.kl_loss for reading in passes]), row["kl_loss"])
    if passes[0].clipped is not None:
        signs = [1 if token.weight > 0 else -1 for trace in traces for token in trace.tokens for _ in token.passes]
        sides = {-1: 0.2, 1: trainer.config.clip_ratio_high or 0.2}
        held = [float(sign * (reading.ratio - 1) > sides[sign]) for sign, reading in zip(signs, passes, strict=True)]
        assert close(mean(held), row["clip_fraction"])
    assert close(sum(trace.sums["kl"] for trace in traces) / 8, row["kl_k1"])
    assert close(sum(trace.sums["return"] for trace in traces) / 8, row["reward_shaped"])
    assert close(sum(trace.score_raw for trace in traces) / 8, row["reward_raw"])
    assert close(sum(trace.score for trace in traces) / 8, row["score"])


def test_the_minibatches_add_up_to_the_diagnostics(make_trainer: MakeTrainer, settings: dict[str, Any]) -> None:
    """And each answer is in one minibatch of every epoch."""
    trainer = make_trainer(**settings)
    trace = trace_step(trainer, [2])[0]
    step, epochs = trace.step, len(trace.tokens[0].passes)
    tokens = sum(minibatch.tokens for minibatch in step.minibatches)
    assert close(sum(m.policy_loss * m.tokens for m in step.minibatches) / tokens, step.diagnostics["policy_loss"])
    assert [step.minibatches[place].epoch for place in trace.minibatches] == list(range(1, epochs + 1))
    assert len(step.minibatches) == len(step.grad_norms["policy"]) == step.diagnostics["optimizer_steps"]
    config, m = trainer.config, step.minibatches[-1]
    expected = m.policy_loss - config.entropy_coef * m.entropy if step.trains_policy else 0.0
    expected += config.vf_coef * m.value_loss if config.has_critic else 0.0
    expected += step.kl_coef / step.advantage_scale * m.kl_loss if m.kl_loss is not None else 0.0
    assert close(m.total_loss, expected)


def test_the_table_follows_its_own_formulas(make_trainer: MakeTrainer) -> None:
    """Rewards, δ, the recursion of A, returns and whitening, each from the columns before it."""
    trainer = make_trainer(gamma=0.9, lam=0.8)
    traces = trace_step(trainer, ALL)
    beta, config = traces[0].step.kl_coef, trainer.config
    for trace in traces:
        following = 0.0
        for place, token in reversed(list(enumerate(trace.tokens))):
            last = place == len(trace.tokens) - 1
            assert close(token.kl, token.old_logprob - token.ref_logprob)
            assert close(token.reward, -beta * token.kl + (trace.score if last else 0.0))
            assert token.next_value == (0.0 if last else trace.tokens[place + 1].value)
            assert close(token.delta, token.reward + config.gamma * token.next_value - token.value)
            assert close(token.advantage, token.delta + config.gamma * config.lam * following)
            assert close(token.return_, token.advantage + token.value)
            following = token.advantage
    advantages = torch.tensor([token.advantage for trace in traces for token in trace.tokens])
    weights = torch.tensor([token.weight for trace in traces for token in trace.tokens])
    assert (whiten(advantages) - weights).abs().max() <= 1e-5
    step = traces[0].step
    assert ((advantages - step.advantage_mean) / step.advantage_scale - weights).abs().max() <= 1e-5


@pytest.mark.parametrize(
    "left_out", [{"truncated": "mask"}, {"advantage": "grpo", "samples_per_prompt": 2, "skip_equal_groups": True}]
)
def test_whitening_is_explained_without_the_answers_that_are_left_out(
    make_trainer: MakeTrainer, left_out: dict[str, Any]
) -> None:
    scorer = lambda answers: [float(len(ids) > 3) for ids in answers.response_ids]  # noqa: E731
    trainer = make_trainer(**left_out, scorer=scorer, kl={"coef": 0.0}, score={"missing_eos_penalty": 0.0})
    traces = trace_step(trainer, ALL)
    step = traces[0].step
    assert step.left_out == sum(not trace.trained for trace in traces) > 0
    for token in (token for trace in traces if trace.trained for token in trace.tokens):
        assert close((token.advantage - step.advantage_mean) / step.advantage_scale, token.weight)


def test_the_clip_acts_in_its_four_cases(make_trainer: MakeTrainer) -> None:
    """A > 0 and ρ ≥ 1 + ε, or A < 0 and ρ ≤ 1 − ε: no pull; everywhere else the pull is ρA. All four cases occur."""
    traces = trace_step(make_trainer(**SETTINGS["large steps"]), ALL)
    cases = set()
    for token in (token for trace in traces for token in trace.tokens):
        reading = token.after
        held = reading.ratio > 1.2 if token.weight > 0 else reading.ratio < 0.8
        assert reading.clipped == (abs(reading.ratio - 1) > 0.2)
        assert close(reading.pull, 0.0 if held else reading.ratio * token.weight)
        bound = max(0.8, min(1.2, reading.ratio))
        assert close(reading.policy_loss, -min(reading.ratio * token.weight, bound * token.weight))
        cases.add((token.weight > 0, held))
    assert len(cases) == 4


def test_before_and_after_the_update(make_trainer: MakeTrainer) -> None:
    """The first pass of the first minibatch sees ρ = 1; afterwards the answer's probability is that of the new weights,
    and so are the choices'."""
    trainer = make_trainer(learning_rate=0.02)
    traces = trace_step(trainer, ALL)
    first = [trace for trace in traces if trace.minibatches[0] == 0]
    assert first
    assert all(close(token.passes[0].ratio, 1.0) for trace in first for token in trace.tokens)
    trace = traces[0]
    assert close(
        trace.sums["logprob_after"] - trace.sums["logprob_before"], sum(math.log(t.after.ratio) for t in trace.tokens)
    )
    assert abs(trace.sums["logprob_after"] - trace.sums["logprob_before"]) > 1e-3
    known = [(token, choice) for token in trace.tokens for choice in token.choices if choice.text == token.text]
    assert known
    for token, choice in known:
        assert close(choice.before, math.exp(token.old_logprob))
        assert close(choice.after, math.exp(token.after.logprob))


def test_scores_before_and_after_the_penalty(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(normalisation=(0.1, 0.3))
    traces = trace_step(trainer, ALL)
    assert {trace.ended for trace in traces} == {True, False}
    raw = torch.tensor([trace.score_raw for trace in traces])
    for trace, normal in zip(traces, normalise_scores(raw, 0.1, 0.3, 5.0).tolist(), strict=True):
        assert close(trace.score_normalised, normal)
        assert close(trace.score, normal if trace.ended else normal - 1.0)


def test_answers_without_a_critic_name_those_they_are_compared_with(make_trainer: MakeTrainer) -> None:
    traces = trace_step(make_trainer(advantage="rloo", samples_per_prompt=4), ALL)
    for trace in traces:
        assert len(trace.rivals) == 3
        assert close(trace.tokens[0].advantage, trace.sums["return"] - sum(trace.rivals) / 3)
    trace = trace_step(make_trainer(advantage="reinforce"), [1])[0]
    assert close(trace.tokens[0].advantage, trace.sums["return"] - sum(trace.rivals) / 8)
    assert trace_step(make_trainer(), [1])[0].rivals == []


def test_answers_that_are_left_out_have_no_pass_and_an_answer_can_have_one_ratio(make_trainer: MakeTrainer) -> None:
    settings = {"advantage": "grpo", "samples_per_prompt": 2, "loss_average": "answer_means", "ratio": "sequence"}
    scorer = lambda answers: [float(len(ids) > 3) for ids in answers.response_ids]  # noqa: E731
    trainer = make_trainer(
        **settings, skip_equal_groups=True, kl={"coef": 0.0}, scorer=scorer, score={"missing_eos_penalty": 0.0}
    )
    traces = trace_step(trainer, ALL)
    assert {trace.trained for trace in traces} == {False, True}
    for trace in traces:
        passes = list(zip(*(token.passes for token in trace.tokens), strict=True))
        assert len(passes) == len(trace.minibatches) == (trainer.config.ppo_epochs if trace.trained else 0)
        assert all(len({reading.ratio for reading in one}) == 1 for one in passes)
        assert trace.trained or {token.weight for token in trace.tokens} == {0.0}


def test_an_early_stop_is_recorded(make_trainer: MakeTrainer) -> None:
    """The minibatch that was too far has been read and not stepped on; an answer of the second has no third pass."""
    step = trace_step(make_trainer(learning_rate=0.05, stop_kl=1e-4), [0])[0].step
    assert step.stopped_early
    assert len(step.minibatches) == len(step.grad_norms["policy"]) + 1


def test_tokens_add_up_to_the_text(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer("eat some oats and an egg", add_special_tokens=False)["input_ids"]
    assert "".join(token_texts(tokenizer, ids)) == "eat some oats and an egg"
    assert token_texts(tokenizer, [*ids, tokenizer.eos_token_id])[-1] == "<|end|>"
