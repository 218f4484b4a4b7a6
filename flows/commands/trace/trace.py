"""Loads a project's models and prompts and traces one PPO step for one prompt."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.precision import Precision
from rlhf_core.data.chat import Conversation
from rlhf_core.data.tokenizer import encode_prompt, load_tokenizer
from rlhf_core.determinism import make_deterministic
from rlhf_core.errors import UserError
from rlhf_core.evaluation.judges import RubricJudge
from rlhf_core.inspect.trace.records import Trace
from rlhf_core.inspect.trace.step import trace_step
from rlhf_core.models.hf import context_length, load_causal_lm, load_scalar_model, place, scalar_head
from rlhf_core.models.precision import body_precision
from rlhf_core.ppo.actor_critic import ActorCritic
from rlhf_core.ppo.plan import prompts_of_step
from rlhf_core.ppo.scoring import RewardSource, ScoreNormalisation, reference_scores
from rlhf_core.ppo.trainer import PPOTrainer
from rlhf_core.training.processes import Processes
from tasks.datasets.jsonl import Row, read_jsonl
from tasks.params.all import Params
from tasks.params.loader import PARAMS_FILE, parse, read_yaml
from tasks.params.scorer import uses_reward_model
from tasks.stage.trust import warn_of_code
from tasks.training.ppo_inputs import SFT, Beginning, beginning, read_text, starting_critic
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


def trace_prompt(root: Path, text: str, start: Start | None = None, seed: int | None = None) -> Traced:
    """One PPO step with the settings of params.yaml on a batch of the prompt and prompts of the run.

    `start` is `policy` (models/policy with models/critic, at the policy's step of the schedule), `sft` (step 1, with
    the model that PPO begins with), or None (the policy where there is one). Raises UserError where models or prompts
    are missing, and for a prompt that is empty or too long.
    """
    if not text.strip():
        raise UserError("the prompt is empty; give the question, in quotation marks")
    params = parse(Params, read_yaml(root / PARAMS_FILE), file=PARAMS_FILE)
    start = start or ("policy" if is_model(root / POLICY) else "sft")
    _require_models(root, params, start)
    seed = params.seed if seed is None else seed
    make_deterministic(seed, params.threads, deterministic=params.deterministic, tf32=params.precision == "bfloat16")
    if trusted := params.trust_remote_code:
        warn_of_code("trace:")
    notes: list[str] = []
    if start == "policy":
        notes.append("Adam starts without moments: those of the run are not saved with the models")
    tokenizer = load_tokenizer(root / SFT, trust_remote_code=trusted)
    source = _reward_source(root, params, tokenizer)
    begin = beginning(root, seed, params.round)
    models = _load_models(root, params.ppo, start, begin, source.normalisation, trusted, params.precision, notes)
    step = _step(root, params.ppo, start, notes)
    prompt: Conversation = [{"role": "user", "content": text}]
    rows, row = _batch(root, params.ppo, prompt, step, begin.seed, tokenizer, context_length(models.policy))
    pieces = read_text(root, params.ppo, tokenizer, context_length(models.policy))
    prompts = [each["prompt"] for each in rows]
    trainer = PPOTrainer(params.ppo, models, tokenizer, source, prompts, begin.seed, pieces, extras_of(rows))
    trainer.steps_done = step
    if start == "policy":
        _restore_controllers(root, trainer, notes)
    for name, scheduler in trainer.schedulers.items():
        done = step - (params.ppo.critic.warmup_steps if name == "policy" else 0)
        rate = scheduler.base_lrs[0] * scheduler.lr_lambdas[0](max(0, done))
        trainer.optimizers[name].param_groups[0]["lr"] = rate
    model = POLICY if start == "policy" else begin.start
    return Traced(trace_step(trainer, [row])[0], params.ppo, start, model, seed, notes)


def is_model(folder: Path) -> bool:
    """Whether the folder holds a model, and not the note of a stage that made none."""
    return (folder / "config.json").is_file()


def _require_models(root: Path, params: Any, start: Start) -> None:
    needed = [SFT] + ([REWARD] if uses_reward_model(params.scorer) else [])
    if start == "policy":
        needed += [POLICY] + ([CRITIC] if params.ppo.has_critic else [])
    missing = [path for path in needed if not is_model(root / path)]
    missing += [] if (root / PROMPTS).is_file() else [PROMPTS]
    if missing:
        raise UserError(f"{', '.join(missing)}: missing; `leash run select` makes what a trace needs")


def _load_models(
    root: Path,
    config: PPOConfig,
    start: Start,
    begin: Beginning,
    normalisation: ScoreNormalisation,
    trusted: bool,
    precision: Precision,
    notes: list[str],
) -> ActorCritic:
    """The models as at the start of PPO, or at its end."""
    frozen, folder = body_precision(precision, config.lora), POLICY if start == "policy" else begin.start
    policy = load_causal_lm(root / folder, trust_remote_code=trusted, frozen=frozen)
    trained = start == "policy" and config.needs_critic_model
    critic = (
        load_scalar_model(root / CRITIC, trust_remote_code=trusted, frozen=frozen)
        if trained
        else starting_critic(root, config, normalisation, begin.seed, ScalarModels(trusted, precision))
    )
    is_own_reference = config.lora is not None and start == "sft" and begin.start == begin.reference
    reference = (
        None
        if is_own_reference
        else load_causal_lm(root / begin.reference, trust_remote_code=trusted, frozen=precision)
    )
    models = ActorCritic(config, policy, reference, critic, begin.seed, precision)
    if start == "policy" and config.lora is not None:
        notes.append("the adapters of the run are folded into models/policy; new ones are trained here")
    if start == "policy" and models.head is not None:
        models.head.load_state_dict(
            scalar_head(load_scalar_model(root / CRITIC, trust_remote_code=trusted)).state_dict()
        )
    return models


def _step(root: Path, config: PPOConfig, start: Start, notes: list[str]) -> int:
    """Steps before the traced one: those of the policy, at most all but the last."""
    if start == "sft":
        return 0
    selected = _read_json(root / "metrics" / "select.json")
    chosen, eta = selected.get("step"), selected.get("eta", 1.0)
    if isinstance(eta, float) and eta < 1:
        notes.append(f"models/policy is SFT + {eta:g}·(the snapshot after step {chosen} − SFT), no policy of the run")
    done = chosen if isinstance(chosen, int) else config.steps
    if 0 <= done < config.steps:
        notes.append(f"models/policy is the snapshot after step {done}, models/critic that of the last step")
        return done
    notes.append(f"the run is over after {config.steps} steps; this is its last one once more, from where it ended")
    return config.steps - 1


def _batch(
    root: Path,
    config: PPOConfig,
    prompt: Conversation,
    step: int,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    context: int,
) -> tuple[list[Row], int]:
    """The rows of the run's prompts, with the traced one in place of the step's first unless the step has it anyway,
    and the place of its (first) answer."""
    if (surplus := _surplus(config, tokenizer, context, prompt)) > 0:
        raise UserError(f"the prompt is {surplus} tokens too long: {config.max_new_tokens} of {context} are the answer")
    kept = _fitting_rows(root, config, tokenizer, context)
    batch = prompts_of_step(step, config.batch_size // config.samples_per_prompt, len(kept), seed)
    found = next((place for place, index in enumerate(batch) if kept[index]["prompt"] == prompt), None)
    if found is None:
        found = 0
        kept[batch[0]] = {"prompt": prompt}
    return kept, found * config.samples_per_prompt


def _surplus(config: PPOConfig, tokenizer: PreTrainedTokenizerBase, context: int, prompt: Conversation) -> int:
    """Tokens by which a prompt with an answer is longer than the context."""
    return len(encode_prompt(tokenizer, prompt)) + config.max_new_tokens - context


def _fitting_rows(root: Path, config: PPOConfig, tokenizer: PreTrainedTokenizerBase, context: int) -> list[Row]:
    """The run's prompts that leave room for an answer. Raises UserError where there is none."""
    rows = read_jsonl(root / PROMPTS)
    kept = [row for row in rows if _surplus(config, tokenizer, context, row["prompt"]) <= 0]
    if not kept:
        raise UserError(f"{PROMPTS}: no prompt leaves room for an answer; enlarge the context")
    return kept


def _reward_source(root: Path, params: Any, tokenizer: PreTrainedTokenizerBase) -> RewardSource:
    """The scorer of the run, normalised as in the run: with the figures of metrics/ppo.json, or measured again where
    PPO has not run."""
    config, trusted, device = params.ppo, params.trust_remote_code, Processes().device
    size, limits = config.micro_batch_size, params.runtime.functions
    scorer = build_scorer(root, params.scorer, limits, tokenizer, size, ScalarModels(trusted, params.precision, device))
    demo = _read_json(root / "metrics" / "ingest.json").get("source") == "demo"
    mean, std = (_read_json(root / "metrics" / "ppo.json").get(name) for name in ("score_mean", "score_std"))
    if isinstance(mean, float) and isinstance(std, float):
        normalisation = ScoreNormalisation(mean, std)
    else:
        begin = beginning(root, params.seed, params.round)
        reference = place(
            load_causal_lm(root / begin.reference, trust_remote_code=trusted, frozen=params.precision, device=device),
            device,
        )
        rows = _fitting_rows(root, config, tokenizer, context_length(reference))
        prompts = [row["prompt"] for row in rows]
        scored = reference_scores(config, reference, tokenizer, scorer, prompts, begin.seed, rows=extras_of(rows))
        normalisation = scored.normalisation
    return RewardSource(scorer, normalisation, RubricJudge() if demo else None)


def _restore_controllers(root: Path, trainer: PPOTrainer, notes: list[str]) -> None:
    """Set the controllers' values at the end of the run, as far as they are saved."""
    config = trainer.config
    if config.kl.controller == "adaptive":
        coef = _read_json(root / "metrics" / "ppo.json").get("kl_coef_last")
        if isinstance(coef, float):
            trainer.controller.coef = coef
        else:
            notes.append("metrics/ppo.json has no last β: it starts from its initial value")
    if config.objective == "kl_penalty":
        notes.append("the coefficient of the step penalty starts from its initial value")
    if config.score.scale == "running":
        notes.append("the running scale of the scores starts from its initial value")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
