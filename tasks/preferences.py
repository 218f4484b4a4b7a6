"""Stage `preferences`: samples from the SFT model, judged into pairs, and the pairs of the data."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rlhf_core.data.tokenizer import decode_response, load_tokenizer, stop_ids
from rlhf_core.determinism import make_deterministic
from rlhf_core.errors import UserError
from rlhf_core.evaluation.judges import NoisyAnnotators, RubricJudge, all_pairs
from rlhf_core.models.hf import context_length, load_causal_lm, place
from rlhf_core.models.sampling import sample
from tasks.datasets.jsonl import Row
from tasks.params.preferences import PreferencesParams
from tasks.stage.long_rows import fitting, prompt_encoder
from tasks.stage.run import run
from tasks.stage.stage import Stage
from tasks.stage.trust import trusts

PROMPTS = "data/ingest/preference_prompts.jsonl"
PAIRS = "data/ingest/pairs.jsonl"

Job = tuple[Row, list[int], int, int]
"""A row, its prompt's token ids, the index of the prompt, and the index of the sample."""
Drawn = tuple[list[int], bool]
"""A response's token ids, and whether it ended."""


def execute(stage: Stage[PreferencesParams]) -> None:
    """Make data/preferences/{samples,preferences}.jsonl and metrics/preferences.json."""
    samples, pairs, too_long = list[Row](), list[Row](), 0
    judged: dict[str, Any] = {"annotator_agreement": None, "ties_dropped": 0, "identical_dropped": 0, "judge": None}
    if stage.params.source in {"judge", "both"}:
        samples, too_long = draw_samples(stage)
        pairs, judged = judge_samples(stage, samples)
    labels = None
    if stage.params.source in {"dataset", "both"}:
        pairs = with_annotators(pairs + dataset_pairs(stage))
        labels = Counter(pair.get("annotator") or "data" for pair in pairs if pair["source"] == "dataset")
    splits = {split: sum(pair["split"] == split for pair in pairs) for split in ("train", "validation")}
    if not all(splits.values()):
        raise UserError(f"preferences: the reward model needs training and validation pairs, there are {splits}")
    stage.outputs.write_jsonl("data/preferences/samples.jsonl", samples)
    stage.outputs.write_jsonl("data/preferences/preferences.jsonl", pairs)
    stage.write_metrics(
        {
            "prompts": len({s["prompt_id"] for s in samples}),
            "samples": len(samples),
            "pairs": len(pairs),
            "missing_eos_share": sum(not s["ended"] for s in samples) / len(samples) if samples else None,
            "mean_response_tokens": sum(len(s["response_ids"]) for s in samples) / len(samples) if samples else None,
            "prompts_too_long": too_long,
            **judged,
            "labels_by": labels and dict(sorted(labels.items())),
        }
    )
    if stage.tracker:
        stage.tracker.table("preferences", pairs[:100])


def draw_samples(stage: Stage[PreferencesParams]) -> tuple[list[Row], int]:
    """Responses of the SFT model, k for each prompt, and the number of prompts that did not fit."""
    make_deterministic(stage.seed, stage.common.threads)
    params = stage.params
    tokenizer = load_tokenizer(stage.root / "models/sft", trust_remote_code=trusts(stage))
    stops = stop_ids(tokenizer, params.stop_tokens)
    model = place(load_causal_lm(stage.root / "models/sft", trust_remote_code=trusts(stage)))
    kept, too_long = fitting(
        stage,
        PROMPTS,
        stage.read(PROMPTS),
        prompt_encoder(tokenizer),
        context_length(model),
        reserve=params.max_new_tokens,
    )
    jobs = [(row, ids, i, k) for i, (row, ids) in enumerate(kept) for k in range(params.samples_per_prompt)]

    def work(part: Sequence[Job]) -> list[Drawn]:
        sampled = sample(
            model,
            [ids for _, ids, _, _ in part],
            [(stage.seed, i, k) for _, _, i, k in part],
            max_new_tokens=params.max_new_tokens,
            temperature=params.temperature,
            stop_ids=stops,
            pad_id=int(tokenizer.pad_token_id),
            batch_size=params.batch_size,
        )
        return list(zip(sampled.responses, sampled.ended, strict=True))

    batches = [jobs[start : start + params.batch_size] for start in range(0, len(jobs), params.batch_size)]
    drawn = stage.resumed("samples", batches, work, show=lambda done: {"tokens": mean_length(done)})
    samples = [
        {
            "prompt_id": row["prompt_id"],
            "prompt": row["prompt"],
            "sample": k,
            "response": decode_response(tokenizer, response, stops),
            "response_ids": response,
            "ended": ended,
            "split": row["split"],
        }
        for (row, _, _, k), (response, ended) in zip(jobs, drawn, strict=True)
    ]
    return samples, too_long


def mean_length(drawn: Sequence[Drawn]) -> float:
    """Tokens a response."""
    return sum(len(response) for response, _ in drawn) / len(drawn)


def judge_samples(stage: Stage[PreferencesParams], samples: Sequence[Row]) -> tuple[list[Row], dict[str, Any]]:
    """All pairs of each prompt's samples, ordered by the simulated annotators; ties are dropped and counted."""
    settings = stage.params.annotators
    annotators = NoisyAnnotators(RubricJudge(), settings.temperature, settings.flip_rate, stage.seed)
    by_prompt: dict[str, list[Row]] = {}
    for row in samples:
        by_prompt.setdefault(row["prompt_id"], []).append(row)
    pairs: list[Row] = []
    ties = identical = agreed = 0
    for place_, rows in enumerate(by_prompt.values()):
        ranked = all_pairs(rows[0]["prompt"], [row["response"] for row in rows], annotators, key=(place_,))
        ties += ranked.ties
        identical += ranked.identical
        agreed += sum(choice.agrees for choice in ranked.pairs)
        pairs += [_pair(rows[choice.chosen], rows[choice.rejected]) for choice in ranked.pairs]
    return pairs, {
        "annotator_agreement": agreed / len(pairs) if pairs else None,
        "ties_dropped": ties,
        "identical_dropped": identical,
        "judge": "simulated annotators (demo rubric)",
    }


def _pair(chosen: Row, rejected: Row) -> Row:
    return {
        "prompt_id": chosen["prompt_id"],
        "prompt": chosen["prompt"],
        "chosen": chosen["response"],
        "rejected": rejected["response"],
        "chosen_ids": chosen["response_ids"],
        "rejected_ids": rejected["response_ids"],
        "chosen_ended": chosen["ended"],
        "rejected_ended": rejected["ended"],
        "source": "judge",
        "split": chosen["split"],
    }


def dataset_pairs(stage: Stage[PreferencesParams]) -> list[Row]:
    """The pairs of the data."""
    return [
        {
            **{name: row[name] for name in ("prompt_id", "prompt", "chosen", "rejected")},
            "chosen_ids": None,
            "rejected_ids": None,
            "chosen_ended": True,
            "rejected_ended": True,
            "source": "dataset",
            "split": row["split"],
            **({"annotator": row["annotator"]} if "annotator" in row else {}),
        }
        for row in stage.read(PAIRS)
    ]


def with_annotators(pairs: list[Row]) -> list[Row]:
    """The pairs; all have the column `annotator` if one of them has it."""
    if not any("annotator" in pair for pair in pairs):
        return pairs
    return [{**pair, "annotator": pair.get("annotator")} for pair in pairs]


if __name__ == "__main__":
    run("preferences", PreferencesParams, execute)
