"""Stage `select`: which of PPO's snapshots becomes models/policy. Every snapshot answers validation prompts that no
training saw; reward model and judge score the answers. The held-out prompts of `evaluate` take no part."""

from collections.abc import Iterator
from typing import Any

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.determinism import make_deterministic
from rlhf_core.errors import UserError
from rlhf_core.models import load_causal_lm, place, save_checkpoint
from rlhf_core.ppo import snapshots
from rlhf_core.tokenizer import stop_ids
from tasks.exam import Contestant, Exam, Marked, fitting_rows, load_contestant, load_scorer
from tasks.jsonl import Row
from tasks.judges import judge_of
from tasks.pair_judges import pair_judge_of
from tasks.params.loader import parse, read_yaml
from tasks.params.select import SelectParams
from tasks.stage import Stage, run
from tasks.trust import trusts

PREFERENCES = "data/preferences/preferences.jsonl"
SFT, SNAPSHOTS = "models/sft", "models/snapshots"


def execute(stage: Stage[SelectParams]) -> None:
    """Make models/policy, plots/select.csv and metrics/select.json."""
    make_deterministic(stage.seed, stage.common.threads)
    config = parse(PPOConfig, read_yaml().get("ppo"), "ppo")
    sft = load_contestant(stage, "sft", stage.root / SFT)
    table = compare(stage, config, sft) if stage.params.prompts else unknown(stage)
    chosen = choose(table)
    step = chosen[stage.params.rule]
    if step is None:
        raise UserError(f"select.rule is {stage.params.rule}, but no judge scores the answers; use best_proxy or last")
    save_policy(stage, config, sft, step)
    stage.outputs.write_csv("plots/select.csv", table)
    others = {f"{rule}_step": found for rule, found in chosen.items()}
    stage.write_metrics({"rule": stage.params.rule, "step": step, **others, "prompts": table[0]["prompts"]})


def compare(stage: Stage[SelectParams], config: PPOConfig, sft: Contestant) -> list[Row]:
    """A row a snapshot, and one for the SFT model as step 0."""
    rows, _ = fitting_rows(stage, PREFERENCES, validation_prompts(stage), sft, config.max_new_tokens)
    exam = Exam(
        stage=stage,
        rows=rows[: stage.params.prompts],
        reference=sft,
        scorer=load_scorer(stage, int(sft.tokenizer.pad_token_id), config.batch_size),
        judge=judge_of(stage),
        pair_judge=pair_judge_of(stage, config.batch_size),
        temperature=config.temperature,
        max_new_tokens=config.max_new_tokens,
        batch_size=config.batch_size,
        stop_tokens=config.stop_tokens,
    )
    start = exam.ask(sft, stage.seed)
    return [
        summarise(exam, start, step, marked)
        for step, marked in [(0, start), *((step, exam.ask(model, stage.seed)) for step, model in policies(stage, sft))]
    ]


def validation_prompts(stage: Stage[SelectParams]) -> list[Row]:
    """The distinct prompts of the preference pairs that the reward model is not trained on."""
    rows = [row for row in stage.read(PREFERENCES) if row["split"] == "validation"]
    return list({row["prompt_id"]: row for row in rows}.values())


def policies(stage: Stage[Any], sft: Contestant) -> Iterator[tuple[int, Contestant]]:
    """The policy after each step that has a snapshot, one at a time."""
    folder = stage.root / SNAPSHOTS
    for step in snapshots.steps_in(folder):
        start = load_causal_lm(stage.root / SFT, trust_remote_code=trusts(stage))
        yield step, Contestant(f"step-{step}", place(snapshots.load(folder, step, start)), sft.tokenizer)


def summarise(exam: Exam, start: Marked, step: int, marked: Marked) -> Row:
    """Means over the prompts; the win rate is against the SFT model."""
    assert marked.divergence is not None  # snapshots have the SFT model's tokenizer
    return {
        "step": step,
        "kl": _mean(marked.divergence.k1),
        "kl_k3": _mean(marked.divergence.k3),
        "reward": _mean(marked.rewards),
        "gold": None if marked.gold is None else _mean(marked.gold),
        "win_rate": _mean(exam.compare(marked, start)),
        "prompts": len(exam.rows),
    }


def unknown(stage: Stage[SelectParams]) -> list[Row]:
    """The table where nothing is compared: the snapshots, and no figures."""
    columns = ("kl", "kl_k3", "reward", "gold", "win_rate")
    steps = snapshots.steps_in(stage.root / SNAPSHOTS)
    return [{"step": step, **dict.fromkeys(columns), "prompts": 0} for step in steps]


def choose(table: list[Row]) -> dict[str, int | None]:
    """By rule, the step of the snapshot that it chooses; the earlier one where two are equal."""

    def best(column: str) -> int | None:
        known = [row for row in table if row["step"] and row[column] is not None]
        return max(known, key=lambda row: row[column])["step"] if known else None

    judged = "gold" if any(row["gold"] is not None for row in table) else "win_rate"
    return {"last": table[-1]["step"], "best_judge": best(judged), "best_proxy": best("reward")}


def save_policy(stage: Stage[SelectParams], config: PPOConfig, sft: Contestant, step: int) -> None:
    """models/policy: the snapshot of `step` as an ordinary folder, which tells others where answers end."""
    start = load_causal_lm(stage.root / SFT, trust_remote_code=trusts(stage))
    policy = snapshots.load(stage.root / SNAPSHOTS, step, start)
    if config.stop_tokens:
        policy.generation_config.eos_token_id = sorted(stop_ids(sft.tokenizer, config.stop_tokens))
    save_checkpoint(stage.out("models/policy"), policy, sft.tokenizer)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    run("select", SelectParams, execute)
