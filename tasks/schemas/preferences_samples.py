"""data/preferences/samples.jsonl: what the SFT model answered to the preference prompts."""

from tasks.schemas import columns

PATH = "data/preferences/samples.jsonl"
SCHEMA = columns.schema(
    {
        "prompt_id": columns.identity(),
        "prompt": columns.prompt(),
        "sample": columns.count(),
        "response": columns.sampled_text(),
        "response_ids": columns.token_ids(),
        "ended": columns.flag(),
        "split": columns.split(),
    },
    columns.matching_id(),
    columns.one_split_per_prompt(),
    columns.unique("prompt_id", "sample"),
)
