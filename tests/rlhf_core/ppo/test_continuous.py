"""`continuous.py`: the manager is kept, and follows the weights, the precision and the sizes of each call. On a CPU,
where the settings refuse the engine; tests of what all engines have in common: test_engines.py."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager

from rlhf_core.ppo.continuous import ContinuousEngine
from rlhf_core.ppo.engines import Rules

Build = Callable[..., PreTrainedModel]
PROMPTS = [[3, 7 + i, *range(20, 20 + i), 4] for i in range(4)]
KEYS = [(1, 0, i) for i in range(len(PROMPTS))]
RULES = Rules(max_new_tokens=5, temperature=0.8, stop_ids=frozenset({1, 17}), pad_id=0, rows=3)


def test_the_manager_is_kept_while_weights_change_in_place(build_lm: Build) -> None:
    """And the responses are those of a new engine with the new weights; the policy stays copyable."""
    model, engine = build_lm(), ContinuousEngine(RULES)
    before = engine(model, PROMPTS, KEYS)
    kept = engine.manager
    assert engine(model, PROMPTS, KEYS) == before
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    after = engine(model, PROMPTS, KEYS)
    assert engine.manager is kept
    assert after != before
    assert after == ContinuousEngine(RULES)(copy.deepcopy(model), PROMPTS, KEYS)


def test_a_larger_call_gets_a_larger_cache_and_another_policy_another_manager(build_lm: Build) -> None:
    model, engine = build_lm(), ContinuousEngine(RULES, page=4)
    engine(model, PROMPTS, KEYS)
    kept = engine.manager
    longer = [[3, *range(20, 40), 4]]
    assert engine(model, longer, KEYS[:1]).logprobs[0]
    larger = engine.manager
    assert larger is not kept
    assert larger.rows == 3
    engine(model, PROMPTS, KEYS)
    assert engine.manager is larger
    engine(build_lm(seed=2), PROMPTS, KEYS)
    assert engine.manager is not larger


def test_it_computes_in_the_precision_of_the_caller(build_lm: Build) -> None:
    """Autocast is a setting of each thread, and the manager has one of its own."""
    model, engine, seen = build_lm(), ContinuousEngine(replace(RULES, max_new_tokens=2)), []
    layer = model.model.layers[0].mlp.down_proj
    layer.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    engine(model, PROMPTS, KEYS)
    assert set(seen) == {torch.float32}
    seen.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        engine(model, PROMPTS, KEYS)
    assert set(seen) == {torch.bfloat16}
    seen.clear()
    engine(model, PROMPTS, KEYS)
    assert set(seen) == {torch.float32}


def test_another_manager_of_transformers_is_an_error(build_lm: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not samples in another precision."""
    monkeypatch.delattr(ContinuousBatchingManager, "_run_generation_loop")
    with pytest.raises(RuntimeError, match="its continuous batching has no _run_generation_loop"):
        ContinuousEngine(RULES)(build_lm(), PROMPTS, KEYS)


def test_a_failure_in_the_managers_thread_is_an_error(build_lm: Build) -> None:
    model, engine = build_lm(), ContinuousEngine(RULES)
    engine(model, PROMPTS, KEYS)

    def fails(*_: object, **__: object) -> None:
        raise ValueError("broken")

    handle = model.register_forward_pre_hook(fails)
    with pytest.raises(RuntimeError, match="continuous batching answered"):
        engine(model, PROMPTS, KEYS)
    handle.remove()
