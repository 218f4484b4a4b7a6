"""Stage `ingest`: makes the datasets of the run from the raw data."""

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tasks.datasets.jsonl import Row
from tasks.datasets.labels import as_text, contradictions, label_figures
from tasks.datasets.named import read_prompts, read_text
from tasks.datasets.prepare import Prepared, prepare, render, use_table
from tasks.datasets.raw import (
    EVALUATION_PROMPTS,
    PRETRAINED,
    REWARD_BASE,
    TEXTS,
    hashes_of_files,
    hashes_of_reward_base,
)
from tasks.datasets.sources import cleaning
from tasks.datasets.sources.datasets import assemble, divide
from tasks.datasets.sources.example import RAW
from tasks.params.ingest import IngestParams
from tasks.params.loader import RAW_FILES, SFT_ENABLED
from tasks.params.scorer import REWARD_MODEL
from tasks.stage.stage import Stage


def execute(stage: Stage[IngestParams]) -> None:
    """Make data/ingest/ and metrics/ingest.json. Raises UserError for data that cannot be used."""
    cache, sft, rewarded = stage.state_dir / "datasets", stage.blocks[SFT_ENABLED], stage.blocks[REWARD_MODEL]
    prepared = prepare(stage.params, RAW, cache, stage.log, sft, rewarded)
    column = stage.params.rating_column
    divided = divide(prepared.kept, prepared.assignment, stage.params.seed, prepared.labels, column)
    sizes: Counter[str] = Counter()
    for name, rows in assemble(divided).items():
        stage.outputs.write_jsonl(f"data/ingest/{name}.jsonl", counted(rows, name, sizes))
    if column is None:
        del sizes["ratings"]
    copy_named(stage, stage.blocks[RAW_FILES])
    dropped = ({"file": row.file, "row": row.row, "reason": row.reason} for row in prepared.dropped)
    stage.outputs.write_jsonl("data/ingest/dropped.jsonl", dropped)
    table = use_table(prepared, divided, rewarded)
    labels = label_figures([*prepared.kept, *prepared.labels, *prepared.ties])
    stage.write_metrics(
        {
            "source": stage.params.source,
            **counts(prepared),
            **sizes,
            **({"shared_prompts": True} if prepared.assignment.shared else {}),
            "rows_by_use": table,
            **({"labels": labels} if labels else {}),
        }
    )
    for line in render(table).splitlines():
        stage.log(line)
    if labels:
        stage.log(as_text(labels))
    for line in contradictions(e for e in (*prepared.kept, *prepared.labels) if e.kind == "pair"):
        stage.log(line)
    if prepared.dropped:
        stage.log(f"left out {cleaning.summary(prepared.dropped)}; all rows: data/ingest/dropped.jsonl")


def copy_named(stage: Stage[IngestParams], named: Mapping[str, Any]) -> None:
    """Make the files of data/ingest/ for the files that the parameters of later stages name. The evaluation
    prompts are the held-out ones where none are named."""
    if named["prompts"] is None:
        shutil.copyfile(stage.out("data/ingest/heldout.jsonl"), stage.out(EVALUATION_PROMPTS))
    else:
        stage.outputs.write_jsonl(EVALUATION_PROMPTS, read_prompts(RAW, named["prompts"]))
    texts = stage.out(TEXTS)
    texts.mkdir(parents=True)
    (texts / "README.md").write_text("Copies of the texts for PPO-ptx that params.yaml names.\n", encoding="utf-8")
    for name in named["texts"]:
        (texts / name).parent.mkdir(parents=True, exist_ok=True)
        (texts / name).write_text(read_text(RAW, name), encoding="utf-8", newline="")
    stage.outputs.write_json(PRETRAINED, hashes_of_files(RAW, named["pretrained"]))
    stage.outputs.write_json(REWARD_BASE, hashes_of_reward_base(RAW, named["reward_base"]))


def counted(rows: Iterable[Row], name: str, sizes: Counter[str]) -> Iterator[Row]:
    """The rows, counted as `name` while they pass."""
    sizes[name] = 0
    for row in rows:
        sizes[name] += 1
        yield row


def counts(prepared: Prepared) -> dict[str, Any]:
    """Rows read, clean rows, and rows dropped by reason; a reason that did not occur counts 0. Only texts can be too
    short."""
    found = Counter(row.reason for row in prepared.dropped)
    total = prepared.read.total()
    return {
        "rows_read": total,
        "rows_used": total - len(prepared.dropped) - len(prepared.ties),
        "dropped": {reason: found[reason] for reason in cleaning.REASONS if found[reason] or reason != "too_short"},
    }
