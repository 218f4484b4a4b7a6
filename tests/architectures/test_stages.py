"""The stages themselves on two pretrained models, from a folder below data/raw/ to the evaluation."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_core.data.tokenizer import eos_ids, load_tokenizer
from tests.architectures.zoo import download

if TYPE_CHECKING:
    from tests.conftest import Ended, Project

Main = Callable[["Project", str], "Ended"]
STAGES = ("check", "check_data", "ingest", "base", "sft", "preferences", "reward", "ppo", "select", "best_of_n")
OFF = ("best_of_n", "rejection_sft", "dpo", "rloo")


def prepared(project: "Project", name: str) -> "Project":
    """The tiny parameters with this pretrained model, and nothing beside the pipeline of PPO."""
    download(name, project.root / "data" / "raw" / name)
    project.set("base", {"source": "pretrained", "pretrained": {"model": name}, "pad_token": "<|pad|>"})
    for method in OFF:
        project.set(f"{method}.enabled", False)
    for key, value in {
        "ingest.demo.prompts": 200,
        "ingest.split.validation": 0.4,
        "ppo.steps": 2,
        "sft.epochs": 1,
        "evaluate.max_prompts": 8,
    }.items():
        project.set(key, value)
    for key in ("sft.max_tokens", "reward.max_tokens"):
        project.set(key, 256)
    project.set("runtime.tracking", False)
    return project


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.chosen("gemma3")
@pytest.mark.parametrize("name", ["gemma3", "qwen2_moe"])
def test_the_stages_run_from_a_pretrained_model_to_the_evaluation(
    name: str, project: "Project", stage_main: Main
) -> None:
    prepared(project, name)
    for stage in (*STAGES, *OFF[1:], "hybrid", "reinforce", "grpo", "ipo", "evaluate"):
        ended = stage_main(project, stage)
        assert ended.code == 0, f"{stage}: {ended.stderr}"
    metrics = project.json("metrics/evaluate.json")
    assert set(metrics["models"]) == {"sft", "policy"}
    assert metrics["kl_per_sequence"] is not None
    for folder in ("base", "sft", "policy"):
        model = AutoModelForCausalLM.from_pretrained(project.root / "models" / folder)
        tokenizer, config, settings = (
            load_tokenizer(project.root / "models" / folder),
            model.config,
            model.generation_config,
        )
        assert tokenizer.eos_token == {"gemma3": "<end_of_turn>", "qwen2_moe": "<|im_end|>"}[name]
        assert (config.eos_token_id, eos_ids(settings)[0]) == (tokenizer.eos_token_id, tokenizer.eos_token_id)
        assert config.pad_token_id == settings.pad_token_id == tokenizer.pad_token_id
    for folder in ("reward", "critic"):
        AutoModelForSequenceClassification.from_pretrained(project.root / "models" / folder)


def test_a_model_that_no_stage_can_sample_from_is_refused_by_the_first_one(
    project: "Project", stage_main: Main
) -> None:
    prepared(project, "mamba")
    for stage in ("check", "check_data", "ingest"):
        assert stage_main(project, stage).code == 0
    ended = stage_main(project, "base")
    assert ended.code == 2
    assert "MambaForCausalLM: has layers without attention" in ended.stderr.splitlines()[-1]
