"""data/ingest/ppo_prompts.jsonl: prompts that the policy answers in PPO."""

from tasks.schemas import columns

PATH = "data/ingest/ppo_prompts.jsonl"
SCHEMA = columns.schema(
    {"prompt_id": columns.identity(), "prompt": columns.prompt()},
    columns.matching_id(),
    columns.unique("prompt_id"),
)
