"""Stage `sft` on tiny models: the figures that it writes."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.sft import SFTConfig
from rlhf_core.data.tokenizer import encode_response
from rlhf_core.errors import UserError
from rlhf_core.models.hf import save_checkpoint
from tasks import sft
from tests.tasks.conftest import TINY

CONFIG = SFTConfig(
    learning_rate=0.003, epochs=7, batch_size=4, micro_batch_size=2, warmup_steps=0, weight_decay=0.0, max_tokens=64,
    evaluate_every=5, patience=0,
)  # fmt: skip
OUTS = ["models/sft", "plots/sft.csv", "metrics/sft.json"]


def test_the_training_loss_is_the_mean_of_the_last_ten_steps(
    tmp_path: Path, make_stage: Callable[..., Any], asked: list[dict[str, Any]]
) -> None:
    save_checkpoint(tmp_path / "models/base", TINY.tiny_lm(), TINY.tiny_tokenizer())
    rows = [
        row | {"response": f"eat oats {'and tea ' * (place % 4)}", "split": "train" if place < 8 else "validation"}
        for place, row in enumerate(asked)
    ]
    stage = make_stage("sft", CONFIG, OUTS, {sft.DEMONSTRATIONS: rows})
    sft.execute(stage)
    stage.outputs.commit()
    with (tmp_path / "plots/sft.csv").open() as file:
        losses = [float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]
    assert len(losses) == 14
    assert json.loads((tmp_path / "metrics/sft.json").read_text())["train_loss"] == pytest.approx(
        sum(losses[-10:]) / 10
    )


def test_switched_off_the_base_model_is_the_sft_model(tmp_path: Path, make_stage: Callable[..., Any]) -> None:
    """Linked file by file, with an empty table and no figure; settings of the training may stand."""
    save_checkpoint(tmp_path / "models/base", TINY.tiny_lm(), TINY.tiny_tokenizer())
    config = SFTConfig.model_validate({**CONFIG.model_dump(), "enabled": False})
    stage = make_stage("sft", config, OUTS, {sft.DEMONSTRATIONS: []})
    sft.execute(stage)
    stage.outputs.commit()
    base, own = (sorted((tmp_path / "models" / name).iterdir()) for name in ("base", "sft"))
    assert [path.name for path in base] == [path.name for path in own]
    assert all(one.samefile(other) for one, other in zip(base, own, strict=True))
    assert json.loads((tmp_path / "metrics/sft.json").read_text()) == {"enabled": False}
    assert (tmp_path / "plots/sft.csv").read_text() == "step,train_loss,validation_loss\n"


def test_all_turns_of_the_assistant_are_trained(
    tmp_path: Path, make_stage: Callable[..., Any], asked: list[dict[str, Any]]
) -> None:
    save_checkpoint(tmp_path / "models/base", TINY.tiny_lm(), TINY.tiny_tokenizer())
    talk = [{"role": "assistant", "content": "eat oats and tea"}, {"role": "user", "content": "and then"}]
    rows = [
        {**row, "prompt": [*row["prompt"], *talk], "response": "tea", "split": "train" if place < 8 else "validation"}
        for place, row in enumerate(asked)
    ]
    tokens = {}
    for turns in ("last", "all"):
        config = SFTConfig.model_validate({**CONFIG.model_dump(), "turns": turns, "epochs": 2})
        stage = make_stage("sft", config, OUTS, {sft.DEMONSTRATIONS: rows}, state=turns)
        sft.execute(stage)
        stage.outputs.commit()
        tokens[turns] = json.loads((tmp_path / "metrics/sft.json").read_text())["tokens"]
    tokenizer = TINY.tiny_tokenizer()
    assert tokens["last"] == 8 * len(encode_response(tokenizer, "tea"))
    assert tokens["all"] == tokens["last"] + 8 * len(encode_response(tokenizer, "eat oats and tea"))


def test_a_template_that_changes_earlier_answers_is_refused(
    tmp_path: Path, make_stage: Callable[..., Any], asked: list[dict[str, Any]]
) -> None:
    tokenizer = TINY.tiny_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message['content']", "message['content'] | replace('oats', 'tea')"
    )
    save_checkpoint(tmp_path / "models/base", TINY.tiny_lm(), tokenizer)
    talk = [{"role": "assistant", "content": "eat oats"}, {"role": "user", "content": "and then"}]
    rows = [{**asked[0], "response": "tea", "split": "train"}]
    rows += [{**row, "prompt": [*row["prompt"], *talk], "response": "tea", "split": "validation"} for row in asked[1:3]]
    config = SFTConfig.model_validate({**CONFIG.model_dump(), "turns": "all"})
    with pytest.raises(
        UserError, match=r"jsonl, row 2: sft\.turns is all, and the chat template does not write turn 2"
    ):
        sft.execute(make_stage("sft", config, OUTS, {sft.DEMONSTRATIONS: rows}))


def test_without_demonstrations_sft_is_refused(tmp_path: Path, make_stage: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match=r"demonstrations\.jsonl: empty data set, and SFT imitates its answers"):
        sft.execute(make_stage("sft", CONFIG, OUTS, {sft.DEMONSTRATIONS: []}))
