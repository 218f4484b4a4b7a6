"""Row shapes become one canonical form, and rows that fit none are named."""

import datetime
import re
from decimal import Decimal

import pytest

from rlhf_core.errors import UserError
from tasks.datasets.sources.cleaning import clean
from tasks.datasets.sources.shapes import read_columns

USER = {"role": "user", "content": "Hello"}
ASSISTANT = {"role": "assistant", "content": "Hi"}
SYSTEM = {"role": "system", "content": "Be brief"}
HH = "\n\nHuman: Tea?\n\nAssistant: Green or black?\n\nHuman: Green.\n\nAssistant:"
HH_TURNS = [
    {"role": "user", "content": "Tea?"},
    {"role": "assistant", "content": "Green or black?"},
    {"role": "user", "content": "Green."},
]


def reply(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("row", "prompt", "answers"),
    [
        ({"prompt": "Hello", "response": " Hi "}, [USER], [" Hi "]),
        ({"prompt": "Hello", "completion": "Hi"}, [USER], ["Hi"]),
        ({"prompt": [USER], "completion": [ASSISTANT]}, [USER], ["Hi"]),
        ({"prompt": "Hello", "chosen": "Hi", "rejected": "No"}, [USER], ["Hi", "No"]),
        ({"prompt": "Hello"}, [USER], []),
        ({"prompt": [SYSTEM, USER]}, [SYSTEM, USER], []),
        ({"prompt": [USER | {"name": "x"}], "response": "Hi"}, [USER], ["Hi"]),
        ({"messages": [SYSTEM, USER, ASSISTANT]}, [SYSTEM, USER], ["Hi"]),
        ({"messages": [SYSTEM | {"content": " "}, USER, ASSISTANT]}, [USER], ["Hi"]),
        ({"instruction": "Hello", "output": '["Paris", "Rome"]'}, [USER], ['["Paris", "Rome"]']),
        ({"instruction": "Hello", "output": '["Paris"]'}, [USER], ['["Paris"]']),
        ({"prompt": "Hello", "messages": [USER, ASSISTANT]}, [USER], ["Hi"]),
        ({"chosen": [USER, ASSISTANT], "rejected": [USER, reply("No")]}, [USER], ["Hi", "No"]),
        ({"prompt": "Hello", "chosen": [USER, ASSISTANT], "rejected": [USER, reply("No")]}, [USER], ["Hi", "No"]),
        ({"prompt": [USER], "chosen": [ASSISTANT], "rejected": [reply("No")]}, [USER], ["Hi", "No"]),
        ({"prompt": HH, "chosen": " Good. ", "rejected": " Bad."}, HH_TURNS, ["Good.", "Bad."]),
        ({"chosen": HH + " Good.", "rejected": HH + " Bad."}, HH_TURNS, ["Good.", "Bad."]),
        ({"prompt": HH, "response": HH + " Good."}, HH_TURNS, ["Good."]),
        ({"prompt": "Human: not a transcript"}, [{"role": "user", "content": "Human: not a transcript"}], []),
        ({"prompt": "Hello", "response": None}, [USER], [""]),
        ({"prompt": "Hello", "response": "42", "score": 3, "date": "2024-01-01"}, [USER], ["42"]),
    ],
)
def test_failure_14_text_and_conversations_of_many_shapes_go_in(examples, row, prompt, answers):
    (example,) = examples([row])
    assert not example.broken
    assert example.prompt == prompt
    assert example.answers == answers


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER, ASSISTANT], "response": "Hi"},
        {"messages": [USER]},
        {"messages": [SYSTEM, USER, ASSISTANT, USER]},
        {"messages": [SYSTEM, ASSISTANT]},
        {"chosen": [USER, ASSISTANT], "rejected": [reply("other"), reply("No")]},
        {"prompt": "Hello", "chosen": [reply("other"), USER, ASSISTANT], "rejected": "No"},
        {"prompt": HH + " I think", "chosen": "a", "rejected": "b"},
    ],
)
def test_turns_that_do_not_fit_are_marked_not_fatal(examples, row):
    assert examples([row])[0].broken


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"body": "x", "label": 1}, "row 1: missing column prompt (found: body, label)"),
        ({"prompt": "x", "chosen": "y"}, "row 1: missing column rejected"),
        ({"prompt": "x", "rejected": "y"}, "row 1: missing column chosen"),
        ({"chosen": "x", "rejected": "y"}, "row 1: missing column prompt (chosen is no whole conversation"),
        (
            {"prompt": "x", "response": "y", "chosen": "a", "rejected": "b"},
            "row 1: has prompt, chosen, rejected and response, which is not read beside them",
        ),
        ({"prompt": "x", "response": "y", "completion": "z"}, "row 1: both response and completion"),
        ({"prompt": 3}, "row 1: prompt: expected text or a list of messages, got int"),
        ({"prompt": "x", "response": {"a": 1}}, "row 1: response: message 1 must be an object with role and content"),
        (
            {"instruction": "x", "output": "y", "history": [["q", None]]},
            "row 1: history: a question or an answer is",
        ),
        ({"messages": [{"input": {"a": 1}, "output": "z"}]}, "row 1: messages: message 1 has input"),
        ({"messages": "x"}, "row 1: messages: expected a list of messages, got str"),
        ({"prompt": ["x"]}, "row 1: prompt: message 1 must be an object with role and content"),
        ({"prompt": [{"role": "tool", "content": "x"}]}, "row 1: prompt: message 1 has role 'tool', expected system"),
        ({"prompt": [{"role": "user", "content": None}]}, "row 1: prompt: message 1 has no content (null)"),
        ({"prompt": [{"role": "user", "content": ["x"]}]}, "message 1 has content of type list, expected text"),
    ],
)
def test_unreadable_rows_are_named(examples, row, says):
    with pytest.raises(UserError, match=re.escape(says)) as caught:
        examples([row])
    assert str(caught.value).startswith("data/raw/set/train.jsonl, row 1: ")


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (
            {"prompt": "a", "response": "b"},
            {"prompt": "a"},
            "row 2: missing column response (row 1 has prompt, response)",
        ),
        ({"prompt": "a"}, {"prompt": "a", "response": "b"}, "row 2: column response is missing in row 1"),
        ({"prompt": "a"}, {"text": "a"}, "row 2: missing column prompt"),
    ],
)
def test_a_file_has_one_shape(examples, first, second, says):
    with pytest.raises(UserError, match=re.escape(says)):
        examples([first, second])


LABEL = {"prompt": "Hello", "chosen": "Hi", "rejected": "No", "annotator": "anna"}


def test_a_pair_has_its_annotator_and_tie(examples):
    full = LABEL | {"tie": False, "time": "2026-11-23T14:00:00Z", "order": [2, 1], "task": "7"}
    rows = [full, LABEL | {"tie": True, "annotator": " ben "}, LABEL | {"annotator": None, "task": 3}]
    assert [(e.annotator, e.tie) for e in examples(rows)] == [("anna", False), ("ben", True), (None, False)]
    (whole,) = examples([{"chosen": HH + " Good.", "rejected": HH + " Bad.", "annotator": "anna"}])
    assert whole.annotator == "anna"
    (demonstration,) = examples([{"prompt": "Hello", "response": "Hi", "annotator": 7}])
    assert demonstration.annotator is None


def test_a_pair_says_which_answers_ended(examples):
    """One column alone: the other answer ended."""
    cuts = [{}, {"chosen_ended": False}, {"rejected_ended": False}, {"chosen_ended": True, "rejected_ended": None}]
    found = [example.ended for example in examples([LABEL | cut for cut in cuts])]
    assert found == [None, (False, True), (True, False), (True, True)]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rejected_ended": 0}, "rejected_ended: expected true or false, got 0"),
        ({"annotator": 7.5}, "annotator: expected a name, got 7.5"),
        ({"annotator": " "}, "annotator: expected a name, got ' '"),
        ({"annotator": "anna\n"}, "annotator: expected a name, got 'anna\\n'"),
        ({"annotator": "\ud83d"}, "annotator: expected a name, got '\\ud83d'"),
        ({"tie": 1}, "tie: expected true or false, got 1"),
        ({"time": 5.0}, "time: expected text, got 5.0"),
        ({"task": 12}, "task: expected text, got 12"),
        ({"order": [1, 1]}, "order: expected two different places from 1, got [1, 1]"),
        ({"order": [0, 1]}, "order: expected two different places"),
        ({"order": "12"}, "order: expected two different places"),
        ({"order": [1, 2, 3]}, "order: expected two different places"),
    ],
)
def test_a_label_of_another_type_is_named(examples, changes, says):
    with pytest.raises(UserError, match=re.escape(f"row 2: {says}")):
        examples([LABEL, LABEL | changes])


def test_other_columns_may_come_and_go(examples):
    assert len(examples([{"prompt": "a", "id": 1}, {"prompt": "b"}])) == 2


def test_further_columns_are_kept_as_far_as_json_can_hold_them(examples):
    row = {"prompt": "1 + 1?", "answer": "2", "steps": [1, {"a": None}], "hard": False, "task": "sums"}
    row |= {"day": datetime.date(2026, 1, 1), "price": Decimal("1.5")}
    lost = {"none": None, "bytes": [b"x"], "nan": float("nan"), "half": "\ud800"}
    (example,) = examples([row | lost | {"\ud800": 1}])
    kept = {"answer": "2", "steps": [1, {"a": None}], "hard": False, "task": "sums"}
    assert example.extra == kept | {"day": "2026-01-01", "price": 1.5}


def test_a_pair_keeps_no_column_of_its_label(examples):
    label = {"annotator": "anna", "time": "now", "order": [1, 2], "tie": False, "task": "7", "chosen_ended": True}
    (example,) = examples([{"prompt": "Hello", "chosen": "Hi", "rejected": "No", "source": "web"} | label])
    assert example.extra == {"source": "web"}


def test_without_an_annotator_task_and_time_are_further_columns(examples):
    (example,) = examples([{"prompt": "Hello", "chosen": "Hi", "rejected": "No", "task": "7", "time": "now"}])
    assert example.extra == {"task": "7", "time": "now"}


def test_a_value_that_is_nested_too_deeply_is_left_out(examples):
    deep = []
    for _ in range(5000):
        deep = [deep]
    (example,) = examples([{"prompt": "Hello", "deep": deep}])
    assert example.extra == {}


def test_columns_of_bytes_are_not_read(examples):
    types = {"prompt": "string", "vector": "list<binary>", "answer": "string", "id": "int64"}
    assert read_columns(types) == ["prompt", "answer", "id"]
    with pytest.raises(UserError, match="has prompt and image, which is not read"):
        examples([{"prompt": "x", "image": {"bytes": b"x", "path": None}}])


@pytest.mark.parametrize(
    ("text", "opening", "rest"),
    [
        ("The film is a joy.", "The film is", " a joy."),
        ("  The  film\nis   a joy. ", "The  film\nis", "   a joy."),
        ("\n\nHuman: Tea? Green now", "Human: Tea? Green", " now"),
    ],
)
def test_a_text_is_cut_after_its_first_words(examples, text, opening, rest):
    (example,) = examples([{"text": text, "label": 1}])
    assert example.kind == "demonstration"
    found = example.cut(3)
    assert (found.prompt, found.response, found.extra) == ([{"role": "user", "content": opening}], rest, {"label": 1})
    assert (found.row, found.kind, found.is_text) == (1, "demonstration", False)
    assert found.cut(1) is found


@pytest.mark.parametrize("text", ["The film is", "The film", "The film is ", ""])
def test_a_text_without_further_words_stays_whole_and_is_too_short(examples, text):
    (example,) = (found.cut(3) for found in examples([{"text": text}]))
    assert (example.is_text, example.response, example.kind) == (True, None, "demonstration")
    assert [row.reason for row in clean([example], 100)[1]] == ["too_short" if text else "empty"]


def test_text_beside_the_columns_of_another_shape_is_a_further_column(examples):
    (example,) = examples([{"prompt": "Hello", "response": "Hi", "text": "Hello Hi"}])
    assert (example.prompt, example.response, example.extra) == ([USER], "Hi", {"text": "Hello Hi"})
    assert example.cut(1) is example


def test_a_text_that_is_no_text_is_named(examples):
    with pytest.raises(UserError, match=r"train\.jsonl, row 2: text: expected text, got int"):
        examples([{"text": "a b"}, {"text": 3}])
    with pytest.raises(UserError, match="row 2: missing column text"):
        examples([{"text": "a b"}, {"prompt": "a"}])
