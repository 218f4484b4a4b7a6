"""Stage `reward`: the Bradley-Terry reward model, and what can be said about it on prompts it never saw."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.chat import Conversation
from rlhf_core.config.reward import RewardConfig
from rlhf_core.evaluation.agreement import correlation
from rlhf_core.evaluation.calibration import CalibrationBin, calibration
from rlhf_core.evaluation.intervals import bootstrap_interval
from rlhf_core.models import context_length, place, save_checkpoint, scalar_model_from
from rlhf_core.reward import Comparison, score_pairs, train_reward_model
from rlhf_core.scorers import Answers, RewardModelScorer
from rlhf_core.tokenizer import encode_prompt, load_tokenizer
from tasks.comparisons import comparisons
from tasks.jsonl import Row
from tasks.judges import judge_of
from tasks.stage import Stage, run
from tasks.tokens import fitting
from tasks.training import log_table, training_run
from tasks.trust import trusts

SAMPLES = "data/preferences/samples.jsonl"
RESAMPLES = 2000


def execute(stage: Stage[RewardConfig]) -> None:
    """Make models/reward (its config holds score_mean and score_std), metrics/reward.json and two tables of plots."""
    run_ = training_run(stage, shown=["loss", "accuracy"])
    tokenizer = load_tokenizer(stage.root / "models/sft", trust_remote_code=trusts(stage))
    model = scalar_model_from(stage.root / "models/sft", stage.seed, trust_remote_code=trusts(stage))
    pad_id, limit = int(tokenizer.pad_token_id), min(stage.params.max_tokens, context_length(model))
    training, too_long = comparisons(stage, tokenizer, "train", limit)
    heldout, also_too_long = comparisons(stage, tokenizer, "validation", limit)

    log = train_reward_model(model, training, stage.params, pad_id, run_)

    model = place(model)
    normalisation = measure_scores(stage, model, tokenizer, limit)
    model.config.score_mean, model.config.score_std = normalisation["score_mean"], normalisation["score_std"]
    save_checkpoint(stage.out("models/reward"), model.cpu(), tokenizer)
    stage.outputs.write_csv("plots/reward.csv", log_table(log, {"loss": "loss", "accuracy": "accuracy"}))
    measured, bins = measure_pairs(stage, place(model), training, heldout, pad_id)
    stage.outputs.write_csv("plots/reward_calibration.csv", calibration_rows(bins))
    stage.write_metrics({**measured, **normalisation, "pairs_too_long": too_long + also_too_long})


def measure_pairs(
    stage: Stage[RewardConfig],
    model: PreTrainedModel,
    training: Sequence[Comparison],
    heldout: Sequence[Comparison],
    pad_id: int,
) -> tuple[dict[str, Any], list[CalibrationBin]]:
    """Accuracy, loss and calibration on pairs of held-out prompts; the interval resamples prompts, not pairs."""
    scores = score_pairs(model, heldout, pad_id, stage.params.batch_size)
    seen = score_pairs(model, training, pad_id, stage.params.batch_size)
    bins, error = calibration((scores.chosen - scores.rejected).tolist())
    right = scores.right.tolist()
    low, high = _accuracy_interval(right, [len(c.pairs) for c in heldout], stage.seed)
    return {
        "heldout_accuracy": sum(right) / len(right),
        "heldout_accuracy_ci95": [low, high],
        "heldout_loss": scores.loss,
        "heldout_pairs": len(right),
        "heldout_prompts": len(heldout),
        "train_accuracy": seen.right.mean().item(),
        "train_loss": seen.loss,
        "expected_calibration_error": error,
    }, bins


def _accuracy_interval(right: Sequence[float], pairs: Sequence[int], seed: int) -> tuple[float, float]:
    """Pairs of one prompt share their responses, so whole prompts are resampled; each counts with its mean."""
    means, start = [], 0
    for count in pairs:
        means.append(sum(right[start : start + count]) / count)
        start += count
    return bootstrap_interval(means, RESAMPLES, seed)


def calibration_rows(bins: Sequence[CalibrationBin]) -> list[dict[str, float]]:
    """The calibration curve as a table."""
    return [
        {"bin_low": b.low, "bin_high": b.high, "predicted": b.predicted, "observed": b.observed, "pairs": b.pairs}
        for b in bins
    ]


def measure_scores(
    stage: Stage[RewardConfig], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, limit: int
) -> dict[str, float | None]:
    """Mean and standard deviation of the scores of SFT samples (what PPO normalises with), and what scores go
    along with."""

    def encode(row: Row) -> tuple[tuple[list[int], list[int]], int]:
        prompt = encode_prompt(tokenizer, row["prompt"])
        response: list[int] = row["response_ids"]
        return (prompt, response), len(prompt) + len(response)

    kept, _ = fitting(stage, SAMPLES, stage.read(SAMPLES), encode, limit)
    prompts: list[Conversation] = [row["prompt"] for row, _ in kept]
    texts = [row["response"] for row, _ in kept]
    answers = Answers(prompts, texts, [p for _, (p, _) in kept], [r for _, (_, r) in kept])
    scores = RewardModelScorer(model, int(tokenizer.pad_token_id), 4 * stage.params.batch_size)(answers)
    mean = sum(scores) / len(scores)
    lengths = [float(len(response)) for _, (_, response) in kept]
    judge = judge_of(stage)
    gold = judge.score(prompts, texts) if judge else None
    return {
        "score_mean": mean,
        "score_std": (sum((s - mean) ** 2 for s in scores) / len(scores)) ** 0.5,
        "length_correlation": correlation(scores, lengths),
        "gold_correlation": correlation(scores, gold) if gold else None,
    }


if __name__ == "__main__":
    run("reward", RewardConfig, execute)
