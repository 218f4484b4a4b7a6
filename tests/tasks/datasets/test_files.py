"""Files below data/raw/: which count, in which order, and the messages about broken ones."""

import errno
import gzip
import json
import os
import re

import pyarrow
import pyarrow.parquet
import pytest

from rlhf_core.errors import UserError
from tasks.datasets.jsonl import write_jsonl
from tasks.datasets.sources import files
from tasks.datasets.sources.formats import OPENERS
from tasks.params.ingest import FilesParams

ROWS = [{"prompt": f"question {i}", "response": f"answer {i}"} for i in range(3)]


def read(raw, path="set", **changes):
    return files.read(FilesParams(path=path, **changes), raw)


def test_folder_in_order_with_heldout_files_and_papers_ignored(raw):
    place = raw(train=ROWS, Test_1=[{"prompt": "held out"}])
    (place / "set/LICENSES").mkdir()
    (place / "set/LICENSES/MIT.txt").write_text("free")
    (place / "set/README.md").write_text("about")
    (place / "set/.hidden.jsonl").write_text("not JSON")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), place / "set/more.parquet")
    found = [(example.file, example.row, example.heldout) for example in read(place)]
    assert found == [
        ("data/raw/set/Test_1.jsonl", 1, True),
        *[("data/raw/set/more.parquet", row, False) for row in (1, 2, 3)],
        *[("data/raw/set/train.jsonl", row, False) for row in (1, 2, 3)],
    ]


def test_one_file_and_own_patterns(raw):
    place = raw(train=ROWS, dev=ROWS)
    assert {example.file for example in read(place, "set/train.jsonl")} == {"data/raw/set/train.jsonl"}
    assert {e.file for e in read(place, heldout_files=["dev*"]) if e.heldout} == {"data/raw/set/dev.jsonl"}


def test_parquet_with_conversations_matches_jsonl(raw):
    rows = [{"prompt": [{"role": "user", "content": "é\n\u2028x"}], "chosen": "a", "rejected": "b", "id": 7}]
    place = raw(train=rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), place / "set/also.parquet")
    from_parquet, from_jsonl = read(place)
    assert (from_parquet.prompt, from_parquet.answers) == (from_jsonl.prompt, from_jsonl.answers)
    assert from_jsonl.prompt == rows[0]["prompt"]


def test_labels_in_parquet(raw):
    row = {"prompt": "q", "chosen": "a", "rejected": "b", "annotator": "anna", "tie": True, "order": [2, 1], "id": 7}
    place = raw(train=[row])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row, row | {"annotator": None}]), place / "set/more.parquet")
    found = [(example.annotator, example.tie) for example in read(place)]
    assert found == [("anna", True), (None, True), ("anna", True)]


def test_texts_that_look_like_numbers_and_dates_stay_text(raw):
    place = raw(train=[{"prompt": "2024-01-01", "response": "042"}, {"prompt": "2024-01-02", "response": "1e3"}])
    assert [example.answers for example in read(place)] == [["042"], ["1e3"]]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"prompt": "a"}\n' * 16 + b'{"prompt": \n', "train.jsonl, row 17: broken JSON"),
        (b'{"prompt": "a"}\n\n{"prompt": "\xff"}\n', "train.jsonl, row 3: not UTF-8"),
        (b'{"prompt": "a"}\n["b"]\n', "train.jsonl, row 2: expected a JSON object, got list"),
        (b"\n\n", "train.jsonl: no rows"),
        (b"[" * 100_000, "train.jsonl, row 1: broken JSON"),
    ],
)
def test_broken_jsonl(raw, content, says):
    place = raw(train=ROWS)
    (place / "set/train.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=re.escape(says)):
        read(place)


def test_every_bad_row_of_every_file_is_named(raw, capsys):
    place = raw(train=ROWS)
    with (place / "set/train.jsonl").open("a") as file:
        file.write('{"prompt": "a"}\n{"prompt": 1, "response": "b"}\n{"prompt": \n{"prompt": "c", "response": "d"}\n')
    (place / "set/alone.jsonl").write_text('{"body": "a"}\n{"body": "b"}\n')
    (place / "set/empty.jsonl").touch()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([*ROWS, {"prompt": "e"}]), place / "set/table.parquet")
    (place / "set/zip.parquet").write_bytes(b"no table")
    with pytest.raises(UserError) as error:
        read(place)
    listed = capsys.readouterr().out.splitlines()
    assert [line.removeprefix(f"{place}/").removeprefix("data/raw/").split(":")[0] for line in listed] == [
        "set/alone.jsonl, row 1",
        "set/empty.jsonl",
        "set/train.jsonl, row 4",
        "set/train.jsonl, row 5",
        "set/train.jsonl, row 6",
        "set/zip.parquet",
    ]
    assert str(error.value) == f"{listed[0]} (first of 6 problems)"


def test_twenty_of_very_many_bad_rows_are_listed(raw, capsys):
    place = raw(train=ROWS)
    with (place / "set/train.jsonl").open("a") as file:
        file.write('{"prompt":\n' * 1000)
    with pytest.raises(UserError, match=r"train\.jsonl, row 4: broken JSON .* \(first of 1000 problems\)$"):
        read(place)
    listed = capsys.readouterr().out.splitlines()
    assert "train.jsonl, row 23: broken JSON" in listed[19]
    assert listed[20:] == ["… and 980 more"]


def test_byte_order_mark_and_windows_line_ends(raw):
    place = raw(train=ROWS)
    (place / "set/train.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    assert [example.opening for example in read(place)] == ["a", "b"]


def test_broken_parquet_and_wrong_types(raw):
    place = raw(train=ROWS)
    (place / "set/bad.parquet").write_bytes(b"version https://git-lfs.example/spec/v1")
    with pytest.raises(UserError, match=r"bad\.parquet: no valid Parquet file"):
        read(place)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": b"a"}]), place / "set/bad.parquet")
    with pytest.raises(UserError, match=r"bad\.parquet, row 1: prompt: expected text or a list of messages, got bytes"):
        read(place)


def test_missing_and_empty_places(raw):
    place = raw(train=ROWS)
    (place / "README.md").touch()
    (place / "chats").mkdir()
    with pytest.raises(UserError, match=r"other: not found; .*data/raw has chats, set\. Set ingest\.files\.path to"):
        read(place, "other")
    (place / "other.dvc").touch()
    with pytest.raises(UserError, match="get the data by `dvc pull`"):
        read(place, "other")
    (place / "empty").mkdir()
    with pytest.raises(UserError, match=r"no data file \(\*\.jsonl"):
        read(place, "empty")


def test_formats_that_would_be_left_out_are_refused(raw):
    place = raw(train=ROWS)
    (place / "set/test.jsonl.zst").write_bytes(b"x")
    with pytest.raises(UserError, match=r"test\.jsonl\.zst: Leash reads \*\.jsonl, \*\.json, \*\.csv"):
        read(place)


ROW = '{"prompt": "question", "chosen": "a", "rejected": "b"}'
FORMS = {
    "lines.json": f"{ROW}\n{ROW}\n",
    "lines.ndjson": f"{ROW}\n{ROW}\n",
    "list.json": json.dumps([json.loads(ROW)] * 2, indent=2),
    "list.jsonl": f"[{ROW}, {ROW}]",
    "pretty.jsonl": "\n".join([json.dumps(json.loads(ROW), indent=2)] * 2),
    "inside.json": json.dumps({"data": [json.loads(ROW)] * 2}, indent=2),
    "first.json": '{"data": [' + f"{ROW},\n{ROW}]\n}}\n",
    "pandas.json": json.dumps({name: {"0": text, "1": text} for name, text in json.loads(ROW).items()}, indent=1),
    "table.csv": ",prompt,chosen,rejected\n0,question,a,b\n1,question,a,b\n",
    "table.tsv": "prompt\tchosen\trejected\nquestion\ta\tb\nquestion\ta\tb\n",
}


@pytest.mark.parametrize("packed", ["", ".gz", ".bz2", ".xz"])
@pytest.mark.parametrize("name", FORMS)
def test_every_usual_form_of_a_file_is_read(raw, name, packed):
    place = raw(train=ROWS[:1])
    (place / "set/train.jsonl").unlink()
    with OPENERS.get(packed, open)(place / f"set/{name}{packed}", "wb") as file:
        file.write(FORMS[name].encode())
    found = read(place)
    assert [(example.opening, example.answers, example.row) for example in found] == [
        ("question", ["a", "b"], 1),
        ("question", ["a", "b"], 2),
    ]


def test_what_libraries_write_beside_data_is_no_data(raw):
    place = raw(train=ROWS)
    (place / "set/dataset_info.json").write_text('{"features": {}}')
    assert len(read(place)) == 3


def test_a_broken_list_and_a_broken_archive_are_one_line(raw):
    place = raw(train=ROWS)
    (place / "set/more.json").write_text("[\n" + f"{ROW},\n" * 200)
    with pytest.raises(
        UserError, match=r"more\.json: broken JSON \(.*line 201, column 56\); correct it, or write"
    ) as caught:
        read(place)
    assert "first of" not in str(caught.value)
    (place / "set/more.json").unlink()
    (place / "set/more.jsonl.gz").write_bytes(gzip.compress(b"x" * 1000)[:-9])
    with pytest.raises(UserError, match=r"more\.jsonl\.gz: cannot be unpacked"):
        read(place)
    (place / "set/more.jsonl.gz").unlink()
    (place / "set/more.jsonl.bz2").write_bytes(b"no archive")
    with pytest.raises(UserError, match=r"more\.jsonl\.bz2: cannot be unpacked"):
        read(place)
    (place / "set/more.jsonl.bz2").unlink()
    (place / "set/more.json").write_text("[1" + "0" * 5000 + "]")
    with pytest.raises(UserError, match="a number of thousands of digits"):
        read(place)


def test_a_file_that_may_not_be_read_is_one_line(raw, monkeypatch):
    place = raw(train=ROWS)

    def refuse(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("tasks.datasets.sources.formats.open", refuse, raising=False)
    with pytest.raises(UserError, match=r"train\.jsonl: cannot be read \(Permission denied\)"):
        read(place)


def test_a_list_of_paths(raw):
    place = raw(train=ROWS)
    write_jsonl(place / "more.jsonl", ROWS[:1])
    assert [example.file for example in read(place, ["more.jsonl", "set"])] == [
        "data/raw/more.jsonl", *["data/raw/set/train.jsonl"] * 3
    ]  # fmt: skip
    with pytest.raises(UserError, match=r"data/raw/gone: not found"):
        read(place, ["set", "gone"])


def test_everything_held_out(raw):
    with pytest.raises(UserError, match="holds out every file"):
        read(raw(test=ROWS))


@pytest.mark.parametrize("path", ["../other", "/etc", "a/../../b", "~/x"])
def test_paths_stay_below_raw(params, path):
    with pytest.raises(ValueError, match="below data/raw"):
        params(files={"path": path})
