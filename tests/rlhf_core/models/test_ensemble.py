"""Ensembles: the combined score by hand, offsets of the members, and what PPO logs of them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlhf_core.data.scorer import Answers, Scored
from rlhf_core.models.ensemble import Ensemble, EnsembleScorer, member_folders
from rlhf_core.ppo.trainer import PPOTrainer

SCORES = torch.tensor([[1.0, 2.0, 6.0], [3.0, 3.0, 3.0]])
"""Of two members on three answers; their means are 3 and 3."""


@pytest.mark.parametrize(
    ("combine", "total"),
    [("mean", [-1.0, -0.5, 1.5]), ("min", [-2.0, -1.0, 0.0]), ("mean_minus_std", [-1.5, -0.75, 0.75])],
)
def test_the_combined_score_is_the_one_computed_by_hand(combine: str, total: list[float]) -> None:
    """Centred, the members have −2, −1, 3 and 0, 0, 0: standard deviations 1, ½ and 1½."""
    ensemble = Ensemble.fitted(combine, 0.5, SCORES)
    found, std = ensemble(SCORES)
    assert found.tolist() == pytest.approx(total)
    assert std.tolist() == pytest.approx([1.0, 0.5, 1.5])
    assert list(ensemble.means) == [3.0, 3.0]
    assert ensemble.mean == pytest.approx(sum(total) / 3)


@pytest.mark.parametrize("combine", ["mean", "min", "mean_minus_std"])
def test_an_offset_of_a_member_changes_nothing(combine: str) -> None:
    """Bradley-Terry has no zero: the same member with 100 more on every answer is the same member."""
    moved = SCORES + torch.tensor([[0.0], [100.0]])
    plain, other = (Ensemble.fitted(combine, 1.0, scores)(scores) for scores in (SCORES, moved))
    for a, b in zip(plain, other, strict=True):
        assert a.tolist() == pytest.approx(b.tolist(), abs=1e-9)


def test_the_first_member_is_shifted_to_the_mean_of_the_combined_score() -> None:
    ensemble = Ensemble.fitted("min", 1.0, SCORES)
    total, _ = ensemble(SCORES)
    assert (SCORES[0] + ensemble.shift_of_first).mean().item() == pytest.approx(total.mean().item())


def test_the_rule_is_read_as_it_was_written(tmp_path: Path) -> None:
    ensemble = Ensemble.fitted("mean_minus_std", 0.7, SCORES / 3)
    assert Ensemble.read(tmp_path) is None
    assert member_folders(tmp_path) == [tmp_path]
    ensemble.write(tmp_path)
    assert Ensemble.read(tmp_path) == ensemble
    assert member_folders(tmp_path) == [tmp_path, tmp_path / "members" / "2"]


def first_tokens(answers: Answers) -> Scored:
    return Scored([float(ids[0]) for ids in answers.response_ids])


def lengths(answers: Answers) -> Scored:
    return Scored([float(len(ids)) for ids in answers.response_ids])


SCORER = EnsembleScorer([first_tokens, lengths], Ensemble("min", 1.0, [20.0, 2.0]))


def test_the_scorer_returns_the_total_and_the_disagreement() -> None:
    found = SCORER(Answers([], [], [], [[21, 5, 5, 5], [18, 5]]))
    assert found == Scored([1.0, -2.0], {"std": [0.5, 1.0]})


def test_ppo_logs_the_disagreement_on_its_own_samples(make_trainer: Callable[..., PPOTrainer]) -> None:
    trainer = make_trainer()
    seen: list[float] = []

    def watched(answers: Answers) -> Scored:
        found = SCORER(answers)
        seen.extend(found.parts["std"])
        return found

    trainer.scoring.source.scorer = watched
    row = trainer.step()
    assert len(seen) == trainer.config.batch_size
    assert row["reward/std"] == pytest.approx(sum(seen) / len(seen))
    assert row["reward/std"] > 0
