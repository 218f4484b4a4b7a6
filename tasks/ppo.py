"""Stage `ppo`: trains the policy against the reward model, on a leash to the SFT model."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.determinism import make_deterministic
from rlhf_core.errors import UserError
from rlhf_core.models import (
    context_length,
    load_causal_lm,
    load_scalar_model,
    place,
    save_checkpoint,
    scalar_model_from,
)
from rlhf_core.ppo.checkpoint import Checkpoints
from rlhf_core.ppo.trainer import PPOTrainer, ScoreNormalisation
from rlhf_core.scorers import RewardModelScorer
from rlhf_core.tokenizer import load_tokenizer
from tasks.jsonl import Row
from tasks.judges import judge_of
from tasks.stage import Stage, run
from tasks.tokens import fitting, prompt_encoder

PROMPTS = "data/ingest/ppo_prompts.jsonl"
HELDOUT = "data/ingest/heldout.jsonl"
READ = 20
"""Held-out prompts whose answers are written down along the run."""
EDGE = 5
"""Steps over which the first and last values of the metrics are averaged."""


def execute(stage: Stage[PPOConfig]) -> None:
    """Make models/{policy,critic}, plots/ppo.csv, data/ppo/samples.jsonl and metrics/ppo.json."""
    make_deterministic(stage.seed, stage.common.threads)
    tokenizer = load_tokenizer(stage.root / "models/sft")
    trainer, watched, too_long = build(stage, tokenizer)
    history, samples = train(stage, trainer, watched)
    if stage.params.stop_tokens:
        trainer.policy.generation_config.eos_token_id = sorted(trainer.stop_ids)
    save_checkpoint(stage.out("models/policy"), trainer.policy.cpu(), tokenizer)
    save_checkpoint(stage.out("models/critic"), trainer.critic.cpu(), tokenizer)
    stage.outputs.write_csv("plots/ppo.csv", history)
    stage.outputs.write_jsonl("data/ppo/samples.jsonl", samples)
    stage.write_metrics({**summary(history), "prompts_too_long": too_long})


def build(stage: Stage[PPOConfig], tokenizer: PreTrainedTokenizerBase) -> tuple[PPOTrainer, list[Row], int]:
    """The trainer with its four models, the held-out rows to watch, and the prompts that did not fit."""
    config = stage.params
    sft, reward = stage.root / "models/sft", stage.root / "models/reward"
    policy = load_causal_lm(sft)
    kept, too_long = fitting(
        stage,
        PROMPTS,
        stage.read(PROMPTS),
        prompt_encoder(tokenizer),
        context_length(policy),
        reserve=config.max_new_tokens,
    )
    watched, _ = fitting(
        stage,
        HELDOUT,
        stage.read(HELDOUT),
        prompt_encoder(tokenizer),
        context_length(policy),
        reserve=config.max_new_tokens,
    )
    if not kept:
        raise UserError(f"{PROMPTS}: PPO needs prompts; enlarge ingest.split.ppo")
    scorer_model = place(load_scalar_model(reward))
    critic = load_scalar_model(reward) if config.critic.init == "reward" else scalar_model_from(sft, stage.seed)
    trainer = PPOTrainer(
        config,
        policy=policy,
        reference=load_causal_lm(sft),
        critic=critic,
        tokenizer=tokenizer,
        scorer=RewardModelScorer(scorer_model, int(tokenizer.pad_token_id), config.micro_batch_size),
        normalisation=ScoreNormalisation(scorer_model.config.score_mean, scorer_model.config.score_std),
        prompts=[row["prompt"] for row, _ in kept],
        seed=stage.seed,
        judge=judge_of(stage),
    )
    return trainer, [row for row, _ in watched[:READ]], too_long


def train(stage: Stage[PPOConfig], trainer: PPOTrainer, watched: list[Row]) -> tuple[list[Row], list[Row]]:
    """All steps, from the last checkpoint if there is one. Returns the history and the held-out samples."""
    checkpoints = Checkpoints(stage.state_dir)
    history: list[Row] = []
    samples: list[Row] = []
    if (state := checkpoints.load()) is not None:
        trainer.load_state_dict(state["trainer"])
        history, samples = state["history"], state["samples"]
        stage.say(f"continues after step {trainer.steps_done}")
    else:
        samples += answers(trainer, watched)
    progress = stage.progress(stage.params.steps)
    while trainer.steps_done < stage.params.steps:
        row = trainer.step()
        step = trainer.steps_done
        history.append(row)
        stage.track(row, step)
        stage.track({f"seconds_{phase}": seconds for phase, seconds in trainer.seconds.items()}, step)
        stage.track({"tokens_per_second": tokens_per_second(row, trainer)}, step)
        progress.update(step, **{name: row[name] for name in ("score", "gold", "kl", "entropy")})
        if step % stage.params.sample_every == 0 or step == stage.params.steps:
            samples += answers(trainer, watched)
        if step % stage.runtime.checkpoint_every == 0 and step < stage.params.steps:
            checkpoints.save(step, {"trainer": trainer.state_dict(), "history": history, "samples": samples})
    if stage.tracker:
        stage.tracker.table("ppo_samples", samples)
    return history, samples


def answers(trainer: PPOTrainer, watched: list[Row]) -> list[Row]:
    """What the policy says now to the watched held-out prompts."""
    given = trainer.answer([row["prompt"] for row in watched])
    return [
        {"step": answer["step"], "prompt_id": row["prompt_id"], **{k: v for k, v in answer.items() if k != "step"}}
        for row, answer in zip(watched, given, strict=True)
    ]


def tokens_per_second(row: Row, trainer: PPOTrainer) -> float:
    """Sampled tokens per second of the whole step."""
    tokens: float = row["response_tokens_mean"] * trainer.config.batch_size
    return tokens / sum(trainer.seconds.values())


def summary(history: list[Row]) -> dict[str, Any]:
    """First and last values of the run, each the mean of a few steps."""

    def mean(name: str, rows: list[Row]) -> float | None:
        values = [row[name] for row in rows if row[name] is not None]
        return sum(values) / len(values) if values else None

    first, last = history[:EDGE], history[-EDGE:]
    return {
        "steps": len(history),
        "optimizer_steps": int(sum(row["optimizer_steps"] for row in history)),
        "reward_first": mean("reward_raw", first),
        "reward_last": mean("reward_raw", last),
        "gold_first": mean("gold", first),
        "gold_last": mean("gold", last),
        "kl_last": mean("kl", last),
        "kl_coef_last": history[-1]["kl_coef"],
        "entropy_last": mean("entropy", last),
        "missing_eos_share_last": mean("missing_eos_share", last),
        "explained_variance_last": mean("explained_variance", last),
    }


if __name__ == "__main__":
    run("ppo", PPOConfig, execute)
