"""Stage `reward`: the Bradley-Terry reward model, and its figures on held-out prompts."""

from collections.abc import Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.config.reward import RewardConfig
from rlhf_core.data.chat import Conversation
from rlhf_core.data.tokenizer import load_tokenizer
from rlhf_core.evaluation.agreement import correlation
from rlhf_core.models.hf import context_length, place, save_checkpoint, scalar_model_from
from rlhf_core.models.scorers import Answers, RewardModelScorer
from rlhf_core.reward import Comparison, score_pairs, train_reward_model
from tasks.datasets.jsonl import Row
from tasks.evaluation.reward_model import PairFigures, figures_of, gold_margins
from tasks.stage.long_rows import fitting, prompts_once
from tasks.stage.run import run
from tasks.stage.stage import Stage
from tasks.stage.trust import trusts
from tasks.training.gold_judge import judge_of
from tasks.training.pairs import PREFERENCES, comparisons
from tasks.training.trainer_setup import log_table, training_run

SAMPLES = "data/preferences/samples.jsonl"


def execute(stage: Stage[RewardConfig]) -> None:
    """Make models/reward (its config holds score_mean and score_std), metrics/reward.json and the tables of plots."""
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
    figures = measure_pairs(stage, place(model), tokenizer, training, heldout)
    for out, rows in figures.tables.items():
        stage.outputs.write_csv(out, rows)
    stage.write_metrics({**figures.metrics, **normalisation, "pairs_too_long": too_long + also_too_long})


def measure_pairs(
    stage: Stage[RewardConfig],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    training: Sequence[Comparison],
    heldout: Sequence[Comparison],
) -> PairFigures:
    """Figures of the pairs of held-out prompts. Beside them accuracy and loss on the pairs of as many training prompts
    as are held out."""
    pad_id, judge = int(tokenizer.pad_token_id), judge_of(stage)
    some = training[: len(heldout)]
    scores, seen = (score_pairs(model, pairs, pad_id, stage.params.batch_size) for pairs in (heldout, some))
    rows = [row for row in stage.read(PREFERENCES) if row["split"] == "validation"] if judge else []
    gold = gold_margins(rows, tokenizer, heldout, judge) if judge else None
    figures = figures_of(scores, [len(c.pairs) for c in heldout], gold, stage.seed)
    figures.metrics.update(train_accuracy=seen.right.mean().item(), train_loss=seen.loss)
    return figures


def measure_scores(
    stage: Stage[RewardConfig], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, limit: int
) -> dict[str, float | None]:
    """Mean and standard deviation of the scores of SFT samples (what PPO normalises with), and what scores
    correlate with."""
    prompt_ids = prompts_once(tokenizer)

    def encode(row: Row) -> tuple[tuple[list[int], list[int]], int]:
        prompt = prompt_ids(row)
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
