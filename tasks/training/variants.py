"""What `hybrid`, `reinforce`, `rloo` and `grpo` share: PPO's loop with the settings of `ppo`, something changed, and a
model at the end. The changes of each variant are defined in tasks/params/variant.py."""

from dataclasses import asdict
from functools import partial
from typing import NoReturn

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.errors import UserError
from rlhf_core.ppo.detectors import COLUMNS
from tasks.params.loader import PARAMS_FILE
from tasks.params.round import RoundParams
from tasks.params.variant import PUBLISHED, VariantParams
from tasks.stage.run import quiet_libraries, run
from tasks.stage.stage import Stage
from tasks.stage.switched_off import write_switched_off
from tasks.stage.workers import requested_processes, start_workers

SFT = "models/sft"


def run_variant(name: str, start: str | None = None) -> NoReturn:
    """The stage `name` as a process: PPO's loop from the folder `start` (None: as the stage `ppo`) to models/<name>."""
    start_workers(f"tasks.{name}", requested_processes(name))
    run(name, VariantParams, partial(execute, name=name, start=start))


def execute(stage: Stage[VariantParams], name: str, start: str | None = None) -> None:
    """Make models/<name>, plots/<name>.csv and metrics/<name>.json."""
    if stage.params.enabled:
        train_variant(stage, settings(stage, name), name, start)
    else:
        write_switched_off(stage, {f"plots/{name}.csv": COLUMNS})


def train_variant(stage: Stage[VariantParams], config: PPOConfig, name: str, start: str | None) -> None:
    """Train and save. What takes seconds to import is imported here: a stage that is switched off does without."""
    from rlhf_core.data.tokenizer import load_tokenizer
    from rlhf_core.models.hf import save_checkpoint, write_ends
    from tasks.stage.numerics import set_numerics
    from tasks.stage.trust import trusts
    from tasks.training.ppo_inputs import Beginning, beginning
    from tasks.training.ppo_loop import build, summary, train

    quiet_libraries()
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


def settings(stage: Stage[VariantParams], name: str) -> PPOConfig:
    """PPO's settings with this variant's changes. Raises UserError for changes that do not fit."""
    ppo = stage.block("ppo", PPOConfig)
    try:
        return stage.params.applied_to(ppo, name)
    except ValueError as error:
        raise UserError(f"{PARAMS_FILE}: {error}") from None
