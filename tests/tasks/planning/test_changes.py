"""Changes that `leash plan` tries."""

from pathlib import Path
from typing import Any

from tasks.params.all import Params
from tasks.params.loader import parse, read_yaml
from tasks.params.variant import merged
from tasks.planning.changes import changes_of

ROOT = Path(__file__).resolve().parents[3]


def params(change: dict[str, Any]) -> Any:
    return parse(Params, merged(read_yaml(ROOT / "examples/tiny.yaml"), change))


def names(stage: str) -> list[str]:
    """The parameters in the order in which they are tried, each once."""
    blocks = [change.get(stage, {}) for change in changes_of(stage, params({}))]
    return list(dict.fromkeys(name for block in blocks for name in block))


def test_what_changes_no_result_comes_first() -> None:
    assert names("ppo") == ["gradient_checkpointing", "micro_batch_tokens", "sampler_rows", "lora", "critic"]
    assert names("sft") == ["gradient_checkpointing", "micro_batch_size", "lora"]
    assert names("reward") == ["gradient_checkpointing", "lora", "batch_size"]


def test_a_run_on_several_gpus_divides_its_models() -> None:
    one, four = params({}), params({"ppo": {"processes": 4}})
    divided = {"ppo": {"sharding": "fsdp"}}
    assert divided in changes_of("ppo", four)
    assert divided not in changes_of("ppo", one)
    for stage in ("sft", "reward"):
        assert {stage: {"processes": 4}} in changes_of(stage, four)
        assert not any("processes" in change.get(stage, {}) for change in changes_of(stage, one))
