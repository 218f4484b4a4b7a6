"""How many processes a stage has."""

from pathlib import Path

import pytest

from tasks.stage.workers import requested_processes

PARAMS = """
ppo: {processes: 2}
rloo: {enabled: true}
grpo: {enabled: true, settings: {processes: 3}}
reinforce: {enabled: false}
dpo: {enabled: true}
"""


@pytest.fixture
def params(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    path = tmp_path / "params.yaml"
    path.write_text(PARAMS, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("stage", "count"), [("ppo", 2), ("rloo", 2), ("grpo", 3), ("reinforce", 1), ("dpo", 1), ("sft", 1)]
)
def test_only_ppo_and_its_variants_have_several_processes(params: Path, stage: str, count: int) -> None:
    assert requested_processes(stage, params) == count


@pytest.mark.parametrize("text", ["ppo: 3", "rloo: 3", "ppo: {processes: many}", "- ppo", "ppo: [", "", "sft: {}"])
def test_params_that_are_not_valid_are_left_to_the_stage(params: Path, text: str) -> None:
    params.write_text(text, encoding="utf-8")
    assert requested_processes("ppo") == requested_processes("rloo") == 1
