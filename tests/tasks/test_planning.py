"""`leash plan`: rows, work, times, files and changes, counted by hand."""

import json
import os
import socket
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, LlamaConfig

from flows.commands.plan import render
from rlhf_core.config.lora import LoraSettings
from rlhf_core.data.tokenizer import encode_prompt, encode_response, load_tokenizer
from rlhf_core.errors import UserError
from rlhf_core.models.hf import load_classifier
from rlhf_core.planning import Model
from tasks import planning
from tasks.params.all import Params
from tasks.params.loader import parse, read_yaml
from tasks.params.methods import VARIANTS
from tasks.params.variant import merged
from tasks.planning import (
    ANY_GPU,
    DATASETS,
    Rows,
    Work,
    changes_of,
    disk_of,
    earlier_runs,
    longest_prompt,
    means_of,
    plan_run,
    rows_of,
    stages_of,
)
from tasks.speed import Speed, of_cpu
from tasks.stage.dvc_files import Hashes
from tasks.tracking import record
from tests.elsewhere import save_classifier, save_language_model, save_reward_model

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {"vocab_size": 99, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
SMALL = Model.of(LlamaConfig(**CONFIG))
FILES = {"ingest": {"source": "files", "files": {"path": "mine"}}, "preferences": {"source": "dataset"}}


def content(change: dict[str, Any]) -> dict[str, Any]:
    return merged(read_yaml(ROOT / "examples/tiny.yaml"), change)


def params(change: dict[str, Any]) -> Any:
    return parse(Params, content(change))


def rows(change: dict[str, Any], root: Path) -> dict[str, int] | None:
    found = rows_of(content(change), params(change), root)
    return None if found is None else dict(found.counts)


# --- rows -------------------------------------------------------------------------------------------------------------


INGESTED = dict.fromkeys(DATASETS, 0) | {"demonstrations": 30}
EXPECTED = {
    "demonstrations": 22, "pairs": 14, "ratings": 14, "preference_prompts": 14, "ppo_prompts": 9, "heldout": 5,
}  # fmt: skip
"""By the shares of the split, of 50 rows."""


@pytest.fixture
def ingested(tmp_path: Path) -> Path:
    """A project whose `ingest` has run with FILES: 30 demonstrations and no pairs; the raw file has 50 rows."""
    raw, made = tmp_path / "data/raw/mine", tmp_path / "data/ingest"
    raw.mkdir(parents=True)
    made.mkdir()
    (raw / "a.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 50)
    outs = [f"data/ingest/{name}.jsonl" for name in DATASETS]
    for name in outs:
        (tmp_path / name).write_text('{"x": 1}\n' * 30 if "demonstrations" in name else "\n")
    stage = {"cmd": "python -m tasks ingest", "deps": ["data/raw"], "params": ["ingest"], "outs": outs}
    (tmp_path / "dvc.yaml").write_text(yaml.safe_dump({"stages": {"ingest": stage}}))
    hashes = Hashes(tmp_path)
    entry: dict[str, Any] = {"cmd": stage["cmd"], "params": {"params.yaml": {"ingest": content(FILES)["ingest"]}}}
    for kind, paths in (("deps", ["data/raw"]), ("outs", outs)):
        entry[kind] = [{"path": path, "md5": hashes.of(tmp_path / path)} for path in paths]
    (tmp_path / "dvc.lock").write_text(yaml.safe_dump({"schema": "2.0", "stages": {"ingest": entry}}))
    return tmp_path


def test_rows_are_those_of_ingest_and_an_empty_file_has_none(ingested: Path) -> None:
    """That there are none is known: it is no unknown number."""
    found = rows(FILES, ingested)
    assert found == INGESTED
    stages = {stage.name: stage for stage in stages_of(params(FILES), SMALL, Rows(found))}
    assert stages["sft"].work is not None
    assert stages["dpo"].work == stages["reward"].work == stages["evaluate"].work == Work()
    plan = plan_run(content(FILES), ingested, 1e12, "cpu")
    assert plan["seconds"] > plan["stages"]["dpo"]["seconds"] == 0
    assert "not known" not in render({"device": "host", **plan})


def test_rows_of_an_ingest_before_a_change_do_not_count(ingested: Path) -> None:
    """Other parameters, or another file: the rows of the file, by the shares of the split."""
    assert rows(merged(FILES, {"ingest": {"seed": 7}}), ingested) == EXPECTED
    (ingested / "data/raw/mine/test.jsonl").write_text("{}\n" * 8)
    found = rows(FILES, ingested)
    assert found is not None
    assert (found["heldout"], found["demonstrations"]) == (8, 25)


def test_files_are_compared_by_their_bytes(ingested: Path) -> None:
    """A new time says nothing, as in a fresh clone; an equal size and an old time say nothing either."""
    file, made = ingested / "data/raw/mine/a.jsonl", ingested / "data/ingest/demonstrations.jsonl"
    os.utime(file, (later := time.time() + 60, later))
    assert rows(FILES, ingested) == INGESTED
    text = file.read_text()
    file.write_text(text.replace("b", "c"))
    os.utime(file, (1.0, 1.0))
    assert rows(FILES, ingested) == EXPECTED
    file.write_text(text)
    made.write_text('{"x": 1}\n' * 31)  # of an `ingest` that DVC has not recorded
    assert rows(FILES, ingested) == EXPECTED


@pytest.mark.parametrize("text", [b"<<<<<<< HEAD\nstages: {}\n=======\n>>>>>>> other\n", b"\xff\xfe\x00\x01\x80"])
def test_a_broken_lock_file_is_one_line(ingested: Path, text: bytes) -> None:
    (ingested / "dvc.lock").write_bytes(text)
    with pytest.raises(UserError, match=r"^dvc\.lock is broken \(.*\); .*$"):
        rows(FILES, ingested)


def test_rows_of_the_demo_are_known_before_it_is_made(tmp_path: Path) -> None:
    assert rows({}, tmp_path) == {
        "demonstrations": 180, "pairs": 0, "ratings": 108, "preference_prompts": 108, "ppo_prompts": 72, "heldout": 40,
    }  # fmt: skip


def test_rows_of_shared_prompts_and_without_sft(tmp_path: Path) -> None:
    """400 prompts, 40 of them held out and 36 of the others for validation; PPO has those that train."""
    shared = {"ingest": {"split": {"share": True}}}
    assert rows(shared, tmp_path) == {
        "demonstrations": 360, "pairs": 0, "ratings": 360, "preference_prompts": 360, "ppo_prompts": 324, "heldout": 40,
    }  # fmt: skip
    assert rows({"ingest": {"split": {"share": None}}}, tmp_path) == rows(shared, tmp_path)
    off = {"sft": {"enabled": False}}
    assert rows(off, tmp_path) == {
        "demonstrations": 0, "pairs": 0, "ratings": 216, "preference_prompts": 216, "ppo_prompts": 144, "heldout": 40,
    }  # fmt: skip
    assert "sft" not in {stage.name for stage in stages_of(params(off), SMALL, None)}
    assert disk_of(SMALL, params(off))["models"] == disk_of(SMALL, params({}))["models"] - 4 * SMALL.parameters


def test_prompts_are_planned_as_shared_where_ingest_shares_them(
    ingested: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no reward model is trained; and the rows of an `ingest` that had one are not those of a run without."""
    monkeypatch.setattr("tasks.datasets.sources.splits.FEW_PROMPTS", 1)
    default = {"ingest": {"split": {"share": None}}}
    alone = {"scorer": [{"term": "a.py", "weight": 1.0}], "ppo": {"critic": {"init": "sft"}}, "dpo": {"enabled": False}}
    apart, together = rows(default, tmp_path), rows(default | alone, tmp_path)
    assert apart is not None
    assert together is not None
    assert (apart["ppo_prompts"], together["ppo_prompts"]) == (72, 324)
    assert rows(FILES, ingested) == INGESTED != rows(FILES | alone, ingested)


def test_without_data_nothing_is_zero(tmp_path: Path) -> None:
    """Neither rows nor seconds; the sum says so."""
    assert rows(FILES, tmp_path) is None
    plan = plan_run(content(FILES), tmp_path, 1e12, "cpu")
    assert (plan["rows"], plan["seconds"]) == (None, None)
    assert plan["stages"]["sft"]["work"] is plan["stages"]["sft"]["seconds"] is None
    assert plan["stages"]["ppo"]["seconds"] > 0


# --- work and time ----------------------------------------------------------------------------------------------------


def test_samples_of_evaluate() -> None:
    """SFT model, policy, rejection_sft and rloo answer twice; one interpolated policy and two snapshots once; SFT
    model and policy answer six more times for the optimum."""
    change = {
        "ppo": {"steps": 4, "snapshot_every": 2},
        "evaluate": {"seeds": [1, 2], "interpolation": [0.5], "snapshots": 5, "optimum_samples": 8, "max_prompts": 10},
        "rejection_sft": {"enabled": True}, "rloo": {"enabled": True},
        **{name: {"enabled": False} for name in ("dpo", "ipo", "best_of_n", "hybrid", "reinforce", "grpo")},
    }  # fmt: skip
    found = params(change)
    *_, last = stages_of(found, SMALL, None, 8)
    new, samples = found.evaluate.max_new_tokens, 10 * (4 * 2 + 1 + 2 + 2 * 6)
    scorers = found.reward.members + (found.reward.judge_share > 0)
    assert last.name == "evaluate"
    assert last.work == Work(samples, samples * new, samples * (8 + new) * (2 + scorers))


def test_the_reward_model_reads_every_answer_once() -> None:
    """Four answers to each of 100 prompts, less the tenth that validates; an epoch."""
    counted = dict.fromkeys(DATASETS, 100)
    found = params({"reward": {"epochs": 1, "max_tokens": 30}, "preferences": {"max_new_tokens": 20}})
    stage = next(stage for stage in stages_of(found, SMALL, Rows(counted)) if stage.name == "reward")
    assert stage.work == Work(trained=90 * (10 + 4 * 20))


def test_rated_texts_are_read_once() -> None:
    """A row of ratings is one text, not a pair; its prompt leaves room for an answer of PPO."""
    change = {
        "ingest": FILES["ingest"] | {"rating_column": "stars"},
        "preferences": {"source": "ratings", "max_new_tokens": 7},
    }
    change |= {"reward": {"epochs": 1, "max_tokens": 30}, "ppo": {"max_new_tokens": 20}, "dpo": {"enabled": False}}
    counted = dict.fromkeys(DATASETS, 100)
    stage = next(stage for stage in stages_of(params(change), SMALL, Rows(counted)) if stage.name == "reward")
    assert stage.work == Work(trained=90 * (10 + 20))
    assert longest_prompt(params(change)) == 10, "not less the 7 tokens of a sampler that does not run"


def test_lengths_are_those_of_ingest_where_it_has_run(ingested: Path) -> None:
    """Means of tokens for the work; memory is still that of the longest rows."""
    model = save_language_model(ingested / "data/raw/base")
    change = merged(FILES, {"base": {"source": "pretrained", "pretrained": {"model": "base"}}})
    texts = ["good", "good good good good good good good good"]
    prompt = [{"role": "user", "content": "a"}]
    rows = [{"prompt_id": text, "prompt": prompt, "response": text, "split": "train"} for text in texts]
    (ingested / "data/ingest/demonstrations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = load_tokenizer(model)
    prompt_tokens = len(encode_prompt(tokenizer, prompt))
    answers = [len(encode_response(tokenizer, text)) for text in texts]
    found = means_of(params(change), ingested, None)
    assert found == {"demonstrations": (prompt_tokens, mean(answers))}
    known = Rows({"demonstrations": 20} | dict.fromkeys(DATASETS[1:], 0), means=found)
    short, longest = (next(stages_of(params(change), SMALL, rows)) for rows in (known, replace(known, means={})))
    assert short.work is not None
    assert longest.work is not None
    epochs = params(change).sft.epochs
    assert short.work.trained == round(18 * epochs) * (prompt_tokens + round(mean(answers))) < longest.work.trained
    assert short.peak() == longest.peak()


def test_every_stage_takes_the_mean_lengths_of_its_own_rows() -> None:
    """Prompts of 3 tokens and, in the pairs, answers of 4; sampled answers are as long as the demonstrations, 2, and no
    longer than their limit."""
    change = {"reward": {"epochs": 1}, "evaluate": {"max_prompts": 10, "max_new_tokens": 1}}
    found = params(merged(FILES, change))
    assert found.ppo.max_new_tokens > 2
    counts = dict.fromkeys(DATASETS, 100)
    means = {"demonstrations": (5, 2), "pairs": (3, 4), "ppo_prompts": (3, 0), "heldout": (3, 9)}
    works, without = (
        {stage.name: stage.work for stage in stages_of(found, SMALL, rows, 20)}
        for rows in (Rows(counts, means=means), Rows(counts))
    )
    assert works["reward"] == Work(trained=90 * (3 + 2 * 4))
    for name, new, longest in (("ppo", 2, found.ppo.max_new_tokens), ("evaluate", 1, 1)):
        less, more = works[name], without[name]
        assert less is not None
        assert more is not None
        assert less.read / more.read == pytest.approx((3 + new) / (20 + longest))
        assert (less.sampled / less.samples, more.sampled / more.samples) == (new, longest)
        assert less.trained * (20 + longest) == more.trained * (3 + new)


def test_a_token_costs_three_passes_in_training_and_two_with_adapters() -> None:
    speed, once = Speed(sampling=1.0, reading=10.0, training=2.0), 2.0 * (SMALL.products + SMALL.head)
    assert Work(sampled=3, read=40, trained=4).seconds(SMALL, speed) == once * (3 + 4 + 6)
    assert Work(sampled=3, read=40, trained=4, adapters=True).seconds(SMALL, speed) == once * (3 + 4 + 4)
    found = params(merged(FILES, {"ppo": {"lora": {}}}))
    works = {stage.name: stage.work for stage in stages_of(found, SMALL, Rows(dict.fromkeys(DATASETS, 100)), 20)}
    adapted = {name for name, work in works.items() if work is not None and work.adapters}
    assert adapted == {"ppo", *(name for name in works if name in VARIANTS)}


def test_the_speed_of_this_cpu_is_measured_and_its_threads_and_random_numbers_stay() -> None:
    before, state = torch.get_num_threads(), torch.random.get_rng_state()
    found = of_cpu(96, 200, "float32", before + 1)
    assert all(1e7 < value < 1e14 for value in asdict(found).values())
    assert torch.get_num_threads() == before
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(("training", "line"), [(50.0, 1), (250.0, 0)])
def test_a_plan_says_where_bfloat16_is_slower_than_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, training: float, line: int
) -> None:
    speeds = {"float32": Speed(100.0, 100.0, 200.0), "bfloat16": Speed(100.0, 100.0, training)}
    monkeypatch.setattr(planning, "of_cpu", lambda hidden, intermediate, precision, threads: speeds[precision])
    change = merged(FILES, {"precision": "bfloat16"})
    plan = {"device": "host", **plan_run(content(change), tmp_path, 1e12, "cpu")}
    assert render(plan).count("bfloat16 takes 4.0 times as long as float32 on this CPU; set float32") == line
    assert plan_run(content(change), tmp_path, 1e12, ANY_GPU)["bfloat16_time"] is None
    assert "after `leash run base` it is of the usual ones" in render(plan), "which has the tokenizer"


def test_an_earlier_run_without_rows_gives_no_time(tmp_path: Path) -> None:
    """Of SFT with adapters, whose work was nothing."""
    change = {"sft": {"lora": {}}}
    run_before(tmp_path, change, seconds=40, stage="sft")
    counted = dict.fromkeys(DATASETS, 0)
    [folder] = record.folder_of(tmp_path).glob("*")
    path = folder / "ingest-1" / record.FILES / "metrics" / "ingest.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(counted))
    assert plan_run(content(change), tmp_path, 1e12, "cpu")["stages"]["sft"]["time_by"] == "formula"


def run_before(root: Path, change: dict[str, Any], seconds: int, stage: str = "ppo", **facts: Any) -> None:
    """A finished stage in the records, on the CPU of this host."""
    folder = root / "work/tracking/before"
    record.write(folder / record.RUN, {"params": record.flatten(content(change))})
    state = {"stage": stage, "status": "FINISHED", "started": 1000, "ended": 1000 + 1000 * seconds}
    state |= {"host": socket.gethostname(), "device": "cpu"}
    record.write(folder / f"{stage}-1" / record.FACTS, state | facts)


def test_time_is_that_of_the_last_run_scaled_by_its_tokens(tmp_path: Path) -> None:
    formula = plan_run(content({}), tmp_path, 1e12, "cpu")["stages"]
    run_before(tmp_path, {}, seconds=40)
    plan = plan_run(content({}), tmp_path, 1e12, "cpu")
    assert plan["stages"]["ppo"]["seconds"] == pytest.approx(40)
    assert plan["stages"]["ppo"]["time_by"].startswith("run of 19")
    factor = 40 / formula["ppo"]["seconds"]
    assert plan["stages"]["sft"]["seconds"] == pytest.approx(factor * formula["sft"]["seconds"])
    assert plan["stages"]["sft"]["time_by"] == f"formula × {factor:.3g} by runs"
    assert plan["seconds"] == pytest.approx(sum(stage["seconds"] for stage in plan["stages"].values()))
    steps = params({}).ppo.steps
    longer = plan_run(content({"ppo": {"steps": 3 * steps}}), tmp_path, 1e12, "cpu")
    assert longer["stages"]["ppo"]["seconds"] == pytest.approx(120)


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"base": {"scratch": {"layers": 3}}}, {}),
        ({"ppo": {"processes": 2}}, {}),
        ({"ppo": {"gradient_checkpointing": True}}, {}),
        ({"ppo": {"lora": {"rank": 2}, "critic": {"init": "sft"}}}, {}),
        ({"ppo": {"optimizer": {"states": "int8"}}}, {}),
        ({}, {"host": "another"}),
        ({}, {"device": "NVIDIA H100"}),
        ({}, {"resumed": True}),
        ({}, {"restarts": 1}),
        ({}, {"restored": True}),
        ({}, {"status": "FAILED"}),
    ],
)
def test_runs_that_say_nothing_about_the_time(tmp_path: Path, change: dict[str, Any], facts: dict[str, Any]) -> None:
    run_before(tmp_path, change, 40, **facts)
    assert earlier_runs(params({}), tmp_path, "cpu") == {}


@pytest.mark.parametrize(
    ("before", "devices"),
    [("cpu", ["cpu"]), ("NVIDIA A100", ["NVIDIA A100", ANY_GPU]), (None, ["cpu", "NVIDIA A100", "NVIDIA H100"])],
)
def test_a_run_counts_for_its_own_device(tmp_path: Path, before: str | None, devices: list[str]) -> None:
    """None: a record of an older version."""
    run_before(tmp_path, {}, 40, device=before)
    all_devices = ("cpu", "NVIDIA A100", "NVIDIA H100", ANY_GPU)
    assert [one for one in all_devices if earlier_runs(params({}), tmp_path, one)] == devices


def test_runs_say_nothing_about_the_model_of_a_folder(tmp_path: Path) -> None:
    run_before(tmp_path, {}, 40)
    folder = tmp_path / "model"
    LlamaConfig(**CONFIG).save_pretrained(folder)
    plan = plan_run(content({}), tmp_path, 1e12, "cpu", folder)
    assert plan["stages"]["ppo"]["time_by"] == "formula"


def test_a_variant_has_the_processes_of_ppo(tmp_path: Path) -> None:
    run_before(tmp_path, {"rloo": {"enabled": True}}, 40, "rloo")
    on_two = {"rloo": {"enabled": True}, "ppo": {"processes": 2}}
    assert list(earlier_runs(params({"rloo": {"enabled": True}}), tmp_path, "cpu")) == ["rloo"]
    assert earlier_runs(params(on_two), tmp_path, "cpu") == {}
    own = merged(on_two, {"rloo": {"settings": {"processes": 1}}})
    assert list(earlier_runs(params(own), tmp_path, "cpu")) == ["rloo"]


def test_the_parameters_of_a_record_are_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for stage in ("sft", "reward", "ppo"):
        run_before(tmp_path, {}, 40, stage)
    wanted, calls = params({}), []
    monkeypatch.setattr(planning, "parse", lambda *one, **more: calls.append(one) or parse(*one, **more))
    assert set(earlier_runs(wanted, tmp_path, "cpu")) == {"sft", "reward", "ppo"}
    assert len(calls) == 1


def test_a_record_of_a_version_with_other_parameters_is_left_out(tmp_path: Path) -> None:
    run_before(tmp_path, {}, 40)
    path = tmp_path / "work/tracking/before" / record.RUN
    known = json.loads(path.read_text())
    record.write(path, {"params": known["params"] | {"ppo.unknown": "1"}})
    assert earlier_runs(params({}), tmp_path, "cpu") == {}


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


def test_adapters_of_a_reward_model_that_is_not_learned_do_not_count() -> None:
    change = {"scorer": [{"term": "length.py", "weight": 1.0}], "ppo": {"critic": {"init": "sft"}}}
    change |= {"reward": {"lora": {"target_modules": ["no_such_layer"]}}, "dpo": {"enabled": False}}
    change["ipo"] = {"enabled": False}
    found = params(change)
    assert disk_of(SMALL, found)["checkpoints"] == 3 * 4 * 3 * (SMALL.parameters + SMALL.scalar)
    assert all(stage.peak() > 0 for stage in stages_of(found, SMALL, None))


def test_models_from_elsewhere_are_in_memory_where_they_score(tmp_path: Path) -> None:
    """And the reward model on another base has that base's size."""
    judges = tmp_path / "models/judges"
    scores, judged, other = save_reward_model(judges / "rm"), save_classifier(judges / "mood"), tmp_path / "data/raw/b"
    save_language_model(other)
    change: dict[str, Any] = {
        "scorer": [{"term": "reward_model", "weight": 1.0}, {"model": "rm", "weight": 1.0}],
        "judge": {"kind": "reward_model", "model": "mood", "label": "POSITIVE", "reads": "answer"},
        "reward": {"base": "b"},
        "ppo": {"critic": {"init": "sft"}},
    }
    sizes = [sum(p.numel() for p in load_classifier(folder).parameters()) for folder in (scores, judged)]
    base = Model.of(AutoConfig.from_pretrained(other))
    plan = plan_run(content(change), tmp_path, 1e12, "cpu")
    assert plan["parameters"]["reward model"] == base.scalar
    alone = {"ppo": change["ppo"], "scorer": [{"term": "a.py", "weight": 1.0}], "dpo": {"enabled": False}}
    without = plan_run(content(alone), tmp_path, 1e12, "cpu")["stages"]

    def held(stage: dict[str, Any], phase: str) -> int:
        return sum(part["bytes"] for part in stage["phases"][phase]["parts"] if part["kind"] == "weights")

    for stage, models in (("ppo", sizes[0]), ("evaluate", sum(sizes))):
        more = held(plan["stages"][stage], "sampling") - held(without[stage], "sampling")
        assert more == 4 * (base.scalar + models)
    assert held(plan["stages"]["reward"], "update") == 4 * base.scalar

    change["reward"] = {"base": ["b", "b"], "members": 2, "judge_share": 0.5}
    several = plan_run(content(change), tmp_path, 1e12, "cpu")
    more = held(several["stages"]["ppo"], "sampling") - held(plan["stages"]["ppo"], "sampling")
    assert more == 2 * 4 * base.scalar, "a second member, and the judging model"
    assert held(several["stages"]["reward"], "update") == 4 * base.scalar, "one after another"
    assert several["disk"]["models"] - plan["disk"]["models"] == 2 * 4 * base.scalar
    with pytest.raises(UserError, match="scorer: models/judges/gone is no Hugging Face folder"):
        plan_run(content(alone | {"scorer": [{"model": "gone", "weight": 1.0}]}), tmp_path, 1e12, "cpu")


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
