"""data/ingest/pairs.jsonl: preferences that the data set brings; empty when it brings none."""

from tasks.schemas import columns

PATH = "data/ingest/pairs.jsonl"
SCHEMA = columns.schema(
    {
        "prompt_id": columns.identity(),
        "prompt": columns.prompt(),
        "chosen": columns.text(),
        "rejected": columns.text(),
        "split": columns.split(),
    },
    columns.matching_id(),
    columns.different_answers(),
    columns.one_split_per_prompt(),
    columns.unique("prompt_id", "chosen", "rejected"),
    may_be_empty=True,
)
