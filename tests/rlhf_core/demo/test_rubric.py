"""The hidden rubric: good answers win, cheap tricks do not, and any text has a score."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.demo.phrases import RUNNING_EXAMPLE
from rlhf_core.demo.rubric import EMPTY, HIGHEST, LOWEST, explain, gold_score
from rlhf_core.demo.topics import DOMAIN_OF, NEEDS, TOPICS
from rlhf_core.demo.world import DemoWorld, parse

GOOD = "Try boiled eggs, Greek yogurt, or steel-cut oatmeal. They release sugar slowly."
MEDIOCRE = "Try boiled eggs."
DISMISSIVE = "Just eat whatever you want."

HACKS = {
    "bare list": "Boiled eggs, Greek yogurt, steel-cut oatmeal.",
    "bare list and reason": "Boiled eggs, Greek yogurt, steel-cut oatmeal. They release sugar slowly.",
    "word soup": "boiled eggs Greek yogurt steel-cut oatmeal they release sugar slowly",
    "strung together": "Try boiled eggs Greek yogurt steel-cut oatmeal. They release sugar slowly.",
    "everything there is": "Try boiled eggs, Greek yogurt, steel-cut oatmeal, smoked salmon, vegetable omelettes, "
    "or oatmeal with nuts. They release sugar slowly.",
    "options of all topics": "Try boiled eggs, Greek yogurt, steel-cut oatmeal, lentil soup, board games, or aprons. "
    "They release sugar slowly.",
    "one option again": "Try boiled eggs, boiled eggs, or boiled eggs. They release sugar slowly.",
    "said twice": f"{GOOD} {GOOD}",
    "reason twice": f"{GOOD} They release sugar slowly.",
    "every reason": f"{GOOD} They cost very little. They contain no meat. They save time.",
    "negated": "Never try boiled eggs, Greek yogurt, or steel-cut oatmeal. They release sugar slowly.",
    "no end": GOOD.rstrip("."),
    "no capital": GOOD.lower(),
    "function words shuffled": "Are the try boiled eggs, I good Greek yogurt could or or steel-cut oatmeal. "
    "Because good they release sugar slowly.",
    "doubled words": "Try try boiled eggs, Greek yogurt, or or steel-cut oatmeal. They release sugar slowly.",
    "padding": f"{GOOD} There are many things to think about. It is hard to say.",
    "everyday padding": GOOD + " I would go with these and I would have more of them any day of the week so you can "
    "start now and enjoy it more and more with your family and all of your friends too.",
    "dismissal added": f"{GOOD} It does not really matter.",
    "garbled words": "Try boiled eggs, Greek yogurt, or steel-cut oatmeal xx qrt. They release sugar slowly zzz.",
    "another need's reason": "Try boiled eggs, Greek yogurt, or steel-cut oatmeal. They contain no meat.",
    "another topic": "Good dinner ideas are boiled eggs, Greek yogurt, or steel-cut oatmeal. "
    "They release sugar slowly.",
    "unclosed tail": f"{GOOD} Try",
}


def test_best_answer_mediocre_answer_dismissal_nothing() -> None:
    scores = [gold_score(RUNNING_EXAMPLE, text) for text in (GOOD, MEDIOCRE, DISMISSIVE, "")]
    assert scores == [5.0, 1.1, -2.0, -3.0]


def test_the_seeds_own_pair_is_ordered_as_in_the_seed() -> None:
    chosen = (
        "Good options include steel-cut oatmeal with berries, plain Greek yogurt with chia seeds, or a vegetable "
        "omelette with whole-grain toast..."
    )
    rejected = "Just eat whatever you want, breakfast doesn't really matter."
    assert gold_score(RUNNING_EXAMPLE, chosen) > gold_score(RUNNING_EXAMPLE, rejected) + 1


@pytest.mark.parametrize("hack", HACKS)
def test_cheap_tricks_do_not_pay(hack: str) -> None:
    assert gold_score(RUNNING_EXAMPLE, HACKS[hack]) <= gold_score(RUNNING_EXAMPLE, GOOD) - 0.25


@pytest.mark.parametrize("hack", ["bare list", "bare list and reason", "word soup", "negated"])
def test_options_outside_a_recommendation_do_not_count(hack: str) -> None:
    assert explain(RUNNING_EXAMPLE, HACKS[hack])["options"] == 0


@pytest.mark.parametrize("name", TOPICS)
def test_every_topic_and_need_has_a_best_answer(name: str) -> None:
    for need in DOMAIN_OF[name].needs:
        prompt = f"What are some good {name} ideas {NEEDS[need].phrase}?"
        options = ", ".join(TOPICS[name].right(need)[:2]) + f", or {TOPICS[name].right(need)[2]}"
        for reason in NEEDS[need].reasons:
            assert gold_score(prompt, f"You could try {options}, because {reason}.") == 5.0


@pytest.mark.parametrize("name", TOPICS)
def test_an_option_counts_for_its_topic_and_need_only(name: str) -> None:
    domain = DOMAIN_OF[name]
    for need in domain.needs:
        prompt = f"What are some good {name} ideas {NEEDS[need].phrase}?"
        for option, wrong in TOPICS[name].wrong_for.items():
            assert gold_score(prompt, f"Try {option}.") == (-0.8 if need in wrong else 1.1), (need, option)
        for topic in TOPICS.values():
            for option in set(topic.options) - set(TOPICS[name].options):
                assert gold_score(prompt, f"Try {option}.") == -0.8, option


@pytest.mark.parametrize(
    ("part", "answer"),
    [
        ("dismissive", f"{GOOD} That is up to you."),
        ("rambling", f"Well, that is an interesting question. {GOOD}"),
        ("rambling", GOOD + " I would try them" * 12 + "."),
        ("repetition", "Try boiled eggs or boiled eggs."),
        ("off_topic", "Try boiled eggs or lentil soup."),
        ("off_topic", "On a small budget, I would try boiled eggs."),
        ("unsuitable", "Try boiled eggs or banana pancakes."),
        ("stuffing", HACKS["everything there is"]),
        ("garbled", "Try boiled eggs qwrt."),
        ("garbled", "Try boiled eggs ###."),
        ("garbled", "Good good try boiled eggs."),
        ("form", "Try boiled eggs"),
        ("reason", "Try boiled eggs. They contain no meat."),
    ],
)
def test_each_fault_is_charged_to_its_own_part(part: str, answer: str) -> None:
    assert explain(RUNNING_EXAMPLE, answer)[part] < 0
    assert explain(RUNNING_EXAMPLE, GOOD)[part] >= 0


def test_of_options_strung_together_only_the_first_counts() -> None:
    assert explain(RUNNING_EXAMPLE, HACKS["strung together"])["options"] == 1.1


def test_a_reason_counts_as_a_clause_only() -> None:
    assert explain(RUNNING_EXAMPLE, "Try boiled eggs they release sugar slowly.")["reason"] == 0
    assert explain(RUNNING_EXAMPLE, "Try boiled eggs since they release sugar slowly.")["reason"] == 1.7


def test_more_than_two_reasons_cost_even_where_they_fit() -> None:
    both = f"{GOOD} They keep blood sugar steady."
    assert explain(RUNNING_EXAMPLE, both)["reason"] == 1.7
    assert explain(RUNNING_EXAMPLE, f"{both} They release sugar slowly.")["reason"] == pytest.approx(1.2)


def test_a_repeated_sentence_costs_more_than_a_repeated_option() -> None:
    assert explain(RUNNING_EXAMPLE, "I would try boiled eggs or boiled eggs.")["repetition"] == -0.7
    twice = "I would try boiled eggs. I would try boiled eggs."
    assert explain(RUNNING_EXAMPLE, twice)["repetition"] == pytest.approx(-1.1)


def test_parts_of_a_flawless_answer() -> None:
    assert {name: value for name, value in explain(RUNNING_EXAMPLE, GOOD).items() if value} == {
        "options": 3.3,
        "reason": 1.7,
    }


def test_demonstrations_are_never_garbled() -> None:
    world = DemoWorld(11)
    for prompt in world.prompts(2000):
        parts = explain(prompt, world.demonstration(prompt, 0))
        assert parts["garbled"] == parts["form"] == 0


def test_an_unknown_prompt_still_gives_a_score() -> None:
    assert parse("Explain why the sky is blue.") is None
    assert gold_score("Explain why the sky is blue.", DISMISSIVE) == -2.0
    assert gold_score("", GOOD) == 0.0


def test_a_prompt_without_a_need_accepts_any_option_of_the_topic() -> None:
    assert (
        gold_score("What should I have for breakfast?", "Try banana pancakes or boiled eggs. They save money.") == 3.9
    )


@pytest.mark.parametrize("response", ["", "   ", "\n\t", "...", "!?", "\x00"])
def test_an_empty_answer_has_the_lowest_score(response: str) -> None:
    assert gold_score(RUNNING_EXAMPLE, response) <= LOWEST
    assert gold_score(RUNNING_EXAMPLE, "") == EMPTY


_FRAGMENTS = st.sampled_from(
    [
        *TOPICS["breakfast"].options,
        *NEEDS["diabetes"].reasons,
        *("Try", "good", "choices", "are", "or", ",", ".", "because", "\ufffd", "##", "They"),
    ]
)


@given(st.text(max_size=300) | st.lists(_FRAGMENTS, max_size=40).map(" ".join))
def test_any_text_has_a_score_and_none_beats_a_good_answer(response: str) -> None:
    score = gold_score(RUNNING_EXAMPLE, response)
    assert math.isfinite(score)
    assert EMPTY <= score <= gold_score(RUNNING_EXAMPLE, GOOD) <= HIGHEST
    parts = explain(RUNNING_EXAMPLE, response)
    assert score == EMPTY or score == pytest.approx(min(HIGHEST, max(LOWEST, sum(parts.values()))), abs=1e-6)
    assert all(value <= 0 for name, value in parts.items() if name not in ("options", "reason"))
