"""data/rejection_sft/samples.jsonl: the answer that was kept for each prompt, and fine-tuned on or measured with; empty
where the stage is switched off."""

from tasks.schemas import columns

PATH = "data/rejection_sft/samples.jsonl"
SCHEMA = columns.schema(
    {
        "prompt_id": columns.identity(),
        "prompt": columns.prompt(),
        "response": columns.sampled_text(),
        "response_ids": columns.token_ids(),
        "reward": columns.number(),
        "mean_reward": columns.number(),
        "ended": columns.flag(),
        "split": columns.split(),
    },
    columns.matching_id(),
    columns.unique("prompt_id"),
    may_be_empty=True,
)
