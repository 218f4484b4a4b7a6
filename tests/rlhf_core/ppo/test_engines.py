"""`engines.py`: every engine samples from exactly π, keeps the rules, and PPO measures how far it is from π_old."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.errors import UserError
from rlhf_core.models.batch import pad_batch, response_logits
from rlhf_core.models.sampling import Sampled
from rlhf_core.ppo.engines import Engine, LeashEngine, Rules, engine_of
from rlhf_core.ppo.trainer import PPOTrainer

Build = Callable[..., PreTrainedModel]
MakeTrainer = Callable[..., PPOTrainer]

PAD, END = 0, 1
PROMPTS = [[3, 7 + i, *range(20, 20 + 2 * (i % 5)), 4] for i in range(12)]
KEYS = [(1, 0, i) for i in range(len(PROMPTS))]
RULES = Rules(max_new_tokens=12, temperature=0.8, stop_ids=frozenset({END, 17, 30}), pad_id=PAD, rows=5)


@pytest.fixture(params=["leash", pytest.param("vllm", marks=pytest.mark.slow)])
def engine(request: pytest.FixtureRequest) -> Callable[[Rules], Engine]:
    """The server of `vllm` is not vLLM here, but has the same interface (`fake_vllm.py`)."""
    make: Callable[[Rules], Engine] = request.getfixturevalue("vllm_engine") if request.param == "vllm" else LeashEngine
    return make


def chi_square(found: Counter[int], expected: torch.Tensor) -> tuple[float, int]:
    """The statistic and its degrees of freedom; tokens expected fewer than five times are one class."""
    frequent = [token for token in range(len(expected)) if expected[token] >= 5]
    rest = sum(found.values()) - sum(found[t] for t in frequent), float(expected.sum() - expected[frequent].sum())
    pairs = [(found[token], float(expected[token])) for token in frequent] + [rest]
    return sum((o - e) ** 2 / e for o, e in pairs if e > 0), len(pairs) - 1


def test_rule_01_samples_follow_softmax_at_the_temperature(engine: Callable[[Rules], Engine], build_lm: Build) -> None:
    """Chi-square of 1,200 first tokens of one prompt against softmax(logits / 0.7)."""
    model, count = build_lm(), 1200
    rules = replace(RULES, max_new_tokens=1, temperature=0.7, rows=600)
    sampled = engine(rules)(model, [PROMPTS[3]] * count, [(10, i) for i in range(count)])
    with torch.no_grad():
        expected = (model(torch.tensor([PROMPTS[3]])).logits[0, -1] / 0.7).softmax(-1) * count
    statistic, degrees = chi_square(Counter(response[0] for response in sampled.responses), expected)
    assert degrees >= 5
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5


def test_rule_01_second_tokens_follow_softmax_after_the_first(
    engine: Callable[[Rules], Engine], build_lm: Build
) -> None:
    """With the cache in play: the token after the most frequent first one."""
    model, count = build_lm(), 1200
    rules = replace(RULES, max_new_tokens=2, temperature=0.7, rows=600, stop_ids=frozenset())
    sampled = engine(rules)(model, [PROMPTS[3]] * count, [(10, i) for i in range(count)])
    first = Counter(response[0] for response in sampled.responses).most_common(1)[0][0]
    second = Counter(response[1] for response in sampled.responses if response[0] == first)
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPTS[3], first]])).logits[0, -1]
    statistic, degrees = chi_square(second, (logits / 0.7).softmax(-1) * second.total())
    assert degrees >= 5
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5


def test_rule_07_the_log_probabilities_are_those_of_the_training_forward_pass(
    engine: Callable[[Rules], Engine], kind: str, build_lm: Build
) -> None:
    """At the temperature, for responses of several lengths and prompts of several widths."""
    model = build_lm(kind)
    sampled = engine(RULES)(model, PROMPTS, KEYS)
    assert len({len(response) for response in sampled.responses}) > 2
    batch = pad_batch(PROMPTS, sampled.responses, PAD)
    with torch.no_grad():
        logprobs = (response_logits(model, batch) / 0.8).log_softmax(-1).gather(-1, batch.response_tokens[:, None])
    for row, theirs in zip(batch.spread(logprobs[:, 0]), sampled.logprobs, strict=True):
        assert (row[: len(theirs)] - torch.tensor(theirs)).abs().max() <= 1e-4


def test_rule_03_a_key_gives_the_same_response_in_every_batch(
    engine: Callable[[Rules], Engine], build_lm: Build
) -> None:
    model = build_lm("gpt2")
    whole = engine(replace(RULES, rows=len(PROMPTS)))(model, PROMPTS, KEYS).responses
    for rows in (1, 5):
        assert engine(replace(RULES, rows=rows))(model, PROMPTS, KEYS).responses == whole
    assert engine(RULES)(model, PROMPTS[::-1], KEYS[::-1]).responses == whole[::-1]
    assert engine(RULES)(model, PROMPTS, [(2, 0, i) for i in range(len(PROMPTS))]).responses != whole


def test_rule_03_global_generators_are_left_where_they_were(engine: Callable[[Rules], Engine], build_lm: Build) -> None:
    model = build_lm()
    torch.manual_seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = engine(RULES)(model, PROMPTS, KEYS).responses
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()
    torch.manual_seed(2)
    assert engine(RULES)(model, PROMPTS, KEYS).responses == first


HOSTILE = {
    "eos_token_id": 9,
    "top_k": 1,
    "top_p": 0.1,
    "temperature": 0.01,
    "do_sample": True,
    "repetition_penalty": 9.0,
    "no_repeat_ngram_size": 1,
    "suppress_tokens": list(range(10, 40)),
    "min_new_tokens": 11,
    "forced_eos_token_id": 9,
    "max_length": 3,
}


def test_rule_00_the_folders_generation_config_is_ignored(
    engine: Callable[[Rules], Engine], build_lm: Build, tmp_path: Path
) -> None:
    """And is there again afterwards."""
    build_lm().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    before = engine(RULES)(model, PROMPTS, KEYS)
    for name, value in HOSTILE.items():
        setattr(model.generation_config, name, value)
    (tmp_path / "generation_config.json").write_text(model.generation_config.to_json_string(), encoding="utf-8")
    hostile = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert hostile.generation_config.repetition_penalty == 9.0
    assert engine(RULES)(hostile, PROMPTS, KEYS) == before
    assert hostile.generation_config.repetition_penalty == 9.0


def test_rule_00_stop_tokens_are_a_set(engine: Callable[[Rules], Engine], build_lm: Build) -> None:
    """A response closes with the first of them; one without any has the full length and has not ended (rule 4)."""
    prompts = PROMPTS * 4
    sampled = engine(RULES)(build_lm(), prompts, [(4, i) for i in range(len(prompts))])
    closing = {response[-1] for response, ended in zip(sampled.responses, sampled.ended, strict=True) if ended}
    assert len(closing & RULES.stop_ids) >= 2
    assert {True, False} == set(sampled.ended)
    for response, logprobs, ended in zip(sampled.responses, sampled.logprobs, sampled.ended, strict=True):
        assert not RULES.stop_ids & set(response[:-1])
        assert (response[-1] in RULES.stop_ids) == ended
        assert ended or len(response) == RULES.max_new_tokens
        assert len(logprobs) == len(response)


def test_rule_00_without_stop_tokens_every_response_is_full_and_may_hold_pad_and_eos(
    engine: Callable[[Rules], Engine], build_lm: Build
) -> None:
    model, prompts = build_lm(), PROMPTS * 4
    hot = replace(RULES, stop_ids=frozenset(), temperature=4.0)
    sampled = engine(hot)(model, prompts, [(4, i) for i in range(len(prompts))])
    assert [len(response) for response in sampled.responses] == [12] * len(prompts)
    assert not any(sampled.ended)
    inside = {token for response in sampled.responses for token in response[:-1]}
    assert {PAD, END} <= inside


def test_no_prompts_give_no_responses(engine: Callable[[Rules], Engine], build_lm: Build) -> None:
    assert engine(RULES)(build_lm(), [], []) == Sampled([], [], [])


# settings


def test_the_settings_choose_the_engine(
    ppo_values: Callable[..., dict[str, Any]], tokenizer: PreTrainedTokenizerBase
) -> None:
    default = engine_of(PPOConfig(**ppo_values()), tokenizer, frozenset({END}))
    assert default == LeashEngine(Rules(7, 1.0, frozenset({END}), PAD, rows=8))
    fewer = engine_of(PPOConfig(**ppo_values(sampler_rows=3)), tokenizer, frozenset({END}))
    assert fewer == LeashEngine(Rules(7, 1.0, frozenset({END}), PAD, rows=3))


def test_sampler_rows_changes_no_response(make_trainer: MakeTrainer) -> None:
    whole, parts = make_trainer(), make_trainer(sampler_rows=3)
    widths = []
    forward = parts.models.policy.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        widths.append(len(kwargs["input_ids"]))
        return forward(*args, **kwargs)

    parts.models.policy.forward = counted
    sampled = parts.engine(parts.models.policy, PROMPTS, KEYS)
    assert max(widths) == 3
    assert sampled.responses == whole.engine(whole.models.policy, PROMPTS, KEYS).responses


def test_failure_03_a_response_that_closes_with_a_custom_stop_token_has_ended(make_trainer: MakeTrainer) -> None:
    """No penalty, and no stop token in its text; other responses are penalised."""
    trainer = make_trainer(stop_tokens=["a", "t"], batch_size=32, scorer=lambda answers: [0.0] * len(answers.texts))
    stops = set(trainer.tokenizer.convert_tokens_to_ids(["a", "t"]))
    rollout = trainer.rollout()
    closed = [response[-1] in stops for response in rollout.response_ids]
    assert sum(closed) >= 3
    ended = [c or response[-1] == END for c, response in zip(closed, rollout.response_ids, strict=True)]
    assert {True, False} == set(ended)
    assert trainer.score(rollout).used.tolist() == [0.0 if e else -1.0 for e in ended]
    for ids, text, at_stop in zip(rollout.response_ids, rollout.texts, closed, strict=True):
        text_ids = ids[:-1] if at_stop else ids
        assert not stops & set(text_ids)
        assert text == trainer.tokenizer.decode(text_ids, skip_special_tokens=True).strip()


@pytest.mark.parametrize("text", ["", "zebra", "then rest"])
def test_a_stop_token_that_is_not_one_token_is_refused_in_one_line(make_trainer: MakeTrainer, text: str) -> None:
    with pytest.raises(UserError, match=r"stop_tokens: .* \d tokens of the tokenizer") as refused:
        make_trainer(stop_tokens=["a", text])
    assert "\n" not in str(refused.value)


# mismatch


@dataclass(frozen=True)
class Distorted:
    """An engine whose logits are 1.1 times the policy's: another distribution than π."""

    rules: Rules

    def __call__(
        self, policy: PreTrainedModel, prompts: Sequence[Sequence[int]], keys: Sequence[tuple[int, ...]]
    ) -> Sampled:
        return LeashEngine(replace(self.rules, temperature=self.rules.temperature / 1.1))(policy, prompts, keys)


def test_rule_07_the_mismatch_of_each_engine_is_measured_and_small(
    make_trainer: MakeTrainer, engine: Callable[[Rules], Engine], kind: str
) -> None:
    """And an engine leaves the policy as it was, attention included: the second step is as good as the first."""
    trainer = make_trainer(kind, temperature=0.8)
    trainer.engine = engine(trainer.engine.rules)
    for _ in range(2):
        row = trainer.step()
        assert 0 < row["engine_mismatch_max"] <= 1e-4
        assert abs(row["engine_mismatch_k3"]) <= 1e-6


def test_rule_07_the_mismatch_shows_an_engine_that_samples_from_something_else(make_trainer: MakeTrainer) -> None:
    """The ratio is 1 all the same: only the mismatch sees it."""
    trainer = make_trainer()
    trainer.engine = Distorted(trainer.engine.rules)
    row = trainer.step()
    assert row["engine_mismatch_max"] > 0.01
    assert row["engine_mismatch_k3"] > 1e-4


def gradient_of_the_step(trainer: PPOTrainer) -> torch.Tensor:
    """How the policy moves in one step, as one vector."""
    before = torch.cat([p.detach().flatten().clone() for p in trainer.models.policy.parameters()])
    trainer.step()
    return torch.cat([p.detach().flatten() for p in trainer.models.policy.parameters()]) - before


def test_rule_07_importance_weights_act_on_a_distorted_engine_alone(make_trainer: MakeTrainer) -> None:
    """With an engine that samples from π all weights are 1 and change nothing; with another they do."""
    one = {"ppo_epochs": 1, "minibatches": 1}

    def moved(distorted: bool, cap: float | None) -> torch.Tensor:
        trainer = make_trainer(importance_cap=cap, **one)
        if distorted:
            trainer.engine = Distorted(trainer.engine.rules)
        return gradient_of_the_step(trainer)

    def change(distorted: bool) -> float:
        plain, weighted = moved(distorted, None), moved(distorted, 2.0)
        return ((weighted - plain).norm() / plain.norm()).item()

    assert change(distorted=False) < 1e-3
    assert change(distorted=True) > 0.01
