"""Planned memory: by hand where it can be counted, and against real runs."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import LlamaConfig

from rlhf_core.config.dpo import DPOConfig
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.reward import RewardConfig
from rlhf_core.config.sft import SFTConfig
from rlhf_core.planning.ledger import CACHE, GATHERED, GRADIENTS, LOGITS, OPTIMIZER, WEIGHTS, Part
from rlhf_core.planning.memory import (
    Lengths,
    Phase,
    evaluate_phases,
    pair_phases,
    ppo_phases,
    reward_phases,
    sampler_phases,
    sft_phases,
)
from rlhf_core.planning.shapes import LIMITS, Shapes, parameters_of, planned_for

ROOT = Path(__file__).resolve().parents[3]
TOLERANCE = 0.05


def shapes() -> Shapes:
    config = LlamaConfig(
        vocab_size=200, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, pad_token_id=0,
    )  # fmt: skip
    return Shapes(config)


def phases(values: dict[str, Any]) -> dict[str, Phase]:
    with planned_for(accelerator=False):
        found = ppo_phases(shapes(), PPOConfig.model_validate(values), Lengths(8, 8), scorers=1)
    return {phase.name: phase for phase in found}


def sft_of(processes: int, precision: Any) -> list[Phase]:
    config = SFTConfig(
        learning_rate=1e-3, epochs=1, batch_size=16, micro_batch_size=2, warmup_steps=0, weight_decay=0.0,
        max_tokens=16, evaluate_every=1, patience=0, processes=processes,
    )  # fmt: skip
    with planned_for(accelerator=False):
        return sft_phases(shapes().in_precision(precision), config, Lengths(8, 8))


def size_of(phase: Phase, kind: str) -> int:
    return sum(size for part, size in phase.parts.items() if part.kind == kind)


def test_models_of_ppo(ppo_values: Any) -> None:
    found = phases(ppo_values(minibatches=1))
    weights = 4 * parameters_of([shapes().causal_lm()])
    update = found["update"]
    assert list(found) == ["sampling", "log-probabilities", "scoring", "update"]
    assert all(phase.peak == sum(phase.parts.values()) for phase in found.values())
    for name in ("policy", "reference", "critic", "reward model"):
        assert update.parts[Part(WEIGHTS, name)] == pytest.approx(weights, rel=0.02)
    for name in ("policy", "critic"):
        assert update.parts[Part(OPTIMIZER, name)] == pytest.approx(2 * weights, rel=0.02)
        assert update.parts[Part(GRADIENTS, name)] == pytest.approx(weights, rel=0.02)  # of the micro-batches before
    assert size_of(found["sampling"], GRADIENTS) == 0


def test_what_the_settings_save(ppo_values: Any) -> None:
    plain = phases(ppo_values())
    lora = phases(ppo_values(lora={"rank": 2, "alpha": 4.0}))
    shared = phases(ppo_values(critic={"kind": "shared"}))
    shorter = phases(ppo_values(micro_batch_size=1))
    again = phases(ppo_values(gradient_checkpointing=True, micro_batch_size=1))
    assert Part(WEIGHTS, "reference") not in lora["update"].parts
    assert size_of(lora["update"], OPTIMIZER) < 0.5 * size_of(plain["update"], OPTIMIZER)
    assert size_of(shared["update"], WEIGHTS) < 0.8 * size_of(plain["update"], WEIGHTS)
    assert again["update"].peak < shorter["update"].peak < plain["update"].peak


def test_the_cache_grows_with_the_answer() -> None:
    """Keys and values of two layers, two heads of 16 numbers, and as many positions as the last pass reads."""
    for new in (40, 80):
        with planned_for(accelerator=False):
            (phase,) = sampler_phases(shapes(), 6, Lengths(10, new), each=2)
        assert phase.parts[Part(CACHE)] == 2 * 2 * 2 * 16 * 4 * 6 * (10 + new - 1)  # of the last pass


def test_models_of_evaluate() -> None:
    """The candidate, the SFT model, a policy between them, and two reward models; logits of both in the exact KL."""
    weights = 4 * parameters_of([shapes().causal_lm()])
    with planned_for(accelerator=False):
        found = evaluate_phases(shapes(), 3, Lengths(8, 8), each=1, scorers=2, interpolates=True)
        fewer = evaluate_phases(shapes(), 3, Lengths(8, 8), each=1, scorers=2, interpolates=False)
    assert [phase.name for phase in found] == ["sampling", "exact KL"]
    for phase, other in zip(found, fewer, strict=True):
        assert size_of(phase, WEIGHTS) == pytest.approx(5 * weights, rel=0.02)
        assert phase.peak - other.peak == pytest.approx(weights, rel=0.02)
    assert found[1].parts[Part(LOGITS)] >= 2 * 4 * 3 * 8 * 200


def test_a_divided_ppo(ppo_values: Any) -> None:
    """Each of four processes has a quarter of what is kept, and the weights that a phase gathers."""
    values = ppo_values(minibatches=1)
    one = phases(values)
    four = phases(values | {"processes": 4, "sharding": "fsdp", "batch_size": 4 * values["batch_size"]})
    for name, phase in four.items():
        for kind in (WEIGHTS, OPTIMIZER):
            assert size_of(phase, kind) == pytest.approx(size_of(one[name], kind) / 4, rel=0.01)
    model = shapes().causal_lm()
    weights, root = 4 * parameters_of([model]), 4 * 64 * (200 + 1)
    layer = (weights - root) // 2
    assert four["sampling"].parts[Part(GATHERED, "policy")] == weights
    assert four["log-probabilities"].parts[Part(GATHERED, "reference")] == root + 2 * layer
    assert four["update"].parts[Part(GATHERED, "policy")] == 2 * root + 4 * layer  # and gradients of both
    assert Part(GATHERED, "policy") not in four["scoring"].parts
    assert four["scoring"].parts[Part(GATHERED, "reward model")] == pytest.approx(weights, rel=0.01)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_divided_sft(precision: Any) -> None:
    """Gathered weights have the precision of the layers; no copies of them are counted beside them."""
    one, many = ({phase.name: phase for phase in sft_of(processes, precision)} for processes in (1, 8))
    size = 2 if precision == "bfloat16" else 4
    root = 64 * (200 + 1)
    body = parameters_of([shapes().causal_lm()]) - root
    assert size_of(many["update"], WEIGHTS) == pytest.approx(size_of(one["update"], WEIGHTS) / 8, rel=0.01)
    assert many["validation"].parts[Part(GATHERED, "policy")] == 4 * root + size * body
    assert many["update"].parts[Part(GATHERED, "policy")] == 2 * 4 * root + size * body + (size + 4) * body // 2
    assert many["update"].peak - size_of(many["update"], GATHERED) < one["update"].peak


@pytest.mark.parametrize(("kind", "plan"), [(RewardConfig, reward_phases), (DPOConfig, pair_phases)])
@pytest.mark.parametrize("change", [{"processes": 8}, {"lora": {"rank": 2, "alpha": 4.0}}], ids=["divided", "lora"])
def test_held_out_pairs_are_read_with_whole_float32_weights(kind: Any, plan: Any, change: dict[str, Any]) -> None:
    """After a divided model has been joined, or adapters have been merged."""
    values = {"learning_rate": 1e-3, "epochs": 1, "batch_size": 4, "warmup_steps": 0, "max_tokens": 16}
    values |= {"weight_decay": 0.0} if kind is RewardConfig else {"enabled": True}
    names = []
    for changed in ({}, change):
        with planned_for(accelerator=False):
            config = kind.model_validate(values | changed)
            found = plan(shapes().in_precision("bfloat16"), config, Lengths(8, 8), 2)
        names.append([phase.name for phase in found])
    assert names[1] == [*names[0], "held-out pairs"]
    weights = 4 * parameters_of([shapes().causal_lm()])
    assert size_of(found[-1], WEIGHTS) == pytest.approx(weights, rel=0.02)
    assert size_of(found[-1], GATHERED) == 0 < size_of(found[-1], "activations")


def test_every_limit_of_the_device_is_planned() -> None:
    """A limit that keeps the CPU's size plans passes that an accelerator does not make, and many more of them."""
    found = {
        name.group()
        for path in (ROOT / "rlhf_core").rglob("*.py")
        for name in re.finditer(r"^\w+_ON_ACCELERATOR(?= =)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert found == {name for _, _, name in LIMITS}


def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plan_memory", ROOT / "benchmarks" / "plan_memory.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["plan_memory"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.chosen("20")
@pytest.mark.parametrize("size", [5, 20, 50])
def test_planned_is_what_a_real_run_takes(size: int) -> None:
    """Resident memory of a real SFT, a PPO update and sampling, each in a process of its own."""
    for row in benchmark().compare([size]):
        assert abs(row["ratio"] - 1) <= TOLERANCE, row
