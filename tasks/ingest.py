"""Stage `ingest`: raw data in, the five datasets of the run out. The order of the work stands here; sources, cleaning
and splits in `tasks/datasets/sources/`, the columns of the results in `tasks/schemas/`."""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rlhf_core.errors import UserError
from tasks.datasets.jsonl import Row
from tasks.datasets.sources import cleaning, demo, files
from tasks.datasets.sources.cleaning import Dropped
from tasks.datasets.sources.datasets import assemble
from tasks.datasets.sources.example import RAW, Example
from tasks.datasets.sources.splits import assign
from tasks.params.ingest import IngestParams
from tasks.stage.run import run
from tasks.stage.stage import Stage


def execute(stage: Stage[IngestParams]) -> None:
    """Read, clean, split, write. Raises UserError for data that the parameters tell to refuse."""
    params = stage.params
    examples = read(params, RAW, stage.state_dir / "datasets")
    kept, dropped = sift(examples, params)
    sizes: Counter[str] = Counter()
    for name, rows in assemble(kept, assign(kept, params.split, params.seed), params.seed).items():
        stage.outputs.write_jsonl(f"data/ingest/{name}.jsonl", counted(rows, name, sizes))
    stage.outputs.write_jsonl("data/ingest/dropped.jsonl", (row._asdict() for row in dropped))
    stage.write_metrics({"source": params.source, **counts(examples, dropped), **sizes})
    stage.say(", ".join(f"{size} {name}" for name, size in sizes.items()))
    if dropped:
        stage.say(f"left out {cleaning.summary(dropped)}; all rows: data/ingest/dropped.jsonl")


def read(params: IngestParams, raw: Path = RAW, cache: Path | None = None) -> list[Example]:
    """The examples of the configured source. Raises UserError, see the sources."""
    if params.source == "demo" and params.demo is not None:
        return demo.read(params.demo, params.seed)
    if params.source == "huggingface" and params.huggingface is not None:
        from tasks.datasets.sources import huggingface  # a slow import that the other sources do not need

        return huggingface.read(params.huggingface, raw, cache)
    assert params.files is not None
    return files.read(params.files, raw)


def sift(examples: list[Example], params: IngestParams) -> tuple[list[Example], list[Dropped]]:
    """The rows to use and the rows left out, leaked training rows among them.

    Raises UserError where the parameters refuse what is found, and when nothing is left.
    """
    kept, dropped = cleaning.clean(examples, params.max_characters)
    if params.on_bad_row == "refuse":
        cleaning.refuse_bad_rows(dropped)
    leaks = cleaning.find_leaks(kept)
    if params.on_leak == "refuse":
        cleaning.refuse_leaks(leaks)
    leaked = {id(leak.training) for leak in leaks}
    kept = [example for example in kept if id(example) not in leaked]
    dropped += [Dropped(leak.training.file, leak.training.row, "leaked") for leak in leaks]
    if all(example.heldout for example in kept):
        why = cleaning.summary(dropped) or "the data set is empty"
        raise UserError(f"no training rows left of {len(examples)} read: {why}")
    return kept, dropped


def counted(rows: Iterable[Row], name: str, sizes: Counter[str]) -> Iterator[Row]:
    """The rows, counted as `name` while they pass."""
    sizes[name] = 0
    for row in rows:
        sizes[name] += 1
        yield row


def counts(examples: list[Example], dropped: list[Dropped]) -> dict[str, Any]:
    """Rows read, used and dropped by reason; a reason that did not occur counts 0."""
    found = Counter(row.reason for row in dropped)
    return {
        "rows_read": len(examples),
        "rows_used": len(examples) - len(dropped),
        "dropped": {reason: found[reason] for reason in cleaning.REASONS},
    }


if __name__ == "__main__":
    run("ingest", IngestParams, execute)
