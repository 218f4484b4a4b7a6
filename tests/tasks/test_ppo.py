"""Stage `ppo` as a whole: what a kill in the middle of it leaves, and what the next start makes of that."""

import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from rlhf_core.ppo.trainer import PPOTrainer, Row

if TYPE_CHECKING:
    from tests.conftest import Ended, Project

KILLED = 137
OUTS = ("models/policy/", "models/critic/", "plots/ppo.csv", "data/ppo/", "metrics/ppo.json")


@pytest.mark.pipeline
def test_failure_01_a_killed_stage_continues_and_ends_byte_identical(
    finished: "Project", stage_main: Callable[["Project", str], "Ended"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in its third step, where the last checkpoint is one step old; policy, critic, history and samples."""
    outputs = finished.outputs()
    expected = {name: content for name, content in outputs.items() if name.startswith(OUTS)}
    assert {"models/policy/model.safetensors", "models/critic/model.safetensors", "plots/ppo.csv"} <= expected.keys()
    finished.set("runtime.tracking", False)
    finished.set("runtime.checkpoint_every", 1)
    shutil.rmtree(finished.root / "work" / "ppo", ignore_errors=True)
    made: list[int] = []
    step = PPOTrainer.step

    def watched(trainer: PPOTrainer) -> Row:
        if len(made) == 2:
            raise SystemExit(KILLED)
        row = step(trainer)
        made.append(trainer.steps_done)
        return row

    monkeypatch.setattr(PPOTrainer, "step", watched)
    assert stage_main(finished, "ppo").code == KILLED
    for name in expected:
        (finished.root / name).unlink()
    made.clear()
    assert stage_main(finished, "ppo").code == 0
    assert made == [3, 4]
    after = finished.outputs()
    assert {name: after[name] for name in expected} == expected
