"""Stage `reward`: the Bradley-Terry reward model, and its figures on held-out prompts."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf_core.config.reward import RewardConfig
from tasks.params.scorer import REWARD_MODEL
from tasks.stage.run import quiet_libraries, run
from tasks.stage.stage import Stage
from tasks.stage.switched_off import NO_REWARD_MODEL, write_switched_off
from tasks.stage.trust import trusts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rlhf_core.reward import Comparison
    from tasks.evaluation.reward_model import PairFigures

TABLES = {
    "plots/reward.csv": ("step", "loss", "accuracy"),
    "plots/reward_calibration.csv": ("bin_low", "bin_high", "predicted", "observed", "pairs"),
    "plots/reward_margins.csv": ("low", "high", "accuracy", "accuracy_low", "accuracy_high", "pairs"),
    "plots/reward_scores.csv": ("low", "high", "chosen", "rejected"),
}
"""Columns of each table."""


def execute(stage: Stage[RewardConfig]) -> None:
    """Make models/reward, metrics/reward.json and the tables of plots; empty where `scorer` has no reward model."""
    if not stage.blocks[REWARD_MODEL]:
        write_switched_off(stage, TABLES, NO_REWARD_MODEL)
        return
    # Imported late: a stage that is switched off does not load torch.
    from rlhf_core.data.tokenizer import load_tokenizer
    from rlhf_core.models.hf import context_length, place, save_checkpoint, scalar_model_from
    from rlhf_core.reward import train_reward_model
    from tasks.training.pairs import comparisons
    from tasks.training.trainer_setup import log_table, training_run

    quiet_libraries()
    run_ = training_run(stage, shown=["loss", "accuracy"])
    tokenizer = load_tokenizer(stage.root / "models/sft", trust_remote_code=trusts(stage))
    model = scalar_model_from(stage.root / "models/sft", stage.seed, trust_remote_code=trusts(stage))
    pad_id, limit = int(tokenizer.pad_token_id), min(stage.params.max_tokens, context_length(model))
    training, too_long = comparisons(stage, tokenizer, "train", limit)
    heldout, also_too_long = comparisons(stage, tokenizer, "validation", limit)

    log = train_reward_model(model, training, stage.params, pad_id, run_)

    save_checkpoint(stage.out("models/reward"), model.cpu(), tokenizer)
    stage.outputs.write_csv("plots/reward.csv", log_table(log, {"loss": "loss", "accuracy": "accuracy"}))
    figures = measure_pairs(stage, place(model), tokenizer, training, heldout)
    for out, rows in figures.tables.items():
        stage.outputs.write_csv(out, rows)
    stage.write_metrics({**figures.metrics, "pairs_too_long": too_long + also_too_long})


def measure_pairs(
    stage: Stage[RewardConfig],
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    training: "Sequence[Comparison]",
    heldout: "Sequence[Comparison]",
) -> "PairFigures":
    """Figures of the pairs of held-out prompts. Beside them accuracy and loss on the pairs of as many training prompts
    as are held out."""
    from rlhf_core.reward import score_pairs
    from tasks.evaluation.reward_model import figures_of, gold_margins
    from tasks.training.gold_judge import judge_of
    from tasks.training.pairs import PREFERENCES

    pad_id, judge = int(tokenizer.pad_token_id), judge_of(stage)
    some = training[: len(heldout)]
    scores, seen = (score_pairs(model, pairs, pad_id, stage.params.batch_size) for pairs in (heldout, some))
    rows = [row for row in stage.read(PREFERENCES) if row["split"] == "validation"] if judge else []
    gold = gold_margins(rows, tokenizer, heldout, judge) if judge else None
    figures = figures_of(scores, [len(c.pairs) for c in heldout], gold, stage.seed)
    figures.metrics.update(train_accuracy=seen.right.mean().item(), train_loss=seen.loss)
    return figures


if __name__ == "__main__":
    run("reward", RewardConfig, execute)
