"""PPO for language models: one step is rollout → score → advantages → update. The caller saves its `state_dict`."""

import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.data.chat import Conversation
from rlhf_core.data.tokenizer import decode_response, encode_prompt, stop_ids
from rlhf_core.errors import NonFiniteError
from rlhf_core.finite import at_step, require_finite
from rlhf_core.models.sampling import Sampled
from rlhf_core.models.scorers import Answers
from rlhf_core.models.sharded_files import divided_as
from rlhf_core.models.sharding import whole
from rlhf_core.ppo.actor_critic import ActorCritic
from rlhf_core.ppo.credit import assign_credit
from rlhf_core.ppo.diagnostics import CRITIC_COLUMNS, step_row
from rlhf_core.ppo.engines import engine_of
from rlhf_core.ppo.kl import AdaptiveKLController, FixedKLController, KLController, StepPrice
from rlhf_core.ppo.optimizers import build_optimizers, schedule
from rlhf_core.ppo.plan import ROLLOUT, SAMPLES, StepPlan, prompts_of_step
from rlhf_core.ppo.ptx import Piece, TextMix
from rlhf_core.ppo.rollout import Credit, Rollout, Scores, to_rows
from rlhf_core.ppo.scoring import RewardSource, Scoring
from rlhf_core.ppo.statistics import UpdateStatistics
from rlhf_core.ppo.update import Updater
from rlhf_core.training.memory import Halving, Log
from rlhf_core.training.processes import Processes

Row = dict[str, float | None]

KEYS = {
    "sampling": "ppo.sampler_rows or ppo.max_new_tokens",
    "scoring": "ppo.micro_batch_size or ppo.max_new_tokens",
    "the update": "ppo.micro_batch_size, ppo.micro_batch_tokens or ppo.max_new_tokens, "
    "or switch ppo.gradient_checkpointing on",
}
"""Phases of a step, and the parameters to lower where one does not fit into memory."""


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
        self.engine = engine_of(config, tokenizer, self.stop_ids, models.precision)
        """Samples the responses; can be replaced before the first step."""
        self.prompts, self.rows = list(prompts), None if rows is None else list(rows)
        self.prompt_ids = [encode_prompt(tokenizer, prompt) for prompt in prompts]
        self.exempt: Log = print
        """Called with the reason why the run is exempt from byte identity; set before `load_state_dict`."""
        self.halvings = {phase: Halving(phase, keys, lambda text: self.exempt(text)) for phase, keys in KEYS.items()}
        self.scoring = Scoring(config.score, source, self.halvings["scoring"], config.micro_batch_size)
        self.controller = _controller(config)
        self.step_price = StepPrice(config.step_price.coef, config.step_price.target)
        self.optimizers = build_optimizers(models.trained(), config)
        self.schedulers = {name: schedule(name, optimizer, config) for name, optimizer in self.optimizers.items()}
        self.updater = Updater(
            models,
            self.optimizers,
            config,
            self.pad_id,
            seed,
            self.processes,
            self.halvings["the update"],
            self._text_mix(text),
        )
        self.steps_done = 0
        self.seconds: dict[str, float] = {}
        """Seconds of each phase of the last step; never part of a result."""

    @property
    def writes(self) -> bool:
        """Whether this process takes part in saving: the main one, or all where models are divided."""
        return self.processes.is_main or self.processes.divides_models

    @property
    def pad_id(self) -> int:
        """The id that fills padding; it marks nothing."""
        return int(self.tokenizer.pad_token_id)

    def step(self) -> Row:
        """One PPO step. Returns its diagnostics. Raises NonFiniteError, naming the step, for a score, loss or gradient
        that is NaN or infinite, and UserError when half a batch does not fit into memory."""
        with at_step(self.steps_done + 1):
            return self._step()

    @property
    def halved(self) -> bool:
        """Whether batches were halved for lack of memory: such a run is exempt from byte identity."""
        return any(halving.done for halving in self.halvings.values())

    def _step(self) -> Row:
        plan = self.plan()
        rollout = self._timed("rollout", self.rollout)
        scores = self._timed("scoring", self.score, rollout)
        credit = self.assign_credit(rollout, scores)
        statistics = self._timed("update", self.updater.run, rollout, credit, plan)
        row = self.diagnose(plan, rollout, scores, credit, statistics)
        self._finish_step(plan, row)
        return row

    def plan(self) -> StepPlan:
        """The plan of the next step, with the current coefficients."""
        return StepPlan.of(self.config, self.steps_done, self.controller.coef, self.step_price.coef)

    def _finish_step(self, plan: StepPlan, row: Row) -> None:
        """Update the coefficients and the learning rates."""
        if plan.trains_policy:
            self.controller.update(float(row["kl_full"] or 0.0), self.config.batch_size)
        if plan.trains_policy and plan.uses_ratio and self.config.objective == "kl_penalty":
            self.step_price.update(float(row["update_kl"] or 0.0))
        with warnings.catch_warnings():  # a step whose minibatches were all skipped counts, too
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            for name, scheduler in self.schedulers.items():
                if name != "policy" or plan.trains_policy:
                    scheduler.step()
        self.steps_done += 1

    @torch.no_grad()
    def rollout(self) -> Rollout:
        """Sample responses to the prompts of the step, and compute their log π_old, log π_ref and V."""
        each = self.config.samples_per_prompt
        places = prompts_of_step(self.steps_done, self.config.batch_size // each, len(self.prompts), self.seed)
        chosen = [i for i in places for _ in range(each)]
        keys = [(self.seed, ROLLOUT, self.steps_done, *divmod(row, each)) for row in range(len(chosen))]
        prompt_ids = [self.prompt_ids[i] for i in chosen]
        sampled = self._sample(prompt_ids, keys)
        time_ = max(len(response) for response in sampled.responses)
        device = self.processes.device
        mask = to_rows([[1.0] * len(response) for response in sampled.responses], time_, device)
        rollout = Rollout(
            prompts=[self.prompts[i] for i in chosen],
            prompt_ids=prompt_ids,
            response_ids=sampled.responses,
            texts=self._texts(sampled),
            ended=torch.tensor(sampled.ended, device=device),
            mask=mask,
            engine_logprobs=to_rows(sampled.logprobs, time_, device),
            old_logprobs=torch.zeros_like(mask),
            ref_logprobs=torch.zeros_like(mask),
            ref_kl=torch.zeros_like(mask),
            old_values=torch.zeros_like(mask),
            rows=self.rows and [self.rows[i] for i in chosen],
        )
        self.updater.read(rollout, self.plan())
        return rollout

    def score(self, rollout: Rollout) -> Scores:
        """Score whole answers (rule 12)."""
        return self.scoring(rollout, self.processes)

    def assign_credit(self, rollout: Rollout, scores: Scores) -> Credit:
        """Token rewards, advantages and returns, at the current β."""
        return assign_credit(rollout, scores, self.config, self.controller.coef)

    def answer(
        self, prompts: Sequence[Conversation], rows: Sequence[Mapping[str, object]] | None = None
    ) -> list[dict[str, Any]]:
        """The policy's answers to held-out prompts, with their scores: rows of step, prompt, response, reward, gold.
        `rows`: those of the data behind the prompts."""
        if not prompts:
            return []
        prompt_ids = [encode_prompt(self.tokenizer, prompt) for prompt in prompts]
        keys = [(self.seed, SAMPLES, self.steps_done, place) for place in range(len(prompts))]
        sampled = self._sample(prompt_ids, keys)
        texts = self._texts(sampled)
        with at_step(self.steps_done):
            rewards = self.scoring.raw(Answers(prompts, texts, prompt_ids, sampled.responses, rows), self.processes)
        judge = self.scoring.source.judge
        gold = judge.score(prompts, texts) if judge else [None] * len(texts)
        return [
            {"step": self.steps_done, "prompt": prompt, "response": text, "reward": reward, "gold": g}
            for prompt, text, reward, g in zip(prompts, texts, rewards, gold, strict=True)
        ]

    def _sample(self, prompt_ids: Sequence[Sequence[int]], keys: Sequence[tuple[int, ...]]) -> Sampled:
        """One response a key; each process samples its share."""

        def work(rows: list[int]) -> list[tuple[list[int], list[float], bool]]:
            with self.models.autocast():
                drawn = self.engine(self.models.policy, [prompt_ids[i] for i in rows], [keys[i] for i in rows])
            return list(zip(drawn.responses, drawn.logprobs, drawn.ended, strict=True))

        def fitting(rows: list[int]) -> list[tuple[list[int], list[float], bool]]:
            at_once = self.config.sampler_rows or self.config.batch_size
            return self.halvings["sampling"].in_pieces(rows, at_once, work, self.processes.gather)

        with whole([self.models.policy]):
            found = self.processes.map(range(len(keys)), fitting)
        responses, logprobs, ended = zip(*found, strict=True)
        return Sampled(list(responses), list(logprobs), list(ended))

    def diagnose(
        self, plan: StepPlan, rollout: Rollout, scores: Scores, credit: Credit, statistics: UpdateStatistics
    ) -> Row:
        """The row of diagnostics of a step whose update is done."""
        rate = self.optimizers["policy"].param_groups[0]["lr"] if plan.trains_policy else 0.0
        row = step_row(plan, rollout, scores, credit, statistics, rate)
        if not self.models.has_critic:
            row |= dict.fromkeys(CRITIC_COLUMNS)
        return row | ({"step_price": plan.step_price} if self.config.objective == "kl_penalty" else {})

    def _text_mix(self, text: Sequence[Piece]) -> TextMix | None:
        settings = self.config.ptx
        if settings.coef == 0:
            return None
        if not text:
            raise ValueError("ptx.coef is above 0 and there is no text to mix in")
        rows, tokens = self.config.micro_batch_size, self.config.micro_batch_tokens
        rows = rows if tokens is None else min(rows, max(1, tokens // settings.tokens))
        return TextMix(text, settings.coef, settings.batch_size, rows, self.pad_id, self.seed)

    def _texts(self, sampled: Sampled) -> list[str]:
        return [decode_response(self.tokenizer, response, self.stop_ids) for response in sampled.responses]

    def _timed(self, phase: str, work: Any, *arguments: Any) -> Any:
        start = time.perf_counter()
        result = work(*arguments)
        if self.processes.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds[phase] = time.perf_counter() - start
        return result

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
        named |= {"controller": self.controller, "step_price": self.step_price, "scoring": self.scoring}
        named |= {f"halving {phase}": part for phase, part in self.halvings.items()}
        return {"models": self.models} | named


def _controller(config: PPOConfig) -> KLController:
    if config.kl.controller == "fixed":
        return FixedKLController(config.kl.coef)
    return AdaptiveKLController(config.kl.coef, config.kl.target, config.kl.horizon, config.batch_size)
