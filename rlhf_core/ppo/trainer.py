"""PPO for language models: one step is rollout → score → advantages → update. The caller saves its `state_dict`."""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.precision import Precision
from rlhf_core.data.chat import Conversation
from rlhf_core.data.scorer import Answers
from rlhf_core.data.tokenizer import closed, decode_response, encode_prompt, stop_ids
from rlhf_core.determinism import strict_kernels
from rlhf_core.errors import NonFiniteError, UserError, is_out_of_memory
from rlhf_core.finite import at_step, require_finite
from rlhf_core.models.batch import TokenBatch
from rlhf_core.models.batching import micro_batches, packed_batches
from rlhf_core.models.masked import zero_padding
from rlhf_core.models.packed import can_pack
from rlhf_core.models.sampling import Sampled
from rlhf_core.models.sharded_files import divided_as
from rlhf_core.models.sharding import clip_gradients, whole
from rlhf_core.models.token_logprobs import action_logprobs
from rlhf_core.ppo.actor_critic import ActorCritic, require_equal_start
from rlhf_core.ppo.credit import assign_credit
from rlhf_core.ppo.diagnostics import step_row
from rlhf_core.ppo.engines import engine_of
from rlhf_core.ppo.kl import AdaptiveKLController, FixedKLController, estimate_kl
from rlhf_core.ppo.losses import compute_value_loss
from rlhf_core.ppo.objective import Pass, losses_of
from rlhf_core.ppo.optimizers import build_optimizers, schedule
from rlhf_core.ppo.plan import ROLLOUT, SAMPLES, StepPlan, minibatches_of_epoch, prompts_of_step
from rlhf_core.ppo.ptx import Piece, TextMix
from rlhf_core.ppo.rollout import Credit, Rollout, Scores, to_rows
from rlhf_core.ppo.scoring import RewardSource, Scoring
from rlhf_core.ppo.statistics import UpdateStatistics
from rlhf_core.progress import report
from rlhf_core.training.processes import Processes

Row = dict[str, float | None]
Watch = Callable[[int, Sequence[int], Pass, dict[str, Tensor]], None]
"""Called with the number of a minibatch of the step, rows of it, their pass, and its losses summed over real tokens."""

KEYS = {
    "rollout": "ppo.sampler_rows, ppo.micro_batch_tokens or ppo.max_new_tokens",
    "scoring": "ppo.micro_batch_size or ppo.max_new_tokens",
    "update": "ppo.micro_batch_size, ppo.micro_batch_tokens or ppo.max_new_tokens, "
    "or switch ppo.gradient_checkpointing on",
}
"""Phases of a step, and the parameters to lower where one does not fit into memory."""
MEASURED = 8
"""The KL of an update is measured on every 8th answer, of at least 32."""
LARGEST_RATIO = 10.0
"""π_θ/π_old of a token in that KL. In the demo one token of 1,200 had a ratio of 270: k3 was 6.5 nats per answer, the
exact KL 0.9, and k3 with this limit 1.0."""
FIRST_RATIO_TOLERANCE = 1e-4
"""Largest |log π_θ − log π_old| at the first minibatch, float32 (rule 7)."""
BFLOAT16_TOLERANCE = 1e-2
"""The same in the mean, for bfloat16."""


class OutOfMemory(UserError):
    """A phase of a step does not fit into memory; the message names the keys to lower."""


class RatioError(UserError):
    """π_θ differs from π_old before any update: sampling and training do not use the same model."""


class PPOTrainer:
    """The models and the scorer of a run. Each call of `step()` is one PPO step.

    Args:
        config: the block `ppo` of params.yaml.
        models: policy, critic and reference.
        tokenizer: of the policy.
        source: scores the responses.
        prompts: conversations that end with a user's message.
        seed: of sampling, and of the order of prompts and minibatches.
        text: pieces of text for PPO-ptx; needed where `ptx.coef` is above 0.
        rows: the rows of the data behind the prompts, for scorers that read them.
    """

    def __init__(
        self,
        config: PPOConfig,
        models: ActorCritic,
        tokenizer: PreTrainedTokenizerBase,
        source: RewardSource,
        prompts: Sequence[Conversation],
        seed: int,
        text: Sequence[Piece] = (),
        rows: Sequence[Mapping[str, object]] | None = None,
    ) -> None:
        self.config, self.seed, self.tokenizer = config, seed, tokenizer
        self.processes = Processes(config.sharding)
        self.models = models.divide() if self.processes.divides_models else models.to(self.processes.device)
        self.stop_ids = stop_ids(tokenizer, models.policy, config.stop_tokens)
        self.pad_id = int(tokenizer.pad_token_id)
        """Fills padding; it marks nothing."""
        self.engine = engine_of(config, tokenizer, self.stop_ids, models.precision)
        """Samples the responses; can be replaced before the first step."""
        self.prompts, self.rows = list(prompts), None if rows is None else list(rows)
        self.prompt_ids = [encode_prompt(tokenizer, prompt) for prompt in prompts]
        self.scoring = Scoring(config.score, source, int(tokenizer.eos_token_id))
        kl = config.kl
        self.controller = FixedKLController(kl.coef)
        if kl.controller == "adaptive":
            self.controller = AdaptiveKLController(kl.coef, kl.target, kl.horizon)
        self.optimizers = build_optimizers(models.trained(), config)
        self.schedulers = {name: schedule(name, optimizer, config) for name, optimizer in self.optimizers.items()}
        self.text = TextMix.of(text, config, self.pad_id, seed)
        self.steps_done = 0
        self.seconds: dict[str, float] = {}
        """Seconds of each phase of the last step; never part of a result."""

    def step(
        self,
        rollout: Rollout | None = None,
        watch: Watch | None = None,
        norms: dict[str, list[float]] | None = None,
    ) -> Row:
        """One PPO step: rollout, scores, credit, epochs of clipped updates, controller. Returns its diagnostics.

        `rollout`: that of this step, where it is there already; `watch` is called after each pass of the update;
        `norms` receives each model's gradient norm of each optimiser step. Raises NonFiniteError, naming the step, for
        a score, loss or gradient that is NaN or infinite, and OutOfMemory.
        """
        config, beta, plan = self.config, self.controller.coef, StepPlan.of(self.config, self.steps_done)
        done = UpdateStatistics(grad_norms={name: [] for name in self.optimizers} if norms is None else norms)
        with at_step(plan.step + 1):
            with self._phase("rollout"):
                rollout = rollout or self.rollout()  # answers; log π_old, log π_ref, exact KL and V of their tokens
            if plan.step == 0:
                require_equal_start(self.models, rollout.ref_kl, rollout.mask)  # rule 27
            with self._phase("scoring"):
                scores = self.score(rollout)  # raw, then normalised, clipped, lowered where the end is missing
            credit = assign_credit(rollout, scores, config, beta)  # −β·KL in the rewards, GAE, whitening
            trained = credit.trained.tolist()

            with self._phase("update"), self.models.training():
                for number, minibatch in enumerate(self._minibatches(rollout, plan)):
                    if number % plan.minibatches == 0:
                        done.last_epoch = UpdateStatistics()
                    minibatch = [row for row in minibatch if trained[row]]
                    if not minibatch:  # all of it is left out: no optimizer step
                        continue
                    found = UpdateStatistics(sum(rollout.lengths[row] for row in minibatch))
                    mean_length = found.tokens / len(minibatch)
                    # Σ over the tokens of the whole minibatch, whatever its micro-batches and processes (rule 13)
                    for rows, counts in self.processes.share_evenly(self.micro_batches(rollout, minibatch, plan)):
                        report("updating", number, plan.epochs * plan.minibatches)
                        share = counts / found.tokens
                        batch = rollout.batch(rows, self.pad_id)
                        values = self._train_critic(batch, rows, rollout, credit, plan, share)
                        forward = Pass.over(
                            *(batch, rows, rollout, credit, self.models, config),
                            *(plan.trains_policy, mean_length, values),
                        )
                        if done.optimizer_steps == 0 and config.check_ratio:
                            require_same_policy(
                                forward.logprobs, forward.old_logprobs, forward.batch.mask, self.models.precision
                            )
                        losses = losses_of(forward, config, beta, plan.trains_policy)  # policy, value, entropy, KL
                        backward(share * losses["total_loss"])
                        if counts:
                            found.add_pass(forward, losses, config)
                            if watch is not None:
                                watch(number, rows, forward, losses)
                    if self.text is not None and plan.trains_policy:
                        for loss in self.text.losses(self.models, plan.step, number, self.processes):
                            backward(self.text.coef * loss)
                            found.sums["ptx_loss"] += loss.item() * found.tokens
                    found.all_reduce(self.processes)
                    done.add(found)
                    if config.stop_kl is not None and found.mean("approx_kl") > config.stop_kl:
                        done.stopped_early = True
                        self._drop_gradients()
                        break
                    self._step_optimizers(done, plan)
                if plan.trains_policy:
                    done.update_kl = self.measure_kl(rollout, plan)

            rate = self.optimizers["policy"].param_groups[0]["lr"] if plan.trains_policy else 0.0
            row = step_row(config, plan, rollout, scores, credit, done, rate, beta)
            if plan.trains_policy:
                self.controller.update(float(row.get("kl_moving", row["kl"]) or 0.0), config.batch_size)
                if config.reference_ema is not None:
                    self.models.move_reference(config.reference_ema)
            self._step_schedulers(plan)
            self.steps_done += 1
            return row

    @torch.no_grad()
    def rollout(self) -> Rollout:
        """Sample responses to the prompts of the step, and compute their log π_old, log π_ref and V, in the
        micro-batches of the first epoch, so that the first ratio is 1 (rule 7)."""
        each = self.config.samples_per_prompt
        places = prompts_of_step(self.steps_done, self.config.batch_size // each, len(self.prompts), self.seed)
        chosen = [i for i in places for _ in range(each)]
        keys = [(self.seed, ROLLOUT, self.steps_done, *divmod(row, each)) for row in range(len(chosen))]
        prompt_ids = [self.prompt_ids[i] for i in chosen]
        sampled = self._sample(prompt_ids, keys)
        time_ = max(len(response) for response in sampled.responses)
        device = self.processes.device
        mask = to_rows([[1.0] * len(response) for response in sampled.responses], time_, device)
        names = ["old_logprobs", "ref_logprobs", "ref_kl", "old_entropy", "old_values"]
        names += [] if self.config.reference_ema is None else ["fixed_logprobs", "fixed_kl"]
        tables = {name: torch.zeros_like(mask) for name in names}
        rollout = Rollout(
            prompts=[self.prompts[i] for i in chosen],
            prompt_ids=prompt_ids,
            response_ids=sampled.responses,
            texts=self._texts(sampled),
            ended=torch.tensor(sampled.ended, device=device),
            mask=mask,
            engine_logprobs=to_rows(sampled.logprobs, time_, device),
            rows=self.rows and [self.rows[i] for i in chosen],
            **tables,
        )
        plan = StepPlan.of(self.config, self.steps_done)
        for number, minibatch in enumerate(self._minibatches(rollout, plan, epochs=1)):
            report("reading", number * len(minibatch), len(chosen))
            for rows, counts in self.processes.share_evenly(self.micro_batches(rollout, minibatch, plan)):
                batch = rollout.batch(rows, self.pad_id)
                found, values, fixed = self.models.compare(batch, self.config.temperature)
                parts = [*map(batch.spread, found), zero_padding(values, batch.mask)]
                parts += [] if fixed is None else map(batch.spread, (fixed.ref_logprobs, fixed.kl))
                if counts:
                    for table, part in zip(tables.values(), parts, strict=True):
                        table[rows, : batch.time] = part
        self.processes.all_reduce(list(tables.values()))
        return rollout

    def score(self, rollout: Rollout) -> Scores:
        """Score whole answers (rule 12)."""
        return self.scoring(rollout, self.processes)

    def micro_batches(self, rollout: Rollout, minibatch: Sequence[int], plan: StepPlan) -> list[list[int]]:
        """The rows of a minibatch in the groups of its passes."""
        share = len(rollout.response_ids) // plan.minibatches // self.processes.count
        rows, tokens = min(self.config.micro_batch_size, max(1, share)), self.config.micro_batch_tokens
        if can_pack(self.models.policy):
            return packed_batches(minibatch, rollout.sequences, rows, tokens)
        return micro_batches(minibatch, rollout.widths, rows, tokens)

    def _minibatches(self, rollout: Rollout, plan: StepPlan, epochs: int | None = None) -> Iterator[list[int]]:
        """The rows of each minibatch, epoch by epoch: an optimiser step each (rule 14)."""
        for epoch in range(plan.epochs if epochs is None else epochs):
            yield from minibatches_of_epoch(len(rollout.response_ids), plan.minibatches, self.seed, plan.step, epoch)

    def _train_critic(
        self, batch: TokenBatch, rows: Sequence[int], rollout: Rollout, credit: Credit, plan: StepPlan, share: float
    ) -> Tensor | None:
        """Add the gradient of a critic of its own, whose graph is freed before the policy's is built. Returns its
        values of the rows; None for a critic that shares the policy's pass."""
        if self.models.critic is None:
            return None
        critic, values = self.config.critic, self.models.values(batch)
        returns, old = (table[rows, : batch.time] for table in (credit.returns, rollout.old_values))
        clips = critic.clip_value and plan.trains_policy
        loss = compute_value_loss(values, returns, old, clips, critic.value_clip, batch.mask, reduction="sum")
        backward(share * self.config.vf_coef * loss)
        return values.detach()

    @torch.no_grad()
    def measure_kl(self, rollout: Rollout, plan: StepPlan) -> float:
        """KL(π_old ‖ π_θ) of the policy as it is now, in nats per token (rule 22), on a part of the answers, by k3 with
        ratios of at most `LARGEST_RATIO`: single tokens would decide it else."""
        measured = range(0, len(rollout.response_ids), MEASURED)
        if len(measured) < MEASURED * 4:
            measured = range(min(len(rollout.response_ids), MEASURED * 4))
        total = torch.zeros((), dtype=torch.float64, device=self.processes.device)
        for rows, counts in self.processes.share_evenly(self.micro_batches(rollout, measured, plan)):
            batch = rollout.batch(rows, self.pad_id)
            read = partial(action_logprobs, actions=batch.response_tokens, temperature=self.config.temperature)
            logprobs = self.models.read_policy(batch, read)
            old = rollout.old_logprobs[rows, : batch.time][batch.real]
            total += counts * estimate_kl(old, logprobs.clamp(max=old + math.log(LARGEST_RATIO)), "k3").sum()
        self.processes.all_reduce([total])
        return total.item() / sum(rollout.lengths[row] for row in measured)

    def _step_optimizers(self, done: UpdateStatistics, plan: StepPlan) -> None:
        """Sum the gradients over the processes, clip each model's by its global norm (rule 16), and step the optimisers
        (not the policy's while only the critic is trained)."""
        trained = {name: p for name, p in self.models.trained().items() if name != "policy" or plan.trains_policy}
        if not plan.trains_policy:
            done.grad_norms["policy"].append(0.0)
        for name, parameters in trained.items():
            self._all_reduce_gradients(parameters)
            norm = clip_gradients(parameters, self.config.optimizer.max_grad_norm)
            if not math.isfinite(norm):
                raise NonFiniteError(f"the gradient norm of the {name} is {norm}; lower the learning rate")
            done.grad_norms[name].append(norm)
            done.grad_clipped += name == "policy" and norm > self.config.optimizer.max_grad_norm
        for name in trained:
            self.optimizers[name].step()
        self._drop_gradients()
        done.optimizer_steps += 1

    def _all_reduce_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        if self.processes.count == 1:
            return
        undivided = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
        for parameter in undivided:
            if parameter.grad is None:  # this process had no micro-batch of this minibatch
                parameter.grad = torch.zeros_like(parameter)
        self.processes.all_reduce([parameter.grad for parameter in undivided if parameter.grad is not None])

    def _drop_gradients(self) -> None:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)

    def _step_schedulers(self, plan: StepPlan) -> None:
        with warnings.catch_warnings():  # a step that stopped before its first minibatch counts, too
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            for name, scheduler in self.schedulers.items():
                if name != "policy" or plan.trains_policy:
                    scheduler.step()

    def answer(
        self, prompts: Sequence[Conversation], rows: Sequence[Mapping[str, object]] | None = None
    ) -> list[dict[str, Any]]:
        """The policy's answers to held-out prompts, with their scores: rows of step, prompt, response, reward, gold.
        `rows`: those of the data behind the prompts."""
        if not prompts:
            return []
        prompt_ids = [encode_prompt(self.tokenizer, prompt) for prompt in prompts]
        keys = [(self.seed, SAMPLES, self.steps_done, place) for place in range(len(prompts))]
        with at_step(self.steps_done), self._phase("rollout"):
            sampled = self._sample(prompt_ids, keys)
            texts = self._texts(sampled)
            ids = closed(sampled.responses, sampled.ended, int(self.tokenizer.eos_token_id))
            answers = Answers(prompts, texts, prompt_ids, ids, rows)
            rewards, judge = self.scoring.raw(answers), self.scoring.source.judge
        gold = judge(answers).total if judge else [None] * len(texts)
        return [
            {"step": self.steps_done, "prompt": prompt, "response": text, "reward": reward, "gold": g}
            for prompt, text, reward, g in zip(prompts, texts, rewards, gold, strict=True)
        ]

    def _sample(self, prompt_ids: Sequence[Sequence[int]], keys: Sequence[tuple[int, ...]]) -> Sampled:
        """One response a key; each process samples its share."""

        def work(rows: list[int]) -> list[tuple[list[int], list[float], bool]]:
            drawn = self.engine(self.models.policy, [prompt_ids[i] for i in rows], [keys[i] for i in rows])
            return list(zip(drawn.responses, drawn.logprobs, drawn.ended, strict=True))

        with whole([self.models.policy]), self.models.autocast():
            found = self.processes.map(range(len(keys)), work)
        responses, logprobs, ended = zip(*found, strict=True)
        return Sampled(list(responses), list(logprobs), list(ended))

    def _texts(self, sampled: Sampled) -> list[str]:
        return [decode_response(self.tokenizer, response, self.stop_ids) for response in sampled.responses]

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Measures the seconds of a phase. Raises OutOfMemory where it does not fit into memory."""
        start = time.perf_counter()
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(
                f"out of memory in the {name} of step {self.steps_done + 1}; lower {KEYS[name]}"
            ) from None
        if self.processes.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds[name] = time.perf_counter() - start

    @property
    def writes(self) -> bool:
        """Whether this process takes part in saving: the main one, or all where models are divided."""
        return self.processes.is_main or self.processes.divides_models

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on; prompt order, minibatch order and noise are functions of the
        step. Raises NonFiniteError for NaN or infinity."""
        parts = self._stateful()
        state = {"steps_done": self.steps_done} | {name: part.state_dict() for name, part in parts.items()}
        with at_step(self.steps_done):
            self.processes.together(partial(require_finite, state), (NonFiniteError,))
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        for name, part in self._stateful().items():
            saved = state[name]
            if isinstance(part, torch.optim.Optimizer):
                saved = divided_as(part, saved)
            part.load_state_dict(saved)
        self.steps_done = int(state["steps_done"])

    def _stateful(self) -> dict[str, Any]:
        named: dict[str, Any] = {f"optimizer_{name}": part for name, part in self.optimizers.items()}
        named |= {f"scheduler_{name}": part for name, part in self.schedulers.items()}
        return {"models": self.models, "controller": self.controller, "scoring": self.scoring} | named


def backward(loss: Tensor) -> None:
    """Add the gradient of a loss, if it has one. Raises UserError for an operation without a deterministic kernel."""
    if loss.requires_grad:
        with strict_kernels():
            loss.backward()  # type: ignore[no-untyped-call]


def require_same_policy(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, precision: Precision = "float32") -> None:
    """Raise RatioError unless both agree on the real tokens, as they must before the first update (rule 7): on every
    token in float32, in the mean in bfloat16. Raises NonFiniteError for log-probabilities that are NaN or infinite."""
    gaps = (logprobs - old_logprobs)[mask.bool()].abs()
    if not torch.isfinite(gaps).all():
        raise NonFiniteError("the policy's log-probabilities are not finite; lower the learning rate")
    gap, allowed = (gaps.max(), FIRST_RATIO_TOLERANCE) if precision == "float32" else (gaps.mean(), BFLOAT16_TOLERANCE)
    if gap > allowed:
        raise RatioError(
            f"before the first update |log π_θ − log π_old| is {gap:.2e}, allowed is {allowed:g}: "
            "dropout, precision or padding differ between rollout and update; use float32 and no dropout"
        )
