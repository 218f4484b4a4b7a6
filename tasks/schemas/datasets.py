"""The schema of every dataset that a stage reads, by its path."""

from tasks.schemas import columns as col

SCHEMAS = {
    # Answers to imitate.
    "data/ingest/demonstrations.jsonl": col.schema(
        {"response": col.text(), "split": col.split()},
        col.one_split_per_prompt(),
        col.unique("prompt_id", "response"),
    ),
    # Preferences in the raw data; empty where there are none.
    "data/ingest/pairs.jsonl": col.schema(
        {
            "chosen": col.text(),
            "rejected": col.text(),
            "split": col.split(),
            "annotator": col.annotator(),
            "from_labels": col.flag(required=False),
            "chosen_ended": col.flag(required=False),
            "rejected_ended": col.flag(required=False),
        },
        col.different_answers(),
        col.one_split_per_prompt(),
        col.unique("prompt_id", "chosen", "rejected", "annotator"),
        may_be_empty=True,
    ),
    # Answers with a number each; empty where the reward model does not learn from ratings.
    "data/ingest/ratings.jsonl": col.schema(
        {"response": col.text(), "rating": col.number(), "split": col.split()},
        col.one_split_per_prompt(),
        col.unique("prompt_id", "response"),
        may_be_empty=True,
    ),
    # Prompts whose answers are sampled and judged.
    "data/ingest/preference_prompts.jsonl": col.schema(
        {"split": col.split(), "extra": col.extra()}, col.unique("prompt_id")
    ),
    # Prompts that the policy answers in PPO.
    "data/ingest/ppo_prompts.jsonl": col.schema({"extra": col.extra()}, col.unique("prompt_id")),
    # Prompts that no training stage reads, with a demonstration where there is one.
    "data/ingest/heldout.jsonl": col.schema(
        {"response": col.text(nullable=True), "extra": col.extra()}, col.unique("prompt_id")
    ),
    # The held-out prompts, or those of the file that evaluate.prompts names.
    "data/ingest/evaluation_prompts.jsonl": col.schema(
        {"response": col.text(nullable=True), "extra": col.extra()}, col.unique("prompt_id")
    ),
    # The SFT model's answers to the preference prompts; empty without a reward model.
    "data/preferences/samples.jsonl": col.schema(
        {
            "sample": col.count(),
            "response": col.sampled_text(),
            "response_ids": col.token_ids(),
            "ended": col.flag(),
            "split": col.split(),
        },
        col.one_split_per_prompt(),
        col.unique("prompt_id", "sample"),
        may_be_empty=True,
    ),
    # Pairs for the reward model, judged or from the raw data; empty without a reward model.
    "data/preferences/preferences.jsonl": col.schema(
        {
            "chosen": col.sampled_text(),
            "rejected": col.sampled_text(),
            "chosen_ids": col.token_ids(nullable=True),
            "rejected_ids": col.token_ids(nullable=True),
            "chosen_ended": col.flag(),
            "rejected_ended": col.flag(),
            "source": col.choice("judge", "dataset"),
            "split": col.split(),
            "annotator": col.annotator(),
            "round": col.count(required=False),
        },
        col.different_answers(),
        col.one_split_per_prompt(),
        may_be_empty=True,
    ),
    # The policy's answers to the same held-out prompts, along the run and at every alert.
    "data/ppo/samples.jsonl": col.schema(
        {
            "step": col.count(),
            "reason": col.text(),
            "response": col.sampled_text(),
            "reward": col.number(),
            "gold": col.number(nullable=True),
        },
        col.unique("step", "prompt_id"),
    ),
    # Many answers of the SFT model to each evaluation prompt; empty where the stage is switched off.
    "data/best_of_n/samples.jsonl": col.schema(
        {
            "sample": col.count(),
            "response": col.sampled_text(),
            "response_ids": col.token_ids(),
            "tokens": col.count(),
            "ended": col.flag(),
            "reward": col.number(),
            "terms": col.scores(),
        },
        col.unique("prompt_id", "sample"),
        may_be_empty=True,
    ),
    # The best answer to each prompt; empty where the stage is switched off.
    "data/rejection_sft/samples.jsonl": col.schema(
        {
            "response": col.sampled_text(),
            "response_ids": col.token_ids(),
            "reward": col.number(),
            "mean_reward": col.number(),
            "ended": col.flag(),
            "split": col.split(),
        },
        col.unique("prompt_id"),
        may_be_empty=True,
    ),
    # SFT model and policy side by side on the held-out prompts.
    "data/evaluate/samples.jsonl": col.schema(
        {
            "sft": col.sampled_text(),
            "policy": col.sampled_text(),
            "sft_ended": col.flag(),
            "policy_ended": col.flag(),
            "gold_sft": col.number(nullable=True),
            "gold_policy": col.number(nullable=True),
            "reward_sft": col.number(),
            "reward_policy": col.number(),
            "kl": col.number(),
            "sft_tokens": col.count(),
            "policy_tokens": col.count(),
        },
        col.unique("prompt_id"),
    ),
    # Every answer of every model to the held-out prompts.
    "data/evaluate/answers.jsonl": col.schema(
        {
            "model": col.text(),
            "seed": col.count(nullable=True),
            "response": col.sampled_text(),
            "ended": col.flag(),
            "tokens": col.count(),
            "reward": col.number(),
            "gold": col.number(nullable=True),
            "kl": col.number(nullable=True),
        },
        col.unique("model", "seed", "prompt_id"),
    ),
}
