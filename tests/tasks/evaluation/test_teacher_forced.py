"""Teacher-forced log-probabilities: signs, pairing and unknown values."""

from typing import Any, cast

import pytest

from rlhf_core.config.base import ScratchConfig
from rlhf_core.data.tokenizer import train_bpe
from rlhf_core.models.hf import build_llama
from tasks.evaluation.evaluator import CandidateModel, Evaluator
from tasks.evaluation.results import Bootstrap
from tasks.evaluation.teacher_forced import (
    TeacherForced,
    fitting_pairs,
    teacher_forced_figures,
    teacher_forced_logprobs,
)
from tasks.page.inputs import interval

BOOTSTRAP = Bootstrap(300, 1)
PAIRS = [{"prompt_id": name} for name in ("a", "a", "b")]
SFT = TeacherForced([-4.0, -6.0], [2, 3], [-1.0, -2.0, -3.0], [-2.0, -2.0, -2.0])


def test_signs_of_the_alignment_tax_and_of_log_probability_changes() -> None:
    """A nat a token more on each demonstration; every rejected answer 3 nats less likely, chosen ones 1."""
    read = TeacherForced([-6.0, -9.0], [2, 3], [-2.0, -3.0, -4.0], [-5.0, -5.0, -5.0])
    figures = teacher_forced_figures(read, SFT, PAIRS, BOOTSTRAP)
    assert figures["heldout_loss"] == pytest.approx(15 / 5)
    assert figures["alignment_tax"] == pytest.approx(1.0)
    assert interval(figures, "alignment_tax") == pytest.approx((1.0, 1.0)), "paired: the same for every prompt"
    assert (figures["logprob_chosen"], figures["logprob_rejected"]) == (-3.0, -5.0)
    assert (figures["logprob_chosen_change"], figures["logprob_rejected_change"]) == (-1.0, -3.0)
    assert interval(figures, "logprob_rejected_change") == (-3.0, -3.0)
    low, high = figures["logprob_chosen_low"], figures["logprob_chosen_high"]
    assert (low, high) == (-4.0, -2.5), "prompts are resampled, with all their pairs"


def test_the_sft_model_has_zero_changes() -> None:
    figures = teacher_forced_figures(SFT, SFT, PAIRS, BOOTSTRAP)
    assert figures["heldout_loss"] == pytest.approx(2.0)
    assert {figures[name] for name in ("alignment_tax", "logprob_chosen_change", "logprob_rejected_change")} == {0.0}


def test_a_model_without_log_probabilities_has_no_figures() -> None:
    figures = teacher_forced_figures(None, SFT, PAIRS, BOOTSTRAP)
    assert set(figures.values()) == {None}
    assert figures.keys() == teacher_forced_figures(SFT, SFT, PAIRS, BOOTSTRAP).keys()


class Tokens:
    """The part of an evaluator that log-probabilities need."""

    rows: tuple[dict[str, Any], ...] = ()
    batch_size = 2

    def __init__(self, reference: CandidateModel) -> None:
        self.reference = reference
        self.compared = 0

    def shares_tokenizer(self, candidate: CandidateModel) -> bool:
        self.compared += 1
        return candidate is self.reference

    def prompt_ids(self, candidate: CandidateModel) -> list[list[int]]:
        return []


def test_tokenizers_are_not_compared_for_each_pair() -> None:
    """With a large vocabulary one comparison takes a tenth of a second."""
    sft, pairs = candidate(64), [pair(text) for text in ("tea", "fig", "oats")]
    for count in (1, 3):
        tokens = Tokens(sft)
        teacher_forced_logprobs(cast(Evaluator, tokens), candidate(64), pairs[:count])
        assert tokens.compared == 3, "once for the demonstrations, once for each side"


def test_pairs_too_long_for_the_sft_model_are_left_out_for_all_models() -> None:
    """A model with a longer context reads the same pairs, so that figures can be compared."""
    pairs = [pair("tea"), pair("oats " * 60), pair("fig")]
    sft, wide = candidate(32), candidate(512)
    evaluator = cast(Evaluator, Tokens(sft))
    kept = fitting_pairs(evaluator, pairs)
    assert [row["chosen"] for row in kept] == ["tea", "fig"]
    before, now = (teacher_forced_logprobs(evaluator, each, kept) for each in (sft, wide))
    assert len(before.chosen) == len(now.chosen) == 2
    assert teacher_forced_figures(now, before, kept, BOOTSTRAP)["logprob_chosen_change"] is not None
    assert teacher_forced_logprobs(evaluator, candidate(8), kept).chosen == [], (
        "a model that cannot read all pairs has no figures"
    )


def pair(chosen: str) -> dict[str, Any]:
    prompt = [{"role": "user", "content": "what shall i eat"}]
    texts = {"chosen": chosen, "rejected": "egg", "chosen_ended": True, "rejected_ended": True}
    return {"prompt_id": chosen, "prompt": prompt, "chosen_ids": None, "rejected_ids": None, **texts}


def candidate(context: int) -> CandidateModel:
    tokenizer = train_bpe(["eat some oats and an egg", "take tea and a fig"] * 3, 300, "<|pad|>", "<|end|>", context)
    size = ScratchConfig(vocabulary=300, context=context, layers=1, hidden=16, intermediate=16, heads=2)
    return CandidateModel(str(context), build_llama(size, tokenizer, 1).eval(), tokenizer)
