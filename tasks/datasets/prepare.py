"""Raw data as the rows of a run: read, cleaned, given a share by prompt, and counted by use."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.demo.world import DemoWorld
from rlhf_core.errors import UserError
from tasks.datasets.problems import Log
from tasks.datasets.sources import cleaning, files
from tasks.datasets.sources.cleaning import Dropped
from tasks.datasets.sources.datasets import PARTS, USES, Divided, rows_by_use
from tasks.datasets.sources.example import RAW, Example, Kind
from tasks.datasets.sources.ratings import mark_low, require_ratings
from tasks.datasets.sources.splits import Assignment, assign
from tasks.params.ingest import DemoParams, FilesParams, IngestParams

KINDS: tuple[Kind, ...] = ("demonstration", "pair", "prompt")
LABELS = {
    "sft_train": "SFT, training",
    "sft_validation": "SFT, validation",
    "reward_train": "reward model, training",
    "reward_validation": "reward model, validation",
    "ppo": "PPO prompts",
    "heldout": "held out",
    "repeated": "left out: same prompt as another row",
    "used_elsewhere": "left out: prompt drawn for another use",
    "rated_too_low": "left out: rated too low to imitate",
    "tie": "left out: tie, only for agreement",
}
SHARED_LABELS = {
    "training": "training",
    "sft_train": "  of these SFT",
    "reward_train": "  of these reward model",
    "ppo": "  of these PPO prompts",
    "validation": "validation",
    "sft_validation": "  of these SFT",
    "reward_validation": "  of these reward model",
    "heldout": "held out",
}
"""Where prompts are shared: the rows of a part, and those of its uses."""
SHARED_NOTE = "prompts are shared (ingest.split.share): a row of training or validation can have several of its uses"


@dataclass(frozen=True)
class Prepared:
    """The clean rows with the shares of their prompts, and what was left out."""

    kept: list[Example]
    labels: list[Example]
    """Clean pairs of `ingest.labels`, which are pairs for the reward model."""
    ties: list[Example]
    """Clean pairs without a preference: for the agreement of annotators, not for training."""
    assignment: Assignment
    dropped: list[Dropped]
    read: Counter[Kind]
    """Rows read, of each kind."""


def prepare(
    params: IngestParams,
    raw: Path = RAW,
    cache: Path | None = None,
    log: Log = print,
    sft: bool = True,
    rewarded: bool = True,
) -> Prepared:
    """Read and clean the raw data, and assign the shares; the labels of `params.labels` change no share. `sft`,
    `rewarded`: whether the stages `sft` and `reward` train. Raises UserError for data that cannot be read, that the
    parameters refuse, or that are too few for a share; several problems are printed by `log`."""
    return arrange(read(params, raw, cache, log), read_labels(params.labels, raw, log), params, log, sft, rewarded)


def arrange(
    examples: list[Example],
    added: list[Example],
    params: IngestParams,
    log: Log = print,
    sft: bool = True,
    rewarded: bool = True,
) -> Prepared:
    """The same for rows that were read; `added` are those of `params.labels`."""
    examples = [example.cut(params.opening_words) for example in examples] + added
    found = Counter(example.kind for example in examples)
    clean, dropped = filter_rows(examples, params, log)
    of_labels = {id(example) for example in added}
    own = [example for example in clean if id(example) not in of_labels]
    kept = [example for example in own if not example.tie]
    require_ratings(kept, params.rating_column, log)
    if (rated := mark_low(kept, params.rating_column, params.sft_rating_above)) is not None and sft:
        log(f"SFT imitates {rated[1]:,} rated answers, those above {rated[0]:g} (ingest.sft_rating_above)")
    assignment = assign(kept, params.split, params.seed, sft, rewarded)
    heldout = [example for example in kept if "heldout" in assignment.share[example.opening]]
    labels, leaked = without_leaks([e for e in clean if id(e) in of_labels], heldout, params, log)
    ties = [example for example in own + labels if example.tie]
    labels = [example for example in labels if not example.tie]
    assignment = assignment.with_unknown((e.opening for e in labels), params.split.validation, params.seed)
    return Prepared(kept, labels, ties, assignment, dropped + leaked, found)


def read(params: IngestParams, raw: Path, cache: Path | None, log: Log) -> list[Example]:
    """The examples of the configured source. Raises UserError, see the sources."""
    if params.source == "demo" and params.demo is not None:
        return demo_examples(params.demo, params.seed)
    if params.source == "huggingface" and params.huggingface is not None:
        from tasks.datasets.sources import huggingface  # a slow import that the other sources do not need

        return huggingface.read(params.huggingface, raw, cache, log)
    assert params.files is not None
    return files.read(params.files, raw, log)


def read_labels(name: str | None, raw: Path, log: Log) -> list[Example]:
    """The pairs of `ingest.labels`. Raises UserError for rows that cannot be read, or that are no pairs."""
    if name is None:
        return []
    found = files.read(FilesParams(path=name, heldout_files=[]), raw, log, key="ingest.labels")
    for example in found:
        if example.kind != "pair":
            raise UserError(
                f"{example.file}, row {example.row}: a {example.kind} among the labels; ingest.labels takes pairs "
                "(prompt, chosen, rejected), other rows belong to ingest.source"
            )
    return found


def demo_examples(params: DemoParams, seed: int) -> list[Example]:
    """Every prompt of the demo world with its demonstrations."""
    world = DemoWorld(seed, params.domains, params.needs)
    return [
        Example("demo", number, False, [{"role": "user", "content": text}], world.demonstration(text, index))
        for number, text in enumerate(world.prompts(params.prompts), start=1)
        for index in range(params.demonstrations_per_prompt)
    ]


def filter_rows(examples: list[Example], params: IngestParams, log: Log) -> tuple[list[Example], list[Dropped]]:
    """The rows to use and the rows left out, leaked training rows among them.

    Raises UserError where the parameters refuse what is found, and when nothing is left.
    """
    kept, dropped = cleaning.clean(examples, params.max_characters)
    if params.on_bad_row == "refuse":
        cleaning.refuse_bad_rows(dropped, log)
    kept, leaked = without_leaks(kept, [example for example in kept if example.heldout], params, log)
    dropped += leaked
    if all(example.heldout for example in kept):
        why = cleaning.summary(dropped) or "the data set is empty"
        raise UserError(f"no training rows left of {len(examples)} read: {why}")
    return kept, dropped


def without_leaks(
    examples: list[Example], heldout: list[Example], params: IngestParams, log: Log
) -> tuple[list[Example], list[Dropped]]:
    """The examples without training rows that open like a held-out row, and those rows. Raises UserError for them where
    `ingest.on_leak` is refuse."""
    leaks = cleaning.find_leaks(examples, heldout)
    if params.on_leak == "refuse":
        cleaning.refuse_leaks(leaks, log)
    leaked = {id(leak.training) for leak in leaks}
    dropped = [Dropped(leak.training.file, leak.training.row, "leaked", leak.training.kind) for leak in leaks]
    return [example for example in examples if id(example) not in leaked], dropped


def use_table(prepared: Prepared, divided: Divided, rewarded: bool = True) -> dict[str, dict[str, Any]]:
    """For each kind of row in the data: rows read, rows of each use, and rows left out by reason. Uses and reasons sum
    to the rows read; where prompts are shared, `PARTS` and reasons do, and a row has several uses. `rewarded`: whether
    there is a reward model."""
    uses = rows_by_use(divided, rewarded) + Counter((row.kind, row.reason) for row in prepared.dropped)
    uses += Counter((example.kind, "tie") for example in prepared.ties)
    named = tuple(dict.fromkeys((*PARTS, *USES))) if divided.assignment.shared else USES
    return {
        kind: {
            "read": prepared.read[kind],
            **{use: uses[kind, use] for use in named},
            "left_out": {reason: uses[kind, reason] for k, reason in sorted(uses) if k == kind and reason not in named},
        }
        for kind in KINDS
        if prepared.read[kind]
    }


def render(table: Mapping[str, Mapping[str, Any]]) -> str:
    """`use_table` as text, a column for each kind of row; of shared prompts the uses are below training and validation,
    those without rows left out."""
    reasons = sorted({reason for column in table.values() for reason in column["left_out"]})
    lines = [["rows", *(f"{kind}s" for kind in table)]]
    shared = any("training" in column for column in table.values())
    for use, label in SHARED_LABELS.items() if shared else ((use, LABELS[use]) for use in USES):
        if not shared or use in PARTS or any(column[use] for column in table.values()):
            lines.append([label, *(f"{column[use]:,}" for column in table.values())])
    lines += [
        [
            LABELS.get(reason, f"left out: {reason}"),
            *(f"{column['left_out'].get(reason, 0):,}" for column in table.values()),
        ]
        for reason in reasons
    ]
    lines.append(["all", *(f"{column['read']:,}" for column in table.values())])
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    text = "\n".join(
        "  ".join([first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(rest, widths[1:], strict=True))])
        for first, *rest in lines
    )
    return f"{text}\n{SHARED_NOTE}" if shared else text
