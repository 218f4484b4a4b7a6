"""Planned files, counted by hand."""

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from rlhf_core.planning.shapes import Shapes
from tasks.params.all import Params
from tasks.params.loader import parse, read_yaml
from tasks.params.variant import merged
from tasks.planning.run import disk_of

ROOT = Path(__file__).resolve().parents[3]
COUNTS = {"policy": 1000, "reward model": 900, "trained": 1000}
ADAPTERS = {"policy": 1000, "reward model": 900, "trained": 10}


def disk(parameters: dict[str, int], ppo: dict[str, Any], precision: str = "float32") -> dict[str, int]:
    change = {"precision": precision, "ppo": {"steps": 4, "snapshot_every": 2, **ppo}}
    params = parse(Params, merged(read_yaml(ROOT / "examples/tiny.yaml"), change))
    config = LlamaConfig(vocab_size=99, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    return disk_of(Shapes(config), params, parameters)


@pytest.mark.parametrize(("precision", "size"), [("float32", 4), ("bfloat16", 2)])
def test_snapshots_have_the_precision_of_the_run(precision: str, size: int) -> None:
    found = disk(COUNTS, {}, precision)
    assert found["snapshots"] == 2 * size * 1000
    assert found["cache"] == found["models"] + found["snapshots"]
    assert found["total"] == 2 * found["cache"] + found["checkpoints"]


def test_snapshots_and_checkpoints_with_adapters() -> None:
    """Snapshots of adapters are float32. The largest checkpoint is SFT's: the model and its moments."""
    found = disk(ADAPTERS, {"lora": {"rank": 2}}, "bfloat16")
    assert found["snapshots"] == 2 * 4 * 10
    assert found["checkpoints"] == 3 * 4 * 3 * 1000
