"""Stages whose `enabled` is false: every out in its place, nothing in it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rlhf_core.ppo.detectors import COLUMNS as OF_DETECTORS
from tasks.rejection_sft import LOGGED as OF_REJECTION
from tasks.schemas.validation import load
from tasks.stage.outputs import Outputs
from tasks.stage.switched_off import COLUMNS, OF_PAIRS, OF_PPO, write_switched_off
from tasks.training.preference_training import LOGGED

if TYPE_CHECKING:
    from tests.conftest import TinyRun

OUTS = ["data/best_of_n/samples.jsonl", "models/toy", "metrics/toy.json", "plots/dpo.csv"]


def test_every_out_is_empty(tmp_path: Path) -> None:
    with Outputs(tmp_path, OUTS) as outputs:
        write_switched_off(outputs, "toy", "it has a switch")
        outputs.commit()
    assert json.loads((tmp_path / "metrics/toy.json").read_text()) == {"enabled": False}
    assert [path.name for path in (tmp_path / "models/toy").iterdir()] == ["README.md"]
    assert "toy is switched off (it has a switch)" in (tmp_path / "models/toy/README.md").read_text()
    assert (tmp_path / "plots/dpo.csv").read_text() == "step,loss,accuracy,margin\n"
    assert load(tmp_path, OUTS[:1]) == {OUTS[0]: []}


def test_the_headers_of_the_reward_model_are_those_of_a_run(tiny_run: "TinyRun") -> None:
    for path in (path for path in COLUMNS if path.startswith("plots/reward")):
        with (tiny_run.project.root / path).open(encoding="utf-8") as file:
            assert file.readline() == ",".join(COLUMNS[path]) + "\n", path


def test_the_headers_are_those_of_the_tables_that_are_written_otherwise() -> None:
    assert ("step", *LOGGED) == OF_PAIRS
    assert OF_DETECTORS == OF_PPO
    assert COLUMNS["plots/rejection_sft.csv"] == ("step", *OF_REJECTION.values())


@pytest.mark.parametrize("out", ["plots/toy.csv", "report/page.html", "metrics/other.json"])
def test_an_out_without_an_empty_form_is_refused(out: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=out):
        write_switched_off(Outputs(tmp_path, [out]), "toy", "it has a switch")
