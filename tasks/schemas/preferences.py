"""data/preferences/preferences.jsonl: pairs for the reward model, judged or brought by the data set."""

from tasks.schemas import columns

PATH = "data/preferences/preferences.jsonl"
SCHEMA = columns.schema(
    {
        "prompt_id": columns.identity(),
        "prompt": columns.prompt(),
        "chosen": columns.sampled_text(),
        "rejected": columns.sampled_text(),
        "chosen_ids": columns.token_ids(nullable=True),
        "rejected_ids": columns.token_ids(nullable=True),
        "chosen_ended": columns.flag(),
        "rejected_ended": columns.flag(),
        "source": columns.choice("judge", "dataset"),
        "split": columns.split(),
    },
    columns.matching_id(),
    columns.different_answers(),
    columns.one_split_per_prompt(),
)
