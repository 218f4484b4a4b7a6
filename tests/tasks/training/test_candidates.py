"""Stages `rejection_sft` and `best_of_n` on tiny models: what is drawn, what is kept, what is trained on."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_core.config.lora import LoraSettings
from rlhf_core.config.sft import SFTConfig
from rlhf_core.data.scorer import Answers
from rlhf_core.data.tokenizer import encode_prompt, encode_response, load_tokenizer
from rlhf_core.models.hf import load_causal_lm, load_scalar_model
from rlhf_core.models.sampling import Sampled
from rlhf_core.models.scorers import RewardModelScorer
from tasks import best_of_n, rejection_sft
from tasks.datasets.raw import EVALUATION_PROMPTS
from tasks.params.best_of_n import BestOfNParams
from tasks.params.rejection_sft import RejectionParams
from tasks.schemas.validation import load
from tasks.training import candidates
from tasks.training.candidates import Candidate

Rows = list[dict[str, Any]]
TRAINING = SFTConfig(
    learning_rate=1e-3,
    epochs=2,
    batch_size=4,
    micro_batch_size=2,
    warmup_steps=1,
    weight_decay=0.0,
    max_tokens=64,
    evaluate_every=2,
    patience=0,
)
REJECTION = RejectionParams(
    enabled=True, samples_per_prompt=5, max_new_tokens=6, batch_size=8, validation=0.3, training=TRAINING
)
REJECTION_OUTS = [
    "data/rejection_sft/samples.jsonl",
    "models/rejection_sft",
    "metrics/rejection_sft.json",
    "plots/rejection_sft.csv",
]
EVALUATE = {
    "prompts": "heldout",
    "max_prompts": 7,
    "seeds": [1],
    "temperature": 1.0,
    "max_new_tokens": 6,
    "batch_size": 64,
    "stop_tokens": [],
    "bootstrap": 100,
}


@pytest.fixture
def reject(workshop: Path, make_stage: Callable[..., Any], asked: Rows) -> Callable[..., tuple[Rows, dict[str, Any]]]:
    """reject(params, state="name") -> the rows and metrics that the stage wrote."""

    def call(params: RejectionParams = REJECTION, state: str = "rejection") -> tuple[Rows, dict[str, Any]]:
        stage = make_stage("rejection_sft", params, REJECTION_OUTS, {rejection_sft.PROMPTS: asked}, state=state)
        rejection_sft.execute(stage)
        stage.outputs.commit()
        metrics = json.loads((workshop / "metrics/rejection_sft.json").read_text())
        return load(workshop, REJECTION_OUTS)["data/rejection_sft/samples.jsonl"], metrics

    return call


@pytest.fixture
def draw_best_of_n(workshop: Path, make_stage: Callable[..., Any], asked: Rows) -> Callable[..., tuple[Rows, Any]]:
    """draw_best_of_n(batch_size=64) -> the rows and metrics that the stage wrote; n is 1, 3."""

    def call(**changes: Any) -> tuple[Rows, Any]:
        outs = ["data/best_of_n/samples.jsonl", "metrics/best_of_n.json"]
        rows = {EVALUATION_PROMPTS: asked}
        params = BestOfNParams(enabled=True, n=[1, 3])
        state = json.dumps(changes)[1:-1].replace("/", "")
        stage = make_stage("best_of_n", params, outs, rows, state=state, blocks={"answers": EVALUATE | changes})
        best_of_n.execute(stage)
        stage.outputs.commit()
        return load(workshop, outs)[outs[0]], json.loads((workshop / outs[1]).read_text())

    return call


def scores(root: Path, rows: Rows) -> list[float]:
    """Of each row's answer, alone in its batch."""
    tokenizer = load_tokenizer(root / "models/sft")
    prompts = [encode_prompt(tokenizer, row["prompt"]) for row in rows]
    scorer = RewardModelScorer(load_scalar_model(root / "models/reward"), 0, 1, 1)
    return scorer(Answers([], [], prompts, [row["response_ids"] for row in rows])).total


def candidate(reward: float, ended: bool = True, text: str = "") -> Candidate:
    return Candidate([7], ended, text, reward)


def test_the_best_is_the_first_of_the_highest_that_ended() -> None:
    first, second = candidate(2.0, text="a"), candidate(2.0, text="b")
    assert rejection_sft.best_of([candidate(1.0), first, second]) is first
    assert rejection_sft.best_of([candidate(-9.0), candidate(5.0, ended=False)]).reward == -9.0
    assert rejection_sft.best_of([candidate(1.0, ended=False), candidate(5.0, ended=False)]).reward == 5.0


def test_rejection_keeps_the_best_of_what_was_drawn(
    reject: Callable[..., tuple[Rows, dict[str, Any]]], workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[list[Candidate]] = []

    def watched(*arguments: Any) -> list[list[Candidate]]:
        groups.extend(draw(*arguments))
        return groups

    draw = rejection_sft.draw_candidates
    monkeypatch.setattr(rejection_sft, "draw_candidates", watched)
    rows, metrics = reject()
    assert [len(group) for group in groups] == [5] * 10
    for row, group, score in zip(rows, groups, scores(workshop, rows), strict=True):
        eligible = [c for c in group if c.ended] or group
        assert row["reward"] == max(c.reward for c in eligible) == pytest.approx(score, abs=1e-4)
        assert row["mean_reward"] == pytest.approx(sum(c.reward for c in group) / 5)
        assert row["response_ids"] in [c.response for c in eligible]
    assert len({tuple(c.response) for c in groups[0]}) > 1, "each draw has a key of its own"
    assert metrics["samples_generated"] == 50
    assert metrics["reward_best"] == pytest.approx(sum(row["reward"] for row in rows) / 10)
    assert metrics["reward_mean"] == pytest.approx(sum(row["mean_reward"] for row in rows) / 10)
    assert metrics["reward_best"] > metrics["reward_mean"]


def test_rejection_trains_on_the_tokens_that_were_sampled(
    reject: Callable[..., tuple[Rows, dict[str, Any]]], workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which are not those of the text; a share of the prompts measures the loss, and the weights are the best ones."""
    seen: dict[str, list[list[int]]] = {}

    def watched(model: Any, training: Any, validation: Any, *more: Any) -> Any:
        seen.update(train=[d.response for d in training], validation=[d.response for d in validation])
        return fine_tune(model, training, validation, *more)

    fine_tune = rejection_sft.fine_tune
    monkeypatch.setattr(rejection_sft, "fine_tune", watched)
    rows, metrics = reject()
    for split, count in (("train", 7), ("validation", 3)):
        assert seen[split] == [row["response_ids"] for row in rows if row["split"] == split]
        assert len(seen[split]) == count
    tokenizer = load_tokenizer(workshop / "models/sft")
    assert any(encode_response(tokenizer, row["response"], row["ended"]) != row["response_ids"] for row in rows)
    assert metrics["tokens_trained"] == 2 * sum(map(len, seen["train"]))
    assert metrics["steps"] == 4
    start, end = (load_file(workshop / f"models/{name}/model.safetensors") for name in ("sft", "rejection_sft"))
    assert any(not torch.equal(start[name], end[name]) for name in start)
    load_causal_lm(workshop / "models/rejection_sft")


@pytest.mark.slow
def test_a_stage_that_was_killed_while_it_sampled_goes_on_to_the_same_bytes(
    reject: Callable[..., tuple[Rows, dict[str, Any]]], workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven batches; killed in the fourth."""
    reject(state="whole")
    expected = [(workshop / out).read_bytes() for out in REJECTION_OUTS if "." in out]
    expected.append((workshop / "models/rejection_sft/model.safetensors").read_bytes())
    calls: list[int] = []
    limit = 3

    def watched(*arguments: Any, **options: Any) -> Sampled:
        if len(calls) == limit:
            raise ZeroDivisionError
        calls.append(len(arguments[1]))
        return draw(*arguments, **options)

    draw = candidates.sample
    monkeypatch.setattr(candidates, "sample", watched)
    with pytest.raises(ZeroDivisionError):
        reject(state="killed")
    limit = 99
    reject(state="killed")
    assert calls == [8, 8, 8, 8, 8, 8, 2]
    found = [(workshop / out).read_bytes() for out in REJECTION_OUTS if "." in out]
    assert [*found, (workshop / "models/rejection_sft/model.safetensors").read_bytes()] == expected


def test_prompts_are_split_by_the_seed() -> None:
    splits = rejection_sft.assign_splits(100, 0.1, 1)
    assert splits.count("validation") == 10
    assert splits == rejection_sft.assign_splits(100, 0.1, 1) != rejection_sft.assign_splits(100, 0.1, 2)
    for count in (2, 3):
        assert set(rejection_sft.assign_splits(count, 0.9, 1)) == {"train", "validation"}
    with pytest.raises(rejection_sft.UserError, match=r"ingest\.split\.ppo"):
        rejection_sft.assign_splits(1, 0.5, 1)


def test_best_of_n_draws_the_same_in_every_batch(
    draw_best_of_n: Callable[..., tuple[Rows, Any]], workshop: Path, asked: Rows
) -> None:
    """max(n) answers to the first max_prompts prompts, scored on their tokens."""
    rows, metrics = draw_best_of_n()
    others, _ = draw_best_of_n(batch_size=4)
    assert [(row["prompt_id"], row["sample"]) for row in rows] == [
        (row["prompt_id"], k) for row in asked[:7] for k in range(3)
    ]
    assert [row["response_ids"] for row in rows] == [row["response_ids"] for row in others]
    assert [row["reward"] for row in rows] == pytest.approx([row["reward"] for row in others], abs=1e-4)
    assert [row["reward"] for row in rows] == pytest.approx(scores(workshop, rows), abs=1e-4)
    assert all(row["tokens"] == len(row["response_ids"]) for row in rows)
    assert len({tuple(row["response_ids"]) for row in rows}) > 14
    best = [max(row["reward"] for row in rows[start : start + 3]) for start in range(0, 21, 3)]
    assert metrics == {
        "enabled": True,
        "prompts": 7,
        "samples_generated": 21,
        "reward_mean": pytest.approx(sum(row["reward"] for row in rows) / 21),
        "reward_best": pytest.approx(sum(best) / 7),
        "prompts_too_long": 0,
    }


def test_no_draw_of_best_of_n_has_the_key_of_another_stage(
    draw_best_of_n: Callable[..., tuple[Rows, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[tuple[int, ...]] = []

    def watched(model: Any, prompts: Any, given: Sequence[tuple[int, ...]], **options: Any) -> Sampled:
        keys.extend(given)
        return draw(model, prompts, given, **options)

    draw = candidates.sample
    monkeypatch.setattr(candidates, "sample", watched)
    draw_best_of_n()
    assert len(set(keys)) == 21
    assert all(key[0] >= 2**32 for key in keys), "no seed is as large"


def test_wrong_settings_of_evaluate_are_those_of_best_of_n(draw_best_of_n: Callable[..., tuple[Rows, Any]]) -> None:
    with pytest.raises(rejection_sft.UserError, match=r"evaluate\.temperature"):
        draw_best_of_n(temperature=0)


def test_sampling_leaves_the_models_gradients_as_they_are(
    workshop: Path, make_stage: Callable[..., Any], asked: Rows
) -> None:
    """Where parameters have gradients autocast casts a weight once a batch, and not in every step of decoding."""
    tokenizer = load_tokenizer(workshop / "models/sft")
    kept = [(asked[0], encode_prompt(tokenizer, asked[0]["prompt"]))]
    for flag in (True, False):
        model = load_causal_lm(workshop / "models/sft").requires_grad_(flag)
        stage = make_stage("rejection_sft", REJECTION, [], state=str(flag))
        candidates.draw_candidates(stage, model, tokenizer, kept, 1, REJECTION, lambda prompt, k: (prompt, k))
        assert {p.requires_grad for p in model.parameters()} == {flag}


@pytest.mark.quantize
def test_adapters_above_4_bit_weights_are_trained_on_the_models_answers(
    workshop: Path, make_stage: Callable[..., Any], asked: Rows
) -> None:
    training = TRAINING.model_copy(update={"lora": LoraSettings(rank=2, alpha=4.0, quantize="nf4")})
    params = REJECTION.model_copy(update={"training": training})
    stage = make_stage("rejection_sft", params, REJECTION_OUTS, {rejection_sft.PROMPTS: asked})
    stage.common = stage.common.model_copy(update={"precision": "bfloat16"})
    rejection_sft.execute(stage)
    stage.outputs.commit()
    tuned = load_file(workshop / "models/rejection_sft/model.safetensors")
    assert {tensor.dtype for tensor in tuned.values()} == {torch.float32}
