"""Files of data below `data/raw/`: which count, in what order, and their examples."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from rlhf_core.errors import UserError
from tasks.datasets.jsonl import LONE_SURROGATE, brief_names
from tasks.datasets.problems import Log, Problems
from tasks.datasets.raw import below_raw
from tasks.datasets.sources.example import RAW, Example
from tasks.datasets.sources.formats import kind_of, read_rows
from tasks.datasets.sources.shapes import read_all
from tasks.params.ingest import FilesParams

READ = "*.jsonl, *.json, *.csv, *.tsv, *.parquet; the first four also as .gz, .bz2, .xz"
UNREAD = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".arrow", ".feather", ".xlsx", ".xls", ".pkl", ".pickle", ".db")
"""Formats of data that Leash does not read: refused. Other files (licences, readmes) are ignored."""
NOT_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "croissant.json")
"""What libraries write about data beside it."""


def read(params: FilesParams, raw: Path = RAW, log: Log = print, key: str = "ingest.files.path") -> list[Example]:
    """All examples of `params.path` below `raw`, in the order of the list, file after file in the order of their names.
    `key`: the parameter that names the paths, for messages.

    Raises UserError for a path that is missing or leads out of `raw`, a folder without data, data that are all held
    out, and for files and rows that cannot be read: several are printed by `log`.
    """
    names: dict[Path, str] = {}
    for path in params.paths:
        place = below_raw(raw, path, key)
        if not place.exists():
            raise UserError(_missing(place, raw, key))
        names |= {file: (RAW / file.relative_to(raw)).as_posix() for file in data_files(place)}
    examples = read_files(names, params, log)
    if all(example.heldout for example in examples):
        patterns = ", ".join(params.heldout_files)
        raise UserError(
            f"{key}: ingest.files.heldout_files ({patterns}) holds out every file of {', '.join(params.paths)}; "
            "nothing to train on"
        )
    return examples


def read_files(names: Mapping[Path, str], params: FilesParams, log: Log) -> list[Example]:
    """All examples of these files, called by their names in messages. Raises UserError for what cannot be read."""
    problems = Problems()
    examples: list[Example] = []
    for path, name in names.items():
        heldout = is_heldout(path.name, params.heldout_files)
        examples += read_all(read_rows(path, problems.add), name, str(path), problems, heldout=heldout, log=log)
    problems.refuse(log)
    return examples


def _missing(place: Path, raw: Path, key: str) -> str:
    """The message for a missing `place`: what `raw` has, and what to do."""
    if Path(f"{place}.dvc").exists():
        return f"{place}: not found, but its .dvc file is there; get the data by `dvc pull`"
    names = sorted(path.name for path in raw.iterdir() if not path.name.startswith(".")) if raw.is_dir() else []
    found = [name for name in names if not name.endswith((".dvc", ".md"))]
    there = f"has {brief_names(found)}" if found else "is empty"
    return f"{place}: not found; {raw} {there}. Set {key} to a name in it, or import the data with `leash import PATH`"


def data_files(place: Path) -> list[Path]:
    """The file itself, or the data files of a folder and its folders, sorted; hidden ones do not count.

    Raises UserError when there is none, and for data in a format that Leash does not read.
    """
    if place.is_file():
        found = [place]
    else:
        hidden = [path for path in place.rglob("*") if path.is_file() and path.name not in NOT_DATA]
        found = sorted(p for p in hidden if not any(part.startswith(".") for part in p.relative_to(place).parts))
    for path in found:
        if LONE_SURROGATE.search(str(path)):
            raise UserError(f"{str(path)!r}: the name of this file is not UTF-8; rename it")
        if not kind_of(path) and path.suffix.lower() in UNREAD:
            raise UserError(f"{path}: Leash reads {READ}; convert this file, unpack it, or move it away")
    data = [path for path in found if kind_of(path)]
    if not data:
        raise UserError(f"{place}: no data file ({READ})")
    return data


def is_heldout(name: str, patterns: list[str]) -> bool:
    """Whether a file name matches one of the patterns; upper and lower case are the same."""
    return any(fnmatchcase(name.lower(), pattern.lower()) for pattern in patterns)
