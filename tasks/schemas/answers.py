"""data/evaluate/answers.jsonl: every answer of every model to the held-out prompts."""

from tasks.schemas import columns

PATH = "data/evaluate/answers.jsonl"
SCHEMA = columns.schema(
    {
        "model": columns.text(),
        "seed": columns.count(nullable=True),
        "prompt_id": columns.identity(),
        "prompt": columns.prompt(),
        "response": columns.sampled_text(),
        "ended": columns.flag(),
        "tokens": columns.count(),
        "reward": columns.number(),
        "gold": columns.number(nullable=True),
        "kl": columns.number(nullable=True),
    },
    columns.matching_id(),
    columns.unique("model", "seed", "prompt_id"),
)
