"""Outs: the same bytes for the same content, in place all together or not at all."""

import math
from pathlib import Path

import pytest

from tasks.datasets.jsonl import read_jsonl
from tasks.stage.outputs import Outputs, rounded


@pytest.fixture
def outputs(tmp_path: Path) -> Outputs:
    return Outputs(tmp_path, ["a.json", "deep/b.csv", "model"])


def write(outputs: Outputs, text: str) -> None:
    outputs.write_json("a.json", {"text": text})
    outputs.write_csv("deep/b.csv", [{"step": 1, "loss": 0.5}, {"step": 2, "loss": None}])
    outputs.path("model").mkdir()
    (outputs.path("model") / text).write_text(text, encoding="utf-8")


def found(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def test_nothing_is_in_place_before_commit(outputs: Outputs, tmp_path: Path) -> None:
    write(outputs, "first")
    assert found(tmp_path) == [".a.json.partial", ".model.partial/first", "deep/.b.csv.partial"]
    outputs.commit()
    assert found(tmp_path) == ["a.json", "deep/b.csv", "model/first"]
    assert (tmp_path / "a.json").read_bytes() == b'{\n  "text": "first"\n}\n'
    assert (tmp_path / "deep/b.csv").read_bytes() == b"step,loss\n1,0.5\n2,\n"


def test_a_second_commit_replaces_files_and_whole_folders(outputs: Outputs, tmp_path: Path) -> None:
    for text in ("first", "second"):
        write(outputs, text)
        outputs.commit()
    assert found(tmp_path) == ["a.json", "deep/b.csv", "model/second"]


def test_a_folder_takes_the_place_of_a_file_and_back(outputs: Outputs, tmp_path: Path) -> None:
    (tmp_path / "model").write_text("a file")
    (tmp_path / "a.json").mkdir()
    write(outputs, "first")
    outputs.commit()
    assert found(tmp_path) == ["a.json", "deep/b.csv", "model/first"]


def test_one_missing_out_keeps_all_back(outputs: Outputs, tmp_path: Path) -> None:
    write(outputs, "first")
    outputs.commit()
    outputs.write_json("a.json", {"text": "second"})
    outputs.path("model")  # begun, never written
    with pytest.raises(ValueError, match=r"without writing deep/b\.csv, model"), outputs:
        outputs.commit()
    assert found(tmp_path) == ["a.json", "deep/b.csv", "model/first"]
    assert "first" in (tmp_path / "a.json").read_text(encoding="utf-8")


def test_what_a_killed_process_left_is_not_mixed_in(tmp_path: Path) -> None:
    killed = Outputs(tmp_path, ["model"])
    killed.path("model").mkdir()
    (killed.path("model") / "stale").write_text("x")
    outputs = Outputs(tmp_path, ["model"])
    outputs.path("model").mkdir()
    (outputs.path("model") / "fresh").write_text("y")
    outputs.commit()
    assert found(tmp_path) == ["model/fresh"]


def test_figures_have_ten_digits_so_that_another_processor_writes_the_same_bytes(tmp_path: Path) -> None:
    near = 0.1 + 0.2, 0.3  # differ in the last of 17 digits
    assert near[0] != near[1]
    content = [
        rounded({"loss": value, "steps": 3, "each": [{"kl": value}], "on": True, "none": None}) for value in near
    ]
    assert content[0] == content[1] == {"loss": 0.3, "steps": 3, "each": [{"kl": 0.3}], "on": True, "none": None}
    assert (rounded(1.23456789012345), rounded(2e-13 / 3), rounded(float("inf"))) == (
        1.23456789,
        6.666666667e-14,
        math.inf,
    )
    outputs = Outputs(tmp_path, ["a.csv"])
    outputs.write_csv("a.csv", [{"step": 1, "loss": near[0]}])
    outputs.commit()
    assert (tmp_path / "a.csv").read_text() == "step,loss\n1,0.3\n"


def test_what_cannot_be_written_is_refused(outputs: Outputs) -> None:
    with pytest.raises(ValueError, match="is no out of this stage"):
        outputs.path("elsewhere")
    with pytest.raises(ValueError, match="JSON"):
        outputs.write_json("a.json", {"loss": float("nan")})
    with pytest.raises(ValueError, match="at least one row"):
        outputs.write_csv("deep/b.csv", [])
    with pytest.raises(ValueError, match="not in fieldnames"):
        outputs.write_csv("deep/b.csv", [{"a": 1}, {"a": 1, "b": 2}])


def test_a_dataset_without_rows_is_not_an_empty_file(tmp_path: Path) -> None:
    """DVC warns of one, once for each stage that reads it."""
    outputs = Outputs(tmp_path, ["data/a.jsonl"])
    outputs.write_jsonl("data/a.jsonl", [])
    outputs.commit()
    assert (tmp_path / "data/a.jsonl").stat().st_size > 0
    assert read_jsonl(tmp_path / "data/a.jsonl") == []
