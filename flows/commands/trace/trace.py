"""Loads a project's models and prompts and traces one PPO step for one prompt."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.data.chat import Conversation
from rlhf_core.data.tokenizer import encode_prompt, load_tokenizer
from rlhf_core.determinism import make_deterministic
from rlhf_core.errors import UserError
from rlhf_core.evaluation.judges import RubricJudge
from rlhf_core.inspect.trace import Trace, trace_step
from rlhf_core.models.hf import context_length, load_causal_lm, load_scalar_model, place, scalar_head
from rlhf_core.models.precision import body_precision
from rlhf_core.ppo.actor_critic import ActorCritic
from rlhf_core.ppo.plan import prompts_of_step
from rlhf_core.ppo.scoring import RewardSource, ScoreNormalisation, reference_scores
from rlhf_core.ppo.trainer import PPOTrainer
from rlhf_core.training.processes import Processes
from tasks.datasets.jsonl import read_jsonl
from tasks.params.all import Params
from tasks.params.loader import PARAMS_FILE, parse, read_yaml
from tasks.params.scorer import uses_reward_model
from tasks.stage.trust import warn_of_code
from tasks.training.ppo_inputs import SFT, beginning, read_text, starting_critic
from tasks.training.scalar_models import ScalarModels
from tasks.training.scorer import REWARD, build_scorer, extras_of

POLICY, CRITIC = "models/policy", "models/critic"
PROMPTS = "data/ingest/ppo_prompts.jsonl"
Start = Literal["policy", "sft"]


@dataclass(frozen=True)
class Traced:
    """A trace with its settings."""

    trace: Trace
    config: PPOConfig
    start: Start
    model: str
    """The folder of the model that the step starts from."""
    seed: int
    notes: list[str]
    """How the step differs from one of the run."""


def trace_prompt(root: Path, text: str | None, start: Start = "sft", seed: int | None = None) -> Traced:
    """One PPO step with the settings of params.yaml on a batch of the prompt and prompts of the run. Without `text` it
    shows the first prompt of the step's own batch.

    `start` is `sft` (step 1, with the model that PPO begins with) or `policy` (models/policy with models/critic, at the
    policy's step of the schedule). Raises UserError where models or prompts are missing, and for a prompt that is empty
    or too long.
    """
    if text is not None and not text.strip():
        raise UserError("the prompt is empty; give the question, in quotation marks")
    params = parse(Params, read_yaml(root / PARAMS_FILE), file=PARAMS_FILE)
    config, trusted, precision = params.ppo, params.trust_remote_code, params.precision
    moves = config.reference_ema is not None  # after a step, so that the first one has the fixed reference
    config = config.model_copy(update={"reference_ema": None})
    at_end = start == "policy"
    needed = {SFT: True, REWARD: uses_reward_model(params.scorer), POLICY: at_end, CRITIC: at_end and config.has_critic}
    missing = [path for path, is_needed in needed.items() if is_needed and not _is_model(root / path)]
    missing += [] if (root / PROMPTS).is_file() else [PROMPTS]
    if missing:
        raise UserError(f"{', '.join(missing)}: missing; `leash run select` makes what a trace needs")
    seed = params.seed if seed is None else seed
    make_deterministic(seed, params.threads, deterministic=params.deterministic, tf32=precision == "bfloat16")
    if trusted:
        warn_of_code("trace:")
    metrics = {name: _read_json(root / "metrics" / f"{name}.json") for name in ("ingest", "ppo", "select")}
    begin = beginning(root, seed, params.round)
    model = POLICY if at_end else begin.start
    step, notes = _steps_before(config, metrics["select"]) if at_end else (0, [])
    if moves and at_end:
        notes.append("the moving reference of the run is not saved with the models: the reference here is its start")

    device = Processes().device
    load = partial(load_causal_lm, trust_remote_code=trusted)
    tokenizer = load_tokenizer(root / SFT, trust_remote_code=trusted)
    body = body_precision(precision, config.lora)
    reference = place(load(root / begin.reference, frozen=body, device=device), device)
    context = context_length(reference)
    prompt: Conversation | None = None if text is None else [{"role": "user", "content": text}]
    room = context - config.max_new_tokens
    if prompt is not None and (tokens := len(encode_prompt(tokenizer, prompt))) > room:
        raise UserError(
            f"the prompt is {tokens - room} tokens too long: {config.max_new_tokens} of {context} are the answer"
        )
    rows = [row for row in read_jsonl(root / PROMPTS) if len(encode_prompt(tokenizer, row["prompt"])) <= room]
    if not rows:
        raise UserError(f"{PROMPTS}: no prompt leaves room for an answer; enlarge the context")

    # The scorer of the run, normalised as in the run: measured again where PPO has not run.
    scalars = ScalarModels(trusted, precision, device)
    limits, size = params.runtime.functions, config.micro_batch_size
    scorer = build_scorer(root, params.scorer, limits, tokenizer, size, scalars)
    mean, std = metrics["ppo"].get("score_mean"), metrics["ppo"].get("score_std")
    if isinstance(mean, float) and isinstance(std, float):
        normalisation = ScoreNormalisation(mean, std)
    else:
        own_seed, prompts = beginning(root, params.seed, params.round).seed, [row["prompt"] for row in rows]
        scored = reference_scores(config, reference, tokenizer, scorer, prompts, own_seed, rows=extras_of(rows))
        normalisation = scored.normalisation
    source = RewardSource(scorer, normalisation, RubricJudge() if metrics["ingest"].get("source") == "demo" else None)

    policy = load(root / model, frozen=body)
    if at_end and config.needs_critic_model:
        critic: Any = load_scalar_model(root / CRITIC, trust_remote_code=trusted, frozen=body)
    else:
        critic = starting_critic(root, config, normalisation, begin.seed, ScalarModels(trusted, precision))
    is_own_reference = config.lora is not None and not at_end and begin.start == begin.reference
    models = ActorCritic(config, policy, None if is_own_reference else reference, critic, begin.seed, precision)
    del reference  # models has it where it is used
    if at_end and models.head is not None:
        trained = scalar_head(load_scalar_model(root / CRITIC, trust_remote_code=trusted))
        models.head.load_state_dict(trained.state_dict())

    # The step's own batch, with the traced prompt in place of its first unless it has it anyway.
    batch = prompts_of_step(step, config.batch_size // config.samples_per_prompt, len(rows), begin.seed)
    prompt = prompt or rows[batch[0]]["prompt"]
    found = next((place for place, index in enumerate(batch) if rows[index]["prompt"] == prompt), None)
    if found is None:
        found = 0
        rows[batch[0]] = {"prompt": prompt}
    pieces, prompts = read_text(root, config, tokenizer, context), [row["prompt"] for row in rows]
    trainer = PPOTrainer(config, models, tokenizer, source, prompts, begin.seed, pieces, extras_of(rows))
    trainer.steps_done = step
    coef = metrics["ppo"].get("kl_coef_last")
    if at_end and config.kl.controller == "adaptive" and isinstance(coef, float):
        trainer.controller.coef = coef
    elif at_end and config.kl.controller == "adaptive":
        notes.append("metrics/ppo.json has no last β: it starts from its initial value")
    for name, scheduler in trainer.schedulers.items():
        done = step - (config.critic_warmup_steps if name == "policy" else 0)
        rate = scheduler.base_lrs[0] * scheduler.lr_lambdas[0](max(0, done))
        trainer.optimizers[name].param_groups[0]["lr"] = rate
    traced = trace_step(trainer, [found * config.samples_per_prompt])[0]
    return Traced(traced, config, start, model, seed, notes)


def _steps_before(config: PPOConfig, selected: dict[str, Any]) -> tuple[int, list[str]]:
    """Steps before the one that is traced from models/policy (those of the policy, at most all but the last), and how
    it differs from a step of the run."""
    notes = ["Adam starts without moments: those of the run are not saved with the models"]
    if config.lora is not None:
        notes.append("the adapters of the run are folded into models/policy; new ones are trained here")
    chosen, eta = selected.get("step"), selected.get("eta", 1.0)
    if isinstance(eta, float) and eta < 1:
        notes.append(f"models/policy is SFT + {eta:g}·(the snapshot after step {chosen} − SFT), no policy of the run")
    done = chosen if isinstance(chosen, int) else config.steps
    if 0 <= done < config.steps:
        notes.append(f"models/policy is the snapshot after step {done}, models/critic that of the last step")
    else:
        notes.append(f"the run is over after {config.steps} steps; this is its last one once more, from where it ended")
    return (done if 0 <= done < config.steps else config.steps - 1), notes


def _is_model(folder: Path) -> bool:
    """Whether the folder holds a model, and not the note of a stage that made none."""
    return (folder / "config.json").is_file()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
