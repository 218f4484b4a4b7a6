"""data/ingest/demonstrations.jsonl: answers to imitate."""

from tasks.schemas import columns

PATH = "data/ingest/demonstrations.jsonl"
SCHEMA = columns.schema(
    {
        "prompt_id": columns.identity(),
        "prompt": columns.prompt(),
        "response": columns.text(),
        "split": columns.split(),
    },
    columns.matching_id(),
    columns.one_split_per_prompt(),
    columns.unique("prompt_id", "response"),
)
