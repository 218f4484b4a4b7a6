"""Stages whose `enabled` is false: every out in its place, nothing in it, and no model loaded."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import tasks.reward
from rlhf_core.config.dpo import DPOConfig
from tasks.params.best_of_n import BestOfNParams
from tasks.params.rejection_sft import RejectionParams
from tasks.schemas.validation import load
from tasks.stage.pipeline_run import numbers
from tasks.stage.switched_off import write_switched_off

if TYPE_CHECKING:
    from tests.conftest import TinyRun

MakeStage = Callable[..., Any]
STAGES = {
    "dpo": (DPOConfig(enabled=False), ["models/dpo", "metrics/dpo.json", "plots/dpo.csv"]),
    "rejection_sft": (
        RejectionParams(enabled=False),
        [
            "data/rejection_sft/samples.jsonl",
            "models/rejection_sft",
            "metrics/rejection_sft.json",
            "plots/rejection_sft.csv",
        ],
    ),
    "best_of_n": (BestOfNParams(enabled=False), ["data/best_of_n/samples.jsonl", "metrics/best_of_n.json"]),
}
HEADERS = {"dpo": "step,loss,accuracy,margin\n", "rejection_sft": "step,train_loss,validation_loss\n"}


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_that_is_switched_off_leaves_every_out_empty(
    name: str, make_stage: MakeStage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is no models/sft to load, nor any dataset to read."""
    params, outs = STAGES[name]
    stage = make_stage(name, params, outs)
    importlib.import_module(f"tasks.{name}").execute(stage)
    stage.outputs.commit()
    assert json.loads((tmp_path / f"metrics/{name}.json").read_text()) == {"enabled": False}
    if f"models/{name}" in outs:
        assert [path.name for path in (tmp_path / "models" / name).iterdir()] == ["README.md"]
        assert "switched off" in (tmp_path / "models" / name / "README.md").read_text()
        assert (tmp_path / f"plots/{name}.csv").read_text() == HEADERS[name]
    samples = [out for out in outs if out.endswith(".jsonl")]
    assert load(tmp_path, samples) == {out: [] for out in samples}
    assert capsys.readouterr().out.count("\n") == 1
    assert numbers(stage.metrics) == {}


@pytest.mark.parametrize(
    ("name", "outs"),
    [
        ("preferences", ["data/preferences/preferences.jsonl", "data/preferences/samples.jsonl"]),
        ("reward", ["models/reward", *tasks.reward.TABLES]),
    ],
)
def test_without_the_reward_model_its_stages_leave_every_out_empty(
    name: str, outs: list[str], make_stage: MakeStage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = make_stage(name, None, [*outs, f"metrics/{name}.json"], blocks={"reward_model": False})
    importlib.import_module(f"tasks.{name}").execute(stage)
    stage.outputs.commit()
    assert json.loads((tmp_path / f"metrics/{name}.json").read_text()) == {"enabled": False}
    samples = [out for out in outs if out.endswith(".jsonl")]
    assert load(tmp_path, samples) == {out: [] for out in samples}
    assert all((tmp_path / out).exists() for out in outs)
    why = f"{name} is switched off (`scorer` in params.yaml has no term reward_model)\n"
    assert capsys.readouterr().out.endswith(why)


def test_the_headers_of_the_reward_model_are_those_of_a_run(tiny_run: "TinyRun") -> None:
    for path, columns in tasks.reward.TABLES.items():
        with (tiny_run.project.root / path).open(encoding="utf-8") as file:
            assert file.readline() == ",".join(columns) + "\n", path


def test_the_headers_are_those_of_the_tables_that_are_written_otherwise() -> None:
    from tasks import rejection_sft
    from tasks.training.preference_training import LOGGED

    assert HEADERS["dpo"] == ",".join(["step", *LOGGED]) + "\n"
    assert HEADERS["rejection_sft"] == ",".join(["step", *rejection_sft.LOGGED.values()]) + "\n"


@pytest.mark.parametrize("out", ["plots/toy.csv", "report/page.html", "metrics/other.json"])
def test_an_out_without_an_empty_form_is_refused(out: str, make_stage: MakeStage) -> None:
    with pytest.raises(ValueError, match=out):
        write_switched_off(make_stage("toy", None, [out]))
