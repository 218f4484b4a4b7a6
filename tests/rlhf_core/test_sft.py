"""`sft.py` and `training/loop.py`: exact token means, early stopping, and resume to the byte."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import PreTrainedModel

from rlhf_core.config.sft import SFTConfig
from rlhf_core.errors import NonFiniteError
from rlhf_core.models.hf import save_weights, unique_weights
from rlhf_core.sft import Demonstration, SFTResult, best_of, fine_tune, response_loss
from rlhf_core.training.checkpoints import SEAL
from rlhf_core.training.run import NeverStops, Run
from rlhf_core.training.state import STATE

Build = Callable[..., PreTrainedModel]
MakeRun = Callable[..., Run]
PAD, END = 0, 1
LENGTHS = [1, 9, 2, 7, 3, 5, 1, 8, 2, 6, 4, 1, 9, 3, 2, 5]
TRAINING = [
    Demonstration([3, 5 + i % 4, 4], [*((10 + i + k) % 40 + 8 for k in range(n)), END]) for i, n in enumerate(LENGTHS)
]
VALIDATION = [Demonstration([3, 5, 4], [19, 20, 21, 22, END]), Demonstration([3, 6, 4], [25, END])]
CONFIG = SFTConfig(
    learning_rate=0.003,
    epochs=2,
    batch_size=8,
    micro_batch_size=8,
    warmup_steps=0,
    weight_decay=0.0,
    max_tokens=64,
    evaluate_every=1,
    patience=0,
)


class Killed(Exception):
    """Simulates a kill during training."""


def kill_at(step: int) -> Callable[..., None]:
    def report(done: int, total: int, values: dict[str, float]) -> None:
        if done == step and "loss" in values:
            raise Killed

    return report


def settings(**changes: Any) -> SFTConfig:
    return SFTConfig(**(CONFIG.model_dump() | changes))


def train(model: PreTrainedModel, config: SFTConfig, run: Run) -> SFTResult:
    return fine_tune(model, TRAINING, VALIDATION, config, PAD, run)


def losses(result: SFTResult) -> list[tuple[float, ...]]:
    names = ("step", "loss", "grad_norm", "learning_rate", "validation_loss")
    return [tuple(row.get(name, -1.0) for name in names) for row in result.log]


def same_weights(one: PreTrainedModel, two: PreTrainedModel) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def weights(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_the_loss_is_the_mean_over_response_tokens_of_all_rows(kind: str, build_lm: Build) -> None:
    """By hand on unpadded rows; not the mean of row means, and the same for every batch size."""
    model = build_lm(kind)
    per_row = []
    for row in TRAINING:
        ids = torch.tensor([row.prompt + row.response])
        logprobs = model(ids).logits[0].log_softmax(-1)
        places = range(len(row.prompt), ids.shape[1])
        per_row.append([-logprobs[i - 1, ids[0, i]].item() for i in places])
    tokens = [loss for row in per_row for loss in row]
    expected = sum(tokens) / len(tokens)
    for batch_size in (1, 5, 100):
        assert response_loss(model, TRAINING, PAD, batch_size) == pytest.approx(expected, abs=1e-4)
    assert abs(sum(sum(row) / len(row) for row in per_row) / len(per_row) - expected) > 1e-2
    assert math.isnan(response_loss(model, [], PAD, 2))


def test_only_the_counted_tokens_of_a_conversation_are_imitated(build_lm: Build, make_run: MakeRun) -> None:
    """By hand: the same as one row for each turn, with all before it as its prompt."""
    talk = [3, 5, 4, 10, 11, END, 3, 6, 4, 12, 13, 14, END]
    turns = [(3, 6), (9, 13)]
    counted = [any(start <= place < end for start, end in turns) for place in range(3, len(talk))]
    whole = Demonstration(talk[:3], talk[3:], counted)
    apart = [Demonstration(talk[:start], talk[start:end]) for start, end in turns]
    assert whole.tokens == sum(row.tokens for row in apart) == 7
    model, short = build_lm(), TRAINING[0]
    together = response_loss(model, [whole, short], PAD, 4)
    assert together == pytest.approx(response_loss(model, [*apart, short], PAD, 4), abs=1e-5)
    assert together != pytest.approx(response_loss(model, [replace(whole, counted=None), short], PAD, 4), abs=1e-3)
    rows, config = [whole, short] * 2, settings(batch_size=4, micro_batch_size=2, epochs=1)
    result = fine_tune(model, rows, VALIDATION, config, PAD, make_run())
    assert result.log[0]["loss"] == pytest.approx(together, abs=1e-3)


def test_the_training_loss_is_token_weighted_whatever_the_micro_batch(build_lm: Build, make_run: MakeRun) -> None:
    """Rows of 1 to 9 tokens: a mean of micro-batch means would train another model."""
    models, logs = {}, {}
    for micro in (8, 4, 1):
        models[micro] = build_lm()
        result = train(models[micro], settings(micro_batch_size=micro), make_run(str(micro)))
        logs[micro] = [row["loss"] for row in result.log if "loss" in row]
    for micro in (4, 1):
        assert logs[micro] == pytest.approx(logs[8], rel=2e-3)
        change = (weights(models[micro]) - weights(models[8])).norm() / (
            weights(models[8]) - weights(build_lm())
        ).norm()
        assert change < 0.02


def test_the_first_logged_loss_is_that_of_the_batch(build_lm: Build, make_run: MakeRun) -> None:
    config = settings(batch_size=16, micro_batch_size=2, epochs=1)
    result = train(model := build_lm(), config, make_run())
    assert not same_weights(model, build_lm())
    assert result.log[0]["loss"] == pytest.approx(response_loss(build_lm(), TRAINING, PAD, 16), abs=1e-3)
    assert result.base_validation_loss == pytest.approx(response_loss(build_lm(), VALIDATION, PAD, 4))


def test_training_learns_and_the_best_weights_are_restored(build_lm: Build, make_run: MakeRun) -> None:
    """So high a learning rate that the validation loss soon rises again."""
    model = build_lm()
    result = train(model, settings(learning_rate=0.05, epochs=10), make_run())
    measured = [row["validation_loss"] for row in result.log if "validation_loss" in row]
    assert result.validation_loss == min(measured) < result.base_validation_loss
    assert result.best_step == measured.index(min(measured)) + 1 < result.steps == 20
    assert response_loss(model, VALIDATION, PAD, 8) == pytest.approx(result.validation_loss, abs=1e-6)


def test_adapters_are_trained_and_merged_with_the_best_weights(build_lm: Build, make_run: MakeRun) -> None:
    model = build_lm()
    names, embeddings = list(model.state_dict()), model.get_input_embeddings().weight.detach().clone()
    result = train(model, settings(lora={"rank": 2}, learning_rate=0.05, epochs=6), make_run())
    assert list(model.state_dict()) == names
    assert torch.equal(model.get_input_embeddings().weight, embeddings)
    assert result.validation_loss < result.base_validation_loss - 0.1
    assert response_loss(model, VALIDATION, PAD, 8) == pytest.approx(result.validation_loss, abs=1e-5)


def test_the_last_step_is_measured(build_lm: Build, make_run: MakeRun) -> None:
    result = train(build_lm(), settings(evaluate_every=3, epochs=2), make_run())
    assert [row["step"] for row in result.log if "validation_loss" in row] == [3, 4]


def test_patience_stops_training(build_lm: Build, make_run: MakeRun) -> None:
    config = settings(learning_rate=0.05, epochs=10)
    patient = train(build_lm(), config, make_run("long"))
    model = build_lm()
    result = train(model, config.model_copy(update={"patience": 2}), make_run("short"))
    assert patient.steps == 20
    assert result.steps == result.best_step + 2 < 20
    assert response_loss(model, VALIDATION, PAD, 8) == pytest.approx(result.validation_loss, abs=1e-6)


def test_the_best_is_the_first_of_equal_losses() -> None:
    log = [{"step": 5, "validation_loss": 2.0}, {"step": 6, "loss": 1.0}, {"step": 10, "validation_loss": 1.5}]
    assert best_of([*log, {"step": 15, "validation_loss": 1.5}]) == (10, 1.5)


@pytest.mark.parametrize(("config", "every"), [(CONFIG, 2), (settings(micro_batch_size=4, epochs=1.5), 1)])
def test_failure_01_a_killed_run_continues_to_the_same_bytes(
    build_lm: Build, make_run: MakeRun, config: SFTConfig, every: int
) -> None:
    whole = build_lm()
    expected = train(whole, config, make_run("whole", checkpoint_every=every))
    run = make_run("killed", checkpoint_every=every)
    with pytest.raises(Killed):
        train(build_lm(), config, replace(run, report=kill_at(3)))
    resumed, seen = build_lm(seed=9), []
    result = train(resumed, config, replace(run, report=lambda step, *_: seen.append(step)))
    assert min(seen) == (3 if every == 1 else every + 1)
    assert same_weights(resumed, whole)
    assert losses(result) == losses(expected)
    assert (result.best_step, result.steps) == (expected.best_step, expected.steps)


@pytest.mark.parametrize("changes", [{"epochs": 1.5}, {"learning_rate": 0.05, "epochs": 10, "patience": 2}])
def test_failure_01_a_finished_run_is_not_trained_further(
    build_lm: Build, make_run: MakeRun, changes: dict[str, float]
) -> None:
    """Killed after the last checkpoint (in mid-epoch, or stopped early) and before its model was saved."""
    config, run = settings(**changes), make_run(checkpoint_every=1)
    whole = build_lm()
    expected = train(whole, config, run)
    resumed, seen = build_lm(seed=9), []
    result = train(resumed, config, replace(run, report=lambda step, *_: seen.append(step)))
    assert not seen
    assert same_weights(resumed, whole)
    assert losses(result) == losses(expected)
    assert result.steps == expected.steps


def test_failure_01_a_checkpoint_that_was_cut_short_is_passed_over(
    build_lm: Build, make_run: MakeRun, tmp_path: Path
) -> None:
    """Killed while checkpoint 3 was being written: its seal, written last, is missing, or its state is half there."""
    whole = build_lm()
    train(whole, CONFIG, make_run("whole"))
    for name, rest in (("missing", None), ("half", b"PK")):
        run = make_run(name, checkpoint_every=1)
        with pytest.raises(Killed):
            train(build_lm(), CONFIG, replace(run, report=kill_at(4)))
        state = tmp_path / name / "trainer" / "checkpoint-3" / STATE
        state.unlink()
        if rest is None:
            (state.parent / SEAL).unlink()
        else:
            state.write_bytes(rest)
        resumed = build_lm(seed=9)
        train(resumed, CONFIG, run)
        assert same_weights(resumed, whole)


def test_failure_01_a_resumed_run_has_the_best_weights_of_its_checkpoint(
    build_lm: Build, make_run: MakeRun, tmp_path: Path
) -> None:
    """Killed after better weights than the checkpoint's were written: on another machine the steps after it may be
    rounded to a higher loss, and those weights would be of no step of the run."""
    config, whole = settings(learning_rate=0.05, epochs=10), build_lm()
    expected = train(whole, config, make_run("whole"))
    run, best = make_run("killed", checkpoint_every=1), tmp_path / "killed" / "best.safetensors"
    with pytest.raises(Killed):
        train(build_lm(), config, replace(run, report=kill_at(expected.best_step + 2)))
    save_weights(best, unique_weights(build_lm(seed=9)))
    resumed = build_lm(seed=9)
    result = train(resumed, config, run)
    assert result.best_step == expected.best_step
    assert same_weights(resumed, whole)


def test_a_request_to_stop_saves_the_step_and_the_run_continues_there(
    build_lm: Build, make_run: MakeRun, tmp_path: Path
) -> None:
    class Requested(NeverStops):
        seen = 0

        def is_requested(self) -> bool:
            return self.seen >= 1

    whole, stopping, seen = build_lm(), Requested(), []
    train(whole, CONFIG, make_run("whole"))
    run = make_run("requested", checkpoint_every=100)
    with pytest.raises(KeyboardInterrupt):
        train(
            build_lm(), CONFIG, replace(run, stopping=stopping, report=lambda step, *_: setattr(stopping, "seen", step))
        )
    assert [path.name for path in (tmp_path / "requested" / "trainer").glob("checkpoint-*")] == ["checkpoint-1"]
    resumed = build_lm(seed=9)
    train(resumed, CONFIG, replace(run, report=lambda step, *_: seen.append(step)))
    assert min(seen) == 2
    assert same_weights(resumed, whole)


def test_the_checkpoint_interval_changes_no_result(build_lm: Build, make_run: MakeRun, tmp_path: Path) -> None:
    often, seldom = build_lm(), build_lm()
    train(often, CONFIG, make_run("often", checkpoint_every=1))
    train(seldom, CONFIG, make_run("seldom", checkpoint_every=100))
    assert same_weights(often, seldom)
    kept = [len(list((tmp_path / name / "trainer").glob("checkpoint-*"))) for name in ("often", "seldom")]
    assert kept == [2, 1], "the last two, and the one at the end"


def test_a_loss_that_is_not_finite_stops_the_run(build_lm: Build, make_run: MakeRun, tmp_path: Path) -> None:
    model = build_lm()
    with torch.no_grad():
        model.get_input_embeddings().weight[11] = math.nan
    with pytest.raises(NonFiniteError, match="lower the learning rate"):
        train(model, CONFIG, make_run("nan", checkpoint_every=1))
    assert not list(tmp_path.glob("nan/trainer/checkpoint-*"))


@pytest.mark.parametrize(("batch", "micro"), [(10, 4), (8, 16)])
def test_a_batch_that_micro_batches_do_not_fill_is_refused(batch: int, micro: int) -> None:
    """Trained would be batches of 8, and of 16."""
    with pytest.raises(ValidationError, match="multiple of micro_batch_size"):
        settings(batch_size=batch, micro_batch_size=micro)


def test_precision_bfloat16_changes_the_products_and_keeps_float32_weights(build_lm: Build, make_run: MakeRun) -> None:
    exact, rounded = build_lm(), build_lm()
    wanted = train(exact, settings(), make_run("exact"))
    found = train(rounded, settings(), make_run("rounded", precision="bfloat16"))
    assert found.base_validation_loss != wanted.base_validation_loss
    assert found.validation_loss == pytest.approx(wanted.validation_loss, rel=0.02)
    assert {parameter.dtype for parameter in rounded.parameters()} == {torch.float32}
    assert not any(torch.equal(p, p.bfloat16().float()) for p in rounded.parameters() if p.ndim > 1)


def test_gradient_checkpointing_changes_nothing_but_memory(build_lm: Build, make_run: MakeRun) -> None:
    usual = train(build_lm(), settings(), make_run("usual"))
    again = train(build_lm(), settings(gradient_checkpointing=2), make_run("again"))
    assert again.validation_loss == pytest.approx(usual.validation_loss, rel=1e-5)
