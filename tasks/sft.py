"""Stage `sft`: supervised fine-tuning of the base model on the demonstrations; switched off, it makes the base model
the SFT model."""

from rlhf_core import files
from rlhf_core.config.sft import SFTConfig
from rlhf_core.data.tokenizer import encode_prompt, encode_response, encode_turns, load_tokenizer
from rlhf_core.errors import UserError
from rlhf_core.models.hf import context_length, load_causal_lm, save_checkpoint
from rlhf_core.sft import Demonstration, fine_tune
from tasks.datasets.jsonl import Row
from tasks.stage.long_rows import fitting
from tasks.stage.stage import Stage
from tasks.stage.trust import trusts
from tasks.stage.workers import is_worker
from tasks.training.trainer_setup import last_means, log_table, place_of, training_run

DEMONSTRATIONS = "data/ingest/demonstrations.jsonl"
PLOT = "plots/sft.csv"
LOGGED = {"loss": "train_loss", "validation_loss": "validation_loss"}


def execute(stage: Stage[SFTConfig]) -> None:
    """Make models/sft, metrics/sft.json and plots/sft.csv."""
    if not stage.params.enabled:
        use_base(stage)
        return
    if not stage.read(DEMONSTRATIONS):
        raise UserError(f"{DEMONSTRATIONS}: empty data set, and SFT imitates its answers; run `dvc repro ingest`")
    run_ = training_run(stage, shown=["loss"])
    tokenizer = load_tokenizer(stage.root / "models/base", trust_remote_code=trusts(stage))
    model = load_causal_lm(
        stage.root / "models/base",
        trust_remote_code=trusts(stage),
        log=stage.log,
        **place_of(run_, stage.params.lora),
    )

    def encode(row: Row) -> tuple[Demonstration, int]:
        if stage.params.turns == "all":
            item = Demonstration(*encode_turns(tokenizer, row["prompt"], row["response"]))
        else:
            item = Demonstration(encode_prompt(tokenizer, row["prompt"]), encode_response(tokenizer, row["response"]))
        return item, len(item.prompt) + len(item.response)

    limit = min(stage.params.max_tokens, context_length(model))
    kept, too_long = fitting(stage, DEMONSTRATIONS, stage.read(DEMONSTRATIONS), encode, limit, key="sft.max_tokens")
    training = [item for row, item in kept if row["split"] == "train"]
    validation = [item for row, item in kept if row["split"] == "validation"]
    if not training or not validation:
        raise UserError(
            f"{DEMONSTRATIONS}: SFT needs training and validation rows; enlarge ingest.split.demonstrations"
        )

    result = fine_tune(model, training, validation, stage.params, int(tokenizer.pad_token_id), run_)
    if not run_.is_main:
        return

    save_checkpoint(stage.out("models/sft"), model.cpu(), tokenizer)
    stage.outputs.write_csv(PLOT, log_table(result.log, LOGGED))
    stage.write_metrics(
        {
            **last_means(result.log),
            "validation_loss": result.validation_loss,
            "validation_perplexity": 2.718281828459045**result.validation_loss,
            "base_validation_loss": result.base_validation_loss,
            "best_step": result.best_step,
            "steps": result.steps,
            "demonstrations": len(training),
            "tokens": sum(item.tokens for item in training),
            "rows_too_long": too_long,
        }
    )


def use_base(stage: Stage[SFTConfig]) -> None:
    """Make the files of models/base those of models/sft, too; there are no figures."""
    if is_worker():
        return
    base, folder = stage.root / "models/base", stage.out("models/sft")
    for path in sorted(path for path in base.rglob("*") if path.is_file()):
        place = folder / path.relative_to(base)
        place.parent.mkdir(parents=True, exist_ok=True)
        files.link(path.resolve(), place)
    stage.out(PLOT).write_text(",".join(["step", *LOGGED.values()]) + "\n", encoding="utf-8")
    stage.write_metrics({"enabled": False})
    stage.tag("leash.sft", "the base model")
    stage.log("sft.enabled is false: models/sft is models/base")
