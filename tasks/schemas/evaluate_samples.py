"""data/evaluate/samples.jsonl: SFT and policy side by side on the held-out prompts."""

from tasks.schemas import columns

PATH = "data/evaluate/samples.jsonl"
SCHEMA = columns.schema(
    {
        "prompt_id": columns.identity(),
        "prompt": columns.prompt(),
        "sft": columns.sampled_text(),
        "policy": columns.sampled_text(),
        "sft_ended": columns.flag(),
        "policy_ended": columns.flag(),
        "gold_sft": columns.number(nullable=True),
        "gold_policy": columns.number(nullable=True),
        "reward_sft": columns.number(),
        "reward_policy": columns.number(),
        "kl": columns.number(),
        "sft_tokens": columns.count(),
        "policy_tokens": columns.count(),
    },
    columns.matching_id(),
    columns.unique("prompt_id"),
)
