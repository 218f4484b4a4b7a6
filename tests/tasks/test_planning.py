"""`leash plan`: rows, work, times, files and changes, counted by hand."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import LlamaConfig

from rlhf_core.config.lora import LoraSettings
from rlhf_core.planning import Model
from tasks.evaluation.ceiling import POLICY_SAMPLES, SFT_SAMPLES
from tasks.params.all import Params
from tasks.params.loader import parse, read_yaml
from tasks.params.variant import merged
from tasks.planning import (
    DATASETS,
    FOR_OPTIMUM,
    Work,
    changes_of,
    disk_of,
    earlier_runs,
    plan_run,
    rows_of,
    stages_of,
)
from tasks.tracking import record

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {"vocab_size": 99, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
SMALL = Model.of(LlamaConfig(**CONFIG))
FILES = {"ingest": {"source": "files", "files": {"path": "mine"}}, "preferences": {"source": "dataset"}}


def content(change: dict[str, Any]) -> dict[str, Any]:
    return merged(read_yaml(ROOT / "examples/tiny.yaml"), change)


def params(change: dict[str, Any]) -> Any:
    return parse(Params, content(change))


def rows(change: dict[str, Any], root: Path) -> dict[str, int] | None:
    return rows_of(content(change), params(change), root)


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ingested(tmp_path: Path) -> Path:
    """A project whose `ingest` has run with FILES: 30 demonstrations and no pairs; the raw file has 50 rows."""
    raw, made = tmp_path / "data/raw/mine", tmp_path / "data/ingest"
    raw.mkdir(parents=True)
    made.mkdir()
    (raw / "a.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 50)
    for name in DATASETS:
        (made / f"{name}.jsonl").write_text('{"x": 1}\n' * 30 if name == "demonstrations" else "\n")
    lock = {"stages": {"ingest": {"params": {"params.yaml": {"ingest": content(FILES)["ingest"]}}}}}
    (tmp_path / "dvc.lock").write_text(yaml.safe_dump(lock))
    return tmp_path


def test_rows_are_those_of_ingest_and_an_empty_file_has_none(ingested: Path) -> None:
    found = rows(FILES, ingested)
    assert found == dict.fromkeys(DATASETS, 0) | {"demonstrations": 30}
    stages = {stage.name: stage for stage in stages_of(params(FILES), SMALL, found)}
    assert stages["sft"].work is not None
    assert stages["dpo"].work is None  # there are no prompts with answers to train on


def test_rows_of_an_ingest_before_a_change_do_not_count(ingested: Path) -> None:
    """Other parameters, or a newer file: the rows of the file, by the shares of the split."""
    expected = {"demonstrations": 22, "pairs": 14, "ratings": 14, "preference_prompts": 14, "ppo_prompts": 9}
    assert rows(merged(FILES, {"ingest": {"seed": 7}}), ingested) == expected | {"heldout": 5}
    file, later = ingested / "data/raw/mine/a.jsonl", time.time() + 60
    os.utime(file, (later, later))
    assert rows(FILES, ingested) == expected | {"heldout": 5}
    lock = yaml.safe_load((ingested / "dvc.lock").read_text())
    lock["stages"]["ingest"]["deps"] = [{"path": "data/raw", "size": file.stat().st_size}]
    (ingested / "dvc.lock").write_text(yaml.safe_dump(lock))  # as in a fresh clone: its files are newer
    assert rows(FILES, ingested) == dict.fromkeys(DATASETS, 0) | {"demonstrations": 30}
    (file.parent / "test.jsonl").write_text("{}\n" * 8)
    found = rows(FILES, ingested)
    assert found is not None
    assert (found["heldout"], found["demonstrations"]) == (8, 25)


def test_rows_of_the_demo_are_known_before_it_is_made(tmp_path: Path) -> None:
    assert rows({}, tmp_path) == {
        "demonstrations": 180, "pairs": 0, "ratings": 108, "preference_prompts": 108, "ppo_prompts": 72, "heldout": 40,
    }  # fmt: skip


def test_without_data_nothing_is_zero(tmp_path: Path) -> None:
    """Neither rows nor seconds; the sum says so."""
    assert rows(FILES, tmp_path) is None
    plan = plan_run(content(FILES), tmp_path, 1e12, accelerator=False)
    assert (plan["rows"], plan["seconds"]) == (None, None)
    assert plan["stages"]["sft"]["work"] is plan["stages"]["sft"]["seconds"] is None
    assert plan["stages"]["ppo"]["seconds"] > 0


# --- work and time ----------------------------------------------------------------------------------------------------


def test_samples_of_evaluate() -> None:
    """SFT model, policy, rejection_sft and rloo answer twice; one interpolated policy and two snapshots once; SFT
    model and policy answer six more times for the optimum."""
    change = {
        "ppo": {"steps": 4, "snapshot_every": 2},
        "evaluate": {"seeds": [1, 2], "interpolation": [0.5], "snapshots": 5, "max_prompts": 10},
        "rejection_sft": {"enabled": True}, "rloo": {"enabled": True},
        **{name: {"enabled": False} for name in ("dpo", "ipo", "best_of_n", "hybrid", "reinforce", "grpo")},
    }  # fmt: skip
    found = params(change)
    *_, last = stages_of(found, SMALL, None, 8)
    new, samples = found.evaluate.max_new_tokens, 10 * (4 * 2 + 1 + 2 + 2 * 6)
    scorers = found.reward.members + (found.reward.judge_share > 0)
    assert last.name == "evaluate"
    assert last.work == Work(samples, samples * new, samples * (8 + new) * (2 + scorers))


def test_answers_for_the_optimum_are_those_of_evaluate() -> None:
    assert FOR_OPTIMUM == SFT_SAMPLES == POLICY_SAMPLES


def test_the_reward_model_reads_every_answer_once() -> None:
    """Four answers to each of 100 prompts, less the tenth that validates; an epoch."""
    counted = dict.fromkeys(DATASETS, 100)
    found = params({"reward": {"epochs": 1, "max_tokens": 30}, "preferences": {"max_new_tokens": 20}})
    stage = next(stage for stage in stages_of(found, SMALL, counted) if stage.name == "reward")
    assert stage.work == Work(trained=90 * (10 + 4 * 20))


def run_before(root: Path, change: dict[str, Any], seconds: int, **facts: Any) -> None:
    """A finished PPO in the records."""
    folder = root / "work/tracking/before"
    record.write(folder / record.RUN, {"params": record.flatten(content(change))})
    state = {"stage": "ppo", "status": "FINISHED", "started": 1000, "ended": 1000 + 1000 * seconds}
    record.write(folder / "ppo-1" / record.FACTS, state | facts)


def test_time_is_that_of_the_last_run_scaled_by_its_tokens(tmp_path: Path) -> None:
    run_before(tmp_path, {}, seconds=40)
    plan = plan_run(content({}), tmp_path, 1e12, accelerator=False)
    assert plan["stages"]["ppo"]["seconds"] == pytest.approx(40)
    assert plan["stages"]["ppo"]["time_by"].startswith("run of 19")
    assert plan["stages"]["sft"]["time_by"] == "formula"
    assert plan["seconds"] == pytest.approx(sum(stage["seconds"] for stage in plan["stages"].values()))
    steps = params({}).ppo.steps
    longer = plan_run(content({"ppo": {"steps": 3 * steps}}), tmp_path, 1e12, accelerator=False)
    assert longer["stages"]["ppo"]["seconds"] == pytest.approx(120)


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"base": {"scratch": {"layers": 3}}}, {}),
        ({"ppo": {"processes": 2}}, {}),
        ({}, {"restarts": 1}),
        ({}, {"restored": True}),
        ({}, {"status": "FAILED"}),
    ],
)
def test_runs_that_say_nothing_about_the_time(tmp_path: Path, change: dict[str, Any], facts: dict[str, Any]) -> None:
    run_before(tmp_path, change, 40, **facts)
    assert earlier_runs(content({}), tmp_path) == {}


def test_a_record_of_a_version_with_other_parameters_is_left_out(tmp_path: Path) -> None:
    run_before(tmp_path, {}, 40)
    path = tmp_path / "work/tracking/before" / record.RUN
    known = json.loads(path.read_text())
    record.write(path, {"params": known["params"] | {"ppo.unknown": "1"}})
    assert earlier_runs(content({}), tmp_path) == {}


# --- disk and changes -------------------------------------------------------------------------------------------------


def disk(ppo: dict[str, Any], precision: Any = "float32") -> dict[str, int]:
    change = {"precision": precision, "ppo": {"steps": 4, "snapshot_every": 2, **ppo}}
    return disk_of(Model.of(LlamaConfig(**CONFIG), precision=precision), params(change))


@pytest.mark.parametrize(("precision", "size"), [("float32", 4), ("bfloat16", 2)])
def test_snapshots_have_the_precision_of_the_run(precision: str, size: int) -> None:
    found = disk({}, precision)
    assert found["snapshots"] == 2 * size * SMALL.parameters
    assert found["cache"] == found["models"] + found["snapshots"]
    assert found["total"] == 2 * found["cache"] + found["checkpoints"]


def test_snapshots_and_checkpoints_with_adapters() -> None:
    """Snapshots of adapters are float32. The largest checkpoint is SFT's: the model and its moments."""
    found = disk({"lora": {"rank": 2}}, "bfloat16")
    assert found["snapshots"] == 2 * 4 * SMALL.trained(LoraSettings(rank=2))
    assert found["checkpoints"] == 3 * 4 * 3 * SMALL.parameters


def names(stage: str) -> list[str]:
    """The parameters in the order in which they are tried, each once."""
    blocks = [change.get(stage, {}) for change in changes_of(stage, params({}))]
    return list(dict.fromkeys(name for block in blocks for name in block))


def test_what_changes_no_result_comes_first() -> None:
    assert names("ppo") == ["gradient_checkpointing", "micro_batch_tokens", "sampler_rows", "lora", "critic"]
    assert names("sft") == ["gradient_checkpointing", "micro_batch_size", "lora"]
    assert names("reward") == ["gradient_checkpointing", "micro_batch_tokens", "lora"]


def test_a_run_on_several_gpus_divides_its_models() -> None:
    one, four = params({}), params({"ppo": {"processes": 4}})
    divided = {"ppo": {"sharding": "fsdp"}}
    assert divided in changes_of("ppo", four)
    assert divided not in changes_of("ppo", one)
    for stage in ("sft", "reward"):
        assert {stage: {"processes": 4}} in changes_of(stage, four)
        assert not any("processes" in change.get(stage, {}) for change in changes_of(stage, one))
