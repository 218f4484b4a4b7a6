"""`leash plan`: what it prints, its exit codes, and the examples for large models."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.commands.plan import plan_file, render

ROOT = Path(__file__).resolve().parents[3]
QWEN_05B = {
    "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
    "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}  # fmt: skip
QWEN_8B = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "tie_word_embeddings": False, "max_position_embeddings": 40960,
}  # fmt: skip
EXAMPLES = {"qwen-0.5b": (QWEN_05B, 494_032_768), "qwen-8b-lora": (QWEN_8B, 8_190_735_360),
            "qwen-8b-8gpus": (QWEN_8B, 8_190_735_360)}  # fmt: skip


@pytest.fixture
def leash(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """leash("plan", …) in the project: exit code, output, errors."""
    monkeypatch.chdir(ROOT)

    def run(*arguments: str) -> tuple[int, str, str]:
        done = CliRunner().invoke(app, list(arguments))
        return done.exit_code, done.stdout, done.stderr

    return run


def test_a_run_that_fits(leash: Callable[..., Any]) -> None:
    code, output, _ = leash("plan", "--params", "examples/tiny.yaml", "--json")
    plan = json.loads(output)
    assert code == 0
    assert plan["fits"]
    assert plan["device"] == "host"
    assert {"sft", "reward", "ppo", "evaluate"} <= set(plan["stages"])
    assert plan["peak"] == max(stage["peak"] for stage in plan["stages"].values())
    ppo = plan["stages"]["ppo"]
    assert list(ppo["phases"]) == ["sampling", "log-probabilities", "scoring", "update"]
    assert ppo["work"]["samples"] > 0
    assert ppo["seconds"] > 0
    assert all(size > 0 for size in plan["disk"].values())


def test_a_run_that_does_not_fit_and_what_to_change(leash: Callable[..., Any]) -> None:
    """Each change saves what the plan with it and those before it needs less."""
    code, output, _ = leash("plan", "--params", "examples/tiny.yaml", "--gpu-memory", "0.005", "--json")
    plan = json.loads(output)
    assert code == 1
    assert not plan["fits"]
    ppo = plan["stages"]["ppo"]
    peak = ppo["peak"]
    assert ppo["changes"]
    for step in ppo["changes"]:
        assert step["saves"] == peak - step["peak"] > 0
        peak = step["peak"]
    assert "does NOT fit" in render(plan)


@pytest.mark.parametrize(
    ("text", "words"),
    [("seed: -1\n", "seed: "), ("- 1\n", "expected a mapping"), (None, "file not found")],
)
def test_a_bad_file_is_an_error_of_the_user(
    leash: Callable[..., Any], tmp_path: Path, text: str | None, words: str
) -> None:
    path = tmp_path / "params.yaml"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    code, output, errors = leash("plan", "--params", str(path))
    assert (code, output) == (2, "")
    assert words in errors


def test_a_model_of_the_hub_without_a_network_is_one_line(
    leash: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, _, errors = leash("plan", "--params", "examples/qwen-0.5b.yaml", "--model", str(tmp_path))
    assert code == 2
    assert errors.count("\n") == 1
    assert "cannot read the config.json" in errors


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "t5"}, "t5: transformers has no AutoModelForCausalLM"),
        ({"model_type": "granite"}, "granite: transformers has no AutoModelForSequenceClassification"),
        ({"model_type": "mamba", "num_hidden_layers": 1}, "has layers without attention"),
        ({"model_type": "mixtral"}, "mixtral: has experts"),
        ({"model_type": "qwen3_moe"}, "qwen3_moe: has experts"),
    ],
)
def test_architectures_that_cannot_be_planned(
    leash: Callable[..., Any], tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "d_model": 64}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "num_layers": 1, "num_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(sizes | config), encoding="utf-8")
    code, output, errors = leash("plan", "--params", "examples/qwen-0.5b.yaml", "--model", str(tmp_path))
    assert (code, output) == (2, ""), errors
    assert words in errors.splitlines()[-1]


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [("--gpu-memory", "0", "above 0"), ("--gpu-memory", "-8", "above 0"), ("--model", "nowhere", "no such folder")],
)
def test_a_bad_option_is_one_line(leash: Callable[..., Any], option: str, value: str, words: str) -> None:
    code, output, errors = leash("plan", "--params", "examples/qwen-0.5b.yaml", option, value)
    assert (code, output, errors.count("\n")) == (2, "", 1)
    assert words in errors


def test_tables_end_with_a_sum(leash: Callable[..., Any]) -> None:
    code, output, _ = leash("plan", "--params", "examples/tiny.yaml")
    assert code == 0
    table = output.split("stage ")[1].split("\n\n")[0].splitlines()
    assert table[-4].startswith("all ")
    assert [line.split(":")[0].split(" of ")[0] for line in table[-3:]] == ["rows", "time", "formula"]
    assert all(line.endswith(("formula", "by runs", "seconds", "minutes")) or "run of" in line for line in table[1:-3])


@pytest.mark.parametrize("name", list(EXAMPLES))
def test_examples_for_80_gb_fit(name: str, tmp_path: Path) -> None:
    config, parameters = EXAMPLES[name]
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    plan = plan_file(ROOT / "examples" / f"{name}.yaml", ROOT, 80, tmp_path, None)
    assert plan["parameters"]["policy"] == parameters
    assert plan["fits"], render(plan)
    divided = {stage for stage, found in plan["stages"].items() if '"gathered"' in json.dumps(found)}
    assert divided == ({"sft", "reward", "ppo"} if name == "qwen-8b-8gpus" else set())
    assert "NOT RUN" in (ROOT / "examples" / f"{name}.yaml").read_text(encoding="utf-8")[:400]
