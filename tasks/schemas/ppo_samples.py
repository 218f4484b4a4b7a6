"""data/ppo/samples.jsonl: the policy's answers to the same held-out prompts, along the run and at every alert."""

from tasks.schemas import columns

PATH = "data/ppo/samples.jsonl"
SCHEMA = columns.schema(
    {
        "step": columns.count(),
        "reason": columns.text(),
        "prompt_id": columns.identity(),
        "prompt": columns.prompt(),
        "response": columns.sampled_text(),
        "reward": columns.number(),
        "gold": columns.number(nullable=True),
    },
    columns.matching_id(),
    columns.unique("step", "prompt_id"),
)
