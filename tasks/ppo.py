"""Stage `ppo`: trains the policy against the reward model, with a KL penalty to the SFT model, and writes snapshots
along the run, from which `select` chooses the policy."""

import shutil
from dataclasses import asdict

from transformers import PreTrainedTokenizerBase

from rlhf_core import files
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.data.tokenizer import load_tokenizer
from rlhf_core.models.hf import save_checkpoint
from rlhf_core.ppo.trainer import PPOTrainer
from tasks.params.round import RoundParams
from tasks.stage.models import set_numerics
from tasks.stage.stage import Stage
from tasks.stage.trust import trusts
from tasks.training.ppo_inputs import SFT, beginning
from tasks.training.ppo_loop import build, snapshots_of, summary, train


def execute(stage: Stage[PPOConfig]) -> None:
    """Make models/{snapshots,critic}, plots/ppo.csv, data/ppo/samples.jsonl and metrics/ppo.json."""
    set_numerics(stage)
    tokenizer = load_tokenizer(stage.root / SFT, trust_remote_code=trusts(stage))
    begin = beginning(stage.root, stage.seed, stage.block("round", RoundParams))
    trainer, watched, inputs = build(stage, stage.params, tokenizer, begin)
    record = train(stage, trainer, watched)
    if trainer.processes.divides_models:
        trainer.models.rejoin()
    if not trainer.processes.is_main:
        return
    shutil.copytree(snapshots_of(stage), stage.out("models/snapshots"), copy_function=files.link)
    save_critic(stage, trainer, tokenizer)
    stage.outputs.write_csv("plots/ppo.csv", record.history)
    stage.outputs.write_jsonl("data/ppo/samples.jsonl", record.samples)
    alerts = [asdict(alert) for alert in record.monitor.alerts]
    stage.write_metrics({**summary(record.history, stage.params), **inputs, "alerts": alerts})


def save_critic(stage: Stage[PPOConfig], trainer: PPOTrainer, tokenizer: PreTrainedTokenizerBase) -> None:
    """models/critic: a scalar model, or a note that there is none."""
    critic = trainer.models.finished_critic()
    folder = stage.out("models/critic")
    if critic is None:
        folder.mkdir(parents=True)
        note = f"There is no critic: `ppo.advantage` is `{stage.params.advantage}`, which needs none.\n"
        (folder / "README.md").write_text(note, encoding="utf-8")
        return
    save_checkpoint(folder, critic, tokenizer)
