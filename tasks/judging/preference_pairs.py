"""What the stage `preferences` does: samples from the SFT model, or from the policy of the round before, judged into
pairs; the pairs of the data and of earlier rounds."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from rlhf_core.data.scorer import Scorer
from rlhf_core.data.tokenizer import decode_response, load_tokenizer, stop_ids
from rlhf_core.determinism import permutation
from rlhf_core.errors import UserError
from rlhf_core.evaluation.intervals import bounds
from rlhf_core.evaluation.judges import NoisyAnnotators, RubricJudge, all_pairs
from rlhf_core.evaluation.pair_judges import PairJudge
from rlhf_core.models.hf import context_length
from rlhf_core.models.sampling import sample
from tasks.datasets.jsonl import Row, read_jsonl
from tasks.judging.labelling import (
    KnownPairs,
    agreement,
    different_pairs,
    fitting_pairs,
    label,
    of_dataset,
    plan,
    with_known_order,
)
from tasks.judging.pair_judge import pair_judge_of
from tasks.params.preferences import PreferencesParams
from tasks.params.round import RoundParams
from tasks.stage import rounds
from tasks.stage.long_rows import fitting, prompt_encoder, warn_of_cut_answers
from tasks.stage.models import load_frozen, set_numerics
from tasks.stage.stage import Stage
from tasks.stage.trust import trusts

PROMPTS = "data/ingest/preference_prompts.jsonl"
PAIRS = "data/ingest/pairs.jsonl"
NO_ANNOTATOR = ""
"""The key of `labels_by` for the data set's own pairs; no annotator can have this name."""

OF_ROUNDS = 0x726E64
"""Distinguishes the order of the prompts over the rounds from other uses of the seed."""

Job = tuple[Row, list[int], int, int]
"""A row, its prompt's token ids, the index of the prompt, and the index of the sample."""
Drawn = tuple[list[int], bool]
"""A response's token ids, and whether it ended."""


def make_pairs(stage: Stage[PreferencesParams], rubric: Scorer | None) -> None:
    """Make data/preferences/{samples,preferences}.jsonl and metrics/preferences.json. `rubric`: the hidden judge of the
    demo; None for other data."""
    samples, pairs, too_long = list[Row](), list[Row](), 0
    judged: dict[str, Any] = {"annotator_agreement": None, "ties_dropped": 0, "identical_dropped": 0, "judge": None}
    last = rounds.last_closed(stage.root)
    judge = None
    if stage.params.source == "model":  # refused, where it cannot be used, before anything is sampled
        all_fit = stage.common.long_rows == "refuse"  # else those that do not are left out when answers are sampled
        prompts = [row["prompt"] for row in stage.read(PROMPTS)] if all_fit else []
        judge = pair_judge_of(stage, prompts, stage.params.max_new_tokens, stage.params.batch_size)
    if stage.params.source != "dataset" or last:  # the answers of a later round can be labelled by people
        samples, too_long = draw_samples(stage, last)
    if judge is not None:
        pairs, judged = label_samples(stage, samples, judge, rubric)
    elif stage.params.source != "dataset":
        pairs, judged = judge_samples(stage, samples, rounds.seed_of(stage.seed, last + 1))
    if stage.params.source in {"dataset", "both"}:
        pairs += dataset_pairs(stage)
    if last:
        pairs = after_earlier_rounds(earlier_pairs(stage.root, last), pairs, last + 1)
    pairs, labels = with_annotators(pairs), None
    if stage.params.source in {"dataset", "both"}:
        labels = Counter(pair.get("annotator") or NO_ANNOTATOR for pair in pairs if pair["source"] == "dataset")
    splits = {split: sum(pair["split"] == split for pair in pairs) for split in ("train", "validation")}
    if not all(splits.values()):
        found = " and ".join(f"{count:,} in {split}" for split, count in splits.items())
        raise UserError(f"the reward model needs training and validation pairs; there are {found}")
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
            **({"pairs_by_round": Counter(str(pair["round"]) for pair in pairs)} if last else {}),
        }
    )


def draw_samples(stage: Stage[PreferencesParams], last: int = 0) -> tuple[list[Row], int]:
    """Responses of the SFT model, or of the policy of the round `last`, k for each prompt of this round; and the number
    of prompts that did not fit. Raises UserError for a policy with another tokenizer than the SFT model."""
    set_numerics(stage)
    params, folder = stage.params, rounds.start_of(stage.root)
    tokenizer = load_tokenizer(stage.root / rounds.SFT, trust_remote_code=trusts(stage))
    if last:  # earlier pairs are token ids
        other = load_tokenizer(stage.root / folder, trust_remote_code=trusts(stage))
        if other.get_vocab() != tokenizer.get_vocab() or other.chat_template != tokenizer.chat_template:
            raise UserError(
                f"{folder} has another tokenizer than models/sft: `ingest` or `base` has changed since that round; go "
                "back to the parameters of its commit (`leash round --list`), or begin again in a clone without rounds"
            )
    model = load_frozen(stage, stage.root / folder)
    stops = stop_ids(tokenizer, model, params.stop_tokens)
    seed = rounds.seed_of(stage.seed, last + 1)
    kept, too_long = fitting(
        stage,
        PROMPTS,
        prompts_of_round(stage, last + 1),
        prompt_encoder(tokenizer),
        context_length(model),
        reserve=params.max_new_tokens,
    )
    jobs = [(row, ids, i, k) for i, (row, ids) in enumerate(kept) for k in range(params.samples_per_prompt)]

    def work(part: Sequence[Job]) -> list[Drawn]:
        sampled = sample(
            model,
            [ids for _, ids, _, _ in part],
            [(seed, i, k) for _, _, i, k in part],
            max_new_tokens=params.max_new_tokens,
            temperature=params.temperature,
            stop_ids=stops,
            pad_id=int(tokenizer.pad_token_id),
            batch_size=params.batch_size,
        )
        return list(zip(sampled.responses, sampled.ended, strict=True))

    batches = [jobs[start : start + params.batch_size] for start in range(0, len(jobs), params.batch_size)]
    drawn = stage.resumed("samples", batches, work, show=lambda done: {"tokens": mean_length(done)})
    cut, key = [not ended for _, ended in drawn], "preferences.max_new_tokens"
    warn_of_cut_answers(stage, tokenizer, folder, cut, params.max_new_tokens, key)
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


def prompts_of_round(stage: Stage[PreferencesParams], number: int) -> list[Row]:
    """The prompts that are sampled in a round, in the order of the data: all, or the part that `round.share` gives."""
    rows, share = stage.read(PROMPTS), stage.block("round", RoundParams).share
    if share == 1:
        return rows
    order = permutation(len(rows), stage.seed, OF_ROUNDS)
    first, end = (round(share * len(rows) * count) for count in (number - 1, number))
    return [rows[i] for i in sorted({order[place % len(rows)] for place in range(first, max(end, first + 1))})]


def earlier_pairs(root: Path, last: int) -> list[Row]:
    """The pairs of the rounds 1 to `last`, each with its `round`. They are in the last of these rounds that has pairs:
    one whose `scorer` had no reward model has none."""
    for number in range(last, 0, -1):
        if pairs := read_jsonl(root / rounds.path_in(number, rounds.PAIRS)):
            return [{**pair, "round": pair.get("round", number)} for pair in pairs]
    return []


def after_earlier_rounds(earlier: Sequence[Row], pairs: Sequence[Row], number: int) -> list[Row]:
    """The earlier pairs, then those that are new in round `number`. Pairs of the data that an earlier round had are not
    new, and a prompt of an earlier round keeps its split."""
    splits = {pair["prompt_id"]: pair["split"] for pair in earlier}
    known = {_identity(pair) for pair in earlier if pair["source"] == "dataset"}
    new = [pair for pair in pairs if pair["source"] != "dataset" or _identity(pair) not in known]
    return [*earlier, *({**p, "split": splits.get(p["prompt_id"], p["split"]), "round": number} for p in new)]


def _identity(pair: Row) -> tuple[Any, ...]:
    return tuple(pair.get(name) for name in ("prompt_id", "chosen", "rejected", "annotator"))


def mean_length(drawn: Sequence[Drawn]) -> float:
    """Tokens a response."""
    return sum(len(response) for response, _ in drawn) / len(drawn)


def judge_samples(
    stage: Stage[PreferencesParams], samples: Sequence[Row], seed: int
) -> tuple[list[Row], dict[str, Any]]:
    """All pairs of each prompt's samples, ordered by the simulated annotators; ties are dropped and counted."""
    settings = stage.params.annotators
    annotators = NoisyAnnotators(RubricJudge(), settings.temperature, settings.flip_rate, seed)
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


def label_samples(
    stage: Stage[PreferencesParams], samples: Sequence[Row], judge: PairJudge, rubric: Scorer | None
) -> tuple[list[Row], dict[str, Any]]:
    """All pairs of each prompt's samples, ordered by a language model, whose agreement is measured before."""
    # Pairs whose order is known: of the data, or else sampled answers by the demo's rubric; none for other data.
    most, people = stage.params.agreement_pairs, fitting_pairs(stage.read(PAIRS), judge)
    known = of_dataset(Random(stage.seed).sample(people, min(most, len(people))))
    if not people and rubric is not None:
        known = with_known_order(samples, rubric, most)
    plan(judge, known.pairs, different_pairs(samples))
    agreement = measure_agreement(stage, known, judge)
    labelled = label(samples, judge)
    figures = labelled.figures()
    stage.log(
        f"{judge.name}: {len(labelled.pairs)} of {figures['judged']} pairs have a preference; {figures['ties']} ties "
        f"(verdicts that change with the order), {figures['unread']} that cannot be read"
    )
    return [_pair(samples[better], samples[worse]) for better, worse in labelled.pairs], {
        "annotator_agreement": None,
        "ties_dropped": figures["ties"],
        "identical_dropped": labelled.identical,
        "judge": judge.name,
        "judge_model": {**figures, "agreement": agreement},
    }


def measure_agreement(stage: Stage[PreferencesParams], known: KnownPairs, judge: PairJudge) -> dict[str, Any] | None:
    """How often the judge agrees with the known order; None where there are no such pairs. Raises UserError where not
    one answer can be read."""
    if not known.b_better:
        stage.log(f"WARNING {judge.name}: its agreement with people is unknown, there are no pairs to measure it on")
        return None
    found, unread = agreement(judge, known, stage.seed)
    if found is None:
        raise UserError(
            f"not one of {unread} verdicts of the judge {judge.name} can be read; it must reply with one "
            "letter: choose another model, or another judge.question"
        )
    stage.log(
        f"{judge.name} agrees with {known.source} on {found.share:.1%} ({found.low:.1%} to {found.high:.1%}) of "
        f"{found.pairs} pairs; {unread} cannot be read"
    )
    return {
        "with": known.source,
        "share": found.share,
        **bounds("share", found.interval),
        "pairs": found.pairs,
        "unread": unread,
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
            "chosen_ended": row.get("chosen_ended", True),
            "rejected_ended": row.get("rejected_ended", True),
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
