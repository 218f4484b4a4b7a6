"""Stage `report`: its files are reproducible, and it does not load torch or pyplot."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.page.figures import PICTURES
from tasks.page.inputs import Run
from tasks.params.report import ReportParams
from tasks.report import execute


def write(root: Path, run: Run, out: Path) -> dict[str, bytes]:
    stage: Any = SimpleNamespace(
        root=root,
        hashes={"data/evaluate/answers.jsonl": "0123abcd", "tasks/report.py": "f"},
        params=ReportParams(samples=20),
        read=lambda path: run.answers if path.endswith("answers.jsonl") else run.samples,
        out=lambda path: out,
    )
    execute(stage)
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.mark.slow
def test_two_runs_write_the_same_bytes(make_run: Callable[..., Run], tmp_path: Path) -> None:
    run = make_run()
    assert any("\ud83d" in row["policy"] for row in run.samples), "the samples have a lone surrogate"
    first = write(tmp_path, run, tmp_path / "one")
    assert first == write(tmp_path, run, tmp_path / "two")
    assert len([name for name in first if name.endswith(".png")]) == len(PICTURES)
    assert "0123abcd" in first["index.html"].decode("utf-8"), "the page says which answers it was made from"
    assert str(tmp_path) not in first["index.html"].decode("utf-8")


def test_neither_torch_nor_pyplot_is_loaded() -> None:
    heavy = ("torch", "transformers", "matplotlib.pyplot")
    code = f"import tasks.report, sys; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
