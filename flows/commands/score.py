"""`leash score`: adds the scores of this project's models and functions to a file of prompts and responses."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, tee
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from flows.text import dotted
from rlhf_core.config.reward import RewardConfig
from rlhf_core.data.chat import Conversation
from rlhf_core.data.tokenizer import answer_text, encode_prompt, encode_response, load_tokenizer
from rlhf_core.determinism import make_deterministic
from rlhf_core.errors import UserError
from rlhf_core.files import atomic
from rlhf_core.loading import load_config
from rlhf_core.models.ensemble import Ensemble
from rlhf_core.models.hf import context_of
from rlhf_core.models.scorers import Answers, Scorer
from tasks.datasets.jsonl import Row, brief_names
from tasks.datasets.sources.cleaning import clean
from tasks.datasets.sources.example import RAW, Example
from tasks.datasets.sources.files import data_files
from tasks.datasets.sources.formats import read_rows
from tasks.datasets.sources.shapes import normalise
from tasks.params.all import Params
from tasks.params.loader import PARAMS_FILE, parse, read_yaml
from tasks.params.scorer import uses_reward_model
from tasks.stage import provenance
from tasks.stage.progress import Progress
from tasks.stage.trust import warn_of_code
from tasks.training.scalar_models import ScalarModels
from tasks.training.scorer import REWARD, build_scorer, judging_scorer_of

SCORE, STD, JUDGING = "score", "score/std", "score/judge"
"""New columns: the total, the members' standard deviation, and the reward model that PPO is not trained on. Those of
terms are called `score/<term>`."""
CHUNK = 512
"""Rows that are in memory at a time."""

Values = tuple[float, ...]
"""What a row gets, in the order of the new columns."""


@dataclass(frozen=True)
class Answer:
    """A row of the file, with what scorers read of it."""

    number: int
    row: Row
    prompt: Conversation
    text: str
    extra: Mapping[str, object]
    prompt_ids: list[int]
    """Empty where only functions score; so are the ids of the response."""
    response_ids: list[int]


@dataclass(frozen=True)
class Scorers:
    """All that gives an answer a number."""

    scorer: Scorer
    judging: Scorer | None
    """The reward model that PPO is not trained on."""
    names: list[str]
    """The new columns."""
    tokenizer: Any
    """None where only functions score."""
    context: int
    """Longest prompt plus answer, in tokens."""
    max_characters: int
    continues: bool
    """Whether answers continue texts, see `answer_text`."""

    def __call__(self, answers: Sequence[Answer]) -> list[list[float]]:
        """For each of `names` a number for each answer."""
        given = Answers(
            [answer.prompt for answer in answers],
            [answer.text for answer in answers],
            [answer.prompt_ids for answer in answers],
            [answer.response_ids for answer in answers],
            [answer.extra for answer in answers],
        )
        scored = self.scorer(given)
        found = {SCORE: scored.total} | {f"{SCORE}/{name}": part for name, part in scored.parts.items()}
        if self.judging is not None:
            found[JUDGING] = self.judging(given).total
        return [found[name] for name in self.names]


def score_file(root: Path, source: Path, out: Path | None = None) -> str:
    """Write the rows of a JSONL or Parquet file with the columns of `Scorers` to `out`, by default beside the file;
    return one line about it. All rows are checked before the first is scored, and `out` is complete or absent.

    Raises UserError for a file of another kind, for an `out` that exists, where models/reward is needed and is missing
    or was made with other parameters than those of params.yaml, and for the first row that cannot be scored.
    """
    out = _new_file(root, source, out)
    params = parse(Params, read_yaml(root / PARAMS_FILE), file=PARAMS_FILE)
    scorers = load_scorers(root, params)
    count = sum(1 for _ in read_answers(source, scorers))
    if not count:
        raise UserError(f"{source}: no rows, so there is nothing to score")
    scored = _scored(source, scorers, Progress("[score]", count, "row", params.runtime.progress_seconds))
    try:
        with atomic(out) as place:
            if _is_parquet(source):
                _write_parquet(source, place, scorers.names, scored)
            else:
                _write_jsonl(place, scorers.names, scored)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror or error}); name another file with --out") from None
    return f"{out}: {count:,} rows; new columns: {', '.join(scorers.names)}"


def load_scorers(root: Path, params: Any) -> Scorers:
    """Those of `scorer` in params.yaml, and the judging reward model where there is one."""
    precision = params.precision
    make_deterministic(params.seed, params.threads, deterministic=params.deterministic, tf32=precision == "bfloat16")
    terms, limits, trusted = params.scorer, params.runtime.functions, params.trust_remote_code
    names = [SCORE, *(f"{SCORE}/{term.term}" for term in terms if len(terms) > 1)]
    tokenizer: Any = None  # functions read text
    judging, context, models = None, 0, ScalarModels(trusted, precision)
    if uses_reward_model(terms):
        if trusted:
            warn_of_code("score:")
        require_reward_model(root, params.reward)
        tokenizer = load_tokenizer(root / REWARD, trust_remote_code=trusted)
        judging = judging_scorer_of(root, tokenizer, CHUNK, models)
        context = context_of(load_config(root / REWARD, None, trusted))
        names += [STD] * (Ensemble.read(root / REWARD) is not None) + [JUDGING] * (judging is not None)
    scorer = build_scorer(root, terms, limits, tokenizer, CHUNK, models)
    return Scorers(
        scorer, judging, names, tokenizer, context, params.ingest.max_characters, params.base.format == "text"
    )


def require_reward_model(root: Path, wanted: RewardConfig) -> None:
    """Raise UserError where models/reward is missing, or was made with other parameters of `reward`."""
    if not (root / REWARD / "config.json").is_file():
        raise UserError(f"{REWARD}: no reward model here; `leash run reward` makes it")
    recorded = (provenance.read(root / REWARD) or {"params": {}})["params"].get("reward")
    if recorded is None:  # the user's own model
        return
    made = parse(RewardConfig, recorded, "reward", provenance.path_of(Path(REWARD)))
    before, now = dotted(made.model_dump()), dotted(wanted.model_dump())
    changed = [f"reward.{key}: {before.get(key)}, now {now.get(key)}" for key in now if before.get(key) != now[key]]
    if changed:
        raise UserError(
            f"{REWARD}: was made with other parameters than those of {PARAMS_FILE} ({', '.join(changed)}); "
            "`leash run reward` makes it again"
        )


def read_answers(source: Path, scorers: Scorers) -> Iterator[Answer]:
    """The rows one by one, read as `leash import` does. Raises UserError, naming the row, for the first that cannot be
    scored, or has one of the new columns already."""
    rows, copies = tee(read_rows(source))
    for (number, row), example in zip(rows, normalise(copies, str(source), heldout=False), strict=True):
        try:
            yield _answer(row, example, scorers)
        except UserError as error:
            raise UserError(f"{source}, row {number}: {error}") from None


def _answer(row: Row, example: Example, scorers: Scorers) -> Answer:
    if example.response is None:
        raise UserError("expected a prompt with one answer: prompt and response (or completion), or messages")
    if there := [name for name in scorers.names if name in row]:
        raise UserError(f"has the column {brief_names(there)} already; rename it, or score the file without it")
    _, dropped = clean([example], scorers.max_characters)
    if dropped:
        raise UserError(f"{dropped[0].reason} (`ingest` leaves such rows out); correct the row or remove it")
    prompt, text = example.prompt, answer_text(example.response, scorers.continues)
    if scorers.tokenizer is None:
        return Answer(example.row, row, prompt, text, example.extra, [], [])
    prompt_ids = encode_prompt(scorers.tokenizer, prompt)
    response_ids = encode_response(scorers.tokenizer, text, ended=row.get("ended") is not False)
    if (tokens := len(prompt_ids) + len(response_ids)) > scorers.context:
        raise UserError(
            f"prompt and response have {tokens} tokens, and the reward model's context holds {scorers.context}; "
            "shorten the row or remove it"
        )
    return Answer(example.row, row, prompt, text, example.extra, prompt_ids, response_ids)


def _scored(source: Path, scorers: Scorers, progress: Progress) -> Iterator[tuple[Row, Values]]:
    """Each row with its new values. Raises UserError, naming the rows, where a function fails."""
    answers, done, total = read_answers(source, scorers), 0, 0.0
    while chunk := list(islice(answers, CHUNK)):
        try:
            columns = scorers(chunk)
        except UserError as error:
            raise UserError(f"{source}, rows {chunk[0].number} to {chunk[-1].number}: {error}") from None
        done, total = done + len(chunk), total + sum(columns[0])
        progress.update(done, mean=total / done)
        yield from zip((answer.row for answer in chunk), zip(*columns, strict=True), strict=True)


def _write_jsonl(place: Path, names: Sequence[str], scored: Iterator[tuple[Row, Values]]) -> None:
    with place.open("wb") as file:
        file.writelines(_line(row | dict(zip(names, values, strict=True))) for row, values in scored)


def _line(row: Row) -> bytes:
    try:
        return json.dumps(row, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # half a surrogate pair, in a column that is not scored
        return json.dumps(row).encode() + b"\n"


def _write_parquet(source: Path, place: Path, names: Sequence[str], scored: Iterator[tuple[Row, Values]]) -> None:
    """Every column of the file as it is, whatever its type, and the new ones."""
    new = [pyarrow.field(name, pyarrow.float64()) for name in names]
    with pyarrow.parquet.ParquetFile(source) as file:
        schema = pyarrow.schema([*file.schema_arrow, *new], file.schema_arrow.metadata)
        with pyarrow.parquet.ParquetWriter(place, schema) as writer:
            for batch in file.iter_batches(batch_size=CHUNK):
                values = [values for _, values in islice(scored, len(batch))]
                columns = [pyarrow.array(column) for column in zip(*values, strict=True)]
                writer.write_batch(pyarrow.RecordBatch.from_arrays([*batch.columns, *columns], schema=schema))


def _new_file(root: Path, source: Path, out: Path | None) -> Path:
    """Where the result goes. Raises UserError for a source that is not read, and an `out` that cannot be written."""
    if not source.is_file():
        raise UserError(f"{source}: {'is a folder; name a file in it' if source.is_dir() else 'file not found'}")
    data_files(source)
    if source.suffix.lower() not in (".jsonl", ".parquet"):
        raise UserError(f"{source}: scores are added to *.jsonl and *.parquet files; `leash import` reads others")
    out = out or source.with_name(f"{source.stem}.scored{source.suffix}")
    if out.suffix.lower() != source.suffix.lower():
        raise UserError(f"--out {out}: the name must end in {source.suffix}, as that of the file")
    if out.exists():
        raise UserError(f"{out}: is there already; remove it, or name another file with --out")
    if out.resolve().is_relative_to((root / RAW).resolve()):
        raise UserError(f"{out}: stages depend on all of {RAW}; name a file outside it with --out")
    return out


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() == ".parquet"
