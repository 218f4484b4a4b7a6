"""data/ingest/heldout.jsonl: prompts that no training stage sees, with a demonstration where there is one."""

from tasks.schemas import columns

PATH = "data/ingest/heldout.jsonl"
SCHEMA = columns.schema(
    {
        "prompt_id": columns.identity(),
        "prompt": columns.prompt(),
        "response": columns.text(nullable=True),
    },
    columns.matching_id(),
    columns.unique("prompt_id"),
)
