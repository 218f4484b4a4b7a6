"""How large a difference is, in words."""

import pytest

from tasks.records.differences import difference


@pytest.mark.parametrize(
    ("suffix", "before", "after", "says"),
    [
        (".json", '{"a": {"b": [1, 2]}}', '{"a": {"b": [1, 2.0000002]}}', "largest relative difference 1e-07 at a.b.2"),
        (".json", '{"a": 1, "b": "x"}', '{"a": 1, "b": "y"}', "other content at b"),
        (".json", '{"a": 0, "b": true}', '{"a": 1e-300, "b": true}', "largest relative difference 1e+00 at a"),
        (".json", '{"a": 1}', '{"a": 1, "c": null}', "c is in one of the two only"),
        (".json", '{"a": 1}', '{"a": 1.0}', "equal numbers, written otherwise"),
        (".json", "{", "{}", "one of the two files cannot be read"),
        (".jsonl", '{"a": 1}\n{"a": 2}\n', '{"a": 1}\n{"a": 4}\n', "largest relative difference 5e-01 at 2.a"),
        (".csv", "step,loss\n1,0.5\n", "step,loss\n1,0.25\n", "largest relative difference 5e-01 at 1.loss"),
    ],
)  # fmt: skip
def test_the_largest_difference_is_named(suffix: str, before: str, after: str, says: str) -> None:
    assert difference(suffix, before, after).startswith(says)
