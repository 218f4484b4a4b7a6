"""`leash score`: adds the scores of this project's models and functions to a file of prompts and responses."""

import json
from collections.abc import Iterator, Sequence
from itertools import islice, tee
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet

from flows.text import dotted
from rlhf_core.config.reward import RewardConfig
from rlhf_core.data.scorer import Answers, Observed, Scorer
from rlhf_core.data.tokenizer import answer_text, encode_prompt, encode_response, load_tokenizer
from rlhf_core.determinism import make_deterministic
from rlhf_core.errors import UserError
from rlhf_core.files import atomic
from rlhf_core.loading import load_config
from rlhf_core.models.ensemble import JUDGE, Ensemble
from rlhf_core.models.hf import context_of
from rlhf_core.models.scorers import TextScorer, parts_of
from tasks.datasets.jsonl import Row, brief_names
from tasks.datasets.sources.cleaning import clean
from tasks.datasets.sources.example import RAW, Example
from tasks.datasets.sources.formats import read_rows
from tasks.datasets.sources.shapes import normalise
from tasks.params.all import Params
from tasks.params.loader import PARAMS_FILE, parse, read_yaml
from tasks.params.scorer import functions, uses_reward_model
from tasks.stage import provenance
from tasks.stage.progress import Progress
from tasks.stage.trust import warn_of_code
from tasks.training.scalar_models import ScalarModels
from tasks.training.scorer import REWARD, build_scorer, judging_scorer_of

SCORE = "score"
"""New column: the total. Its parts are `score/<part>`: terms, the members' standard deviation (`std`), and the reward
model that PPO is not trained on (`judge`)."""
CHUNK = 512
"""Rows that are in memory at a time."""


class Answer(NamedTuple):
    """A row of the file, with what scorers read of it."""

    row: Row
    example: Example
    text: str
    prompt_ids: list[int]
    """Empty without the run's reward model; so are the ids of the response."""
    response_ids: list[int]


class Scorers:
    """All that gives an answer a number: `scorer` of params.yaml, and the judging reward model where there is one."""

    def __init__(self, root: Path, params: Any) -> None:
        """Raises UserError where models/reward is needed and is missing, or was made with other parameters."""
        self.params, terms, trusted, precision = params, params.scorer, params.trust_remote_code, params.precision
        tf32 = precision == "bfloat16"
        make_deterministic(params.seed, params.threads, deterministic=params.deterministic, tf32=tf32)
        parts = [term.name for term in terms if len(terms) > 1]
        self.tokenizer: Any = None  # functions and models from elsewhere read text
        models, folder, judging = ScalarModels(trusted, precision), root / REWARD, None
        if trusted and not all(functions([term]) for term in terms):
            warn_of_code("score:")
        if uses_reward_model(terms):
            require_reward_model(folder, params.reward)
            self.tokenizer = load_tokenizer(folder, trust_remote_code=trusted)
            judging = judging_scorer_of(root, self.tokenizer, CHUNK, models)
            self.context = context_of(load_config(folder, None, trusted))
            parts += ["std"] * (Ensemble.read(folder) is not None)
        limits, continues = params.runtime.functions, params.base.format == "text"
        scorer = build_scorer(root, terms, limits, self.tokenizer, CHUNK, models, continues)
        self.readers = list(parts_of(scorer, TextScorer))
        observers: dict[str, Scorer] = {} if judging is None else {JUDGE: judging}
        self.scorer = Observed(scorer, observers)
        self.names = [SCORE, *(f"{SCORE}/{part}" for part in (*parts, *observers))]

    def read(self, source: Path) -> Iterator[Answer]:
        """The rows one by one, read as `leash import` does. Raises UserError, naming the row, for the first that cannot
        be scored, or has one of the new columns already."""
        rows, copies = tee(read_rows(source))
        for (number, row), example in zip(rows, normalise(copies, str(source), heldout=False), strict=True):
            try:
                yield self._answer(row, example)
            except UserError as error:
                raise UserError(f"{source}, row {number}: {error}") from None

    def _answer(self, row: Row, example: Example) -> Answer:
        if example.response is None:
            raise UserError("expected a prompt with one answer: prompt and response (or completion), or messages")
        if there := [name for name in self.names if name in row]:
            raise UserError(f"has the column {brief_names(there)} already; rename it, or score the file without it")
        _, dropped = clean([example], self.params.ingest.max_characters)
        if dropped:
            raise UserError(f"{dropped[0].reason} (`ingest` leaves such rows out); correct the row or remove it")
        text = answer_text(example.response, self.params.base.format == "text")
        for model in self.readers:
            model.encode(example.prompt, text)
        if self.tokenizer is None:
            return Answer(row, example, text, [], [])
        prompt_ids = encode_prompt(self.tokenizer, example.prompt)
        response_ids = encode_response(self.tokenizer, text, ended=False)  # the scorer adds the end
        if (tokens := len(prompt_ids) + len(response_ids)) > self.context:
            raise UserError(
                f"prompt and response have {tokens} tokens, and the reward model's context holds {self.context}; "
                "shorten the row or remove it"
            )
        return Answer(row, example, text, prompt_ids, response_ids)

    def score(self, source: Path, progress: Progress) -> Iterator[tuple[Row, tuple[float, ...]]]:
        """Each row with a value for each of `names`. Raises UserError, naming the rows, where a function fails."""
        answers, done, total = self.read(source), 0, 0.0
        while chunk := list(islice(answers, CHUNK)):
            rows, examples, texts, prompt_ids, response_ids = zip(*chunk, strict=True)
            prompts, extras = [one.prompt for one in examples], [one.extra for one in examples]
            given = Answers(prompts, texts, prompt_ids, response_ids, extras)
            try:
                scored = self.scorer(given)
                found = {SCORE: scored.total} | {f"{SCORE}/{name}": part for name, part in scored.parts.items()}
            except UserError as error:
                raise UserError(f"{source}, rows {examples[0].row} to {examples[-1].row}: {error}") from None
            done, total = done + len(chunk), total + sum(scored.total)
            progress.update(done, mean=total / done)
            yield from zip(rows, zip(*(found[name] for name in self.names), strict=True), strict=True)


def score_file(root: Path, source: Path, out: Path | None = None) -> str:
    """Write the rows of a JSONL or Parquet file with the columns of their scores to `out`, by default beside the file;
    return one line about it. All rows are checked before the first is scored, and `out` is complete or absent.

    Raises UserError for a file of another kind, for an `out` that exists, where models/reward is needed and is missing
    or was made with other parameters than those of params.yaml, and for the first row that cannot be scored.
    """
    kind = source.suffix.lower()
    out = out or source.with_name(f"{source.stem}.scored{source.suffix}")
    if not source.is_file():
        raise UserError(f"{source}: {'is a folder; name a file in it' if source.is_dir() else 'file not found'}")
    if kind not in (".jsonl", ".parquet"):
        raise UserError(f"{source}: scores are added to *.jsonl and *.parquet files; `leash import` reads others")
    if out.suffix.lower() != kind:
        raise UserError(f"--out {out}: the name must end in {source.suffix}, as that of the file")
    if out.exists():
        raise UserError(f"{out}: is there already; remove it, or name another file with --out")
    if out.resolve().is_relative_to((root / RAW).resolve()):
        raise UserError(f"{out}: stages depend on all of {RAW}; name a file outside it with --out")
    params = parse(Params, read_yaml(root / PARAMS_FILE), file=PARAMS_FILE)
    scorers = Scorers(root, params)
    count = sum(1 for _ in scorers.read(source))
    if not count:
        raise UserError(f"{source}: no rows, so there is nothing to score")
    scored = scorers.score(source, Progress("[score]", count, "row", params.runtime.progress_seconds))
    try:
        with atomic(out) as partial:
            if kind == ".parquet":
                _write_parquet(source, partial, scorers.names, scored)
            else:
                with partial.open("wb") as file:
                    for row, new in scored:
                        line = json.dumps(row | dict(zip(scorers.names, new, strict=True)), ensure_ascii=False)
                        file.write(line.encode(errors="backslashreplace") + b"\n")  # half a surrogate pair: \ud800
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror or error}); name another file with --out") from None
    return f"{out}: {count:,} rows; new columns: {', '.join(scorers.names)}"


def require_reward_model(folder: Path, wanted: RewardConfig) -> None:
    """Raise UserError where the model is missing, or was made with other parameters of `reward`."""
    if not (folder / "config.json").is_file():
        raise UserError(f"{REWARD}: no reward model here; `leash run reward` makes it")
    recorded = (provenance.read(folder) or {"params": {}})["params"].get("reward")
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


def _write_parquet(
    source: Path, target: Path, names: Sequence[str], scored: Iterator[tuple[Row, tuple[float, ...]]]
) -> None:
    """Every column of the file as it is, whatever its type, and the new ones."""
    new = [pyarrow.field(name, pyarrow.float64()) for name in names]
    with pyarrow.parquet.ParquetFile(source) as file:
        schema = pyarrow.schema([*file.schema_arrow, *new], file.schema_arrow.metadata)
        with pyarrow.parquet.ParquetWriter(target, schema) as writer:
            for batch in file.iter_batches(batch_size=CHUNK):
                values = [values for _, values in islice(scored, len(batch))]
                columns = [pyarrow.array(column) for column in zip(*values, strict=True)]
                writer.write_batch(pyarrow.RecordBatch.from_arrays([*batch.columns, *columns], schema=schema))
