"""Agreement of reward model and judge."""

import pytest

from tasks.evaluation.evaluator import ScoredAnswers
from tasks.evaluation.judge_reliability import scorer_check, scorer_checks
from tasks.evaluation.results import Bootstrap, Results

BOOTSTRAP = Bootstrap(100, 1)


def scored(texts: list[str], rewards: list[float], gold: list[float] | None, ended: bool = True) -> ScoredAnswers:
    return ScoredAnswers([[5]] * len(texts), [ended] * len(texts), texts, rewards, gold, [1] * len(texts), None)


def test_equal_answers_are_no_pair_despite_rounding() -> None:
    """The same text twice, with scores that differ in their last bits, beside one pair that both order alike."""
    results = Results.of(
        [scored(["a", "b"], [0.5, 1.0], [1.0, 2.0]), scored(["a", "c"], [0.5 + 5e-7, 2.0], [1.0, 3.0])]
    )
    found = scorer_check(results, BOOTSTRAP)
    assert found is not None
    assert (found["pairs"], found["agreement"]) == (1, 1.0)


def test_a_cut_off_text_is_a_different_answer() -> None:
    results = Results.of([scored(["a"], [0.5], [1.0]), scored(["a"], [0.9], [1.0], ended=False)])
    found = scorer_check(results, BOOTSTRAP)
    assert found is not None
    assert (found["pairs"], found["agreement"]) == (1, 0.5)


def test_sfts_agreement_is_also_given_at_the_policys_margins() -> None:
    """SFT's large margins are ranked right and its small ones wrong; the policy has small ones only."""
    sft = Results.of([scored(["a", "b"], [0.0, 0.0], [0.0, 0.0]), scored(["c", "d"], [1.0, -1.0], [5.0, 1.0])])
    policy = Results.of([scored(["a", "b"], [0.0, 0.0], [0.0, 0.0]), scored(["c", "d"], [1.0, 1.0], [1.0, 1.0])])
    found = scorer_checks({"sft": sft, "policy": policy}, BOOTSTRAP)
    assert found["sft"] is not None
    assert found["policy"] is not None
    assert (found["sft"]["agreement"], found["policy"]["agreement"]) == (0.5, 1.0)
    assert found["sft"]["agreement_at_policy_margins"] == pytest.approx(0.0)


def test_without_a_judge_that_scores_there_are_no_checks() -> None:
    results = Results.of([scored(["a"], [0.5], None), scored(["b"], [0.9], None)])
    assert scorer_checks({"sft": results, "policy": results}, BOOTSTRAP) == {"sft": None, "policy": None}
