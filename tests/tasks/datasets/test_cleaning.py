"""Bad rows are found, each under its reason."""

import pytest

from rlhf_core.errors import UserError
from tasks.datasets.sources import cleaning


def reasons(examples, limit=50):
    kept, dropped = cleaning.clean(examples, limit)
    assert len(kept) + len(dropped) == len(examples)
    return [(row.row, row.reason) for row in dropped]


def test_every_reason_of_pairs(examples):
    rows = [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": "q", "chosen": "b", "rejected": "a"},
        {"prompt": " ", "chosen": "a", "rejected": "b"},
        {"prompt": "q", "chosen": "", "rejected": "b"},
        {"prompt": "q", "chosen": "a", "rejected": None},
        {"prompt": "q", "chosen": "a ", "rejected": "a"},
        {"prompt": "q" * 51, "chosen": "a", "rejected": "b"},
        {"prompt": "q", "chosen": "a" * 51, "rejected": "b"},
        {"prompt": "q" * 50, "chosen": "a" * 50, "rejected": "b"},
        {"prompt": "q\0", "chosen": "a", "rejected": "b"},
        {"prompt": "q", "chosen": "a\ud83d", "rejected": "b"},
        {"prompt": [{"role": "assistant", "content": "a"}], "chosen": "a", "rejected": "b"},
        {"prompt": "naïve 🙂", "chosen": "a", "rejected": "b"},
    ]
    assert reasons(examples(rows)) == [
        (2, "duplicate"),
        (4, "empty"),
        (5, "empty"),
        (6, "empty"),
        (7, "same_chosen_rejected"),
        (8, "too_long"),
        (9, "too_long"),
        (11, "bad_text"),
        (12, "bad_text"),
        (13, "bad_conversation"),
    ]


def test_demonstrations_and_prompts(examples):
    rows = [{"prompt": "q", "response": "a"}, {"prompt": "q", "response": "b"}, {"prompt": "q", "response": "a"}]
    assert reasons(examples(rows)) == [(3, "duplicate")]
    assert reasons(examples([{"prompt": "q"}, {"prompt": "q"}, {"prompt": []}])) == [(2, "duplicate"), (3, "empty")]


def test_an_empty_turn_in_the_middle_is_empty(examples):
    row = {"prompt": "\n\nHuman: a\n\nAssistant:\n\nHuman: b\n\nAssistant:", "chosen": "x", "rejected": "y"}
    assert reasons(examples([row])) == [(1, "empty")]


def test_a_pair_of_several_annotators_is_no_duplicate_and_a_second_label_of_one_is(examples):
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    other = {"prompt": "q", "chosen": "b", "rejected": "a"}
    rows = [
        pair,
        {**pair, "annotator": "anna"},
        {**other, "annotator": "ben"},
        {**pair, "annotator": "anna"},
        {**other, "annotator": "anna"},
        {**pair, "annotator": "ben", "tie": True},
        {**pair, "annotator": "cleo", "tie": True},
        {**pair, "prompt": "r", "annotator": "anna"},
    ]
    assert reasons(examples(rows)) == [(4, "duplicate"), (5, "duplicate"), (6, "duplicate")]


def test_the_same_row_on_both_sides_is_no_duplicate(examples):
    row = {"prompt": "q", "response": "a"}
    both = examples([row]) + examples([row], heldout=True)
    assert reasons(both) == []
    assert [leak.training.heldout for leak in cleaning.find_leaks(both)] == [False]


def test_leaks_fold_case_and_space_and_look_at_the_first_user_message(examples):
    heldout = examples([{"prompt": "What  is Tea?"}], "test.jsonl", heldout=True)
    train = examples([{"prompt": "\n\nHuman: what is\n tea?\n\nAssistant: A drink.\n\nHuman: Why?\n\nAssistant:"}])
    other = examples([{"prompt": "Why?"}])
    assert cleaning.find_leaks([*train, *heldout, *other]) == [(train[0], heldout[0])]
    with pytest.raises(UserError, match=r"1 training rows.*train\.jsonl row 1 = test\.jsonl row 1.*on_leak: drop"):
        cleaning.refuse_leaks(cleaning.find_leaks([*train, *heldout]), print)


def test_refusal_is_one_line_with_counts_and_first_row(examples, capsys):
    rows = [{"prompt": "q", "response": "a"}] * 5 + [{"prompt": "q", "response": " "}]
    _, dropped = cleaning.clean(examples(rows), 50)
    with pytest.raises(UserError) as caught:
        cleaning.refuse_bad_rows(dropped, print)
    file = "data/raw/set/train.jsonl"
    assert f"duplicate 4, empty 1 (first: {file}, row 2)" in str(caught.value)
    assert "\n" not in str(caught.value)
    listed = capsys.readouterr().out.splitlines()
    assert listed == [*(f"{file}, row {row}: duplicate" for row in (2, 3, 4, 5)), f"{file}, row 6: empty"]
    cleaning.refuse_bad_rows([], print)


def test_all_leaks_are_listed(examples, capsys):
    heldout = examples([{"prompt": f"q{i}"} for i in range(25)], "test.jsonl", heldout=True)
    train = examples([{"prompt": f"Q{i}"} for i in range(25)])
    with pytest.raises(UserError, match="25 training rows"):
        cleaning.refuse_leaks(cleaning.find_leaks([*train, *heldout]), print)
    listed = capsys.readouterr().out.splitlines()
    assert listed[0] == "leaked: data/raw/set/train.jsonl row 1 = test.jsonl row 1 ('q0')"
    assert len(listed) == 21
    assert listed[-1] == "… and 5 more"
