"""The loss on demonstrations: signs, pairing and unknown values."""

from typing import Any, cast

import pytest

from rlhf_core.config.base import ScratchConfig
from rlhf_core.data.tokenizer import train_bpe
from rlhf_core.models.hf import build_llama
from tasks.evaluation.evaluator import CandidateModel, Evaluator
from tasks.evaluation.results import Bootstrap
from tasks.evaluation.teacher_forced import Demonstrated, demonstration_figures, read_demonstrations
from tasks.page.inputs import interval

BOOTSTRAP = Bootstrap(300, 1)
SFT = Demonstrated([-4.0, -6.0], [2, 3])


def test_the_alignment_tax_is_the_rise_of_the_loss() -> None:
    """A nat a token more on each demonstration."""
    figures = demonstration_figures(Demonstrated([-6.0, -9.0], [2, 3]), SFT, BOOTSTRAP)
    assert figures["heldout_loss"] == pytest.approx(15 / 5)
    assert figures["alignment_tax"] == pytest.approx(1.0)
    assert interval(figures, "alignment_tax") == pytest.approx((1.0, 1.0)), "paired: the same for every prompt"
    own = demonstration_figures(SFT, SFT, BOOTSTRAP)
    assert (own["heldout_loss"], own["alignment_tax"]) == (pytest.approx(2.0), 0.0)


def test_a_model_without_log_probabilities_has_no_figures() -> None:
    figures = demonstration_figures(None, SFT, BOOTSTRAP)
    assert set(figures.values()) == {None}
    assert figures.keys() == demonstration_figures(SFT, SFT, BOOTSTRAP).keys()


class Shown:
    """The part of an evaluator that demonstrations need."""

    batch_size = 2

    def __init__(self, reference: CandidateModel, *responses: str | None) -> None:
        self.reference = reference
        self.rows: list[dict[str, Any]] = [{"response": response} for response in responses]

    def shares_tokenizer(self, candidate: CandidateModel) -> bool:
        return candidate.name != "foreign"

    def prompt_ids(self, candidate: CandidateModel) -> list[list[int]]:
        return [[5, 6]] * len(self.rows)


def test_demonstrations_too_long_for_the_sft_model_are_left_out_for_all_models() -> None:
    """A model with a longer context reads the same texts, so that figures can be compared."""
    evaluator = cast(Evaluator, Shown(candidate(32), "tea", "oats " * 60, None, "fig"))
    before, now = read_demonstrations(evaluator, candidate(32)), read_demonstrations(evaluator, candidate(512))
    assert len(before.logprobs) == len(now.logprobs) == len(now.tokens) == 2
    assert demonstration_figures(now, before, BOOTSTRAP)["alignment_tax"] is not None
    assert read_demonstrations(evaluator, candidate(3)) == Demonstrated(), "one text does not fit"
    assert read_demonstrations(evaluator, candidate(512, "foreign")) == Demonstrated()


def candidate(context: int, name: str = "a model") -> CandidateModel:
    tokenizer = train_bpe(["eat some oats and an egg", "take tea and a fig"] * 3, 300, "<|pad|>", "<|end|>", context)
    size = ScratchConfig(vocabulary=300, context=context, layers=1, hidden=16, intermediate=16, heads=2)
    return CandidateModel(name, build_llama(size, tokenizer, 1).eval(), tokenizer)
