"""Judges and simulated annotators: which text is judged, and the statistics of the noisy choices."""

import math
from dataclasses import dataclass
from statistics import fmean

import pytest

from rlhf_core.data.chat import Conversation
from rlhf_core.data.scorer import Answers, Scored, Scorer
from rlhf_core.demo.phrases import RUNNING_EXAMPLE
from rlhf_core.evaluation.judges import NoisyAnnotators, RubricJudge, all_pairs

PROMPT: Conversation = [{"role": "user", "content": RUNNING_EXAMPLE}]
GOOD = "Try boiled eggs, Greek yogurt, or steel-cut oatmeal. They release sugar slowly."


@dataclass(frozen=True)
class NumberJudge:
    """A judge for which a response is its score."""

    name: str = "numbers"

    def __call__(self, answers: Answers) -> Scored:
        return Scored([float(response) for response in answers.texts])


def prefer(who: NoisyAnnotators, a: str, b: str, key: tuple[int, ...]) -> bool | None:
    """The annotators' choice between two answers."""
    return who.choose(*who.judge(Answers([PROMPT, PROMPT], [a, b])).total, key)


def annotators(temperature: float = 1.0, flip_rate: float = 0.0, seed: int = 1) -> NoisyAnnotators:
    return NoisyAnnotators(NumberJudge(), temperature, flip_rate, seed)


def share(who: NoisyAnnotators, a: str, b: str, count: int = 4000) -> float:
    """How often `a` is chosen over `b`."""
    return fmean(prefer(who, a, b, (index,)) is True for index in range(count))


def test_rubric_judge_reads_the_last_user_message() -> None:
    judge: Scorer = RubricJudge()
    earlier: Conversation = [
        {"role": "system", "content": "You help."},
        {"role": "user", "content": "What are some good herb ideas for a beginner?"},
        {"role": "assistant", "content": "Try mint."},
        {"role": "user", "content": RUNNING_EXAMPLE},
    ]
    assert judge(Answers([earlier, PROMPT], [GOOD, ""])).total == [5.0, -3.0]
    assert judge.name == "gold rubric (simulated)"


def test_rubric_judge_wants_as_many_responses_as_prompts() -> None:
    with pytest.raises(ValueError):
        RubricJudge()(Answers([PROMPT, PROMPT], [GOOD]))


@pytest.mark.parametrize(("temperature", "difference"), [(1.0, 1.0), (0.5, 1.0), (2.0, -1.5)])
def test_choices_follow_bradley_terry(temperature: float, difference: float) -> None:
    expected = 1 / (1 + math.exp(-difference / temperature))
    assert share(annotators(temperature), str(difference), "0") == pytest.approx(expected, abs=0.025)


def test_temperature_zero_takes_the_better() -> None:
    who = annotators(temperature=0.0)
    assert share(who, "0.001", "0", 500) == 1.0
    assert share(who, "0", "0.001", 500) == 0.0


@pytest.mark.parametrize("flip_rate", [0.1, 0.3])
def test_flips_reverse_choices_at_their_rate(flip_rate: float) -> None:
    assert share(annotators(0.0, flip_rate), "1", "0") == pytest.approx(1 - flip_rate, abs=0.025)


def test_flips_are_independent_of_the_choice() -> None:
    right = 1 / (1 + math.exp(-1))
    expected = right * 0.8 + (1 - right) * 0.2
    assert share(annotators(1.0, 0.2), "1", "0") == pytest.approx(expected, abs=0.025)


def test_flip_rate_one_always_reverses() -> None:
    assert share(annotators(0.0, 1.0), "1", "0", 200) == 0.0


def test_extreme_differences_do_not_overflow() -> None:
    assert share(annotators(1e-6), "5", "-5", 50) == 1.0
    assert share(annotators(1e-6), "-5", "5", 50) == 0.0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_equal_scores_are_a_tie(temperature: float) -> None:
    who = annotators(temperature, 0.5)
    assert prefer(who, "2", "2.0000000001", (1,)) is None
    assert prefer(who, "2", "2.00000001", (1,)) is not None


def test_choices_depend_on_seed_and_key_not_on_order() -> None:
    keys = [(prompt, pair) for prompt in range(30) for pair in range(10)]
    first = {key: prefer(annotators(), "0.1", "0", key) for key in keys}
    again = {key: prefer(annotators(), "0.1", "0", key) for key in reversed(keys)}
    other = {key: prefer(annotators(seed=2), "0.1", "0", key) for key in keys}
    assert first == again
    assert first != other
    assert len(set(first.values())) == 2


def test_keys_are_not_run_together() -> None:
    left = [prefer(annotators(), "0", "0.1", (1, 1, index)) for index in range(70)]
    right = [prefer(annotators(), "0", "0.1", (11, index)) for index in range(70)]
    assert left != right


def test_all_pairs_of_a_ranking() -> None:
    ranked = all_pairs(PROMPT, ["1", "3", "2"], annotators(0.0), (0,))
    assert [(pair.chosen, pair.rejected) for pair in ranked.pairs] == [(1, 0), (2, 0), (1, 2)]
    assert all(pair.agrees for pair in ranked.pairs)
    assert (ranked.ties, ranked.identical) == (0, 0)


def test_ties_and_identical_texts_are_dropped_and_counted() -> None:
    ranked = all_pairs(PROMPT, ["1", "1", "1.0", "2"], annotators(0.0), (0,))
    assert [(pair.chosen, pair.rejected) for pair in ranked.pairs] == [(3, 0), (3, 1), (3, 2)]
    assert (ranked.ties, ranked.identical) == (2, 1)


def test_pairs_record_whether_the_annotator_agrees_with_the_judge() -> None:
    noisy = annotators(0.0, 0.25)
    pairs = [pair for prompt in range(700) for pair in all_pairs(PROMPT, ["3", "1", "2", "4"], noisy, (prompt,)).pairs]
    assert fmean(pair.agrees for pair in pairs) == pytest.approx(0.75, abs=0.025)
    scores = [3, 1, 2, 4]
    assert all((scores[pair.chosen] > scores[pair.rejected]) == pair.agrees for pair in pairs)


def test_pairs_of_a_prompt_are_judged_independently() -> None:
    agreed = {
        tuple(pair.agrees for pair in all_pairs(PROMPT, ["0", "1", "2"], annotators(0.0, 0.5), (prompt,)).pairs)
        for prompt in range(200)
    }
    assert len(agreed) == 8


def test_fewer_than_two_responses_make_no_pair() -> None:
    assert all_pairs(PROMPT, ["1"], annotators(), (0,)).pairs == []
