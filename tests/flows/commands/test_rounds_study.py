"""`benchmarks/rounds.py`: its table, from results that are made up, and which rounds it still has to run."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlhf_core.errors import UserError
from rlhf_core.evaluation.intervals import bounds
from tasks.datasets.jsonl import write_jsonl
from tests.conftest import benchmark

PROMPTS = 40


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return benchmark("rounds")


def write_results(folder: Path, gold: float, agreement: float, policies: dict[str, tuple[float, float]]) -> None:
    """Results of a round; `policies` are the gold score and KL of each model, equal for all prompts."""
    policy = {
        "gold": gold,
        "kl": 2.0,
        **bounds("gold", [gold - 0.1, gold + 0.1]),
        **bounds("kl", [1.9, 2.1]),
    }
    own = {"agreement": agreement, **bounds("agreement", [agreement - 0.02, agreement + 0.02])}
    for name, content in {
        "evaluate": {"models": {"policy": policy}, "reward_model": {"policy": own}},
        "preferences": {"pairs": 100},
    }.items():
        (folder / "metrics").mkdir(parents=True, exist_ok=True)
        (folder / f"metrics/{name}.json").write_text(json.dumps(content))
    write_jsonl(
        folder / "data/evaluate/answers.jsonl",
        (
            {"model": model, "prompt_id": f"{prompt:02}", "seed": seed, "gold": score, "kl": kl}
            for model, (score, kl) in policies.items()
            for prompt in range(PROMPTS)
            for seed in (1, 2)
        ),
    )


def test_the_table_has_means_over_seeds_and_compares_at_the_kl_of_the_single_round(
    script: ModuleType, tmp_path: Path
) -> None:
    """On the line from SFT (0 nats, gold 0) to the rounds' policy (4 nats, gold 4), 2 nats give 2."""
    for seed, agreement in ((1, 0.6), (2, 0.7)):
        single = {"sft": (0.0, 0.0), "policy": (1.5, 2.0)}
        write_results(script.place_of(tmp_path, "single", seed, 1), 1.5, 0.5, single)
        write_results(script.place_of(tmp_path, "sft", seed, 1), 1.0, 0.5, {"sft": (0.0, 0.0), "policy": (1.0, 1.0)})
        later = {"sft": (0.0, 0.0), "policy": (4.0, 4.0), "round_1": (1.0, 1.0), "dpo": (9.0, 1.0)}
        write_results(script.place_of(tmp_path, "sft", seed, 2), 4.0, agreement, later)
    lines = script.table(tmp_path, ["single", "sft"], [1, 2], 2).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert [row[:3] for row in cells] == [
        ["single", "1", "100 [100, 100]"],
        ["sft", "1", "100 [100, 100]"],
        ["sft", "2", "100 [100, 100]"],
    ]
    assert cells[2][3].startswith("0.65 (")
    assert cells[2][3].endswith("[0.60, 0.70]")
    assert [row[6] for row in cells[:2]] == ["–", "–"], "nothing to compare, and beyond the KL of the first round"
    assert cells[2][6].endswith("[0.50, 0.50]")


def test_an_arm_goes_on_with_the_first_round_that_is_missing(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(script.workspace, "opened", lambda space: calls.append(space.name) or pytest.fail("opened"))
    for number in (1, 2):
        script.place_of(tmp_path, "sft", 1, number).mkdir(parents=True)
    script.play(tmp_path, tmp_path, "c" * 40, "sft", 1, 2, [])
    assert calls == [], "all results are there"
    params = "\n".join(f"{name}: {{enabled: {str(name == 'dpo').lower()}}}" for name in ("dpo", "rloo"))
    (tmp_path / "params.yaml").write_text(params)
    with pytest.raises(pytest.fail.Exception):
        script.play(tmp_path, tmp_path, "c" * 40, "sft", 1, 3, [])
    assert calls == ["rounds-sft-1"]
    found = script.overrides(tmp_path, 1, 3, "previous", ["a=b"])
    assert "++round.share=0.333333333" in found
    assert "dpo.enabled=false" in found
    assert "rloo.enabled=false" not in found
    assert found[-1] == "a=b"


def test_a_study_stays_at_its_commit_and_another_call_needs_another_folder(script: ModuleType, tmp_path: Path) -> None:
    call = {"rounds": 3, "set": []}
    assert script.commit_of(tmp_path / "study", "first", call) == "first"
    assert script.commit_of(tmp_path / "study", "second", call) == "first"
    with pytest.raises(UserError, match="a study with other --rounds or --set"):
        script.commit_of(tmp_path / "study", "second", {"rounds": 2, "set": []})
