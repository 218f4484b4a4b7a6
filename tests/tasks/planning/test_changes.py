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


def test_a_run_on_several_gpus_divides_its_models() -> None:
    one, four = params({}), params({"ppo": {"processes": 4}})
    divided = {"ppo": {"sharding": "fsdp"}}
    assert divided in changes_of("ppo", four)
    assert divided not in changes_of("ppo", one)
    for stage in ("sft", "reward"):
        assert {stage: {"processes": 4}} in changes_of(stage, four)
        assert not any("processes" in change.get(stage, {}) for change in changes_of(stage, one))
