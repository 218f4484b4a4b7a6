"""The demo world's tables: consistent with each other, and read back unambiguously."""

from itertools import pairwise

import pytest

from rlhf_core.demo.phrases import ANY_FRAMES, DISMISSALS, FILLERS, LIST_FRAMES, PROMPT_FRAMES
from rlhf_core.demo.scanner import Symbol, scanner_of, words, world_scanner
from rlhf_core.demo.topics import DOMAIN_OF, DOMAINS, NEEDS, TOPICS


def test_topic_names_are_unique() -> None:
    assert len(TOPICS) == sum(len(domain.topics) for domain in DOMAINS)


@pytest.mark.parametrize("topic", TOPICS.values(), ids=lambda topic: topic.name)
def test_every_need_has_enough_right_options(topic) -> None:
    for need in DOMAIN_OF[topic.name].needs:
        assert len(topic.right(need)) >= 4, need
        assert not set(topic.right(need)) & set(topic.wrong(need))


@pytest.mark.parametrize("topic", TOPICS.values(), ids=lambda topic: topic.name)
def test_options_are_wrong_only_for_needs_of_their_domain_and_never_for_all(topic) -> None:
    needs = set(DOMAIN_OF[topic.name].needs)
    for option, wrong in topic.wrong_for.items():
        assert wrong < needs, option


def test_every_need_occurs_in_prompts_and_has_reasons() -> None:
    assert {need for domain in DOMAINS for need in domain.needs} == set(NEEDS)
    assert all(len(set(need.reasons)) == 2 for need in NEEDS.values())


@pytest.mark.parametrize("topic", TOPICS.values(), ids=lambda topic: topic.name)
def test_options_are_read_back_as_themselves(topic) -> None:
    for option in topic.options:
        assert world_scanner().scan(f"Try {option}, please.")[1] == Symbol("option", option)


def test_wording_contains_no_option_by_accident() -> None:
    stock = [*ANY_FRAMES, *LIST_FRAMES, *PROMPT_FRAMES, *DISMISSALS, *FILLERS]
    stock += [text for need in NEEDS.values() for text in (need.phrase, *need.reasons)]
    for text in stock:
        assert not [symbol for symbol in world_scanner().scan(text) if symbol.kind == "option"], text


def test_longest_phrase_wins_and_only_whole_words_count() -> None:
    scanner = scanner_of([("rice", Symbol("topic", "rice")), ("rice cakes", Symbol("option", "rice cakes"))])
    assert scanner.scan("Rice cakes") == [Symbol("option", "rice cakes")]
    assert scanner.scan("rice cake") == [Symbol("topic", "rice"), Symbol("word", "cake")]
    assert scanner.scan("ricecakes") == [Symbol("word", "ricecakes")]
    assert scanner.scan("rice-cakes") == [Symbol("word", "rice-cakes")]


def test_a_phrase_cannot_mean_two_things() -> None:
    with pytest.raises(ValueError, match="rice"):
        scanner_of([("rice", Symbol("topic", "rice")), ("Rice", Symbol("option", "rice"))])


def test_vocabulary_stays_small_enough_for_a_tiny_model() -> None:
    texts = [option for topic in TOPICS.values() for option in (topic.name, *topic.options)]
    texts += [text for need in NEEDS.values() for text in (need.phrase, *need.reasons)]
    assert 400 <= len({word for text in texts for word in words(text)}) <= 700


def test_no_option_names_another_within() -> None:
    options = {option for topic in TOPICS.values() for option in topic.options}
    for shorter, longer in pairwise(sorted(options)):
        assert not longer.startswith(shorter + " ")
