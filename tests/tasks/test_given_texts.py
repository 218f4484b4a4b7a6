"""What became of texts that a model did not write: signs, pairing, and what is left unknown."""

import pytest

from tasks.given_texts import Read, given_figures
from tasks.results import Bootstrap

BOOTSTRAP = Bootstrap(300, 1)
PAIRS = [{"prompt_id": name} for name in ("a", "a", "b")]
SFT = Read([-4.0, -6.0], [2, 3], [-1.0, -2.0, -3.0], [-2.0, -2.0, -2.0])


def test_a_model_that_forgets_pays_a_tax_and_pushes_rejected_answers_down() -> None:
    """A nat a token more on each demonstration; every rejected answer 3 nats less likely, chosen ones 1."""
    read = Read([-6.0, -9.0], [2, 3], [-2.0, -3.0, -4.0], [-5.0, -5.0, -5.0])
    figures = given_figures(read, SFT, PAIRS, BOOTSTRAP)
    assert figures["heldout_loss"] == pytest.approx(15 / 5)
    assert figures["alignment_tax"] == pytest.approx(1.0)
    assert figures["alignment_tax_ci95"] == pytest.approx([1.0, 1.0]), "paired: the same for every prompt"
    assert (figures["logprob_chosen"], figures["logprob_rejected"]) == (-3.0, -5.0)
    assert (figures["logprob_chosen_change"], figures["logprob_rejected_change"]) == (-1.0, -3.0)
    assert figures["logprob_rejected_change_ci95"] == [-3.0, -3.0]
    low, high = figures["logprob_chosen_ci95"]
    assert (low, high) == (-4.0, -2.5), "prompts are resampled, with all their pairs"


def test_the_sft_model_is_where_it_was() -> None:
    figures = given_figures(SFT, SFT, PAIRS, BOOTSTRAP)
    assert figures["heldout_loss"] == pytest.approx(2.0)
    assert {figures[name] for name in ("alignment_tax", "logprob_chosen_change", "logprob_rejected_change")} == {0.0}


def test_who_reads_nothing_has_no_figures() -> None:
    figures = given_figures(None, SFT, PAIRS, BOOTSTRAP)
    assert set(figures.values()) == {None}
    assert figures.keys() == given_figures(SFT, SFT, PAIRS, BOOTSTRAP).keys()
