"""PPO's loop inside a stage, for `ppo` and its variants: models and prompts in, a trained policy and the record of
the run out; resumable, checked by the detectors, logged to MLflow."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.precision import Precision
from rlhf_core.data.scorer import Observed
from rlhf_core.determinism import permutation
from rlhf_core.errors import UserError
from rlhf_core.models.ensemble import JUDGE
from rlhf_core.models.hf import context_length, load_causal_lm, place
from rlhf_core.models.precision import body_precision
from rlhf_core.models.scorers import require_room
from rlhf_core.models.sharding import divide
from rlhf_core.ppo import snapshots
from rlhf_core.ppo.actor_critic import ActorCritic
from rlhf_core.ppo.health import Alert, Monitor
from rlhf_core.ppo.plan import WATCHED, StepPlan
from rlhf_core.ppo.scoring import RewardSource, reference_scores
from rlhf_core.ppo.trainer import OutOfMemory, PPOTrainer
from rlhf_core.training import state as checkpoint
from rlhf_core.training.checkpoints import Checkpoints
from rlhf_core.training.processes import Processes
from tasks.datasets.jsonl import Row, write_jsonl
from tasks.stage.long_rows import fitting_prompts, warn_of_cut_answers
from tasks.stage.progress import Progress
from tasks.stage.stage import Stage
from tasks.stage.trust import trusts
from tasks.stage.workers import is_worker
from tasks.training.gold_judge import judge_of
from tasks.training.ppo_inputs import SFT, Beginning, read_text, starting_critic
from tasks.training.scalar_models import ScalarModels, unchanged
from tasks.training.scorer import extras_of, judging_scorer_of, scorer_of

PROMPTS = "data/ingest/ppo_prompts.jsonl"
HELDOUT = "data/ingest/heldout.jsonl"
READ = 20
"""Held-out prompts that are answered along the run, and at every alert."""
SCHEDULE = "schedule"
"""The reason of samples by `sample_every`."""
POLICY_TRAINED = 1.5
"""Time of an update of policy and critic, over that of the critic alone, which reads the policy without training it."""
EDGE = 5
"""Steps over which the first and last values of the metrics are averaged."""


def build(
    stage: Stage[Any], config: PPOConfig, tokenizer: PreTrainedTokenizerBase, begin: Beginning
) -> tuple[PPOTrainer, list[Row], dict[str, float | None]]:
    """The trainer with its models, the held-out rows to watch, and figures of its inputs: the number of prompts that
    did not fit, and the scores of the reference."""
    processes, trusted, seed, precision = Processes(config.sharding), trusts(stage), begin.seed, stage.precision
    device = torch.device("cpu") if processes.divides_models else processes.device  # `divide` moves parts
    load = partial(load_causal_lm, trust_remote_code=trusted, device=device, log=stage.log)
    is_own_reference = config.lora is not None and begin.start == begin.reference  # the policy without its adapter
    if config.reference_ema is not None and config.lora is not None and not is_own_reference:
        raise UserError(
            f"ppo.reference_ema: with lora the reference is an adapter on {begin.start}, where the policy starts, and "
            f"here it is {begin.reference}; set reference_ema or lora to null, or from round 2 on round.reference to "
            "previous"
        )
    trained: Precision = "float32" if processes.divides_models else precision  # `divide` casts gathered layers
    body_type = body_precision(trained, config.lora)
    ready = partial(divide, bfloat16=precision == "bfloat16") if processes.divides_models else unchanged
    reference = ready(place(load(stage.root / begin.reference, frozen=body_type), device))  # as the policy
    longest = (context_length(reference), config.max_new_tokens)
    kept, too_long = fitting_prompts(stage, PROMPTS, stage.read(PROMPTS), tokenizer, *longest, config.max_prompt_tokens)
    heldout, _ = fitting_prompts(stage, HELDOUT, stage.read(HELDOUT), tokenizer, *longest)
    if not kept:
        raise UserError(f"{PROMPTS}: PPO needs prompts; enlarge ingest.split.ppo")
    known_rows = [row for row, _ in kept]
    prompts, rows, judge = [row["prompt"] for row in known_rows], extras_of(known_rows), judge_of(stage)
    body = reference if is_own_reference and not processes.divides_models else None
    scalars = ScalarModels(trusted, precision, device, body if begin.start == SFT else None, ready, stage.log)
    scorer = scorer_of(stage, tokenizer, config.micro_batch_size, scalars)
    judging = judging_scorer_of(stage.root, tokenizer, config.micro_batch_size, scalars)
    require_room((scorer, judging), [row["prompt"] for row, _ in (*kept, *heldout)], config.max_new_tokens)
    journal = "reference" if processes.count == 1 else f"reference-{processes.accelerator.process_index}"
    known = reference_scores(
        *(config, reference, tokenizer, scorer, prompts, seed, rows, judge, processes),
        in_batches=partial(stage.resumed, journal, unit="reference answer"),
        precision=precision,
    )
    cut = [not ended for ended in known.ended]
    warn_of_cut_answers(stage, tokenizer, begin.reference, cut, config.max_new_tokens, "ppo.max_new_tokens")
    models = ActorCritic(
        config,
        body or load(stage.root / begin.start, frozen=body_type),
        None if is_own_reference else reference,
        starting_critic(stage.root, config, known.normalisation, seed, replace(scalars, precision=trained)),
        seed,
        precision,
    )
    text = read_text(stage.root, config, tokenizer, context_length(models.policy))
    observed = Observed(scorer, {} if judging is None else {JUDGE: judging})
    source = RewardSource(observed, known.normalisation, judge)
    trainer = PPOTrainer(config, models, tokenizer, source, prompts, seed, text, rows)
    return trainer, drawn([row for row, _ in heldout], stage.seed), {**known.figures, "prompts_too_long": too_long}


def drawn(rows: list[Row], seed: int) -> list[Row]:
    """The held-out rows that are answered along the run: drawn by seed, in the order of the data."""
    return [rows[i] for i in sorted(permutation(len(rows), seed, WATCHED)[:READ])]


@dataclass
class Record:
    """The record of a run beside its models; part of every checkpoint."""

    monitor: Monitor
    history: list[Row] = field(default_factory=list)
    samples: list[Row] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """Plain types only."""
        return {"monitor": self.monitor.state_dict(), "history": self.history, "samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.monitor.load_state_dict(state["monitor"])
        self.history, self.samples = state["history"], state["samples"]


def train(stage: Stage[Any], trainer: PPOTrainer, watched: list[Row]) -> Record:
    """All steps, from the last checkpoint if there is one; snapshots go into the stage's state. Raises UserError at an
    alert, where `runtime.on_alert` says stop."""
    checkpoints, record = Checkpoints(stage.state_dir, stage.log), Record(Monitor(trainer.config))
    state = checkpoint.load(checkpoints, trainer.processes)
    if state is not None and snapshots_are_whole(stage, trainer, state["trainer"]["steps_done"]):
        trainer.load_state_dict(state["trainer"])
        record.load_state_dict(state["record"])
        stage.log(f"continues after step {trainer.steps_done}")
        stop_at_alert(stage, record)
    else:
        record.samples += answers(trainer, watched, [SCHEDULE])
    saved, progress = trainer.steps_done, stage.progress(trainer.config.steps, done=trainer.steps_done)
    took: list[Took] = []
    with stage.interrupts.deferred():
        while trainer.steps_done < trainer.config.steps:
            try:
                step(stage, trainer, record, watched, progress, took)
            except OutOfMemory as error:
                raise UserError(
                    f"{error}, and the stage starts again; with the same parameters, when there is more memory, the "
                    f"run continues at step {saved + 1}"
                ) from None
            leaving = stage.interrupts.is_requested()
            saving = leaving or save_is_due(stage, trainer, record)
            if trainer.processes.divides_models:  # every process has a part of the state
                leaving, saving = trainer.processes.gather([(leaving, saving)])[0]
            if saving and trainer.writes:
                state = {"trainer": trainer.state_dict(), "record": record.state_dict()}
                checkpoint.save(checkpoints, trainer.steps_done, state, trainer.processes)
                saved = trainer.steps_done
            if leaving:
                stage.interrupts.leave()
            stop_at_alert(stage, record)
    return record


def snapshots_of(stage: Stage[Any]) -> Path:
    """The folder of the run's snapshots, in its state."""
    return stage.state_dir / "snapshots"


def snapshot_is_due(config: PPOConfig, step: int) -> bool:
    """Every `snapshot_every` steps, and at the end."""
    return step == config.steps or (config.snapshot_every is not None and step % config.snapshot_every == 0)


def snapshots_are_whole(stage: Stage[Any], trainer: PPOTrainer, steps: int) -> bool:
    """Whether every snapshot of the first `steps` steps lies in the state; a run without one of them starts again."""
    wanted = {step for step in range(1, steps + 1) if snapshot_is_due(trainer.config, step)}
    missing = wanted - set(snapshots.steps_in(snapshots_of(stage)))
    if missing:
        stage.log(f"the snapshot of step {min(missing)} is gone from {snapshots_of(stage)}; starting again")
    return not missing


@dataclass(frozen=True)
class Took:
    """The time of a step of this process."""

    plan: StepPlan
    seconds: float
    """With what is done between this step and the last."""
    update: float
    """The part of its updates."""


def seconds_left(config: PPOConfig, took: Sequence[Took]) -> float:
    """Of the steps after the last one of `took`: the mean of steps with the same plan, without the first of all, which
    is slow. Before there is one, the last step's time with as much more for its updates as they are more: in the
    critic's warm-up the policy is read, and not trained."""
    known = took[1:] or took
    last = known[-1]

    def weight(plan: StepPlan) -> float:
        return plan.epochs * (POLICY_TRAINED if plan.trains_policy else 1.0)

    alike: dict[float, list[float]] = {}
    for one in known:
        alike.setdefault(weight(one.plan), []).append(one.seconds)
    coming = Counter(weight(StepPlan.of(config, number)) for number in range(took[-1].plan.step + 1, config.steps))

    def each(kind: float) -> float:
        return fmean(alike[kind]) if kind in alike else last.seconds + last.update * (kind / weight(last.plan) - 1.0)

    return sum(count * each(kind) for kind, count in coming.items())


def step(
    stage: Stage[Any],
    trainer: PPOTrainer,
    record: Record,
    watched: list[Row],
    progress: Progress,
    took: list[Took],
) -> None:
    """One step, logged: its row, new alerts, and samples where they are due. Its time is added to `took`."""
    plan = StepPlan.of(trainer.config, trainer.steps_done)
    row = trainer.step()
    done = trainer.steps_done
    record.history.append(row)
    if trainer.writes and snapshot_is_due(trainer.config, done):
        snapshots.write(snapshots_of(stage), trainer.models, done, trainer.config.lora)
    track(stage, trainer, row)
    took.append(Took(plan, time.monotonic() - progress.last_update, trainer.seconds["update"]))
    shown = {name: row[name] for name in ("score", "gold", "kl", "entropy")}
    progress.update(done, seconds_left(trainer.config, took), **shown)
    if not row["optimizer_steps"] and not row["stopped_early"]:
        progress.note(f"step {done}: no update: every answer is of a group with equal scores, or was cut off")
    for name in row:
        term, before = name.removeprefix("equal_groups_share/"), record.history[-2:-1]
        if term != name and row[name] == 1.0 and not (before and before[0][name] == 1.0):
            progress.note(f"step {done}: the term {term} does not vary in any group: it adds nothing to the advantages")
    alerts = watch(stage, trainer, record, progress)
    reasons = [SCHEDULE] if done % trainer.config.sample_every == 0 or done == trainer.config.steps else []
    if reasons := reasons + [alert.name for alert in alerts]:
        record.samples += answers(trainer, watched, reasons)


def save_is_due(stage: Stage[Any], trainer: PPOTrainer, record: Record) -> bool:
    """Every `runtime.checkpoint_every` steps, at the end, and before an alert stops the run."""
    done = trainer.steps_done
    alerted = stage.runtime.on_alert == "stop" and any(alert.step == done for alert in record.monitor.alerts)
    return alerted or done % stage.runtime.checkpoint_every == 0 or done == trainer.config.steps


def track(stage: Stage[Any], trainer: PPOTrainer, row: Row) -> None:
    """Diagnostics and speed of the step that was just done."""
    step = trainer.steps_done
    stage.track(row, step)
    stage.track({f"seconds_{phase}": seconds for phase, seconds in trainer.seconds.items()}, step)
    stage.track({"tokens_per_second": tokens_per_second(row, trainer)}, step)


def watch(stage: Stage[Any], trainer: PPOTrainer, record: Record, progress: Progress) -> list[Alert]:
    """Run the detectors on the last step and log new alerts. Returns those that an output may contain: all but the ones
    that depend on time."""
    step = trainer.steps_done
    alerts = record.monitor.observe(record.history[-1])
    slow = record.monitor.observe_seconds(trainer.seconds, step)
    for alert in [*alerts, *slow]:
        progress.note(f"ALERT {alert}")
        stage.tag(f"leash.alert.{alert.name}", str(alert))
    stage.track({"alerts": len(record.monitor.active)}, step)
    return alerts


def stop_at_alert(stage: Stage[Any], record: Record) -> None:
    """Where `runtime.on_alert` says stop and there was an alert: put history, samples and alerts where they can be
    read, and raise UserError."""
    if stage.runtime.on_alert != "stop" or not record.monitor.alerts:
        return
    folder = stage.state_dir / "stopped"
    if not is_worker():
        folder.mkdir(exist_ok=True)
        write_jsonl(folder / "history.jsonl", record.history)
        write_jsonl(folder / "samples.jsonl", record.samples)
        write_jsonl(folder / "alerts.jsonl", map(asdict, record.monitor.alerts))
    raise UserError(
        f"stopped by {record.monitor.alerts[-1]}. History, samples and alerts so far: "
        f"{folder.relative_to(stage.root)}; runtime.on_alert: warn goes on from here"
    )


def answers(trainer: PPOTrainer, watched: list[Row], reasons: Sequence[str]) -> list[Row]:
    """The policy's present answers to the watched held-out prompts, and the reasons for them."""
    given = trainer.answer([row["prompt"] for row in watched], extras_of(watched))
    return [
        {
            "step": answer["step"],
            "reason": ", ".join(reasons),
            "prompt_id": row["prompt_id"],
            **{name: value for name, value in answer.items() if name != "step"},
        }
        for row, answer in zip(watched, given, strict=True)
    ]


def tokens_per_second(row: Row, trainer: PPOTrainer) -> float:
    """Sampled tokens per second of the whole step."""
    tokens: float = row["response_tokens_mean"] * trainer.config.batch_size
    return tokens / sum(trainer.seconds.values())


def summary(history: list[Row], config: PPOConfig) -> dict[str, Any]:
    """First and last values of the run, each the mean of a few steps, and what it cost."""

    def mean(name: str, rows: list[Row]) -> float | None:
        values = [row[name] for row in rows if row[name] is not None]
        return sum(values) / len(values) if values else None

    first, last = history[:EDGE], history[-EDGE:]
    return {
        "steps": len(history),
        "samples_generated": len(history) * config.batch_size,
        "tokens_trained": int(sum(row["tokens_trained"] for row in history)),
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
        "grad_clipped_share": mean("grad_clipped_share", history),
    }
