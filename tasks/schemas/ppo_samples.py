"""data/ppo/samples.jsonl: the policy's answers to the same held-out prompts, step after step."""

from tasks.schemas import columns

PATH = "data/ppo/samples.jsonl"
SCHEMA = columns.schema(
    {
        "step": columns.count(),
        "prompt_id": columns.identity(),
        "prompt": columns.prompt(),
        "response": columns.sampled_text(),
        "reward": columns.number(),
        "gold": columns.number(nullable=True),
    },
    columns.matching_id(),
    columns.unique("step", "prompt_id"),
)
