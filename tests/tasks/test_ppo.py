"""Stage `ppo` as a whole: what a kill in the middle of it leaves, and what the next start makes of that."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from ruamel.yaml import YAML
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.models import hf
from rlhf_core.models.hf import load_causal_lm, load_scalar_model
from rlhf_core.models.shared_body import has_adapter
from rlhf_core.ppo.scoring import ScoreNormalisation
from rlhf_core.ppo.trainer import PPOTrainer, Row
from tasks.training.ppo_inputs import starting_critic
from tasks.training.scalar_models import ScalarModels

if TYPE_CHECKING:
    from tests.conftest import Ended, Project

KILLED = 137
OUTS = ("models/snapshots/", "models/critic/", "plots/ppo.csv", "data/ppo/", "metrics/ppo.json")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_failure_01_a_killed_stage_continues_and_ends_byte_identical(
    finished: "Project", stage_main: Callable[["Project", str], "Ended"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in its third step, where the last checkpoint is one step old; policy, critic, history and samples."""
    outputs = finished.outputs()
    expected = {name: content for name, content in outputs.items() if name.startswith(OUTS)}
    assert {"models/snapshots/step-000004.safetensors", "models/critic/model.safetensors"} <= expected.keys()
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


@pytest.mark.slow
@pytest.mark.chosen("shared critic")
@pytest.mark.parametrize(
    "changes",
    [
        {"advantage": "rloo", "samples_per_prompt": 2, "whiten_advantages": False},
        {"critic.kind": "shared", "micro_batch_tokens": 200},
        {"lora": {"rank": 2, "alpha": 4.0}, "gradient_checkpointing": True},
    ],
    ids=["no critic", "shared critic", "lora"],
)
def test_every_kind_of_models_goes_from_sft_to_the_report(
    changes: dict[str, Any], finished: "Project", stage_main: Callable[["Project", str], "Ended"]
) -> None:
    """The policy is a plain folder; the critic's folder is one too, or says why there is none."""
    finished.set("runtime.tracking", False)
    for key, value in changes.items():
        finished.set(f"ppo.{key}", value)
    for stage in ("ppo", "select", "evaluate", "report"):
        assert stage_main(finished, stage).code == 0
    AutoModelForCausalLM.from_pretrained(finished.root / "models/policy")
    if "advantage" in changes:
        assert "rloo" in (finished.root / "models/critic/README.md").read_text(encoding="utf-8")
    else:
        assert load_scalar_model(finished.root / "models/critic").config.num_labels == 1
    assert finished.json("metrics/ppo.json")["optimizer_steps"] == 16


@pytest.mark.slow
def test_with_lora_in_all_stages_one_body_is_in_memory(
    finished: "Project", stage_main: Callable[["Project", str], "Ended"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SFT, reward model, critic and policy: adapters; PPO loads the SFT model once, and no other. In bfloat16."""
    finished.set("runtime.tracking", False)
    finished.set("precision", "bfloat16")
    for block in ("sft", "reward", "ppo"):
        finished.set(f"{block}.lora", {"rank": 2, "alpha": 4.0})
    finished.set("ppo.gradient_checkpointing", 2)
    finished.evaluate_little()
    for stage in ("sft", "preferences", "reward"):
        assert stage_main(finished, stage).code == 0
    assert has_adapter(finished.root / "models/reward")
    loaded: list[str] = []
    weights = hf._weights

    def counted(kind: Any, path: Any, *rest: Any) -> PreTrainedModel:
        loaded.append(str(path))
        return weights(kind, path, *rest)

    monkeypatch.setattr(hf, "_weights", counted)
    assert stage_main(finished, "ppo").code == 0
    assert [Path(path).name for path in loaded] == ["sft"]
    assert load_scalar_model(finished.root / "models/critic").config.num_labels == 1
    for stage in ("select", "evaluate", "report"):
        assert stage_main(finished, stage).code == 0
    AutoModelForCausalLM.from_pretrained(finished.root / "models/policy")
    assert finished.json("metrics/ppo.json")["optimizer_steps"] == 16


@pytest.mark.slow
@pytest.mark.chosen("fsdp")
@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_failure_10_a_stage_of_two_processes_makes_what_one_makes(sharding: str, finished: "Project") -> None:
    """Run as DVC runs it, with whole and with divided models; the same answers, and numbers that differ in their last
    digits."""
    before, weights = finished.json("metrics/ppo.json"), last_weights(finished)
    finished.set("runtime.tracking", False)
    finished.set("ppo.processes", 2)
    finished.set("ppo.sharding", sharding)
    done = finished.stage("ppo")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("continues") == 0
    after = finished.json("metrics/ppo.json")
    assert after.keys() == before.keys()
    for name in ("kl_last", "reward_last", "entropy_last"):
        assert after[name] == pytest.approx(before[name], rel=1e-3, abs=1e-4)
    assert not list((finished.root / "work" / "ppo").glob("*/"))
    now = last_weights(finished)
    assert {name: tensor.shape for name, tensor in now.items()} == {name: t.shape for name, t in weights.items()}
    for name, tensor in weights.items():
        assert torch.allclose(now[name], tensor, rtol=1e-2, atol=1e-3), name


def last_weights(project: "Project") -> dict[str, torch.Tensor]:
    """Of the last snapshot of the policy, and of the critic."""
    files = (
        project.root / "models/snapshots/step-000004.safetensors",
        project.root / "models/critic/model.safetensors",
    )
    return {f"{file.parent.name} {name}": tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.slow
def test_a_text_for_ptx_is_read_from_data_raw(
    finished: "Project", stage_main: Callable[["Project", str], "Ended"]
) -> None:
    finished.set("runtime.tracking", False)
    finished.set("ppo.ptx", {"coef": 1.0, "file": "corpus.txt", "batch_size": 2, "tokens": 8})
    missing = stage_main(finished, "check_data")
    assert (missing.code, "data/raw/corpus.txt" in missing.stderr) == (2, True)
    (finished.root / "data/raw/corpus.txt").write_text("Eat some oats and an egg. Rest. " * 9, encoding="utf-8")
    for stage in ("check_data", "ingest", "ppo"):
        assert stage_main(finished, stage).code == 0
    header, row = (finished.root / "plots/ppo.csv").read_text(encoding="utf-8").splitlines()[:2]
    assert float(dict(zip(header.split(","), row.split(","), strict=True))["ptx_loss"]) > 0
    finished.set("ppo.ptx.tokens", 10_000)
    assert "longer than the model's context" in stage_main(finished, "ppo").stderr
    finished.set("ppo.ptx.tokens", 8)
    finished.set("ppo.ptx.file", "../../params.yaml")
    assert "must stay below data/raw/" in stage_main(finished, "check").stderr


def critic_with(project: "Project", init: str) -> PreTrainedModel:
    """The critic that a run starts with, for scores of mean 2 and deviation 0.5."""
    values = YAML(typ="safe").load(project.root / "params.yaml")["ppo"]
    config = PPOConfig.model_validate(values | {"critic": {**values["critic"], "init": init}})
    critic = starting_critic(project.root, config, ScoreNormalisation(2.0, 0.5), 1, ScalarModels())
    assert critic is not None
    return critic


def test_the_critic_starts_where_the_settings_say(finished: "Project") -> None:
    """From the reward model in the unit of the score, or from the SFT model with a new head."""
    trained = load_scalar_model(finished.root / "models" / "reward")
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.5)  # further than one tiny batch takes it
    trained.save_pretrained(finished.root / "models" / "reward")
    reward = trained.state_dict()
    body = load_causal_lm(finished.root / "models" / "sft").model.state_dict()
    from_reward, from_sft = critic_with(finished, "reward"), critic_with(finished, "sft")
    expected = reward | {"score.weight": 2.0 * reward["score.weight"], "score.bias": torch.tensor([-4.0])}
    assert all(torch.equal(weight, expected[name]) for name, weight in from_reward.state_dict().items())
    assert all(torch.equal(weight, body[name]) for name, weight in from_sft.model.state_dict().items())
    assert not torch.equal(from_sft.score.weight, reward["score.weight"])
