"""`pretrain.py`: blocks of text, and a run that ends where it should."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from rlhf_core.config.base import PretrainConfig
from rlhf_core.errors import UserError
from rlhf_core.pretrain import pack, pretrain
from rlhf_core.training.run import Run

Build = Callable[..., PreTrainedModel]
DOCUMENTS = [[5 + (i * k) % 50 for k in range(7 + i % 5)] for i in range(40)]
CONFIG = PretrainConfig(steps=5, batch_size=8, learning_rate=0.01)


def train(model: PreTrainedModel, run: Run) -> list[dict[str, float]]:
    log = pretrain(model, DOCUMENTS, CONFIG, 16, run)
    return [row for row in log if "loss" in row]


def test_documents_are_packed_into_full_blocks() -> None:
    assert pack([[1, 2, 3], [4], [5, 6, 7]], 2) == [[1, 2], [3, 4], [5, 6]]
    assert pack([[1, 2], [3, 4]], 4) == [[1, 2, 3, 4]]
    assert pack([[1, 2]], 3) == []


def test_every_token_of_a_block_but_the_first_is_learnt(build_lm: Build, make_run: Callable[..., Run]) -> None:
    blocks = torch.tensor(pack(DOCUMENTS, 16))
    logprobs = build_lm()(blocks).logits[:, :-1].log_softmax(-1).gather(2, blocks[:, 1:, None])
    config = CONFIG.model_copy(update={"batch_size": len(blocks), "steps": 1})
    log = pretrain(build_lm(), DOCUMENTS, config, 16, make_run())
    assert log[0]["loss"] == pytest.approx(-logprobs.mean().item(), abs=1e-4)


def test_pretraining_takes_exactly_its_steps_and_learns(build_lm: Build, make_run: Callable[..., Run]) -> None:
    model = build_lm()
    log = train(model, make_run())
    assert [row["step"] for row in log] == [1, 2, 3, 4, 5]
    assert log[-1]["loss"] < log[0]["loss"]


def test_too_little_text_is_refused(build_lm: Build, make_run: Callable[..., Run]) -> None:
    with pytest.raises(UserError, match="fewer than 64 tokens"):
        pretrain(build_lm(), [[1, 2, 3]], CONFIG, 64, make_run())


def test_failure_01_a_finished_run_is_not_trained_further(build_lm: Build, make_run: Callable[..., Run]) -> None:
    """Five steps end in mid-epoch; the stage was killed after them and starts again."""
    run = make_run(checkpoint_every=2)
    whole, resumed, seen = build_lm(), build_lm(seed=9), []
    expected = train(whole, run)
    log = train(resumed, replace(run, report=lambda step, *_: seen.append(step)))
    assert not seen
    assert log == expected
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
