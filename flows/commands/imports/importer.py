"""`leash import PATH`: check a data set, copy it to data/raw/, and put it under DVC."""

import filecmp
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import groupby, islice
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from flows.commands.imports.rewriting import Rewriting
from flows.commands.imports.summary import summary
from rlhf_core.errors import UserError
from rlhf_core.files import remove
from tasks.datasets.jsonl import brief_names, write_jsonl
from tasks.datasets.prepare import arrange, render, use_table
from tasks.datasets.problems import Log
from tasks.datasets.sources import cleaning
from tasks.datasets.sources.datasets import divide
from tasks.datasets.sources.example import RAW, Example
from tasks.datasets.sources.exports import is_export
from tasks.datasets.sources.files import data_files, read_files
from tasks.datasets.sources.formats import read_rows, stem_of
from tasks.datasets.sources.shapes import VOTED, layout_of
from tasks.datasets.sources.verdicts import verdict_columns
from tasks.params.all import Params
from tasks.params.ingest import FilesParams, IngestParams, SplitParams
from tasks.params.loader import PARAMS_FILE, parse, read_yaml

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DOCUMENTS = ("licen", "copying", "notice", "readme", "citation")
"""Beginnings of the names of files and folders that are copied with the data."""
SCANNED = 10_000
"""Rows of a file whose columns are printed."""
SPLIT = SplitParams(demonstrations=0.5, preferences=0.3, ppo=0.2, heldout=0.1, validation=0.1)
"""The shares of the table, unless params.yaml has others."""


def import_data(
    source: Path,
    root: Path,
    force: bool = False,
    log: Log = print,
    rewriting: Rewriting | None = None,
    check: Callable[[list[Example]], object] | None = None,
) -> tuple[Path, list[Example]]:
    """Copy a data file, or a folder of them, to `root`/data/raw/<name> and run `dvc add`. Returns the new path and the
    clean examples. `force` replaces other data of the same name; `rewriting` changes every row on the way, the copies
    are then JSONL files; `log` prints what was found, and the parameters to set; `check` can raise UserError for the
    clean examples, before anything is copied.

    Every row is read before anything is copied, and the copy is complete or absent. Raises UserError for a missing
    source, rows that cannot be read (file and row), data of which no row is left, other data of the same name without
    `force`, a full disk, and a failing `dvc add`.
    """
    source = source.expanduser()
    real = source.resolve()
    # The name of a link says what the file is, as in Hugging Face's cache.
    source = source.parent.resolve() / source.name if source.is_symlink() else real
    if not source.exists():
        raise UserError(f"{source}: file not found")
    if not (root / ".dvc").is_dir():
        raise UserError(f"{root}: not a DVC repository; run this in a clone of the project")
    with TemporaryDirectory() as folder:
        data = source if rewriting is None else _rewritten(source, Path(folder), rewriting)
        target = (root / RAW).resolve() / data.name
        if real == target and data != source:
            raise UserError(f"{source}: lies in {RAW} already; move it out to import it with changed rows")
        if real != target and (source.name.startswith(".") or target in real.parents or real in target.parents):
            name = RAW / source.name
            raise UserError(f"{source}: cannot become {name}; put the data into a folder with a name of its own first")
        examples, found = describe(data, source, root, log)
        if check is not None:
            check(examples)
        files = _files_to_copy(data)
        if data.resolve() == target or _equal(files, data, target):
            dvc_add(target, root)
        elif target.exists() and not force:
            raise UserError(f"{target}: holds other data; use --force to replace them, or rename the source")
        else:
            _replace(target, files, data, root)
    for line in found:
        log(line)
    place, ignore = (RAW / target.name).as_posix(), (RAW / ".gitignore").as_posix()
    kept = [f"{place}.dvc", *([ignore] if (root / ignore).exists() else [])]
    log(f"{place}: tracked by DVC; for git: git add {shlex.join(kept)}")
    log(f"to undo it: dvc remove {shlex.quote(kept[0])} && rm -r {shlex.quote(place)}")
    log("set in params.yaml (examples/own-data.yaml is a complete file to start from):")
    if any(example.annotator for example in examples) and all(example.kind == "pair" for example in examples):
        log(f"  ingest.labels: {json.dumps(target.name)}    (added to the data of ingest.source)")
        log("or, where these labels are all of the data:")
    log("  ingest.source: files")
    log(f"  ingest.files.path: {json.dumps(target.name)}    (or a list of names)")
    if any(example.rating is not None for example in examples):
        log("  ingest.rating_column: label, preferences.source: ratings    (the reward model learns from the labels)")
    if all(example.kind == "prompt" for example in examples):
        log("  sft.enabled: false    (there is no answer to imitate: the base model must answer already)")
        log("  scorer: [{term: FILE.py, weight: 1.0}]    (a function below rewards/: there are no pairs)")
    return target, examples


def _rewritten(source: Path, folder: Path, rewriting: Rewriting) -> Path:
    """A copy of the source with rewritten rows, in `folder`. Raises UserError for a row that cannot be rewritten, and
    for two files that would become one."""
    target = folder / (source.name if source.is_dir() else f"{stem_of(source)}.jsonl")
    data, seen = data_files(source), set[str]()
    for file in _files_to_copy(source):
        path, place = source / file, target / file
        if path in data:
            place = place if source.is_file() else place.with_name(f"{stem_of(place)}.jsonl")
            if place.exists():
                raise UserError(f"{path}: a second file that would become {place.name}; rename one of them")
            try:
                write_jsonl(place, rewriting.rows(path, seen))
            except OSError as error:
                raise UserError(
                    f"{place}: cannot write the changed rows ({error.strerror}); set TMPDIR to a folder with room"
                ) from None
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
    if missing := sorted({*rewriting.names, *rewriting.ignored} - seen):
        raise UserError(f"{source}: no column or key {brief_names(missing)} (found: {brief_names(sorted(seen))})")
    return target


def describe(data: Path, source: Path, root: Path, log: Log) -> tuple[list[Example], list[str]]:
    """The clean examples; what the files hold, a line for each; which rows `ingest` would leave out or refuse; what it
    would use each row for; and what `summary` says of them. Raises UserError for rows that cannot be read, called by
    their place in `source`; `log` lists them before."""
    names = {path: path.relative_to(data if data.is_dir() else data.parent).as_posix() for path in data_files(data)}
    called = {path: str(source / name if source.is_dir() else source) for path, name in names.items()}
    split, sft, tokenizer = _of_the_run(root)
    params = IngestParams(source="files", seed=1, files=FilesParams(path="data"), split=split, on_leak="drop")
    whole = read_files(called, FilesParams(path="data"), log)
    examples = [example.cut(params.opening_words) for example in whole]
    by_file = {path: list(found) for path, found in groupby(examples, key=attrgetter("file"))}
    lines = []
    for path, name in names.items():
        lines.append(_file_line(path, name, by_file[called[path]]))
        for example in by_file[called[path]]:
            example.file = name
    if any(example.is_text for example in whole):
        lines.append(
            f"texts: the first {params.opening_words} words are the prompt (ingest.opening_words); set base.format: "
            "text"
        )
    kept, dropped = cleaning.clean(examples, params.max_characters)
    if lost := set(names.values()) - {example.file for example in kept}:
        of_file = [row for row in dropped if row.file == min(lost)]
        raise UserError(f"{source}: {min(lost)}: no row is left of {len(of_file):,}: {cleaning.summary(of_file)}")
    if dropped:
        found = cleaning.list_bad_rows(dropped, lines.append)
        lines.append(f"{len(dropped)} rows that ingest leaves out (ingest.on_bad_row: refuse stops instead): {found}")
    if leaks := cleaning.find_leaks(kept):
        lines.append(cleaning.list_leaks(leaks, lines.append))
    if not (paired := any(example.kind == "pair" and not example.heldout for example in examples)):
        lines.append(
            "no pairs (prompt, chosen, rejected): a reward model needs them, or ratings (ingest.rating_column); a "
            "function as reward needs none (scorer)"
        )
    answered = any(example.kind != "prompt" for example in examples)
    try:
        prepared = arrange(examples, [], params, lines.append, sft and answered)
        divided = divide(prepared.kept, prepared.assignment, params.seed)
        lines += render(use_table(prepared, divided, paired or answered)).splitlines()
    except UserError as error:
        lines.append(f"by itself this is too little for a run: {error}")
    return kept, lines + summary(kept, tokenizer)


def _of_the_run(root: Path) -> tuple[SplitParams, bool, "PreTrainedTokenizerBase | None"]:
    """The shares that params.yaml has for own data, whether SFT trains, and the tokenizer of its model where that is in
    a folder here."""
    try:
        params = parse(Params, read_yaml(root / PARAMS_FILE))
    except UserError:  # it is reported by the stage `check`
        return SPLIT, True, None
    split, base = SPLIT if params.ingest.source == "demo" else params.ingest.split, params.base
    folder = root / RAW / base.pretrained.model if base.pretrained else None
    if base.source != "pretrained" or folder is None or not folder.exists():
        return split, params.sft.enabled, None
    from rlhf_core.data.tokenizer import complete, read_tokenizer  # imports transformers
    from rlhf_core.gguf import gguf_in, load_gguf_tokenizer

    gguf = gguf_in(folder)
    tokenizer = (
        load_gguf_tokenizer(gguf) if gguf else read_tokenizer(folder, trust_remote_code=params.trust_remote_code)
    )
    repaired, _ = complete(tokenizer, base.pad_token, base.format == "text", base.chat_template_kwargs)
    return split, params.sft.enabled, repaired


def _file_line(path: Path, name: str, examples: list[Example]) -> str:
    """Rows by kind, the columns of the first rows, the further ones by themselves, and whether the file is held out."""
    kinds = Counter(example.kind for example in examples)
    line = f"{name}: " + ", ".join(f"{count:,} {kind}{'s' * (count != 1)}" for kind, count in kinds.items())
    line += ", held out (ingest.files.heldout_files)" if examples[0].heldout else ""
    rows = [row for _, row in islice(read_rows(path), SCANNED)]
    if is_export(rows[0]):
        return line
    found = tuple(dict.fromkeys(column for row in rows for column in row))
    layout = layout_of(tuple(rows[0]))
    rated = any(example.rating is not None for example in examples)
    read = {column for row in rows for column in set(row) - set(layout_of(tuple(row)).further)}
    further = [column for column in found if column not in read or (column == layout.label and not rated)]
    if layout.shape is VOTED:
        verdict = verdict_columns(tuple(rows[0]), rows[0], layout.answers)
        further = [column for column in further if column not in verdict]
    numbers = [c for c in further if kinds["demonstration"] and isinstance(rows[0].get(c), int | float)]
    line += f"; columns: {brief_names(column for column in found if column not in further)}"
    line += f"; not read, kept for reward functions: {brief_names(further)}" if further else ""
    line += f"; numbers, which can be ratings (ingest.rating_column): {brief_names(numbers)}" if numbers else ""
    splits = {str(row.get("split")) for row in rows} | set(Path(name).parts[:-1])
    if not examples[0].heldout and {"test", "validation", "valid", "eval"} & splits:
        line += "; all rows train, also those of another split: put held-out rows into a file test.jsonl"
    return line


def _files_to_copy(source: Path) -> list[Path]:
    """Data files, licences and readmes, relative to `source`; a source that is a file is the path "."."""
    if source.is_file():
        return [Path()]
    below = (path.relative_to(source) for path in source.rglob("*") if path.is_file())
    documents = {path for path in below if any(part.lower().startswith(DOCUMENTS) for part in path.parts)}
    return sorted(documents | {path.relative_to(source) for path in data_files(source)})


def _equal(files: list[Path], source: Path, target: Path) -> bool:
    """Whether the target holds exactly the files that would be copied, byte for byte."""
    below = sorted(path.relative_to(target) for path in target.rglob("*") if path.is_file())
    present = [Path()] if target.is_file() else below
    return present == files and all(filecmp.cmp(source / file, target / file, shallow=False) for file in files)


def _replace(target: Path, files: list[Path], source: Path, root: Path) -> None:
    """Replace the target by a copy and run `dvc add`; when one of them fails, the old target is put back. The copy is
    made beside data/raw/, on the same disk."""
    target.parent.mkdir(parents=True, exist_ok=True)
    had_target = target.exists()
    with TemporaryDirectory(dir=target.parent.parent, prefix=".import.") as folder:
        fresh, old = Path(folder) / "new", Path(folder) / "old"
        try:
            for file in files:
                (fresh / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source / file, fresh / file)
            if had_target:
                target.replace(old)
            fresh.replace(target)
            dvc_add(target, root)
        except BaseException as error:
            if old.exists() or not had_target:
                remove(target)
            if old.exists():
                old.replace(target)
            if isinstance(error, OSError):
                raise UserError(f"{target}: cannot copy the data there ({error.strerror or error})") from None
            raise


def dvc_add(target: Path, root: Path) -> None:
    """Put a file or folder of the project at `root` under DVC. Raises UserError with DVC's error."""
    command = [sys.executable, "-m", "dvc", "--wait-for-lock", "add", "--quiet", str(target)]
    environment = os.environ | {"DVC_NO_ANALYTICS": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        raise UserError(f"{target}: dvc add failed ({lines[0].removeprefix('ERROR: ')}); nothing was changed")
