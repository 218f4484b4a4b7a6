"""The lines of the summary, with numbers counted by hand on small examples."""

import pytest

from flows.commands.imports.summary import (
    agreement,
    as_read,
    contradictions,
    lengths,
    longer_answers,
    near_duplicates,
    summary,
)
from rlhf_core.data.tokenizer import train_bpe
from rlhf_core.errors import UserError
from tasks.datasets.sources.example import Example

LONG = "please tell me how to keep a pot of rice warm for two hours without a cooker at home"
"""A prompt of 18 words, 18 sequences."""


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(["eat oats"] * 9, 300, "<|pad|>", "<|end|>", 64)


def pair(prompt, chosen, rejected, row=1, **more):
    return Example("a.jsonl", row, more.pop("heldout", False), user(prompt), chosen=chosen, rejected=rejected, **more)


def user(text):
    return [{"role": "user", "content": text}]


def demo(prompt, response, row=1, **more):
    return Example("a.jsonl", row, more.pop("heldout", False), user(prompt), response, **more)


def test_lengths_are_of_distinct_prompts_and_all_answers():
    rows = [demo("p" * n, "r" * 10 * n, row=n) for n in range(1, 21)] + [demo("p", "r" * 5000, row=21)]
    assert lengths(rows, None) == [
        "lengths              median  95%  longest",
        "prompts, characters      10   19       20",
        "answers, characters     110  200    5,000",
    ]
    assert lengths([Example("a.jsonl", 1, False, user("hi"))], None) == [
        "lengths              median  95%  longest",
        "prompts, characters       2    2        2",
    ]


def test_lengths_in_tokens_have_the_roles_and_the_end(tokenizer):
    rows = [pair("eat", "oat", "t")]
    eat, oat = (len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in ("eat", "oat"))
    *_, prompts, answers, note = lengths(rows, tokenizer)
    assert prompts.split() == ["prompts,", "tokens", *[f"{3 + eat}"] * 3], "user, eat, end, assistant"
    assert answers.split() == ["answers,", "tokens", "2", f"{oat + 1}", f"{oat + 1}"]
    assert note == "tokens of an answer include its end"


def test_the_longest_answer_in_tokens_is_of_the_rows_that_are_encoded(tokenizer, monkeypatch):
    monkeypatch.setattr("flows.commands.imports.summary.ENCODED", 2)
    rows = [demo("eat", "t" * n, row=n) for n in (1, 9, 2, 9)]
    *_, answers, note = lengths(rows, tokenizer)
    assert answers.split()[-1] == str(1 + len(tokenizer("tt", add_special_tokens=False)["input_ids"]))
    assert note.endswith("of 2 rows at most")


def test_rows_as_the_reward_model_reads_them(tokenizer):
    """Also an answer that was cut off has its end."""
    assert as_read(pair("eat\noats", " rest", "t", ended=(True, False)), tokenizer) == [
        "a.jsonl row 1, a pair, as the model reads it:",
        "  prompt    '<|user|>eat\\noats<|end|><|assistant|>'",
        "  chosen    'rest<|end|>'",
        "  rejected  't<|end|>'",
    ]


def test_rows_without_a_tokenizer_and_without_their_middle():
    turns = [{"role": "system", "content": "Be kind."}, *user("a" * 200 + "b" * 200)]
    lines = as_read(Example("a.jsonl", 7, False, turns, "\x1b[2J\u202e"), None)
    assert lines[0] == "a.jsonl row 7, a demonstration, as a model from scratch reads it:"
    prompt, rest = "<|system|>Be kind.<|end|><|user|>", "<|end|><|assistant|>"
    shown = f"{prompt}{'a' * (150 - len(prompt))} […] {'b' * (150 - len(rest))}{rest}"
    assert lines[1] == f"  prompt    '{shown}'", "150 characters of each end"
    assert lines[2] == "  response  '\\x1b[2J\\u202e<|end|>'", "no control character reaches the terminal"


def test_without_a_tokenizer_rows_are_those_of_a_model_from_scratch(tokenizer):
    turns = [
        {"role": "system", "content": "Be kind."},
        *user("eat"),
        {"role": "assistant", "content": "oats"},
        *user("t"),
    ]
    example = Example("a.jsonl", 7, False, turns, "rest")
    assert as_read(example, None)[1:] == as_read(example, tokenizer)[1:]


def test_two_rows_are_shown_of_the_training_rows():
    heldout, first, second = demo("a", "b", heldout=True), demo("c", "d", row=2), demo("e", "f", row=3)
    assert [line[:14] for line in summary([heldout, first, second]) if "reads it" in line] == [
        "a.jsonl row 2,",
        "a.jsonl row 3,",
    ]
    assert sum("reads it" in line for line in summary([heldout])) == 1


def test_a_row_that_cannot_be_encoded_is_named(tokenizer, monkeypatch):
    def fail(*_):
        raise UserError("its chat template fails")

    monkeypatch.setattr("rlhf_core.data.tokenizer.encode_prompt", fail)
    with pytest.raises(UserError, match=r"a\.jsonl row 1: its chat template fails"):
        as_read(demo("q", "a"), tokenizer)


def test_near_duplicates_are_named_with_the_earlier_prompt():
    other = "which trees lose their leaves in winter and which of them keep the leaves all year long"
    rows = [
        demo(LONG, "a", row=1),
        demo(other, "a", row=2),
        demo(LONG.upper().replace(" ", "  ") + "?!", "a", row=3),
        demo(LONG, "b", row=4),  # the same prompt: not a near-duplicate
        demo(other.replace("which trees", "what trees"), "a", row=5),  # 16 of 18 sequences are shared
    ]
    [line] = near_duplicates(rows)
    assert line == (
        "near-duplicate prompts: 50.0% of 4 (a.jsonl row 3 is nearly a.jsonl row 1; a.jsonl row 5 is nearly "
        "a.jsonl row 2)"
    )


def test_of_very_many_prompts_some_are_compared(monkeypatch):
    monkeypatch.setattr("flows.commands.imports.summary.COMPARED", 2)
    rows = [demo(text, "a", row=row) for row, text in enumerate((LONG, "two", LONG + "!", "four"), start=1)]
    assert near_duplicates(rows) == ["near-duplicate prompts: 50.0% of 2 (a.jsonl row 3 is nearly a.jsonl row 1)"]


def test_near_duplicates_have_most_words_in_the_same_order():
    """Another order, other numbers, another question behind the same system turn, and prompts without words."""
    system = {"role": "system", "content": LONG}
    rows = [
        demo(LONG, "a"),
        demo(" ".join(reversed(LONG.split())), "a"),
        demo("what is 3 + 4", "a"),
        demo("what is 5 + 6", "a"),
        Example("a.jsonl", 1, False, [system, *user("why?")], "a"),
        Example("a.jsonl", 2, False, [system, *user("when?")], "a"),
        demo("???", "a"),
        demo("!!!", "a"),
    ]
    assert near_duplicates(rows) == ["near-duplicate prompts: 0.0% of 8"]
    assert near_duplicates(rows[:1]) == []


def test_prompts_of_one_short_template_are_no_near_duplicates():
    rows = [demo(f"how do I look after {chr(97 + n // 26)}{chr(97 + n % 26)}", "a") for n in range(300)]
    [line] = near_duplicates(rows)
    assert float(line.split()[2].rstrip("%")) <= 5.0, "a third of their sequences is the same"


def test_held_out_prompts_near_a_training_prompt_are_counted_wherever_they_are():
    rows = [demo(LONG + "?", "a", row=1, heldout=True), demo("other", "a", row=2, heldout=True), demo(LONG, "a", row=3)]
    share, leaked = near_duplicates(rows)
    assert share == "near-duplicate prompts: 33.3% of 3 (a.jsonl row 1 is nearly a.jsonl row 3)"
    assert leaked == "held-out prompts that are nearly a training prompt: 1 of 2"


def test_contradictions_are_told_from_disagreement():
    rows = [
        pair("p", "x", "y", row=1),
        pair("p", " y", "x ", row=2),  # the other way
        pair("q", "x", "y", row=3),
        pair("q", "x", "z", row=4),  # other answers
        pair("r", "x", "y", row=5),
        pair("s", "x", "y", row=6, annotator="anna"),
        pair("s", "y", "x", row=7, annotator="ben"),
        pair("s", "y", "x", row=8, annotator="eve"),
        pair("t", "y", "x", row=9, annotator="anna"),
        pair("t", "y", "x", row=10, annotator="ben"),
        pair("t", "x", "y", row=11, annotator="ben"),
    ]
    assert contradictions(rows) == [
        "contradictions: 2 pairs are chosen both ways (a.jsonl row 1 and a.jsonl row 2; a.jsonl row 10 and "
        "a.jsonl row 11)",
        "disagreements of annotators: 1 pair is chosen both ways (a.jsonl row 6 and a.jsonl row 7)",
    ]
    assert contradictions(rows[2:5]) == []


@pytest.mark.parametrize(
    ("longer", "n", "line"),
    [
        (60, 100, "60% of 100 pairs (50% – 69%): a small preference for longer answers"),
        (50, 100, "50% of 100 pairs (40% – 60%): length says nothing about the choice"),
        (5, 10, "50% of 10 pairs (24% – 76%): too few pairs to tell"),
        (420, 1000, "42% of 1,000 pairs (39% – 45%): a small preference for shorter answers"),
        (70, 100, "70% of 100 pairs (60% – 78%): length is a confound: report wins at equal length"),
        (20, 100, "20% of 100 pairs (13% – 29%): length is a confound: report wins at equal length"),
    ],
)
def test_how_often_the_longer_answer_is_chosen(longer, n, line):
    rows = [pair("p", *(("long", "b") if place < longer else ("b", "long"))) for place in range(n)]
    same = [pair("p", "same", "size")]
    assert longer_answers(rows + same) == [f"the longer answer is chosen in {line}"]
    assert longer_answers(same) == []


def labelled(*votes):
    """One pair for each vote, "12" for example: anna prefers the first answer, ben the second; 0 is a tie."""
    rows = []
    for place, vote in enumerate(votes):
        for name, choice in zip(("anna", "ben", "eve"), vote, strict=False):
            answers = ("a", "b") if choice in "01" else ("b", "a")
            rows.append(pair(f"p{place}", *answers, annotator=name, tie=choice == "0"))
    return rows


@pytest.mark.parametrize(
    ("votes", "number", "words"),
    [
        (["11"] * 20 + ["22"] * 20 + ["12"] * 2, 42, "0.91 (0.78 – 1.00): good"),
        (["11"] * 40 + ["22"] * 40 + ["12"] * 20, 100, "0.60 (0.44 – 0.76): moderate"),
        (["11"] * 65 + ["22"] * 65 + ["12"] * 70, 200, "0.30 (0.17 – 0.43): weak"),
        (["11"] * 5 + ["22"] * 5 + ["12", "21"] * 5, 20, "0.03 (-0.42 – 0.47): this is chance"),
        (["12", "21"] * 10, 20, "-0.95 (-0.95 – -0.95): this is worse than chance"),
        (["11", "22"] * 4, 8, "1.00 (1.00 – 1.00): too few pairs to tell"),
        (["11"] * 20, 20, "no alpha: too few pairs to tell"),
    ],
)
def test_agreement_in_words(votes, number, words):
    """By hand: alpha is 1 - 39 · 10 / (20 · 20) = 0.03 in the fourth case, and 1 - 39 · 20 / (20 · 20) = -0.95 in the
    next."""
    assert agreement(labelled(*votes))[0] == (
        f"agreement of annotators: {number} pairs by several, Krippendorff's alpha {words}"
    ).replace(", Krippendorff's alpha no alpha", "")


def test_each_annotators_agreement_and_none_without_shared_pairs():
    assert agreement(labelled("112", "111", "22"))[1] == "equal to the labels of the others: eve 50%, anna 80%, ben 80%"
    assert agreement(labelled("1", "2")) == []
    assert agreement([pair("p", "a", "b")]) == []


def test_the_whole_is_the_same_each_time_and_has_no_line_for_what_is_missing(tokenizer):
    rows = [demo("one two", "three"), *labelled("11", "12"), pair("p9", "aa", "b", row=9)]
    assert summary(rows, tokenizer) == summary(rows, tokenizer)
    found = summary([demo("one two", "three")])
    assert [line.split()[0] for line in found] == ["lengths", "prompts,", "answers,", "a.jsonl", "prompt", "response"]
    assert summary([]) == []
