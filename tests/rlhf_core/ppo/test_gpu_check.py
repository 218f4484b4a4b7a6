"""`benchmarks/gpu_check.py`: its table, budget and operations; and the whole of it at toy size."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from tests.conftest import benchmark

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu_check.py"
NOT_PLANNED = ("nf4, LoRA",)
"""Checks of our engine that the planner may refuse."""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return benchmark("gpu_check")


@pytest.fixture(scope="module")
def speed() -> ModuleType:
    return benchmark("gpu_speed")


@pytest.fixture(scope="module")
def case() -> ModuleType:
    return benchmark("gpu_case")


def llama(tied: bool) -> LlamaConfig:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaConfig(**sizes, vocab_size=50, tie_word_embeddings=tied, num_labels=1, pad_token_id=0)


LAYERS = 2 * (4 * 16 * 16 + 3 * 16 * 24 + 2 * 16) + 16
"""Parameters of the body without the embedding: projections, feed-forward layers, norms."""


@pytest.mark.parametrize("tied", [True, False])
def test_a_forward_pass_costs_two_operations_a_parameter_and_token(speed: ModuleType, tied: bool) -> None:
    """The output layer counts for responses only, the input embedding not at all, whether they are tied or not."""
    model = LlamaForCausalLM(llama(tied))
    assert speed.forward_flops(model, speed.Tokens(30, 12)) == 2 * (LAYERS * 42 + 16 * 50 * 12)


def test_a_scalar_model_has_a_small_head(speed: ModuleType) -> None:
    model = LlamaForSequenceClassification(llama(False))
    assert speed.forward_flops(model, speed.Tokens(30, 12)) == 2 * (LAYERS + 16) * 42


def test_peaks_are_those_of_the_gpu_in_bfloat16(speed: ModuleType) -> None:
    assert speed.peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989e12
    assert speed.peak_flops("NVIDIA H100 PCIe", "bfloat16") == 756e12
    assert speed.peak_flops("NVIDIA A100-SXM4-80GB", "bfloat16") == 312e12
    assert speed.peak_flops("NVIDIA H100 80GB HBM3", "float32") is None
    assert speed.peak_flops("NVIDIA L4", "bfloat16") is None


def test_relative_error_is_that_of_the_whole_gradient(case: ModuleType) -> None:
    expected = [torch.tensor([3.0]), torch.tensor([0.0, 4.0])]
    assert case.relative_error([torch.tensor([3.0]), torch.tensor([0.5, 4.0])], expected) == pytest.approx(0.1)
    assert case.relative_error(expected[:1], expected) == float("inf")
    assert case.relative_error([], []) == float("inf")


def measured(peak: int) -> dict[str, Any]:
    """A row of a check that passed."""
    return {"name": "x", "result": "passed", "reason": "", "figures": {"peak_bytes": peak}}


@pytest.mark.parametrize(("peak", "fits"), [(119, True), (81, True), (130, False), (70, False)])
def test_on_a_gpu_a_check_fails_if_its_peak_does_not_fit_the_plan(script: ModuleType, peak: int, fits: bool) -> None:
    row = measured(peak)
    assert script.add_plan(row, {"bytes": 100, "reason": ""}, gpu=True) is not fits
    assert row["result"] == (script.PASSED if fits else script.FAILED)
    assert row["figures"]["planned_bytes"] == 100
    assert fits or f"{peak / 100:.2f} times the planned one" in row["reason"]


def test_memory_is_not_compared_without_a_plan_or_without_a_gpu(script: ModuleType) -> None:
    for plan, gpu in (({"bytes": None, "reason": "torch\nis old"}, True), ({"bytes": 100, "reason": ""}, False)):
        row = measured(1000)
        assert not script.add_plan(row, plan, gpu)
        assert row["result"] == script.PASSED
    assert script.memory(row["figures"]) == ("9.3e-07", "9.3e-08")


def test_which_checks_are_planned(script: ModuleType) -> None:
    """Of other checks, and of settings that are not planned, there is a reason."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        ours, large = (
            script.plan_of(script.Case("x", reward="1.5B", changes=script.BF16), gpu) for gpu in (False, True)
        )
        gradient = script.plan_of(script.Case("gradient", check="gradient"), gpu=False)
        quantised = next(case for case in script.CASES if case.name == "nf4, LoRA")
        refused = script.plan_of(quantised, gpu=True)
    assert 0 < ours["bytes"] < 1e9 < large["bytes"] < 40e9
    assert gradient == {"bytes": None, "reason": "not planned"}
    assert "nf4 is not planned" in refused["reason"]


@pytest.mark.slow
def test_a_failing_check_is_a_row_with_its_reason(script: ModuleType, tmp_path: Path) -> None:
    """In a process of its own: a setting that PPO refuses."""
    refused = script.run_case(script.Case("refused", changes={"clip_ratio": 2.0}), 250.0, tmp_path)
    assert refused["result"] == script.FAILED
    assert "clip_ratio" in refused["reason"]
    assert "\n" not in refused["reason"]
    assert script.result_line(refused | {"reason": "a | b"}).endswith(" | a \\| b |")
    assert script.result_line(refused).startswith("| refused | FAILED | ")


def test_a_process_that_dies_is_a_failed_check(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpu_case.py").write_text("print('the last words')\nraise SystemExit(9)")
    monkeypatch.setattr(script, "HERE", tmp_path / "gpu_check.py")
    row = script.run_case(script.Case("dies"), 60.0, tmp_path)
    assert row["result"] == script.FAILED
    assert "status 9: the last words" in row["reason"]


def test_limits_and_budget(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over its own limit a check fails; over the minutes, or without a package, it did not run."""
    (tmp_path / "gpu_case.py").write_text("import time\ntime.sleep(60)")
    monkeypatch.setattr(script, "HERE", tmp_path / "gpu_check.py")
    monkeypatch.setattr(script, "SHORTEST", 0.1)
    rows = [
        script.run_case(script.Case("slow", seconds=0.5), 60.0, tmp_path),
        script.run_case(script.Case("late"), 0.5, tmp_path),
        script.run_case(script.Case("too late"), 0.0, tmp_path),
        script.run_case(script.Case("optional", needs="no_such_package"), 60.0, tmp_path),
        script.run_case(script.Case("newer", needs="torch>=99"), 60.0, tmp_path),
    ]
    assert [row["result"] for row in rows] == [script.FAILED, *[script.NOT_RUN] * 4]
    assert rows[-2]["reason"] == "no_such_package is not installed"
    assert rows[-1]["reason"].startswith("needs torch>=99; installed is 2")
    assert script.summary(rows) == "0 passed, 1 failed, 4 not run"


def test_the_exit_code_is_1_if_a_check_failed(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others go on, and both files hold every row."""
    (tmp_path / "gpu_case.py").write_text(
        "import json, pathlib, sys\n"
        "name = json.loads(sys.argv[1])['name']\n"
        "found = {'problem': 'is wrong' if name == 'a' else None, 'figures': {}, 'environment': {'device': 'a GPU'}}\n"
        "pathlib.Path(sys.argv[2], 'result.json').write_text(json.dumps(found))\n"
    )
    monkeypatch.setattr(script, "HERE", tmp_path / "gpu_check.py")
    for names, code in (("ab", 1), ("bc", 0)):
        monkeypatch.setattr(script, "CASES", tuple(map(script.Case, names)))
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(tmp_path / names)])
        assert script.main() == code
        content = json.loads((tmp_path / names / "gpu_check.json").read_text())
        assert [row["name"] for row in content["rows"]] == list(names)
        assert content["environment"] == {"device": "a GPU"}
    assert "| a | FAILED | 0 | is wrong |" in (tmp_path / "ab/gpu_check.md").read_text()


def test_speed_table(script: ModuleType) -> None:
    """A share only where a peak is known, and no planned memory that nothing has planned."""
    phase = {"seconds": 1.0, "tokens_per_s": 12345.6, "flops": 1.0, "share_of_peak": 0.4}
    figures: dict[str, Any] = {"model": "8B", "precision": "bfloat16", "peak_bytes": 2**30}
    figures |= {"reserved_bytes": 3 * 2**29, "planned_bytes": None}
    figures["phases"] = dict.fromkeys(script.PHASES, phase) | {"scoring": phase | {"share_of_peak": None}}
    *_, line = script.speed_table([{"name": "x", "figures": figures}, {"name": "y", "figures": {}}])
    assert line.startswith("| x | 8B | bfloat16 | 1.0 (1.5) | not compared | 12,346 (40.0%) |")
    assert "| 12,346 |" in line


SOME = ["bfloat16", "gradient, checkpointing", "same bytes", "GRPO"]
"""A check of each kind."""


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.chosen("some")
@pytest.mark.parametrize("only", [SOME, None], ids=["some", "all"])
def test_everything_passes_at_toy_size(script: ModuleType, tmp_path: Path, only: list[str] | None) -> None:
    """On a CPU; JSON and Markdown hold the figures."""
    names = only or [case.name for case in script.CASES]
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path), "--minutes", "22", "--only", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "gpu_check.json").read_text())["rows"]
    cases = [case for case in script.CASES if case.name in names]
    expected = {case.name: script.NOT_RUN if script.missing(case.needs) else script.PASSED for case in cases}
    assert {row["name"]: row["result"] for row in rows} == expected
    measured = {row["name"]: row["figures"] for row in rows if "phases" in row["figures"]}
    passed_steps = {case.name for case in cases if case.check == "step" and expected[case.name] == script.PASSED}
    assert measured.keys() == passed_steps
    for name, figures in measured.items():
        assert all(figures["phases"][phase]["tokens_per_s"] > 0 for phase in script.PHASES)
        assert figures["peak_bytes"] > 0
        assert figures["planned_bytes"] is not None or name in NOT_PLANNED, figures["not_planned"]
    text = (tmp_path / "gpu_check.md").read_text()
    assert all(f"| {name} | {result} |" in text for name, result in expected.items())
