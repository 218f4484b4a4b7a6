"""The scorers of a run from its folders, and the unit of a critic that starts from an ensemble."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.data.scorer import Answers, Scorer
from rlhf_core.models.batch import pad_batch, sequence_scores
from rlhf_core.models.ensemble import Ensemble
from rlhf_core.models.hf import load_scalar_model, save_checkpoint
from rlhf_core.ppo.scoring import ScoreNormalisation
from tasks.params.runtime import FunctionParams
from tasks.params.scorer import REWARD_MODEL, Term
from tasks.training.ppo_inputs import starting_critic
from tasks.training.scalar_models import ScalarModels
from tasks.training.scorer import build_scorer, judging_scorer_of
from tests.tasks.conftest import TINY

PROMPTS = [[3, 9, 4], [3, 8, 7, 6, 4], [3, 4], [3, 5, 6, 4]]
RESPONSES = [[20, 21, 22, 23, 1], [30, 1], [40, 41, 42], [50, 1]]
COMPLETE = [[20, 21, 22, 23, 1], [30, 1], [40, 41, 42, 1], [50, 1]]
"""The third was cut off."""
ANSWERS = Answers([[] for _ in PROMPTS], [""] * 4, PROMPTS, RESPONSES)


@pytest.fixture
def ensemble(workshop: Path) -> Ensemble:
    """Three members in models/reward, and their rule from ANSWERS; another model judges."""
    folder = workshop / "models/reward"
    for seed, name in ((4, "members/2"), (5, "members/3"), (6, "judge")):
        save_checkpoint(folder / name, TINY.tiny_scalar(seed=seed), TINY.tiny_tokenizer())
    scores = [own_scores(folder / name) for name in ("", "members/2", "members/3")]
    rule = Ensemble.fitted("min", 1.0, torch.tensor(scores))
    rule.write(folder)
    return rule


def reward_model(root: Path) -> Scorer:
    """The scorer of a run with the reward model alone."""
    terms = [Term(term=REWARD_MODEL, weight=1.0)]
    return build_scorer(root, terms, FunctionParams(), TINY.tiny_tokenizer(), 4, ScalarModels())


def own_scores(folder: Path) -> list[float]:
    found: list[float] = sequence_scores(load_scalar_model(folder), pad_batch(PROMPTS, COMPLETE, 0)).tolist()
    return found


def test_a_single_reward_model_is_the_scorer(workshop: Path) -> None:
    found = reward_model(workshop)(ANSWERS)
    assert found.total == pytest.approx(own_scores(workshop / "models/reward"), abs=1e-5)
    assert found.parts == {}
    assert judging_scorer_of(workshop, TINY.tiny_tokenizer(), 4, ScalarModels()) is None


def test_all_members_score_and_the_judge_is_none_of_them(workshop: Path, ensemble: Ensemble) -> None:
    folder = workshop / "models/reward"
    members = [own_scores(folder / name) for name in ("", "members/2", "members/3")]
    total, std = ensemble(torch.tensor(members))
    found = reward_model(workshop)(ANSWERS)
    assert found.total == pytest.approx(total.tolist(), abs=1e-5)
    assert found.parts["std"] == pytest.approx(std.tolist(), abs=1e-5)
    judge = judging_scorer_of(workshop, TINY.tiny_tokenizer(), 4, ScalarModels())
    assert judge is not None
    assert judge(ANSWERS).total == pytest.approx(own_scores(folder / "judge"), abs=1e-5)


def critic_values(root: Path, normalisation: ScoreNormalisation, score: dict[str, Any]) -> list[float]:
    config = PPOConfig(**TINY.tiny_ppo_values(score=score))
    critic = starting_critic(root, config, normalisation, 1, ScalarModels())
    assert critic is not None
    found: list[float] = sequence_scores(critic, pad_batch(PROMPTS, COMPLETE, 0)).tolist()
    return found


@pytest.mark.parametrize("normalise", [True, False])
def test_rule_20_a_critic_from_an_ensemble_has_the_mean_of_its_score(
    workshop: Path, ensemble: Ensemble, normalise: bool
) -> None:
    """In the unit that PPO uses, on the answers that the members were centred on."""
    total = reward_model(workshop)(ANSWERS).total
    normalisation = ScoreNormalisation(1.5, 2.0)
    scale, shift = (0.5, -0.75) if normalise else (1.0, 0.0)
    values = critic_values(workshop, normalisation, {"normalise": normalise})
    assert sum(values) / 4 == pytest.approx(scale * sum(total) / 4 + shift, abs=1e-5)
    first = own_scores(workshop / "models/reward")
    assert values == pytest.approx([scale * (s + ensemble.shift_of_first) + shift for s in first], abs=1e-5)


@pytest.mark.parametrize("combine", ["mean", "min", "mean_minus_std"])
def test_rule_20_the_critic_of_equal_members_predicts_the_score_itself(workshop: Path, combine: str) -> None:
    folder = workshop / "models/reward"
    save_checkpoint(folder / "members/2", TINY.tiny_scalar(seed=3), TINY.tiny_tokenizer())
    Ensemble.fitted(combine, 1.0, torch.tensor([own_scores(folder)] * 2)).write(folder)
    total = reward_model(workshop)(ANSWERS).total
    values = critic_values(workshop, ScoreNormalisation(1.5, 2.0), {"normalise": True})
    assert values == pytest.approx([(score - 1.5) / 2.0 for score in total], abs=1e-5)
