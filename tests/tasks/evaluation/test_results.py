"""A model's figures from its scored answers: weights and pairing."""

from typing import Any

import numpy as np
import pytest

from rlhf_core.evaluation.best_of_n import best_of_n_weights
from rlhf_core.evaluation.divergence import Divergence
from tasks.evaluation.evaluator import ScoredAnswers
from tasks.evaluation.results import (
    Bootstrap,
    Results,
    difference,
    distinct_bigrams,
    own_figures,
    rates_by_reward_models,
    win_rate_figures,
)

BOOTSTRAP = Bootstrap(500, 1)
TEXTS = ["eat some oats", "have an egg", "oats again today"]


def scored(
    gold: list[float] | None, rewards: list[float], lengths: list[int], kl: list[float] | None = None
) -> ScoredAnswers:
    divergence = None if kl is None else Divergence(kl, [2 * k for k in kl])
    texts = [TEXTS[i % 3] for i in range(len(rewards))]
    return ScoredAnswers([[5] * n for n in lengths], [True] * len(rewards), texts, rewards, gold, lengths, divergence)


@pytest.fixture
def twice() -> Results:
    """Three prompts, two repetitions."""
    first = scored([1.0, 2.0, 3.0], [0.0, 1.0, 2.0], [2, 4, 6], [0.1, 0.2, 0.3])
    second = scored([3.0, 2.0, 1.0], [1.0, 1.0, 1.0], [4, 4, 4], [0.3, 0.4, 0.5])
    return Results.of([first, second])


def test_means_are_over_all_answers_and_intervals_over_prompts(twice: Results) -> None:
    figures = own_figures(twice, BOOTSTRAP)
    assert (figures["answers"], figures["gold"], figures["reward"]) == (6, 2.0, 1.0)
    assert (figures["gold_low"], figures["gold_high"]) == (2.0, 2.0), (
        "every prompt has the mean 2: nothing varies between prompts"
    )
    assert figures["reward_low"] < 1.0 < figures["reward_high"]
    assert not [name for name, value in figures.items() if isinstance(value, list)], "DVC and MLflow drop lists"
    assert (figures["gold_spread"], figures["reward_spread"]) == (0.0, 0.0)
    assert figures["kl"] == pytest.approx(0.3)
    assert (figures["response_tokens"], figures["missing_eos_share"]) == (4.0, 0.0)


def test_the_kl_of_every_table_is_the_exact_one(twice: Results) -> None:
    """The log ratios of the fixture are twice the exact KL."""
    figures = own_figures(twice, BOOTSTRAP)
    assert [name for name in figures if name.startswith("kl")] == ["kl", "kl_low", "kl_high"]
    assert figures["kl"] == pytest.approx(np.mean([column.divergence.kl for column in twice.columns]))  # type: ignore[union-attr]


def test_unknown_figures_are_none() -> None:
    figures = own_figures(Results.of([scored(None, [1.0, 2.0], [1, 1])]), BOOTSTRAP)
    unknown = {name for name, value in figures.items() if value is None}
    with_ends = {f"{name}{end}" for name in ["gold", "kl"] for end in ("", "_low", "_high")}
    assert unknown == with_ends | {"gold_spread", "reward_spread"}


def test_best_of_n_weighs_the_samples_of_every_prompt_by_its_own_rewards() -> None:
    columns = [scored([float(k), -float(k)], [float(k), -float(k)], [k + 1, k + 1]) for k in range(4)]
    rewards = np.array([column.rewards for column in columns]).T
    best = Results(columns, best_of_n_weights(rewards, 4), best_of=4)
    figures = own_figures(best, BOOTSTRAP)
    assert figures["gold"] == pytest.approx((3.0 + 0.0) / 2), (
        "sample 3 is the first prompt's best, sample 0 the other's"
    )
    assert figures["response_tokens"] == pytest.approx((4 + 1) / 2)
    assert (figures["answers"], figures["gold_spread"]) == (2, None)
    two = own_figures(Results(columns, best_of_n_weights(rewards, 2), best_of=2), BOOTSTRAP)
    assert two["answers"] == 4, "two picks for each prompt"
    one = Results(columns, best_of_n_weights(rewards, 1))
    assert own_figures(one, BOOTSTRAP)["gold"] == pytest.approx(0.0)


def test_distinct_bigrams_by_hand() -> None:
    assert distinct_bigrams(["eat the oats", "Eat the egg", "oats"]) == pytest.approx(3 / 4)
    assert distinct_bigrams(["oats"]) == distinct_bigrams([]) == 0.0


def test_a_difference_is_paired_by_prompt() -> None:
    easy_and_hard = np.array([0.0, 10.0, 20.0, 30.0])
    mine = Results.of([scored((easy_and_hard + 1).tolist(), [0.0] * 4, [1] * 4)])
    theirs = Results.of([scored(easy_and_hard.tolist(), [0.0] * 4, [1] * 4)] * 2)
    found = difference(mine, theirs, "gold", BOOTSTRAP)
    assert found is not None
    assert (found.mean, found.low, found.high) == (1.0, 1.0, 1.0)
    assert difference(mine, Results.of([scored(None, [0.0] * 4, [1] * 4)]), "gold", BOOTSTRAP) is None


def test_the_controlled_win_rate_removes_the_effect_of_length() -> None:
    """Longer answers always win; at equal length the rate is one half."""
    generator = np.random.default_rng(1)
    lengths = generator.integers(1, 20, (2, 300))
    mine, theirs = (Results.of([scored(None, [0.0] * 300, row.tolist())]) for row in lengths)
    won = np.where(lengths[0] == lengths[1], 0.5, lengths[0] > lengths[1])[:, None].astype(np.float64)
    figures = win_rate_figures(mine, theirs, won, BOOTSTRAP)
    assert figures["ties"] == pytest.approx((lengths[0] == lengths[1]).mean())
    assert figures["win_rate"] == pytest.approx(won.mean())
    low, high = figures["win_rate_controlled_low"], figures["win_rate_controlled_high"]
    assert low < 0.5 < high
    assert figures.keys() == win_rate_figures(mine, theirs, None, BOOTSTRAP).keys()


def test_columns_beyond_the_other_models_start_again() -> None:
    sft: Any = Results.of([scored(None, [0.0], [1]), scored(None, [0.0], [2])])
    assert [sft.column(i).tokens for i in range(5)] == [[1], [2], [1], [2], [1]]


def test_the_controlled_rate_of_best_of_n_uses_only_the_picks() -> None:
    """The pick of two always wins and the other always loses, with uninformative lengths."""
    prompts = 60
    lengths = [[1 + (i + k) % 5 for i in range(prompts)] for k in range(2)]
    columns = [scored(None, [1.0 - k] * prompts, lengths[k]) for k in range(2)]
    best = Results(columns, best_of_n_weights(np.array([column.rewards for column in columns]).T, 2), best_of=2)
    sft = Results.of([scored(None, [0.0] * prompts, [3] * prompts)])
    won = np.tile([1.0, 0.0], (prompts, 1))
    figures = win_rate_figures(best, sft, won, BOOTSTRAP)
    assert figures["win_rate"] == 1.0
    assert figures["win_rate_controlled"] > 0.99


def test_win_rates_by_both_reward_models_have_names_that_say_so() -> None:
    """PPO's reward model prefers every answer of the model, the judging one two of four."""

    class Compares:
        judging: Any = object()

        def compare(self, mine: ScoredAnswers, theirs: ScoredAnswers, by: Any) -> list[float]:
            return [1.0] * 4 if by == "rewards" else [1.0, 1.0, 0.0, 0.0]

    evaluator: Any = Compares()
    sft, other = (Results.of([scored(None, [0.0] * 4, [3, 2, 3, 2])]) for _ in range(2))
    found = rates_by_reward_models(evaluator, other, sft, BOOTSTRAP)
    rates = ("win_rate_by_reward_model", "win_rate_by_judging_model")
    assert [found[name] for name in rates] == [1.0, 0.5]
    assert found["win_rate_by_reward_model_low"] == found["win_rate_by_reward_model_high"] == 1.0
    assert found["win_rate_controlled_by_reward_model"] > found["win_rate_controlled_by_judging_model"]
    assert found["win_rate_controlled_by_judging_model"] == pytest.approx(0.5)
    assert set(rates_by_reward_models(evaluator, sft, sft, BOOTSTRAP).values()) == {None}
    assert found.keys() == rates_by_reward_models(evaluator, sft, sft, BOOTSTRAP).keys()
    Compares.judging = None
    assert rates_by_reward_models(evaluator, other, sft, BOOTSTRAP) == {}
