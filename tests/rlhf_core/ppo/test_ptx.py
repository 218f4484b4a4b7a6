"""`ptx.py`: a text of the user's in every minibatch, as one mean over its tokens whatever the micro-batches."""

import math
from collections.abc import Callable

import pytest
from transformers import PreTrainedTokenizerBase

from rlhf_core.models.batch import pad_batch, response_logits
from rlhf_core.ppo.ptx import cut_text
from rlhf_core.ppo.trainer import PPOTrainer

MakeTrainer = Callable[..., PPOTrainer]
PIECES = [[3, 9, 4, 20, 21], [30, 31, 32], [40, 12, 10, 10, 8, 7]]
SETTINGS = {"coef": 2.0, "batch_size": 4, "tokens": 6}


def nats_per_token(trainer: PPOTrainer, pieces: list[list[int]]) -> float:
    """Next-token loss, one piece and one token at a time."""
    total = 0.0
    for piece in pieces:
        logits = response_logits(trainer.models.policy, pad_batch([piece[:1]], [piece[1:]], 0))
        total -= sum(logits.log_softmax(-1)[t, token].item() for t, token in enumerate(piece[1:]))
    return total / sum(len(piece) - 1 for piece in pieces)


@pytest.mark.parametrize("micro", [1, 3, 4])
def test_the_loss_is_a_mean_over_the_tokens_of_the_minibatch(make_trainer: MakeTrainer, micro: int) -> None:
    trainer = make_trainer(text=PIECES[:1], ptx=SETTINGS, micro_batch_size=micro)
    losses = trainer.text.losses(trainer.models, 0, 0, trainer.processes)
    assert sum(loss.item() for loss in losses) == pytest.approx(nats_per_token(trainer, PIECES[:1]), rel=1e-5)


def test_each_minibatch_draws_other_pieces_by_step_and_seed(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(text=[[a, b] for a in range(5, 50) for b in (6, 7)], ptx=SETTINGS)
    text, drawn = trainer.text, []
    for step, minibatch in ((0, 0), (0, 1), (1, 0), (0, 0)):
        losses = text.losses(trainer.models, step, minibatch, trainer.processes)
        drawn.append(sum(loss.item() for loss in losses))
    assert len(set(drawn)) == 3
    assert drawn[0] == drawn[3]


def test_the_policy_learns_the_text_and_forgets_it_without(make_trainer: MakeTrainer) -> None:
    """The coefficient is all that differs."""
    found = {}
    for coef in (0.0, 20.0):
        trainer = make_trainer(text=PIECES, ptx={**SETTINGS, "coef": coef}, learning_rate=3e-3)
        rows = [trainer.step() for _ in range(6)]
        found[coef] = nats_per_token(trainer, PIECES)
        assert ("ptx_loss" in rows[0]) == (coef > 0)
    assert found[20.0] < found[0.0] - 1.0


def test_every_row_has_the_same_columns_behind_a_warm_up_of_the_critic(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(text=PIECES, ptx=SETTINGS, critic={"warmup_steps": 1})
    first, second = trainer.step(), trainer.step()
    assert first.keys() == second.keys()
    assert first["ptx_loss"] is None
    assert second["ptx_loss"]


def test_the_critic_does_not_read_the_text(make_trainer: MakeTrainer) -> None:
    read = []
    for coef in (0.0, 1.0):
        trainer = make_trainer(text=PIECES, ptx={**SETTINGS, "coef": coef})
        passes: list[int] = []
        trainer.models.critic.model.register_forward_hook(lambda *_, passes=passes: passes.append(1))
        trainer.step()
        read.append(len(passes))
    assert read[0] == read[1] > 0


def test_ptx_needs_a_text(make_trainer: MakeTrainer) -> None:
    with pytest.raises(ValueError, match="no text"):
        make_trainer(ptx=SETTINGS)


def test_a_text_is_cut_into_pieces_that_lose_nothing_but_a_last_token(tokenizer: PreTrainedTokenizerBase) -> None:
    """Control tokens in it are text, not control tokens."""
    text = "eat some oats and an egg <|end|> then rest"
    whole = cut_text(text, tokenizer, 10_000)[0]
    assert tokenizer.eos_token_id not in whole
    for tokens in (2, 3, 7):
        pieces = cut_text(text, tokenizer, tokens)
        assert [i for piece in pieces for i in piece] == whole[: sum(map(len, pieces))]
        assert len(whole) - sum(map(len, pieces)) <= 1
        assert len(pieces) == math.ceil((len(whole) - 1) / tokens)
    assert cut_text("", tokenizer, 5) == []
