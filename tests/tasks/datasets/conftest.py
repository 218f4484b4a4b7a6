"""What the tests of ingest share: parameters, and examples made from rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.datasets.jsonl import Row, write_jsonl
from tasks.datasets.sources.example import Example
from tasks.datasets.sources.shapes import normalise
from tasks.params.ingest import IngestParams

SPLIT = {"share": False, "demonstrations": 0.5, "preferences": 0.3, "ppo": 0.2, "heldout": 0.1, "validation": 0.1}


@pytest.fixture
def params() -> Callable[..., IngestParams]:
    """Parameters for files below `set`, with changes."""

    def make(**changes: Any) -> IngestParams:
        content = {"source": "files", "seed": 1, "files": {"path": "set"}, "split": SPLIT} | changes
        return IngestParams.model_validate(content)

    return make


@pytest.fixture
def examples() -> Callable[..., list[Example]]:
    """Examples of one imagined file."""

    def make(rows: list[Row], file: str = "data/raw/set/train.jsonl", *, heldout: bool = False) -> list[Example]:
        return list(normalise(enumerate(rows, start=1), file, heldout=heldout))

    return make


@pytest.fixture
def raw(tmp_path: Path) -> Callable[..., Path]:
    """A data/raw with a folder `set`, one file a keyword: train=[…] becomes train.jsonl."""

    def make(**files: list[Row]) -> Path:
        for name, rows in files.items():
            write_jsonl(tmp_path / "data/raw/set" / f"{name}.jsonl", rows)
        return tmp_path / "data/raw"

    return make
