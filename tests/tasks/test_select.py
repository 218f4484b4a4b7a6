"""Stage `select`: which snapshot becomes the policy."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_core.config.lora import LoraSettings
from rlhf_core.errors import UserError
from rlhf_core.models.hf import save_checkpoint
from rlhf_core.ppo import snapshots
from tasks.evaluation.evaluator import load_candidate
from tasks.params.select import SelectParams
from tasks.select import best_step, choose, judging_column, policy_at, save_policy
from tasks.stage.models import load_frozen
from tests.tasks.conftest import TINY

if TYPE_CHECKING:
    from tasks.stage.stage import Stage
    from tests.conftest import Ended, Project


def row(
    step: int,
    reward: float | None = None,
    gold: float | None = None,
    win_rate: float | None = None,
    eta: float = 1.0,
    kl: float | None = None,
) -> dict[str, Any]:
    scores = {"reward": reward, "gold": gold, "win_rate": win_rate}
    return {"step": step, "eta": eta, "kl": kl, "kl_standard_error": 0.1, **scores}


def test_the_policy_is_the_earlier_of_equal_snapshots_even_if_sft_is_best() -> None:
    table = [row(0, 9.0, 9.0, 0.5), row(5, 1.0, 3.0, 0.8), row(10, 2.0, 3.0, 0.9), row(15, 3.0, 1.0, 0.6)]
    assert [choose(table, rule, "gold")["step"] for rule in ("last", "best_judge", "best_proxy")] == [15, 5, 15]
    assert (best_step(table, "gold"), best_step(table, "reward")) == (0, 0)
    assert choose(table, "best_judge", "win_rate")["step"] == 10, "the judge that the parameters name decides"


def test_without_a_judge_best_judge_is_refused() -> None:
    table = [row(0, 0.0, None, 0.5), row(5, 1.0, None, 0.9), row(10, 2.0, None, 0.7)]
    assert best_step(table, None) is None
    with pytest.raises(UserError, match="no judge besides the reward model"):
        choose(table, "best_judge", None)
    assert choose([row(5), row(10)], "last", None)["step"] == 10


def test_a_language_model_judges_before_the_data_and_from_a_folder_as_from_an_endpoint() -> None:
    assert [judging_column(kind, gold) for kind in ("model", "api") for gold in (True, False)] == ["win_rate"] * 4
    assert [judging_column("data", gold) for gold in (True, False)] == ["gold", None]
    assert judging_column("function", True) == "gold"


TABLE = [
    row(0, 0.0, 0.0, eta=0.0, kl=0.0),
    row(5, 2.0, 2.5, kl=1.0),
    row(10, 1.0, 1.0, eta=0.3, kl=0.4),
    row(10, 2.2, 2.0, eta=0.6, kl=1.9),
    row(10, 3.0, 2.2, kl=4.0),
]
"""Two snapshots and two interpolations of the last; the standard error of every KL is 0.1."""


@pytest.mark.parametrize(
    ("rule", "budget", "step", "eta"),
    [
        ("last", None, 10, 1.0), ("last", 4.2, 10, 1.0), ("last", 4.1, 10, 0.6), ("last", 2.0, 10, 0.3),
        ("best_judge", None, 5, 1.0), ("best_judge", 1.0, 10, 0.3), ("best_proxy", None, 10, 1.0),
        ("best_proxy", 4.1, 10, 0.6), ("best_proxy", 2.0, 5, 1.0),
    ],
)  # fmt: skip
def test_the_choice_is_the_best_within_the_budget(rule: str, budget: float | None, step: int, eta: float) -> None:
    """A KL counts with 1.645 standard errors: 4.0 is not within 4.1."""
    chosen = choose(TABLE, rule, "gold", budget)
    assert (chosen["step"], chosen["eta"]) == (step, eta)


def test_a_budget_that_nothing_keeps_names_the_smallest_kl() -> None:
    with pytest.raises(UserError, match=r"the smallest KL is 0.4 \(0.56\d with its margin\) at step 10 with eta 0.3"):
        choose(TABLE, "last", "gold", 0.5)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"rule": "last", "prompts": 0, "kl_budget": 2.0}, "set prompts above 0"),
        ({"rule": "last", "prompts": 9, "interpolation": [0.5, 0.5]}, "distinct"),
        ({"rule": "last", "prompts": 9, "interpolation": [1.0]}, "less than 1"),
        ({"rule": "last", "prompts": 9, "kl_budget": 0}, "greater than 0"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(params: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SelectParams(**params)


def test_a_budget_is_kept_on_the_held_out_prompts(
    finished: "Project", stage_main: Callable[["Project", str], "Ended"]
) -> None:
    """Half of the last snapshot's KL as budget: the policy is an interpolation of it, and `evaluate` measures less than
    the budget on prompts that `select` has not seen."""
    finished.set("runtime.tracking", False)
    rows = list(csv.DictReader((finished.root / "plots/select.csv").open(encoding="utf-8")))
    budget = 0.5 * float(rows[-1]["kl"])
    etas = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
    finished.set("select.interpolation", etas)
    finished.set("select.kl_budget", budget)
    assert stage_main(finished, "select").code == 0
    metrics = finished.json("metrics/select.json")
    assert (metrics["step"], metrics["last_step"], metrics["kl_budget"]) == (4, 4, budget)
    assert metrics["eta"] in etas
    assert metrics["kl"] < budget
    places = ("sft/model", "snapshots/step-000004", "policy/model")
    sft, last, policy = (load_file(finished.root / f"models/{place}.safetensors") for place in places)
    for name, tensor in policy.items():
        assert torch.allclose(tensor, torch.lerp(sft[name], last[name], metrics["eta"]), atol=1e-6)
    assert stage_main(finished, "evaluate").code == 0
    evaluated = finished.json("metrics/evaluate.json")
    assert 0 < evaluated["kl_per_sequence"] <= budget
    points = list(csv.DictReader((finished.root / "plots/frontier.csv").open(encoding="utf-8")))
    assert [row["family"] for row in points].count("policy") == 1, "it is no snapshot"
    assert stage_main(finished, "report").code == 0
    finished.set("select.kl_budget", 1e-6)
    done = stage_main(finished, "select")
    assert (done.code, "no candidate is within it" in done.stderr) == (2, True)


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
        "rule": "last", "step": 4, "eta": 1.0, "kl": None, "kl_budget": None, "last_step": 4, "best_judge_step": None,
        "best_proxy_step": None, "prompts": 0,
    }  # fmt: skip
    for stage in ("evaluate", "report"):
        assert stage_main(finished, stage).code == 0


def test_a_snapshot_of_adapters_belongs_to_the_model_that_ppo_began_with(
    workshop: Path, make_stage: Callable[..., "Stage[Any]"], close_round: Callable[[Path, int], None]
) -> None:
    """From round 2 on that is the policy of the round before, not the SFT model."""
    close_round(workshop, 1)
    save_checkpoint(workshop / "rounds/1/policy", TINY.tiny_lm(seed=9), TINY.tiny_tokenizer())
    trainer = TINY.tiny_trainer(lora={"rank": 2, "alpha": 4.0})
    settings = LoraSettings(rank=2, alpha=4.0)
    snapshots.write(workshop / "models/snapshots", trainer.models, 1, settings)
    stage = make_stage("select", None, [])
    sft = load_candidate(stage, "sft", workshop / "models/sft")
    wanted = snapshots.load(workshop / "models/snapshots", 1, TINY.tiny_lm(seed=9))
    found = policy_at(stage, sft, 1).model
    for mine, other in zip(found.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert not torch.equal(found.get_input_embeddings().weight, sft.model.get_input_embeddings().weight)


@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4.0}], ids=["all weights", "adapters"])
def test_one_model_holds_one_snapshot_after_another(
    lora: dict[str, Any] | None,
    workshop: Path,
    make_stage: Callable[..., "Stage[Any]"],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The SFT model is neither loaded nor copied for each, and the weights are those of a fresh copy."""
    trainer = TINY.tiny_trainer(lora=lora)
    for step in (1, 2):
        trainer.step()
        snapshots.write(workshop / "models/snapshots", trainer.models, step, lora and LoraSettings(**lora))
    stage = make_stage("select", None, [])
    sft = load_candidate(stage, "sft", workshop / "models/sft")
    wanted = policy_at(stage, sft, 2).model.state_dict()
    first = policy_at(stage, sft, 1)
    before = {name: tensor.clone() for name, tensor in sft.model.state_dict().items()}
    monkeypatch.setattr("tasks.select.copy", None)
    monkeypatch.setattr("tasks.select.load_frozen", None)
    second = policy_at(stage, sft, 2, first)
    assert second.model is first.model
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in second.model.state_dict().items())
    assert all(torch.equal(tensor, before[name]) for name, tensor in sft.model.state_dict().items())


@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4.0}], ids=["all weights", "adapters"])
def test_a_snapshot_is_judged_in_the_precision_in_which_evaluate_loads_the_policy(
    lora: dict[str, Any] | None, workshop: Path, make_stage: Callable[..., "Stage[Any]"]
) -> None:
    """With `precision: bfloat16` both snapshots have the very weights of the saved policy, which was rounded once."""
    trainer = TINY.tiny_trainer(lora=lora, precision="bfloat16")
    for step in (1, 2):
        trainer.step()
        snapshots.write(workshop / "models/snapshots", trainer.models, step, lora and LoraSettings(**lora))
    stage = make_stage("select", None, ["models/policy"])
    stage.common = stage.common.model_copy(update={"precision": "bfloat16"})
    sft, policy = load_candidate(stage, "sft", workshop / "models/sft"), None
    for step in (1, 2):
        policy = policy_at(stage, sft, step, policy)
        save_policy(stage, trainer.config, sft, row(step))
        saved = load_frozen(stage, stage.out("models/policy"))
        assert {p.dtype for p in policy.model.parameters()} == {torch.bfloat16}
        for mine, other in zip(policy.model.parameters(), saved.parameters(), strict=True):
            assert torch.equal(mine, other)
        tokens = torch.tensor([[3, 9, 4]])
        assert torch.equal(policy.model(tokens).logits, saved(tokens).logits)
        assert policy.model(tokens).logits.dtype == torch.float32
