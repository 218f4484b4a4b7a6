"""A dataset of the Hugging Face hub at a pinned revision, or a dataset folder below `data/raw/`. No code of a dataset
is ever run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow
from datasets.exceptions import DatasetsError

from rlhf_core.errors import UserError
from tasks.datasets.jsonl import Row
from tasks.datasets.problems import Log, Problems
from tasks.datasets.raw import below_raw, require_hub_id, require_inside
from tasks.datasets.sources.example import RAW, Example
from tasks.datasets.sources.shapes import read_all, read_columns
from tasks.params.ingest import HuggingFaceParams

KEY = "ingest.huggingface.dataset"


def read(params: HuggingFaceParams, raw: Path = RAW, cache: Path | None = None, log: Log = print) -> list[Example]:
    """The examples of the training split and, where one is named, of the held-out split.

    `cache` holds the converted files of a local folder; downloads are kept in the library's own cache. Raises UserError
    for a hub id without a revision, a dataset, configuration or split that does not exist, a hub that does not answer,
    and rows that cannot be read, which `log` prints.
    """
    datasets.disable_progress_bars()
    problems = Problems()
    examples: list[Example] = []
    for split, heldout in ((params.train_split, False), (params.heldout_split, True)):
        if split is not None:
            rows, name = _rows(_load(params, split, raw, cache)), f"{params.dataset}[{split}]"
            examples += read_all(rows, name, name, problems, heldout=heldout, log=log)
    problems.refuse(log)
    return examples


def _load(params: HuggingFaceParams, split: str, raw: Path, cache: Path | None) -> Any:
    try:
        folder = below_raw(raw, params.dataset, KEY)
        if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
            saved = _saved_split(datasets.load_from_disk(str(folder)), split)
            _require_inside([file["filename"] for file in saved.cache_files], raw)
            return saved
        if folder.is_dir():
            place, where = str(folder.resolve()), cache and str(cache)
            builder = datasets.load_dataset_builder(place, params.name, cache_dir=where)
            _require_inside(_data_files(builder), raw)
            return datasets.load_dataset(place, params.name, split=split, cache_dir=where)
        require_hub_id(params.dataset, KEY)
        if params.revision is None:
            raise UserError(
                f"{KEY} {params.dataset}: no folder below {raw}, and a dataset of the hub needs "
                "ingest.huggingface.revision, its commit hash of 40 digits"
            )
        builder = datasets.load_dataset_builder(params.dataset, params.name, revision=params.revision)
        _require_on_hub(_data_files(builder), params.dataset)
        return datasets.load_dataset(params.dataset, params.name, split=split, revision=params.revision)
    except ConnectionError as error:
        raise UserError(
            f"{KEY} {params.dataset}: the hub cannot be reached ({_line(error)}); try again "
            "with a network, or `leash import` a folder and name that"
        ) from None
    except (DatasetsError, OSError, ValueError, RuntimeError, pyarrow.ArrowException) as error:
        raise UserError(
            f"{KEY} {params.dataset}, split {split}: {_line(error)} "
            "(splits: ingest.huggingface.train_split, heldout_split or null)"
        ) from None


def _data_files(builder: Any) -> list[str]:
    """The files that a builder would read. A dataset's README can name any file of the machine, and any address."""
    files = builder.config.data_files or {}
    return [str(file) for split in files.values() for file in split]


def _require_inside(files: list[str], raw: Path) -> None:
    for file in files:
        require_inside(Path(file), raw, KEY)


def _require_on_hub(files: list[str], dataset: str) -> None:
    for file in files:
        if not file.startswith(f"hf://datasets/{dataset}@"):
            raise UserError(
                f"{KEY} {dataset}: its README names the data file {file} of somewhere else; nothing was read"
            )


def _saved_split(saved: Any, split: str) -> Any:
    """A split of a folder written by `save_to_disk`; a single dataset counts as `train`."""
    splits = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
    if split not in splits:
        raise ValueError(f'Unknown split "{split}". Should be one of {list(splits)}.')
    return splits[split]


def _rows(dataset: Any) -> Iterator[tuple[int, Row]]:
    types = {field.name: str(field.type) for field in dataset.features.arrow_schema}
    number, wanted = 0, read_columns(types)
    for table in dataset.select_columns(wanted).with_format("arrow").iter(batch_size=10_000):
        for row in table.to_pylist():
            number += 1
            yield number, row


def _line(error: Exception) -> str:
    cause = f": {error.__cause__}" if error.__cause__ else ""
    return " ".join(f"{error}{cause}".split())[:300]
