"""Stages whose model is divided over processes, run as DVC runs them."""

from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file

if TYPE_CHECKING:
    from tests.conftest import Project

COMPARED = {
    "sft": ("models/sft", ("validation_loss", "train_loss", "base_validation_loss")),
    "reward": ("models/reward", ("heldout_loss", "heldout_accuracy")),
    "dpo": ("models/dpo", ("heldout_loss", "heldout_margin", "train_loss")),
}
SWITCHED = {
    "sft": {"sft.micro_batch_size": 4},
    "reward": {"reward.members": 2},
    "dpo": {"dpo.enabled": True, "dpo.batch_size": 4},
    "dpo, adapters": {"dpo.enabled": True, "dpo.batch_size": 4, "dpo.lora": {"rank": 4, "alpha": 8.0}},
}


@pytest.mark.slow
@pytest.mark.chosen("dpo, adapters")
@pytest.mark.parametrize("name", list(SWITCHED))
def test_a_stage_of_two_processes_makes_what_one_makes(name: str, finished: "Project") -> None:
    stage = name.partition(",")[0]
    finished.set("runtime.tracking", False)
    for key, value in SWITCHED[name].items():
        finished.set(key, value)
    folder, names = COMPARED[stage]
    made = []
    for count in (1, 2):
        finished.set(f"{stage}.processes", count)
        done = finished.stage(stage)
        assert done.returncode == 0, done.stderr
        files = sorted((finished.root / folder).rglob("*.safetensors"))
        made.append((finished.json(f"metrics/{stage}.json"), [load_file(file) for file in files]))
    (one, weights), (two, divided) = made
    assert one.keys() == two.keys()
    for figure in names:
        assert two[figure] == pytest.approx(one[figure], rel=1e-3, abs=1e-4)
    assert len(weights) == len(divided) == (2 if stage == "reward" else 1)
    for before, after in zip(weights, divided, strict=True):
        assert before.keys() == after.keys()
        for part, tensor in before.items():
            assert (after[part] - tensor).norm() <= 1e-3 * tensor.norm() + 1e-6, part
