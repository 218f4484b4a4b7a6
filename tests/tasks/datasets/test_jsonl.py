"""JSON lines: what is written is read back, equal rows give equal bytes, and mistakes are named by row."""

import pytest

from rlhf_core.errors import UserError
from tasks.datasets.jsonl import brief, brief_names, iter_jsonl, read_jsonl, write_jsonl


def test_round_trip_and_bytes(tmp_path):
    rows = [{"b": "é\u2028\n\t", "a": [1, 2.5, None, True]}, {"x": {}}]
    write_jsonl(tmp_path / "new/a.jsonl", rows)
    assert read_jsonl(tmp_path / "new/a.jsonl") == rows
    assert (tmp_path / "new/a.jsonl").read_bytes().count(b"\n") == 2
    assert "é\u2028".encode() in (tmp_path / "new/a.jsonl").read_bytes()


def test_rows_count_as_lines(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n\n  \n{"a": 2}')
    assert list(iter_jsonl(tmp_path / "a.jsonl")) == [(1, {"a": 1}), (4, {"a": 2})]


def test_mistakes_name_file_and_row(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n' * 16 + '{"a": \n')
    with pytest.raises(UserError, match=r"a\.jsonl, row 17: broken JSON \(Expecting value, column 6\)"):
        read_jsonl(path)
    with pytest.raises(UserError, match=r"nothing\.jsonl: file not found"):
        read_jsonl(tmp_path / "nothing.jsonl")
    with pytest.raises(UserError, match="is a folder"):
        read_jsonl(tmp_path)


def test_nan_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        write_jsonl(tmp_path / "a.jsonl", [{"a": float("nan")}])


def test_half_a_surrogate_pair_is_refused_where_a_stage_wrote_the_file(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": "\\ud83d\\ude00"}\n{"a": ["\\ud83d"]}\n')
    with pytest.raises(UserError, match=r"a\.jsonl, row 2: half a surrogate pair in a text; correct the row"):
        read_jsonl(path)
    assert list(iter_jsonl(path)) == [(1, {"a": "😀"}), (2, {"a": ["\ud83d"]})]


def test_rows_share_their_keys_and_short_texts(tmp_path):
    """A million rows: one object for each of `role`, `user`, `train`."""
    (tmp_path / "a.jsonl").write_text('{"split": "train"}\n' * 2)
    first, second = read_jsonl(tmp_path / "a.jsonl")
    assert next(iter(first)) is next(iter(second))
    assert first["split"] is second["split"]


def test_a_value_in_a_message_is_short_and_harmless():
    assert len(brief("x" * 1000)) < 70
    assert brief("\x1b[2J\n\ud800") == r"'\x1b[2J\n\ud800'"
    assert brief_names(f"c{number}" for number in range(1000)).endswith("c59, …")
