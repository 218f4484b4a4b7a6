"""Peak memory of each phase of a stage, measured by running the stage's own code on tensors without data."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedModel

from rlhf_core.config.dpo import PairConfig
from rlhf_core.config.lora import LoraSettings
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.precision import Recomputed
from rlhf_core.config.reward import RewardConfig
from rlhf_core.config.sft import SFTConfig
from rlhf_core.dpo import (
    PROMPTS,
    PairObjective,
    PolicyPairTrainer,
    Referenced,
    ReferencedCollator,
    dpo_loss,
    reference_logprobs,
)
from rlhf_core.evaluation.divergence import measure_divergence
from rlhf_core.models.hf import fresh_head
from rlhf_core.models.lora import Adapter, add_lora
from rlhf_core.models.packed import can_pack
from rlhf_core.models.precision import autocast, body_precision
from rlhf_core.models.recompute import recomputing
from rlhf_core.models.sampling import sample
from rlhf_core.models.scorers import Answers, RewardModelScorer
from rlhf_core.models.shared_body import add_scalar_adapter, shares_body
from rlhf_core.planning.gathered import pass_bytes, whole_bytes
from rlhf_core.planning.ledger import ACTIVATIONS, CACHE, GRADIENTS, Ledger, Part, counting
from rlhf_core.planning.shapes import Shapes, rows_of
from rlhf_core.ppo.actor_critic import ActorCritic
from rlhf_core.ppo.optimizers import build_optimizers
from rlhf_core.ppo.plan import StepPlan
from rlhf_core.ppo.rollout import Credit, Rollout
from rlhf_core.ppo.update import Updater
from rlhf_core.reward import Comparison, PairCollator, PairTrainer, score_pairs
from rlhf_core.sft import Collator, Demonstration, ResponseTrainer, response_loss
from rlhf_core.training.memory import Halving
from rlhf_core.training.processes import Processes
from rlhf_core.training.run import Run, Schedule, trainer_arguments
from rlhf_core.training.trainer import GuardedTrainer

FEW, MORE = 2, 4
"""New tokens of the two samplings from which longer ones are extrapolated: memory is linear in their number."""


@dataclass(frozen=True)
class Lengths:
    """The longest rows that are planned for, in tokens."""

    prompt: int
    response: int

    @property
    def whole(self) -> int:
        """Prompt and response."""
        return self.prompt + self.response


@dataclass(frozen=True)
class Phase:
    """A phase of a stage at its peak."""

    name: str
    peak: int
    """Bytes."""
    parts: dict[Part, int]
    """Bytes of each part; their sum is `peak`."""


def _following(shapes: Shapes, *models: tuple[str, PreTrainedModel], processes: int = 1) -> Ledger:
    """A ledger that counts the weights and gradients of these models, by name; of one of several processes that divide
    them."""
    ledger = Ledger(shapes.vocabulary, shapes.mode, processes)
    with ledger:
        for name, model in models:
            ledger.follow(name, model)
    return ledger


def _passing(
    shapes: Shapes, ledger: Ledger, *models: tuple[str, PreTrainedModel], trains: bool = True
) -> AbstractContextManager[None]:
    """Passes through models; where they are divided, with what a pass gathers."""
    return ledger.gathering({name: pass_bytes(shapes, model, trains) for name, model in models if ledger.processes > 1})


def _whole(shapes: Shapes, ledger: Ledger, *models: tuple[str, PreTrainedModel]) -> AbstractContextManager[None]:
    """Work with models; where they are divided, with the whole weights gathered."""
    sizes = Counter[str]()
    for name, model in models:
        sizes[name] += whole_bytes(shapes, model) if ledger.processes > 1 else 0
    return ledger.gathering(sizes)


def _phase(name: str, ledger: Ledger) -> Phase:
    return Phase(name, ledger.peak, {part: size for part, size in ledger.at_peak.items() if size})


# --- sampling ---------------------------------------------------------------------------------------------------------


def sampling_phase(
    name: str,
    ledger: Ledger,
    model: PreTrainedModel,
    rows: int,
    lengths: Lengths,
    answers_per_prompt: int = 1,
    precision: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Phase:
    """The peak while our sampler draws `rows` responses side by side from `model`, in the context `precision`."""

    def segments(new_tokens: int) -> list[Phase]:
        with precision():
            return _segments(name, ledger, model, rows, lengths.prompt, new_tokens, answers_per_prompt)

    if lengths.response <= MORE:
        return max(segments(lengths.response), key=lambda phase: phase.peak)
    few, more = segments(FEW), segments(MORE)
    factor = (lengths.response - MORE) / (MORE - FEW)
    ends = [_extrapolated(name, *pair, factor) for pair in ((few[0], more[0]), (few[-1], more[-1]))]
    return max(ends, key=lambda phase: phase.peak)


def _segments(
    name: str, ledger: Ledger, model: PreTrainedModel, rows: int, prompt: int, new_tokens: int, each: int
) -> list[Phase]:
    """The peak from each forward pass to the next one."""
    found: list[Phase] = []
    calls = cache = 0

    def begins(*_: Any) -> None:
        nonlocal calls
        if calls:
            found.append(_with_cache(_phase(name, ledger), cache))
        calls += 1
        ledger.restart()

    def ends(module: Any, args: Any, options: dict[str, Any], output: Any) -> None:
        nonlocal cache
        layers = getattr(options.get("past_key_values"), "layers", ())
        ledger.mark([x for layer in layers for x in (layer.keys, layer.values)], Part(CACHE))
        cache = ledger.live[Part(CACHE)]

    hooks = [
        model.register_forward_pre_hook(begins),
        model.register_forward_hook(ends, with_kwargs=True),
    ]
    prompts = rows_of(-(-rows // each), prompt, model.config.get_text_config().vocab_size)
    with ledger:
        sample(
            model,
            [prompts[row // each] for row in range(rows)],
            [(0, row) for row in range(rows)],
            max_new_tokens=new_tokens,
            temperature=1.0,
            stop_ids=frozenset(),
            pad_id=0,
            batch_size=rows,
        )
    for hook in hooks:
        hook.remove()
    return [*found, _with_cache(_phase(name, ledger), cache)]


def _with_cache(phase: Phase, size: int) -> Phase:
    """The phase with a cache of `size` bytes, as after the forward pass; in the pass it counts as activations."""
    cache, other = Part(CACHE), Part(ACTIVATIONS)
    both = phase.parts.get(cache, 0) + phase.parts.get(other, 0)
    size = min(both, size)
    return Phase(phase.name, phase.peak, {**phase.parts, cache: size, other: both - size})


def _extrapolated(name: str, few: Phase, more: Phase, factor: float) -> Phase:
    def line(at_few: int, at_more: int) -> int:
        return round(at_more + factor * (at_more - at_few))

    parts = {part: max(0, line(few.parts.get(part, 0), more.parts.get(part, 0))) for part in {*few.parts, *more.parts}}
    return Phase(name, line(few.peak, more.peak), parts)


# --- stages of a Trainer ----------------------------------------------------------------------------------------------


def sft_phases(shapes: Shapes, config: SFTConfig, lengths: Lengths) -> list[Phase]:
    """SFT: a training step, and the validation loss after it."""
    model = shapes.causal_lm(body_precision(shapes.precision, config.lora))
    if config.lora is not None:
        with shapes.mode:
            add_lora(model, config.lora, 0)
    rows = _demonstrations(config.micro_batch_size, lengths, shapes.vocabulary)
    schedule = _schedule(config, config.micro_batch_size)
    ledger = _following(shapes, ("policy", model), processes=config.processes)
    with TemporaryDirectory() as folder:
        trainer = _trainer(ResponseTrainer, shapes, model, schedule, Collator(0), rows, Path(folder))
        with _passing(shapes, ledger, ("policy", model)):
            update = _training(ledger, "update", trainer, Collator(0)(rows), "policy", config.gradient_checkpointing)
        with _whole(shapes, ledger, ("policy", model)), counting(ledger), autocast(shapes.precision, model.device):
            response_loss(model, rows, 0, config.micro_batch_size)
    return [update, _phase("validation", ledger)]


def reward_phases(shapes: Shapes, config: RewardConfig, lengths: Lengths, answers: int) -> list[Phase]:
    """The reward model: a training step over `config.batch_size` prompts with `answers` responses each; where the model
    is divided, in passes over one prompt. Of a divided model and with adapters, held-out pairs, too."""
    model = shapes.scalar_model(body_precision(shapes.precision, config.lora))
    rows = _comparisons(_prompts_in_pass(config), answers, lengths, shapes.vocabulary)
    update = _pairs(shapes, model, PairTrainer, PairCollator(0), rows, config, "reward model")
    heldout = _comparisons(config.batch_size, answers, lengths, shapes.vocabulary)
    read = partial(score_pairs, comparisons=heldout, pad_id=0, batch_size=config.batch_size)
    return [update, *_heldout(shapes, config, "reward model", shapes.scalar_model, read)]


def pair_phases(shapes: Shapes, config: PairConfig, lengths: Lengths, answers: int) -> list[Phase]:
    """DPO or IPO: log π_ref of the responses, and a training step. Of a divided model and with adapters, held-out
    pairs, too."""
    model = shapes.causal_lm(body_precision(shapes.precision, config.lora))
    ledger = _following(shapes, ("policy", model), processes=config.processes)
    rows = _comparisons(_prompts_in_pass(config), answers, lengths, shapes.vocabulary)
    with _whole(shapes, ledger, ("policy", model)), counting(ledger), autocast(shapes.precision, model.device):
        reference_logprobs(model, rows, 0)
    before = _phase("reference", ledger)
    kind = partial(PolicyPairTrainer, PairObjective(1.0, dpo_loss))
    referenced = [Referenced(row, [0.0] * len(row.responses)) for row in rows]
    update = _pairs(shapes, model, kind, ReferencedCollator(0), referenced, config, "policy")
    heldout = _comparisons(PROMPTS, answers, lengths, shapes.vocabulary)
    read = partial(reference_logprobs, comparisons=heldout, pad_id=0)
    return [before, update, *_heldout(shapes, config, "policy", shapes.causal_lm, read)]


def _heldout(
    shapes: Shapes,
    config: RewardConfig | PairConfig,
    name: str,
    build: Callable[[], PreTrainedModel],
    read: Callable[[PreTrainedModel], Any],
) -> list[Phase]:
    """Held-out pairs after the training of a divided model or of adapters, with the whole float32 weights that `build`
    makes; any other training needs more memory itself."""
    if config.processes == 1 and config.lora is None:
        return []
    model = build().requires_grad_(False)
    ledger = _following(shapes, (name, model))
    with counting(ledger), autocast(shapes.precision, model.device):
        read(model)
    return [_phase("held-out pairs", ledger)]


def _pairs(
    shapes: Shapes, model: PreTrainedModel, kind: Any, collate: Any, rows: Sequence[Any], config: Any, name: str
) -> Phase:
    if config.lora is not None:
        with shapes.mode:
            add_lora(model, config.lora, 0)
    ledger = _following(shapes, (name, model), processes=config.processes)
    schedule = _schedule(config, _prompts_in_pass(config))
    with TemporaryDirectory() as folder, _passing(shapes, ledger, (name, model)):
        trainer = _trainer(kind, shapes, model, schedule, collate, rows, Path(folder))
        return _training(ledger, "update", trainer, collate(rows), name, config.gradient_checkpointing)


def _prompts_in_pass(config: Any) -> int:
    return 1 if config.processes > 1 else config.batch_size


def _schedule(config: Any, micro_batch_size: int) -> Schedule:
    """Of one process: it makes its share of the micro-batches."""
    passes = -(-config.batch_size // (micro_batch_size * config.processes))
    return Schedule(
        learning_rate=config.learning_rate,
        batch_size=passes * micro_batch_size,
        micro_batch_size=micro_batch_size,
        warmup_steps=config.warmup_steps,
        weight_decay=config.weight_decay,
    )


def _trainer(
    kind: Any, shapes: Shapes, model: PreTrainedModel, schedule: Schedule, collate: Any, rows: Any, folder: Path
) -> GuardedTrainer:
    """The stage's own Trainer, ready for a step."""
    run = Run(folder, 0, lambda *_: None, precision=shapes.precision)
    options = {"model": model, "args": trainer_arguments(run, schedule), "data_collator": collate}
    trainer: GuardedTrainer = kind(run, "", train_dataset=list(rows), **options)
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    return trainer


def _training(
    ledger: Ledger,
    name: str,
    trainer: GuardedTrainer,
    inputs: dict[str, torch.Tensor],
    model: str,
    recomputed: Recomputed,
) -> Phase:
    """An optimizer step with the optimizer's state of the step before; with several micro-batches its last one."""
    optimizer = trainer.create_optimizer()
    ledger.follow_optimizer(model, optimizer)
    wrapped = trainer.accelerator.prepare_model(trainer.model)
    _step_before(ledger, optimizer, model, trainer.args.gradient_accumulation_steps > 1)
    with recomputing([trainer.model], recomputed), counting(ledger):
        trainer.training_step(wrapped, inputs)
        optimizer.step()
    optimizer.zero_grad()
    return _phase(name, ledger)


def _step_before(ledger: Ledger, optimizer: torch.optim.Optimizer, name: str, more: bool) -> None:
    """Give the optimizer its state by a step and, where there are `more` micro-batches, the gradient of the others."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    with ledger:
        for again in (False, True):
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            ledger.mark([p.grad for p in parameters if p.grad is not None], Part(GRADIENTS, name))
            if not again:
                optimizer.step()
        if not more:
            optimizer.zero_grad()


def _demonstrations(rows: int, lengths: Lengths, vocabulary: int) -> list[Demonstration]:
    prompts, responses = (rows_of(rows, length, vocabulary) for length in (lengths.prompt, lengths.response))
    return [Demonstration(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]


def _comparisons(rows: int, answers: int, lengths: Lengths, vocabulary: int) -> list[Comparison]:
    """Every two responses are a pair."""
    prompts = rows_of(rows, lengths.prompt, vocabulary)
    responses = rows_of(rows * answers, lengths.response, vocabulary)
    pairs = [(better, worse) for better in range(answers) for worse in range(better)]
    return [Comparison(prompts[i], responses[i * answers : (i + 1) * answers], pairs) for i in range(rows)]


# --- PPO --------------------------------------------------------------------------------------------------------------


@dataclass
class _PPO:
    """The models of a PPO run, its updater, and rows of the planned lengths."""

    shapes: Shapes
    config: PPOConfig
    lengths: Lengths
    scorers: int
    """Reward models that score: members of the ensemble, and the one that only judges."""
    reward_lora: LoraSettings | None = None
    """The adapters that the reward models were trained as."""

    def __post_init__(self) -> None:
        config = self.config = self.config.model_copy(update={"stop_kl": None, "max_ratio": None, "check_ratio": False})
        self.divides = config.processes if config.sharding == "fsdp" else 1
        self.ledger = Ledger(self.shapes.vocabulary, self.shapes.mode, self.divides)
        shapes, precision = self.shapes, self.shapes.precision
        policy = shapes.causal_lm(body_precision(precision, config.lora))
        reference = None if config.lora is not None else shapes.causal_lm(precision)
        if config.lora is not None:
            policy.requires_grad_(False)
            with self.ledger:
                can_pack(policy)  # reads numbers
        with shapes.mode:
            self.reward_models = [self._reward_model(policy, number) for number in range(self.scorers)]
            self.models = ActorCritic(config, policy, reference, self._critic(policy), precision=precision)
        self.optimizers = build_optimizers(self.models.trained(), config)
        found = [(name, getattr(self.models, name)) for name in ("policy", "reference", "critic")]
        self.bodies = [(name, model) for name, model in found if model is not None and not shares_body(model)]
        with self.ledger:
            for name, model in [*self.bodies, *self.scoring()]:
                self.ledger.follow(name, model)
            if self.models.head is not None:
                self.ledger.follow("critic", self.models.head)
            for name, optimizer in self.optimizers.items():
                self.ledger.follow_optimizer(name, optimizer)
        processes, halving = Processes(), Halving("planning", "", print)
        self.updater = Updater(self.models, self.optimizers, config, 0, 0, processes, halving)

    def scoring(self) -> list[tuple[str, PreTrainedModel]]:
        """The reward models with a body of their own."""
        return [("reward model", model) for model in self.reward_models if not shares_body(model)]

    def _reward_model(self, policy: PreTrainedModel, number: int) -> PreTrainedModel:
        """As `ScalarModels.frozen` loads it."""
        if self.config.lora is None or self.reward_lora is None:
            return self.shapes.scalar_model(self.shapes.precision).requires_grad_(False)
        adapter = add_scalar_adapter(policy, fresh_head(policy), self.reward_lora, 0, f"reward_{number}")
        for parameter in adapter.parameters():
            parameter.requires_grad_(False)
        return adapter.model

    def _critic(self, policy: PreTrainedModel) -> PreTrainedModel | Adapter | None:
        """As `starting_critic` makes it."""
        config = self.config
        if not config.needs_critic_model:
            return None
        settings = config.lora if config.critic.init == "sft" else self.reward_lora
        if config.lora is None or settings is None:
            return self.shapes.scalar_model(body_precision(self.shapes.precision, config.lora))
        return add_scalar_adapter(policy, fresh_head(policy), settings, 0, "critic")

    @property
    def answers(self) -> int:
        """Responses of a process in a step."""
        return -(-self.config.batch_size // self.config.processes)

    @property
    def micro_batch(self) -> int:
        """Rows of a pass, of rows of the longest length."""
        tokens = self.config.micro_batch_tokens
        rows = min(self.config.micro_batch_size, self.minibatch)
        return rows if tokens is None else max(1, min(rows, tokens // self.lengths.whole))

    @property
    def minibatch(self) -> int:
        """Responses of a process in a minibatch."""
        return max(1, -(-self.answers // self.config.minibatches))

    def rollout(self) -> tuple[Rollout, Credit]:
        """A micro-batch of the longest rows."""
        rows = self.micro_batch
        prompts = rows_of(rows, self.lengths.prompt, self.shapes.vocabulary)
        responses = rows_of(rows, self.lengths.response, self.shapes.vocabulary)
        mask = torch.ones(rows, self.lengths.response)
        zero = torch.zeros_like(mask)
        rollout = Rollout(
            prompts=[[] for _ in range(rows)],
            prompt_ids=prompts,
            response_ids=responses,
            texts=[""] * rows,
            ended=mask[:, 0].bool(),
            mask=mask,
            engine_logprobs=zero.clone(),
            old_logprobs=zero.clone(),
            ref_logprobs=zero.clone(),
            ref_kl=zero.clone(),
            old_values=zero.clone(),
        )
        return rollout, Credit(zero, zero, zero, zero, zero, scale=1.0)

    def plan(self) -> StepPlan:
        """One optimizer step on the rollout."""
        price = self.config.step_price.coef
        return StepPlan(0, True, True, epochs=1, minibatches=1, kl_coef=self.config.kl.coef, step_price=price)


def ppo_phases(
    shapes: Shapes, config: PPOConfig, lengths: Lengths, scorers: int, reward_lora: LoraSettings | None = None
) -> list[Phase]:
    """A PPO step of one process after the first, which made the optimizers' state: sampling, log-probabilities and
    values, scoring, update."""
    run = _PPO(shapes, config, lengths, scorers, reward_lora)
    ledger, (rollout, credit), plan = run.ledger, run.rollout(), run.plan()
    for name, optimizer in run.optimizers.items():
        _step_before(ledger, optimizer, name, run.minibatch > run.micro_batch)
    with _passing(shapes, ledger, *run.bodies), counting(ledger):
        run.updater.run(rollout, credit, plan)
    update = _phase("update", ledger)
    with _passing(shapes, ledger, *run.bodies, trains=False), counting(ledger):
        run.updater.read(rollout, plan)
    phases = [_phase("log-probabilities", ledger)]
    for model in run.reward_models[:1]:
        scorer = RewardModelScorer(model, 0, config.micro_batch_size)
        texts = [""] * len(rollout.response_ids)
        with _whole(shapes, ledger, *(run.scoring() or run.bodies[:1])), counting(ledger):
            scorer(Answers([[] for _ in texts], texts, rollout.prompt_ids, rollout.response_ids))
        phases.append(_phase("scoring", ledger))
    rows = min(run.answers, config.sampler_rows or config.batch_size)
    each = min(config.samples_per_prompt, rows)
    with torch.no_grad(), _whole(shapes, ledger, *run.bodies[:1]):
        first = sampling_phase("sampling", ledger, run.models.policy, rows, lengths, each, run.models.autocast)
    return [first, *phases, update]


def sampler_phases(shapes: Shapes, rows: int, lengths: Lengths, each: int) -> list[Phase]:
    """Sampling from one model."""
    policy = shapes.causal_lm(shapes.precision).requires_grad_(False)
    return [sampling_phase("sampling", _following(shapes, ("policy", policy)), policy, rows, lengths, each)]


def evaluate_phases(
    shapes: Shapes, rows: int, lengths: Lengths, each: int, scorers: int, interpolates: bool
) -> list[Phase]:
    """Sampling from a candidate, and the exact KL to the SFT model. In memory are both, with `interpolates` a policy
    between them, too, and the reward models that score."""
    names = ["candidate", "SFT model"] + ["interpolated"] * interpolates
    models = [(name, shapes.causal_lm(shapes.precision)) for name in names]
    models += [("reward model", shapes.scalar_model(shapes.precision)) for _ in range(scorers)]
    for _, model in models:
        model.requires_grad_(False)
    (_, candidate), (_, sft), *_ = models
    ledger = _following(shapes, *models)
    first = sampling_phase("sampling", ledger, candidate, rows, lengths, each)
    texts = [rows_of(rows, length, shapes.vocabulary) for length in (lengths.prompt, lengths.response)]
    with counting(ledger):
        measure_divergence(candidate, sft, *texts, pad_id=0, temperature=1.0, batch_size=rows)
    return [first, _phase("exact KL", ledger)]
