"""What `hybrid`, `reinforce`, `rloo` and `grpo` share: PPO's loop with the settings of `ppo`, something changed, and a
model at the end. The changes of each variant are defined in tasks/params/variant.py."""

from dataclasses import asdict

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.data.tokenizer import load_tokenizer
from rlhf_core.errors import UserError
from rlhf_core.models.hf import save_checkpoint, write_ends
from tasks.params.loader import PARAMS_FILE
from tasks.params.round import RoundParams
from tasks.params.variant import PUBLISHED, VariantParams
from tasks.stage.models import set_numerics
from tasks.stage.stage import Stage
from tasks.stage.trust import trusts
from tasks.training.ppo_inputs import Beginning, beginning
from tasks.training.ppo_loop import build, summary, train

SFT = "models/sft"


def train_variant(stage: Stage[VariantParams], start: str | None = None) -> None:
    """Make models/<name>, plots/<name>.csv and metrics/<name>.json of the stage: PPO's loop from the model in the
    folder `start` (None: as the stage `ppo`)."""
    name, config = stage.name, settings(stage)
    set_numerics(stage)
    tokenizer = load_tokenizer(stage.root / SFT, trust_remote_code=trusts(stage))
    if start:
        begin = Beginning(start, SFT, stage.seed)
    else:
        begin = beginning(stage.root, stage.seed, stage.block("round", RoundParams))
    trainer, watched, inputs = build(stage, config, tokenizer, begin)
    record = train(stage, trainer, watched)
    if trainer.processes.divides_models:
        trainer.models.rejoin()
    if not trainer.processes.is_main:
        return
    policy = trainer.models.finished_policy()
    if config.stop_tokens:
        write_ends(policy, tokenizer, trainer.stop_ids)
    save_checkpoint(stage.out(f"models/{name}"), policy, tokenizer)
    stage.outputs.write_csv(f"plots/{name}.csv", record.history)
    alerts = [asdict(alert) for alert in record.monitor.alerts]
    told = {**summary(record.history, config), **inputs, "alerts": alerts}
    recipe = {"recipe": stage.params.recipe} if name in PUBLISHED else {}
    stage.write_metrics({"enabled": True, **recipe, **told})


def settings(stage: Stage[VariantParams]) -> PPOConfig:
    """PPO's settings with this variant's changes. Raises UserError for changes that do not fit."""
    ppo = stage.block("ppo", PPOConfig)
    try:
        return stage.params.applied_to(ppo, stage.name)
    except ValueError as error:
        raise UserError(f"{PARAMS_FILE}: {error}") from None
