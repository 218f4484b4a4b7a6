"""The stages that train a policy on preference pairs, such as `dpo`: all but the objective."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from rlhf_core.config.dpo import PairConfig
from rlhf_core.data.tokenizer import load_tokenizer
from rlhf_core.dpo import PairObjective, measure_pairs, reference_logprobs, train_on_pairs
from rlhf_core.models.hf import context_length, load_causal_lm, place, save_checkpoint, trainable
from rlhf_core.models.precision import autocast
from rlhf_core.models.sharding import divide
from rlhf_core.training.processes import map_whole
from tasks.stage.stage import Stage
from tasks.stage.trust import trusts
from tasks.training.pairs import comparisons
from tasks.training.ratings import RATINGS, rated_comparisons
from tasks.training.trainer_setup import last_means, log_table, place_of, tokens_read, training_run

Settings = TypeVar("Settings", bound=PairConfig)

SFT = "models/sft"
LOGGED = ("loss", "accuracy", "margin")


def train_policy_on_pairs(stage: Stage[Settings], objective_of: Callable[[Settings], PairObjective]) -> None:
    """Make models/<name>, plots/<name>.csv and metrics/<name>.json of the stage."""
    objective = objective_of(stage.params)
    run_ = training_run(stage, shown=LOGGED)
    tokenizer = load_tokenizer(stage.root / SFT, trust_remote_code=trusts(stage))
    where = place_of(run_, stage.params.lora)
    model = load_causal_lm(stage.root / SFT, trust_remote_code=trusts(stage), log=stage.log, **where)
    pad_id, limit = int(tokenizer.pad_token_id), min(stage.params.max_tokens, context_length(model))
    compared = rated_comparisons if stage.read(RATINGS) else comparisons
    training, too_long = compared(stage, tokenizer, "train", limit)
    heldout, also_too_long = compared(stage, tokenizer, "validation", limit)
    read = partial(reference_logprobs, model, pad_id=pad_id)
    with autocast(stage.precision, place(model).device):
        heldout_references = map_whole(model, run_.processes, heldout, read)  # by the whole model, as the measurement
    if run_.processes is not None and stage.params.lora is None:
        divide(trainable(model.cpu()), stage.precision == "bfloat16").eval()  # now they round as the training does
    with autocast(stage.precision, model.device):
        references = map_whole(model, run_.processes, training, read)

    log = train_on_pairs(trainable(model), training, references, stage.params, objective, pad_id, run_, stage.name)
    if not run_.is_main:
        return

    with autocast(stage.precision, place(model).device):
        measured = measure_pairs(model, heldout, heldout_references, objective, pad_id)
    save_checkpoint(stage.out(f"models/{stage.name}"), model.cpu(), tokenizer)
    stage.outputs.write_csv(f"plots/{stage.name}.csv", log_table(log, {name: name for name in LOGGED}))
    stage.write_metrics(
        {
            "enabled": True,
            "heldout_loss": measured.loss,
            "heldout_accuracy": measured.accuracy,
            "heldout_margin": measured.margin,
            **last_means(log, LOGGED),
            "prompts": len(training),
            "pairs": sum(len(c.pairs) for c in training),
            "heldout_pairs": sum(len(c.pairs) for c in heldout),
            "pairs_too_long": too_long + also_too_long,
            "samples_generated": 0,  # the pairs are common to all
            "tokens_trained": tokens_read(log, sum(len(answer) for c in training for answer in c.responses)),
        }
    )
