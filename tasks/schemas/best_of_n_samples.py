"""data/best_of_n/samples.jsonl: many answers of the SFT model to each prompt that `evaluate` asks, with the reward
model's scores; empty where the stage is switched off."""

from tasks.schemas import columns

PATH = "data/best_of_n/samples.jsonl"
SCHEMA = columns.schema(
    {
        "prompt_id": columns.identity(),
        "prompt": columns.prompt(),
        "sample": columns.count(),
        "response": columns.sampled_text(),
        "response_ids": columns.token_ids(),
        "tokens": columns.count(),
        "ended": columns.flag(),
        "reward": columns.number(),
    },
    columns.matching_id(),
    columns.unique("prompt_id", "sample"),
    may_be_empty=True,
)
