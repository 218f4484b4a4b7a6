"""The schema of every dataset that a stage reads, by its path; docs/reference/files.md is made from them."""

from tasks.schemas.columns import Pairs, Prompts, Split, column

EXTRA = "The further columns of your data; missing where there are none"
ANNOTATOR = "Who labelled the pair; null where it is not known, missing in data without labels"
IDS = "The tokens that the model sampled, with the end token"
ENDED = "Whether the model ended the answer itself"
GOLD = "The simulated annotator's score; null where there is none"
REWARD = "The score that PPO maximises"


class Demonstrations(Split):
    """Answers that SFT imitates; empty with `sft.enabled: false`."""

    response: object = column("non-empty text", "The answer")

    class Config(Split.Config):
        unique_by = {"names": ("prompt_id", "response")}
        metadata = {"may_be_empty": True}


class RawPairs(Pairs):
    """Preferences in the raw data; empty where there are none."""

    chosen: object = column("non-empty text", "The better answer")
    rejected: object = column("non-empty text", "The other one")
    annotator: object = column("non-empty text", ANNOTATOR, or_null=True, required=False)
    from_labels: object = column("true or false", "Whether people labelled it with `leash annotate`", required=False)
    chosen_ended: object = column("true or false", "Whether the better answer is whole", required=False)
    rejected_ended: object = column("true or false", "The same for the other one", required=False)

    class Config(Pairs.Config):
        unique_by = {"names": ("prompt_id", "chosen", "rejected", "annotator")}
        metadata = {"may_be_empty": True}


class Ratings(Split):
    """Answers with a number each; empty where the reward model does not learn from ratings."""

    response: object = column("non-empty text", "The answer")
    rating: object = column("a finite number", "Higher is better")

    class Config(Split.Config):
        unique_by = {"names": ("prompt_id", "response")}
        metadata = {"may_be_empty": True}


class PreferencePrompts(Split):
    """Prompts whose answers are sampled and judged."""

    extra: object = column("an object", EXTRA, required=False)

    class Config(Split.Config):
        unique_by = {"names": ("prompt_id",)}


class PPOPrompts(Prompts):
    """Prompts that the policy answers in PPO."""

    extra: object = column("an object", EXTRA, required=False)

    class Config(Prompts.Config):
        unique_by = {"names": ("prompt_id",)}


class Heldout(Prompts):
    """Prompts that no training stage reads."""

    response: object = column("non-empty text", "A demonstration; null where there is none", or_null=True)
    extra: object = column("an object", EXTRA, required=False)

    class Config(Prompts.Config):
        unique_by = {"names": ("prompt_id",)}


class EvaluationPrompts(Heldout):
    """The held-out prompts, or those of the file that `evaluate.prompts` names."""


class PreferenceSamples(Split):
    """The SFT model's answers to the preference prompts; empty without a reward model."""

    sample: object = column("a whole number from 0", "Which of the answers to this prompt")
    response: object = column("text", "The answer")
    response_ids: object = column("a list of token ids", IDS)
    ended: object = column("true or false", ENDED)

    class Config(Split.Config):
        unique_by = {"names": ("prompt_id", "sample")}
        metadata = {"may_be_empty": True}


class Preferences(Pairs):
    """Pairs for the reward model, judged or from the raw data; empty without a reward model."""

    chosen: object = column("text", "The better answer")
    rejected: object = column("text", "The other one")
    chosen_ids: object = column("a list of token ids", f"{IDS}; null for text of the raw data", or_null=True)
    rejected_ids: object = column("a list of token ids", f"{IDS}; null for text of the raw data", or_null=True)
    chosen_ended: object = column("true or false", ENDED)
    rejected_ended: object = column("true or false", ENDED)
    source: object = column("judge or dataset", "Where the preference is from")
    annotator: object = column("non-empty text", ANNOTATOR, or_null=True, required=False)
    round: object = column(
        "a whole number from 0", "The round that the pair was made in; missing in the first", required=False
    )

    class Config(Pairs.Config):
        metadata = {"may_be_empty": True}


class PPOSamples(Prompts):
    """The policy's answers to the same held-out prompts, along the run and at every alert."""

    step: object = column("a whole number from 0", "PPO's step")
    reason: object = column("non-empty text", "Why they were sampled then")
    response: object = column("text", "The answer")
    reward: object = column("a finite number", REWARD)
    gold: object = column("a finite number", GOLD, or_null=True)

    class Config(Prompts.Config):
        unique_by = {"names": ("step", "prompt_id")}


class BestOfN(Prompts):
    """Many answers of the SFT model to each evaluation prompt; empty where the stage is switched off."""

    sample: object = column("a whole number from 0", "Which of the answers to this prompt")
    response: object = column("text", "The answer")
    response_ids: object = column("a list of token ids", IDS)
    tokens: object = column("a whole number from 0", "How many")
    ended: object = column("true or false", ENDED)
    reward: object = column("a finite number", REWARD)
    terms: object = column(
        "an object of finite numbers", "What the score was made from; missing with a reward model alone", required=False
    )

    class Config(Prompts.Config):
        unique_by = {"names": ("prompt_id", "sample")}
        metadata = {"may_be_empty": True}


class RejectionSFT(Split):
    """The best answer to each prompt; empty where the stage is switched off."""

    response: object = column("text", "The answer")
    response_ids: object = column("a list of token ids", IDS)
    reward: object = column("a finite number", REWARD)
    mean_reward: object = column("a finite number", "Of all answers to the prompt")
    ended: object = column("true or false", ENDED)

    class Config(Split.Config):
        unique_by = {"names": ("prompt_id",)}
        metadata = {"may_be_empty": True}


class EvaluationSamples(Prompts):
    """SFT model and policy side by side on the held-out prompts."""

    sft: object = column("text", "The SFT model's answer")
    policy: object = column("text", "The policy's answer")
    sft_ended: object = column("true or false", ENDED)
    policy_ended: object = column("true or false", ENDED)
    gold_sft: object = column("a finite number", GOLD, or_null=True)
    gold_policy: object = column("a finite number", GOLD, or_null=True)
    reward_sft: object = column("a finite number", REWARD)
    reward_policy: object = column("a finite number", REWARD)
    kl: object = column("a finite number", "To the reference, of the policy's answer, nats")
    sft_tokens: object = column("a whole number from 0", "Of the SFT model's answer")
    policy_tokens: object = column("a whole number from 0", "Of the policy's answer")

    class Config(Prompts.Config):
        unique_by = {"names": ("prompt_id",)}


class EvaluationAnswers(Prompts):
    """Every answer of every model to the held-out prompts."""

    model: object = column("non-empty text", "The name of the model")
    seed: object = column("a whole number from 0", "Of a model with several training seeds; else null", or_null=True)
    response: object = column("text", "The answer")
    ended: object = column("true or false", ENDED)
    tokens: object = column("a whole number from 0", "How many")
    reward: object = column("a finite number", REWARD)
    gold: object = column("a finite number", GOLD, or_null=True)
    kl: object = column("a finite number", "To the reference, nats; null for a model without one", or_null=True)

    class Config(Prompts.Config):
        unique_by = {"names": ("model", "seed", "prompt_id")}


SCHEMAS: dict[str, type[Prompts]] = {
    "data/ingest/demonstrations.jsonl": Demonstrations,
    "data/ingest/pairs.jsonl": RawPairs,
    "data/ingest/ratings.jsonl": Ratings,
    "data/ingest/preference_prompts.jsonl": PreferencePrompts,
    "data/ingest/ppo_prompts.jsonl": PPOPrompts,
    "data/ingest/heldout.jsonl": Heldout,
    "data/ingest/evaluation_prompts.jsonl": EvaluationPrompts,
    "data/preferences/samples.jsonl": PreferenceSamples,
    "data/preferences/preferences.jsonl": Preferences,
    "data/ppo/samples.jsonl": PPOSamples,
    "data/best_of_n/samples.jsonl": BestOfN,
    "data/rejection_sft/samples.jsonl": RejectionSFT,
    "data/evaluate/samples.jsonl": EvaluationSamples,
    "data/evaluate/answers.jsonl": EvaluationAnswers,
}
