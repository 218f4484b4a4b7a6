"""Stage `dpo`: the SFT model trained on the preference pairs themselves, the alternative that needs no reward model."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf_core.config.dpo import DPOConfig
from tasks.stage.run import quiet_libraries, run
from tasks.stage.stage import Stage
from tasks.stage.switched_off import write_switched_off
from tasks.stage.trust import trusts

if TYPE_CHECKING:
    from rlhf_core.reward import Comparison

SFT = "models/sft"
PLOT = "plots/dpo.csv"
LOGGED = ("loss", "accuracy", "margin")
LAST = 10
"""Steps at the end of training over which the training figures are averaged."""


def execute(stage: Stage[DPOConfig]) -> None:
    """Make models/dpo, plots/dpo.csv and metrics/dpo.json."""
    if not stage.params.enabled:
        write_switched_off(stage, {PLOT: ("step", *LOGGED)})
        return
    # A stage that is switched off does not load torch.
    from rlhf_core.data.tokenizer import load_tokenizer
    from rlhf_core.dpo import measure_pairs, reference_logprobs, train_dpo
    from rlhf_core.models.hf import context_length, load_causal_lm, place, save_checkpoint
    from tasks.training.pairs import comparisons
    from tasks.training.trainer_setup import log_table, tokens_read, training_run

    quiet_libraries()
    run_ = training_run(stage, shown=LOGGED)
    tokenizer = load_tokenizer(stage.root / SFT, trust_remote_code=trusts(stage))
    model = load_causal_lm(stage.root / SFT, trust_remote_code=trusts(stage))
    pad_id, limit = int(tokenizer.pad_token_id), min(stage.params.max_tokens, context_length(model))
    training, too_long = comparisons(stage, tokenizer, "train", limit)
    heldout, also_too_long = comparisons(stage, tokenizer, "validation", limit)
    references, heldout_references = (reference_logprobs(place(model), part, pad_id) for part in (training, heldout))

    log = train_dpo(model.requires_grad_(True), training, references, stage.params, pad_id, run_)

    measured = measure_pairs(place(model), heldout, heldout_references, stage.params, pad_id)
    save_checkpoint(stage.out("models/dpo"), model.cpu(), tokenizer)
    stage.outputs.write_csv(PLOT, log_table(log, {name: name for name in LOGGED}))
    stage.write_metrics(
        {
            "enabled": True,
            "heldout_loss": measured.loss,
            "heldout_accuracy": measured.accuracy,
            "heldout_margin": measured.margin,
            **{f"train_{name}": value for name, value in last_means(log).items()},
            "prompts": len(training),
            "pairs": sum(len(c.pairs) for c in training),
            "heldout_pairs": sum(len(c.pairs) for c in heldout),
            "pairs_too_long": too_long + also_too_long,
            "samples_generated": 0,  # the pairs are common to all
            "tokens_trained": tokens_read(log, response_tokens(training)),
        }
    )


def last_means(log: Sequence[dict[str, float]]) -> dict[str, float]:
    """Loss, accuracy and margin of the training batches, over the last steps."""
    last = [row for row in log if "loss" in row][-LAST:]
    return {name: sum(row[name] for row in last) / len(last) for name in LOGGED}


def response_tokens(training: "Sequence[Comparison]") -> int:
    """Response tokens of one epoch: each distinct response is read once, however many pairs it is in."""
    return sum(len(response) for c in training for response in c.responses)


if __name__ == "__main__":
    run("dpo", DPOConfig, execute)
