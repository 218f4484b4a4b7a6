"""data/ingest/preference_prompts.jsonl: prompts whose answers are sampled and judged."""

from tasks.schemas import columns

PATH = "data/ingest/preference_prompts.jsonl"
SCHEMA = columns.schema(
    {"prompt_id": columns.identity(), "prompt": columns.prompt(), "split": columns.split()},
    columns.matching_id(),
    columns.unique("prompt_id"),
)
