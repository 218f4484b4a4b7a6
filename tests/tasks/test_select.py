"""Stage `select`: which snapshot becomes the policy."""

import csv
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_core.errors import UserError
from tasks.select import best_step, choose

if TYPE_CHECKING:
    from tests.conftest import Ended, Project


def row(
    step: int, reward: float | None = None, gold: float | None = None, win_rate: float | None = None
) -> dict[str, Any]:
    return {"step": step, "reward": reward, "gold": gold, "win_rate": win_rate}


def test_the_policy_is_the_earlier_of_equal_snapshots_even_if_sft_is_best() -> None:
    table = [row(0, 9.0, 9.0, 0.5), row(5, 1.0, 3.0, 0.8), row(10, 2.0, 3.0, 0.9), row(15, 3.0, 1.0, 0.6)]
    assert [choose(table, rule, "gold") for rule in ("last", "best_judge", "best_proxy")] == [15, 5, 15]
    assert (best_step(table, "gold"), best_step(table, "reward")) == (0, 0)
    assert choose(table, "best_judge", "win_rate") == 10, "the judge that the parameters name decides"


def test_without_a_judge_best_judge_is_refused() -> None:
    table = [row(0, 0.0, None, 0.5), row(5, 1.0, None, 0.9), row(10, 2.0, None, 0.7)]
    assert best_step(table, None) is None
    with pytest.raises(UserError, match="no judge besides the reward model"):
        choose(table, "best_judge", None)
    assert choose([row(5), row(10)], "last", None) == 10


def is_the_snapshot(project: "Project", step: int) -> bool:
    """Whether models/policy holds what a snapshot holds."""
    policy = load_file(project.root / "models/policy/model.safetensors")
    snapshot = load_file(project.root / f"models/snapshots/step-{step:06d}.safetensors")
    return policy.keys() == snapshot.keys() and all(torch.equal(policy[name], snapshot[name]) for name in policy)


def test_the_policy_is_the_chosen_snapshot(
    finished: "Project", stage_main: Callable[["Project", str], "Ended"]
) -> None:
    """`last` as it was run; then each rule by the figures of plots/select.csv, which stay the same."""
    finished.set("runtime.tracking", False)
    before = (finished.root / "plots/select.csv").read_bytes()
    metrics = finished.json("metrics/select.json")
    assert (metrics["rule"], metrics["step"], metrics["last_step"]) == ("last", 4, 4)
    assert metrics["prompts"] == len(
        {r["prompt_id"] for r in finished.rows("data/preferences/preferences.jsonl") if r["split"] == "validation"}
    )
    assert is_the_snapshot(finished, 4)
    assert not is_the_snapshot(finished, 2)
    for rule in ("best_judge", "best_proxy"):
        finished.set("select.rule", rule)
        assert stage_main(finished, "select").code == 0
        step = finished.json("metrics/select.json")["step"]
        assert metrics[f"{rule}_step"] in (0, step)
        assert is_the_snapshot(finished, step)
        assert (finished.root / "plots/select.csv").read_bytes() == before


@pytest.mark.slow
def test_random_numbers_differ_from_those_of_evaluate(
    finished: "Project", stage_main: Callable[["Project", str], "Ended"]
) -> None:
    """With the same prompts and seed the answers differ, so that selection does not bias the evaluation."""
    finished.set("runtime.tracking", False)
    path = finished.root / "data/preferences/preferences.jsonl"
    original, pairs = path.read_bytes(), finished.rows("data/preferences/preferences.jsonl")
    held_out = iter(finished.rows("data/ingest/heldout.jsonl"))
    swapped = {
        row["prompt_id"]: {key: value for key, value in next(held_out).items() if key in row}
        for row in {row["prompt_id"]: row for row in pairs if row["split"] == "validation"}.values()
    }
    rows = [row | swapped.get(row["prompt_id"], {}) for row in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert stage_main(finished, "select").code == 0
    path.write_bytes(original)  # `evaluate` refuses held-out prompts among the pairs
    finished.set("evaluate.max_prompts", len(swapped))
    finished.set("evaluate.seeds", [finished.params()["seed"]])
    assert stage_main(finished, "evaluate").code == 0
    first, *_, last = list(csv.DictReader((finished.root / "plots/select.csv").open(encoding="utf-8")))
    models = finished.json("metrics/evaluate.json")["models"]
    assert models["sft"]["reward"] != pytest.approx(float(first["reward"]), abs=1e-6)
    assert models["policy"]["reward"] != pytest.approx(float(last["reward"]), abs=1e-6)


@pytest.mark.slow
def test_without_prompts_nothing_is_compared(
    finished: "Project", stage_main: Callable[["Project", str], "Ended"]
) -> None:
    finished.set("runtime.tracking", False)
    finished.set("select.prompts", 0)
    assert stage_main(finished, "select").code == 0
    assert finished.json("metrics/select.json") == {
        "rule": "last", "step": 4, "last_step": 4, "best_judge_step": None, "best_proxy_step": None, "prompts": 0,
    }  # fmt: skip
    for stage in ("evaluate", "report"):
        assert stage_main(finished, stage).code == 0
