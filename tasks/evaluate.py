"""Stage `evaluate`: SFT model and policy on the held-out prompts, side by side, with intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.batch import pad_batch, response_logits
from rlhf_core.determinism import make_deterministic
from rlhf_core.evaluation.diversity import distinct_n
from rlhf_core.evaluation.intervals import bootstrap_interval
from rlhf_core.evaluation.wins import wins
from rlhf_core.judges import Judge
from rlhf_core.models import context_length, load_causal_lm, load_scalar_model, place
from rlhf_core.ppo.kl import estimate_kl
from rlhf_core.ppo.logprobs import logprobs_and_entropy
from rlhf_core.sampling import sample
from rlhf_core.scorers import Answers, RewardModelScorer
from rlhf_core.sft import Demonstration, response_loss
from rlhf_core.tokenizer import decode_response, encode_response, load_tokenizer, stop_ids
from tasks.jsonl import Row
from tasks.judges import judge_of
from tasks.params.evaluate import EvaluateParams
from tasks.pipeline_run import headline_numbers
from tasks.stage import Stage, run
from tasks.tokens import fitting, prompt_encoder
from tasks.trust import trusts

HELDOUT = "data/ingest/heldout.jsonl"
REWARD_MODEL_JUDGE = "reward model"

Kept = list[tuple[Row, list[int]]]


@dataclass(frozen=True)
class Answered:
    """One model's answers to the held-out prompts and what they scored."""

    responses: list[list[int]]
    """Token ids."""
    ended: list[bool]
    texts: list[str]
    rewards: list[float]
    gold: list[float] | None
    heldout_loss: float | None
    """Nats per token on the held-out demonstrations."""

    @property
    def tokens(self) -> list[int]:
        """Length of each answer."""
        return [len(response) for response in self.responses]


def execute(stage: Stage[EvaluateParams]) -> None:
    """Make data/evaluate/samples.jsonl and metrics/evaluate.json."""
    make_deterministic(stage.seed, stage.common.threads)
    tokenizer = load_tokenizer(stage.root / "models/sft", trust_remote_code=trusts(stage))
    models = {
        name: place(load_causal_lm(stage.root / "models" / name, trust_remote_code=trusts(stage)))
        for name in ("sft", "policy")
    }
    scorer = RewardModelScorer(
        place(load_scalar_model(stage.root / "models/reward", trust_remote_code=trusts(stage))),
        int(tokenizer.pad_token_id),
        stage.params.batch_size,
    )
    kept, too_long = fitting(
        stage,
        HELDOUT,
        stage.read(HELDOUT)[: stage.params.max_prompts],
        prompt_encoder(tokenizer),
        context_length(models["sft"]),
        reserve=stage.params.max_new_tokens,
    )
    judge = judge_of(stage)
    answered = {name: answer(stage, name, model, tokenizer, kept, scorer, judge) for name, model in models.items()}
    sft, policy = answered["sft"], answered["policy"]
    kl = sequence_kl(stage, models, tokenizer, kept, policy.responses)
    metrics = summarise(stage, judge, sft, policy, kl)
    stage.write_metrics({**metrics, "prompts_too_long": too_long})
    rows = sample_rows(kept, sft, policy, kl["k1"])
    stage.outputs.write_jsonl("data/evaluate/samples.jsonl", rows)
    if stage.tracker:
        stage.tracker.table("evaluate_samples", rows)
        register = partial(
            stage.tracker.register_policy, stage.hashes["models/policy"], headline_numbers("evaluate", metrics)
        )
        stage.afterwards.append(register)


def answer(
    stage: Stage[EvaluateParams],
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    kept: Kept,
    scorer: RewardModelScorer,
    judge: Judge | None,
) -> Answered:
    """One answer of the model called `name` to each prompt; all models get the same noise."""
    prompts, prompt_ids = [row["prompt"] for row, _ in kept], [ids for _, ids in kept]
    stops = stop_ids(tokenizer, stage.params.stop_tokens)
    responses, ended = draw(stage, name, model, prompt_ids, stops, int(tokenizer.pad_token_id))
    texts = [decode_response(tokenizer, response, stops) for response in responses]
    rewards = scorer(Answers(prompts, texts, prompt_ids, responses))
    gold = judge.score(prompts, texts) if judge else None
    return Answered(responses, ended, texts, rewards, gold, demonstration_loss(stage, model, tokenizer, kept))


def draw(
    stage: Stage[EvaluateParams],
    name: str,
    model: PreTrainedModel,
    prompt_ids: Sequence[Sequence[int]],
    stops: frozenset[int],
    pad_id: int,
) -> tuple[list[list[int]], list[bool]]:
    """Responses as token ids, and whether each ended, in the order of the prompts; prompts of similar length are
    answered together."""
    params = stage.params

    def work(places: Sequence[int]) -> list[tuple[list[int], bool]]:
        sampled = sample(
            model,
            [prompt_ids[i] for i in places],
            [(stage.seed, i) for i in places],
            max_new_tokens=params.max_new_tokens,
            temperature=params.temperature,
            stop_ids=stops,
            pad_id=pad_id,
            batch_size=params.batch_size,
        )
        return list(zip(sampled.responses, sampled.ended, strict=True))

    order = sorted(range(len(prompt_ids)), key=lambda i: len(prompt_ids[i]))
    batches = [order[start : start + params.batch_size] for start in range(0, len(order), params.batch_size)]
    drawn = dict(zip(order, stage.resumed(f"answers-{name}", batches, work, unit="answer"), strict=True))
    return [drawn[i][0] for i in range(len(order))], [drawn[i][1] for i in range(len(order))]


def demonstration_loss(
    stage: Stage[EvaluateParams], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, kept: Kept
) -> float | None:
    """The loss on the held-out demonstrations that fit the context; None where there are none."""
    rows = [
        Demonstration(ids, encode_response(tokenizer, row["response"]))
        for row, ids in kept
        if row["response"] is not None
    ]
    rows = [row for row in rows if len(row.prompt) + len(row.response) <= context_length(model)]
    loss = response_loss(model, rows, int(tokenizer.pad_token_id), stage.params.batch_size)
    return None if math.isnan(loss) else loss


@torch.no_grad()
def sequence_kl(
    stage: Stage[EvaluateParams],
    models: dict[str, PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    kept: Kept,
    responses: list[list[int]],
) -> dict[str, list[float]]:
    """KL(policy ‖ SFT) of each of the policy's answers, in nats, as the sums of k1 and of k3 over its tokens."""
    sums: dict[str, list[float]] = {"k1": [], "k3": []}
    for start in range(0, len(kept), stage.params.batch_size):
        rows = range(start, min(start + stage.params.batch_size, len(kept)))
        batch = pad_batch(
            [kept[i][1] for i in rows],
            [responses[i] for i in rows],
            int(tokenizer.pad_token_id),
            models["policy"].device,
        )
        policy, reference = (
            logprobs_and_entropy(
                response_logits(models[name], batch), batch.actions, stage.params.temperature, batch.mask
            )[0]
            for name in ("policy", "sft")
        )
        sums["k1"] += estimate_kl(policy, reference, "k1", batch.mask).sum(dim=1).tolist()
        sums["k3"] += estimate_kl(policy, reference, "k3", batch.mask).sum(dim=1).tolist()
    return sums


def summarise(
    stage: Stage[EvaluateParams], judge: Judge | None, sft: Answered, policy: Answered, kl: dict[str, list[float]]
) -> dict[str, Any]:
    """The metrics of the page: means over prompts, the win rate with its interval, and whose win rate it is."""
    first, second = (sft.gold, policy.gold) if judge else (sft.rewards, policy.rewards)
    assert first is not None  # a judge scores every answer
    assert second is not None
    won = wins(first, second)
    low, high = bootstrap_interval(won, stage.params.bootstrap, stage.seed)
    metrics: dict[str, Any] = {
        "judge": judge.name if judge else None,
        "win_rate_judge": judge.name if judge else REWARD_MODEL_JUDGE,
        "prompts": len(won),
        "win_rate": _mean(won),
        "win_rate_ci95": [low, high],
        "ties": sum(value == 0.5 for value in won),
        "kl_per_sequence": _mean(kl["k1"]),
        "kl_k3_per_sequence": _mean(kl["k3"]),
        "missing_eos_share": _missing(policy),
        "missing_eos_share_sft": _missing(sft),
    }
    for name, model in (("sft", sft), ("policy", policy)):
        metrics |= {
            f"gold_{name}": _mean(model.gold) if model.gold is not None else None,
            f"reward_{name}": _mean(model.rewards),
            f"response_tokens_{name}": _mean([float(t) for t in model.tokens]),
            f"distinct_1_{name}": distinct_n(model.texts, 1),
            f"distinct_2_{name}": distinct_n(model.texts, 2),
            f"heldout_loss_{name}": model.heldout_loss,
        }
    losses = (sft.heldout_loss, policy.heldout_loss)
    metrics["alignment_tax"] = losses[1] - losses[0] if losses[0] is not None and losses[1] is not None else None
    return metrics


def sample_rows(kept: Kept, sft: Answered, policy: Answered, kl: list[float]) -> list[Row]:
    """Every prompt with both answers side by side."""
    return [
        {
            "prompt_id": row["prompt_id"],
            "prompt": row["prompt"],
            "sft": sft.texts[i],
            "policy": policy.texts[i],
            "sft_ended": sft.ended[i],
            "policy_ended": policy.ended[i],
            "gold_sft": sft.gold[i] if sft.gold is not None else None,
            "gold_policy": policy.gold[i] if policy.gold is not None else None,
            "reward_sft": sft.rewards[i],
            "reward_policy": policy.rewards[i],
            "kl": kl[i],
            "sft_tokens": sft.tokens[i],
            "policy_tokens": policy.tokens[i],
        }
        for i, (row, _) in enumerate(kept)
    ]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _missing(answered: Answered) -> float:
    return sum(not ended for ended in answered.ended) / len(answered.ended)


if __name__ == "__main__":
    run("evaluate", EvaluateParams, execute)
