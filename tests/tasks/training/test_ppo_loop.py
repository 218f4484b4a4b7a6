"""The models that a PPO run begins with, and the held-out prompts that are answered along it."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.errors import UserError
from rlhf_core.models.hf import save_checkpoint
from rlhf_core.ppo import scoring
from rlhf_core.ppo.plan import StepPlan
from tasks.datasets.jsonl import Row
from tasks.params.round import RoundParams
from tasks.training import ppo_loop
from tasks.training.ppo_inputs import Beginning, beginning
from tasks.training.ppo_loop import READ, Took, build, drawn, seconds_left
from tests.tasks.conftest import TINY

if TYPE_CHECKING:
    from tasks.stage.stage import Stage

Make = Callable[..., "Stage[Any]"]


def test_the_watched_prompts_are_drawn_by_seed_and_fixed_for_a_run() -> None:
    """Not the first twenty; in the order of the data."""
    rows = [{"prompt_id": str(place)} for place in range(100)]
    found = drawn(rows, seed=1)
    assert len(found) == READ
    assert found == drawn(rows, seed=1)
    assert found != drawn(rows, seed=2)
    assert found != rows[:READ]
    assert found == sorted(found, key=lambda row: int(row["prompt_id"]))


def test_few_prompts_are_all_watched() -> None:
    rows = [{"prompt_id": str(place)} for place in range(3)]
    assert drawn(rows, seed=1) == rows


def stage_in_round(
    number: int, make_stage: Make, root: Path, asked: list[Row], close_round: Callable[[Path, int], None], **block: Any
) -> "Stage[Any]":
    """The stage in a round whose last policy is another model than models/sft."""
    for closed in range(1, number):
        close_round(root, closed)
        save_checkpoint(root / f"rounds/{closed}/policy", TINY.tiny_lm(seed=10 + closed), TINY.tiny_tokenizer())
    rows = {"data/ingest/ppo_prompts.jsonl": asked, "data/ingest/heldout.jsonl": asked}
    return make_stage("ppo", None, [], rows, blocks={"round": block})


def beginning_of(stage: "Stage[Any]") -> Beginning:
    return beginning(stage.root, stage.seed, stage.block("round", RoundParams))


@pytest.mark.parametrize(
    ("number", "block", "start", "reference"),
    [
        (1, {}, "models/sft", "models/sft"),
        (1, {"reference": "previous"}, "models/sft", "models/sft"),
        (3, {}, "rounds/2/policy", "models/sft"),
        (3, {"reference": "previous"}, "rounds/2/policy", "rounds/2/policy"),
    ],
)
def test_a_later_round_begins_with_the_last_policy_and_the_reference_stays_or_moves(
    number: int,
    block: dict[str, Any],
    start: str,
    reference: str,
    workshop: Path,
    make_stage: Make,
    asked: list[Row],
    close_round: Callable[[Path, int], None],
) -> None:
    found = beginning_of(stage_in_round(number, make_stage, workshop, asked, close_round, **block))
    assert (found.start, found.reference, found.seed == 3) == (start, reference, number == 1)


@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4.0}])
@pytest.mark.parametrize("reference", ["sft", "previous"])
def test_the_loop_has_the_models_of_its_beginning(
    reference: str,
    lora: dict[str, Any] | None,
    workshop: Path,
    make_stage: Make,
    asked: list[Row],
    close_round: Callable[[Path, int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With lora, the policy without its adapter is the reference only where that is what the reference is."""
    monkeypatch.setattr(scoring, "REFERENCE_ANSWERS", 16)
    stage = stage_in_round(2, make_stage, workshop, asked, close_round, reference=reference)
    config = PPOConfig.model_validate(TINY.tiny_ppo_values(lora=lora) if lora else TINY.tiny_ppo_values())
    trainer, _, _ = build(stage, config, TINY.tiny_tokenizer(), beginning_of(stage))
    moved = reference == "previous"
    assert (trainer.models.reference is None) is (moved and lora is not None)
    weights = {"sft": TINY.tiny_lm(seed=1), "previous": TINY.tiny_lm(seed=11)}
    with trainer.models.as_reference() as model:
        found = model.get_input_embeddings().weight
        assert torch.equal(found, weights[reference].get_input_embeddings().weight)
    assert torch.equal(
        trainer.models.policy.get_input_embeddings().weight, weights["previous"].get_input_embeddings().weight
    )
    row = trainer.step()
    assert (abs(row["kl_k3"]) < 1e-6) is moved, "before the first step, only the policy itself is no nat away"


def test_with_lora_no_reference_moves_from_another_model_than_the_policys_start(
    workshop: Path, make_stage: Make, asked: list[Row], close_round: Callable[[Path, int], None]
) -> None:
    stage = stage_in_round(2, make_stage, workshop, asked, close_round)
    config = PPOConfig.model_validate(TINY.tiny_ppo_values(lora={"rank": 2, "alpha": 4.0}, reference_ema=0.1))
    with pytest.raises(UserError, match=r"ppo\.reference_ema: with lora .* rounds/1/policy, .* here it is models/sft"):
        build(stage, config, TINY.tiny_tokenizer(), beginning_of(stage))


def test_a_run_that_continues_takes_the_scores_of_the_reference_from_its_state(
    workshop: Path,
    make_stage: Make,
    asked: list[Row],
    close_round: Callable[[Path, int], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also where the first process was stopped while it sampled; the progress is shown."""
    monkeypatch.setattr(scoring, "REFERENCE_ANSWERS", 24)
    stage = stage_in_round(1, make_stage, workshop, asked, close_round)
    config, sample, sampled = PPOConfig.model_validate(TINY.tiny_ppo_values()), scoring.sample, []

    def counted(*arguments: Any, **options: Any) -> Any:
        if len(sampled) == 1:
            sampled.append(0)
            raise KeyboardInterrupt
        sampled.append(len(arguments[1]))
        return sample(*arguments, **options)

    def begin() -> tuple[float, float]:
        source = build(stage, config, TINY.tiny_tokenizer(), beginning_of(stage))[0].scoring.source
        return source.normalisation.mean, source.normalisation.std

    monkeypatch.setattr(scoring, "sample", counted)
    with pytest.raises(KeyboardInterrupt):
        begin()
    found = begin()
    assert sampled == [8, 0, 8, 8], "the first batch is kept"
    assert "reference answer 24/24" in capsys.readouterr().out
    assert begin() == found
    assert sampled == [8, 0, 8, 8], "nothing is sampled again"


def test_out_of_memory_says_at_which_step_the_run_continues(
    workshop: Path,
    make_stage: Make,
    asked: list[Row],
    close_round: Callable[[Path, int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one line with the keys to lower; the same command goes on there."""
    monkeypatch.setattr(scoring, "REFERENCE_ANSWERS", 16)
    monkeypatch.setattr(ppo_loop, "save_is_due", lambda _, trainer, __: trainer.steps_done == 2)
    stage = stage_in_round(1, make_stage, workshop, asked, close_round)
    config = PPOConfig.model_validate(TINY.tiny_ppo_values())
    trainer, watched, _ = build(stage, config, TINY.tiny_tokenizer(), beginning_of(stage))
    engine = trainer.engine

    def short(*arguments: Any) -> Any:
        if trainer.steps_done == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return engine(*arguments)

    trainer.engine = short
    with pytest.raises(UserError) as error:
        ppo_loop.train(stage, trainer, watched)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("out of memory in the rollout of step 4; lower ppo.sampler_rows")
    assert str(error.value).endswith("the run continues at step 3")
    again, watched, _ = build(stage, config, TINY.tiny_tokenizer(), beginning_of(stage))
    assert [row["step"] for row in ppo_loop.train(stage, again, watched).history] == [1, 2, 3, 4]


def test_the_time_left_knows_that_warm_up_steps_are_cheaper() -> None:
    """Two steps of the critic alone, of which the first is slow; an update with the policy takes half as long again."""
    config = PPOConfig(steps=5, critic={"warmup_steps": 2})  # type: ignore[arg-type]
    plans = [StepPlan.of(config, step) for step in range(5)]
    took = [Took(plans[0], 90.0, 40.0)]
    assert seconds_left(config, took) == 90 + 3 * (90 + 20)
    took.append(Took(plans[1], 60.0, 40.0))
    assert seconds_left(config, took) == 3 * (60 + 20), "the slow first step does not count"
    took.append(Took(plans[2], 84.0, 64.0))
    assert seconds_left(config, took) == 2 * 84, "now it is known"
    assert seconds_left(config, [*took, Took(plans[4], 84.0, 64.0)]) == 0.0
