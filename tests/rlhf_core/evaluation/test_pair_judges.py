"""Judges of pairs: both orders by hand, and annotators with a known bias."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.data.chat import Conversation
from rlhf_core.data.scorer import Answers, Scored
from rlhf_core.errors import UserError
from rlhf_core.evaluation.judges import NoisyAnnotators
from rlhf_core.evaluation.pair_judges import CachedPairJudge, SimulatedAnnotators, both_orders

PROMPT: Conversation = [{"role": "user", "content": "what shall i eat"}]
PAIRS = 3000


@dataclass(frozen=True)
class FirstNumber:
    """A judge for which a response's score is its first word."""

    name: str = "numbers"

    def __call__(self, answers: Answers) -> Scored:
        return Scored([float(text.split()[0]) for _, text in zip(answers.prompts, answers.texts, strict=True)])


@dataclass(frozen=True)
class Table:
    """A judge that looks its verdicts up."""

    verdicts: dict[tuple[str, str], float]
    name: str = "table"

    def prefer(self, prompts: Sequence[Conversation], firsts: Sequence[str], seconds: Sequence[str]) -> list[float]:
        return [self.verdicts[pair] for pair in zip(firsts, seconds, strict=True)]


def annotators(bias: float, temperature: float = 1.0, seed: int = 1) -> SimulatedAnnotators:
    return SimulatedAnnotators(NoisyAnnotators(FirstNumber(), temperature, 0.0, seed), bias)


def pairs(a: float, b: float, count: int = PAIRS) -> tuple[list[Conversation], list[str], list[str]]:
    """Pairs of different texts with the scores a and b."""
    return [PROMPT] * count, [f"{a} a{i}" for i in range(count)], [f"{b} b{i}" for i in range(count)]


def test_both_orders_by_hand() -> None:
    """Four pairs: b wins twice; the first shown wins twice; a wins, then a tie; a tie twice."""
    verdicts = {("a", "b"): 0.0, ("b", "a"): 1.0}
    verdicts |= {("c", "d"): 1.0, ("d", "c"): 1.0}
    verdicts |= {("e", "f"): 1.0, ("f", "e"): 0.5}
    verdicts |= {("g", "h"): 0.5, ("h", "g"): 0.5}
    found = both_orders(Table(verdicts), [PROMPT] * 4, ["a", "c", "e", "g"], ["b", "d", "f", "h"])
    assert found.preference == [1.0, 0.5, 0.25, 0.5]
    assert found.position_bias == pytest.approx((0 + 1 + 1 + 1 + 1 + 0.5 + 0.5 + 0.5) / 8 - 0.5)
    assert found.self_agreement == 0.5


@given(st.lists(st.tuples(*[st.sampled_from([0.0, 0.5, 1.0])] * 2), min_size=1, max_size=12))
def test_swapping_the_models_reverses_the_preference_only(rows: list[tuple[float, float]]) -> None:
    firsts, seconds = [f"a{i}" for i in range(len(rows))], [f"b{i}" for i in range(len(rows))]
    verdicts = {(f"a{i}", f"b{i}"): row[0] for i, row in enumerate(rows)}
    judge = Table(verdicts | {(f"b{i}", f"a{i}"): row[1] for i, row in enumerate(rows)})
    there = both_orders(judge, [PROMPT] * len(rows), firsts, seconds)
    back = both_orders(judge, [PROMPT] * len(rows), seconds, firsts)
    assert back.preference == [1 - value for value in there.preference]
    assert back.position_bias == pytest.approx(there.position_bias)
    assert back.self_agreement == there.self_agreement


@pytest.mark.parametrize("bias", [-0.3, 0.0, 0.1, 0.5])
def test_a_known_position_bias_is_recovered(bias: float) -> None:
    found = both_orders(annotators(bias), *pairs(0.0, 1.0))
    assert found.position_bias == pytest.approx(bias, abs=0.015)


@pytest.mark.parametrize("bias", [0.0, 0.2])
def test_the_preference_is_that_of_the_annotators_drawn_to_half_by_their_bias(bias: float) -> None:
    reads = 1 - 2 * bias
    expected = reads / (1 + math.exp(-1.0)) + (1 - reads) / 2
    assert fmean(both_orders(annotators(bias), *pairs(0.0, 1.0)).preference) == pytest.approx(expected, abs=0.02)


def test_self_agreement_is_what_two_independent_readings_give() -> None:
    """Noisy annotators take the better with p, and agree with themselves with p² + (1 − p)²."""
    p = 1 / (1 + math.exp(-1.0))
    found = both_orders(annotators(0.0), *pairs(0.0, 1.0))
    assert found.self_agreement == pytest.approx(p * p + (1 - p) * (1 - p), abs=0.03)
    sure = both_orders(annotators(0.0, temperature=0.0), *pairs(0.0, 1.0, 50))
    assert (sure.self_agreement, sure.position_bias, set(sure.preference)) == (1.0, 0.0, {1.0})
    blind = both_orders(annotators(0.5), *pairs(0.0, 1.0, 50))
    assert (blind.self_agreement, blind.position_bias, set(blind.preference)) == (0.0, 0.5, {0.5})


def test_a_tie_is_a_tie_unless_it_is_not_read() -> None:
    assert set(both_orders(annotators(0.0), *pairs(1.0, 1.0, 30)).preference) == {0.5}
    assert annotators(0.0).prefer(*pairs(1.0, 1.0, 5)) == [0.5] * 5
    assert annotators(-0.5).prefer(*pairs(1.0, 1.0, 5)) == [0.0] * 5


def test_verdicts_depend_on_seed_and_texts_not_on_the_batch() -> None:
    prompts, a, b = pairs(0.0, 0.3, 200)
    judge = annotators(0.1)
    together = judge.prefer(prompts, a, b)
    assert together == [judge.prefer([p], [x], [y])[0] for p, x, y in zip(prompts, a, b, strict=True)]
    assert together != annotators(0.1, seed=2).prefer(prompts, a, b)
    other: Conversation = [{"role": "user", "content": "and for tea"}]
    assert together != judge.prefer([other] * 200, a, b)
    assert judge.name == "simulated annotators (numbers)"


@pytest.mark.parametrize("bias", [0.51, -0.6, math.nan])
def test_an_impossible_bias_is_refused(bias: float) -> None:
    with pytest.raises(UserError, match="position bias"):
        annotators(bias)


def test_no_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one pair"):
        both_orders(annotators(0.0), [], [], [])


def test_a_cached_judge_computes_each_pair_once_in_each_order() -> None:
    judged: list[tuple[str, str]] = []

    class Longest:
        name = "longest"

        def prefer(self, prompts: Sequence[Conversation], firsts: Sequence[str], seconds: Sequence[str]) -> list[float]:
            judged.extend(zip(firsts, seconds, strict=True))
            return [float(len(a) > len(b)) for a, b in zip(firsts, seconds, strict=True)]

    judge = CachedPairJudge(Longest())
    prompts: list[Conversation] = [[{"role": "user", "content": text}] for text in ("p", "p", "q")]
    for _ in range(2):
        assert judge.prefer(prompts, ["aa", "aa", "aa"], ["b", "b", "b"]) == [1.0, 1.0, 1.0]
        assert judge.prefer(prompts, ["b"] * 3, ["aa"] * 3) == [0.0, 0.0, 0.0]
    assert sorted(judged) == [("aa", "b"), ("aa", "b"), ("b", "aa"), ("b", "aa")]
    assert judge.name == "longest"
