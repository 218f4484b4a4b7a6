"""PPO for language models: one step is rollout → score → advantages → update, and a run is many steps.

The mathematics stands in `advantages`, `losses`, `kl` and `rewards`; this module only connects it. It writes no files
except through `state_dict`, which its caller saves.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.batch import TokenBatch, response_logits, state_values
from rlhf_core.chat import Conversation
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.engines import engine_of
from rlhf_core.judges import Judge
from rlhf_core.ppo.advantages import compute_gae, deviation, whiten
from rlhf_core.ppo.diagnostics import step_row
from rlhf_core.ppo.kl import AdaptiveKLController, FixedKLController, KLController, StepPrice, estimate_kl
from rlhf_core.ppo.losses import logprobs_and_entropy
from rlhf_core.ppo.objective import Prices
from rlhf_core.ppo.plan import ROLLOUT, SAMPLES, prompts_of_step
from rlhf_core.ppo.rewards import normalise_scores, penalise_missing_eos, shape_rewards
from rlhf_core.ppo.rollout import Credit, Rollout, Scores, to_rows
from rlhf_core.ppo.update import Updater, every_row
from rlhf_core.sampling import Sampled
from rlhf_core.scorers import Answers, Scorer
from rlhf_core.tokenizer import decode_response, encode_prompt, stop_ids

Row = dict[str, float | None]


@dataclass(frozen=True)
class ScoreNormalisation:
    """Mean and standard deviation of the scorer on reference responses, frozen before the first step."""

    mean: float
    std: float


class PPOTrainer:
    """Policy, critic, reference and scorer, and the loop over them. `step()` is one trip around it."""

    def __init__(
        self,
        config: PPOConfig,
        policy: PreTrainedModel,
        reference: PreTrainedModel,
        critic: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        scorer: Scorer,
        normalisation: ScoreNormalisation,
        prompts: Sequence[Conversation],
        seed: int,
        judge: Judge | None = None,
    ) -> None:
        if policy is reference:
            raise ValueError("policy and reference must be two models: the reference is frozen")
        self.config, self.seed = config, seed
        self.accelerator = Accelerator()
        device = self.accelerator.device
        self.policy = policy.to(device).eval()
        self.critic = critic.to(device).eval()
        self.reference = reference.to(device).eval().requires_grad_(False)
        self.tokenizer, self.scorer, self.judge = tokenizer, scorer, judge
        self.stop_ids = stop_ids(tokenizer, config.stop_tokens)
        self.engine = engine_of(config, tokenizer)
        """What samples; another engine may be put in its place before the first step."""
        self.normalisation = normalisation
        self.prompts = list(prompts)
        self.prompt_ids = [encode_prompt(tokenizer, prompt) for prompt in prompts]
        self.controller = _controller(config)
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            "policy": _adam(self.policy, config.learning_rate, config),
            "critic": _adam(self.critic, config.critic.learning_rate, config),
        }
        self.schedulers = {name: _schedule(optimizer, config) for name, optimizer in self.optimizers.items()}
        self.step_price = StepPrice(config.step_price.coef, config.step_price.target)
        self.updater = Updater(
            self.policy, self.critic, self.reference, self.optimizers, config, self.pad_id, seed, self.accelerator
        )
        self.steps_done = 0
        self.seconds: dict[str, float] = {}
        """Seconds of each phase of the last step; for people, never for results."""

    @property
    def pad_id(self) -> int:
        """The id that fills padding; it marks nothing."""
        return int(self.tokenizer.pad_token_id)

    def step(self) -> Row:
        """One PPO step. Returns its diagnostics."""
        rollout = self._timed("rollout", self.rollout)
        scores = self._timed("scoring", self.score, rollout)
        credit = self.assign_credit(rollout, scores)
        prices = Prices(self.controller.coef, self.step_price.coef)
        statistics = self._timed("update", self.updater.run, rollout, credit, self.steps_done, prices)
        learning_rate = self.optimizers["policy"].param_groups[0]["lr"]
        row = step_row(self.steps_done + 1, rollout, scores, credit, statistics, self.controller.coef, learning_rate)
        self.controller.update(float(row["kl"] or 0.0), self.config.batch_size)
        if self.config.objective == "kl_penalty":
            self.step_price.update(statistics.mean("approx_kl"))
        for scheduler in self.schedulers.values():
            scheduler.step()
        self.steps_done += 1
        return row

    @torch.no_grad()
    def rollout(self) -> Rollout:
        """Sample one response for each prompt of the step, and read π_old, π_ref and V on them."""
        chosen = prompts_of_step(self.steps_done, self.config.batch_size, len(self.prompts), self.seed)
        prompt_ids = [self.prompt_ids[i] for i in chosen]
        keys = [(self.seed, ROLLOUT, self.steps_done, place) for place in range(len(chosen))]
        sampled = self.engine(self.policy, prompt_ids, keys)
        time_ = max(len(response) for response in sampled.responses)
        device = self.accelerator.device
        mask = to_rows([[1.0] * len(response) for response in sampled.responses], time_, device)
        empty = torch.zeros_like(mask)
        rollout = Rollout(
            prompts=[self.prompts[i] for i in chosen],
            prompt_ids=prompt_ids,
            response_ids=sampled.responses,
            texts=self._texts(sampled),
            ended=torch.tensor(sampled.ended, device=device),
            mask=mask,
            engine_logprobs=to_rows(sampled.logprobs, time_, device),
            old_logprobs=empty,
            ref_logprobs=empty.clone(),
            old_values=empty.clone(),
        )
        self._read_models(rollout)
        return rollout

    def _read_models(self, rollout: Rollout) -> None:
        """Fill in π_old, π_ref and V, in the micro-batches of epoch 0, so that the first ratio is 1 (rule 7)."""
        for rows in every_row(self.updater.plan(rollout, self.steps_done, 0)):
            batch = rollout.batch(rows, self.pad_id)
            rollout.old_logprobs[rows, : batch.time] = self._logprobs(self.policy, batch)
            rollout.ref_logprobs[rows, : batch.time] = self._logprobs(self.reference, batch)
            rollout.old_values[rows, : batch.time] = state_values(self.critic, batch) * batch.mask

    def _logprobs(self, model: PreTrainedModel, batch: TokenBatch) -> Tensor:
        logits = response_logits(model, batch)
        return logprobs_and_entropy(logits, batch.actions, self.config.temperature, batch.mask)[0]

    def score(self, rollout: Rollout) -> Scores:
        """Score whole answers: normalise, clip, then the penalty for a missing end (rule 12)."""
        answers = Answers(rollout.prompts, rollout.texts, rollout.prompt_ids, rollout.response_ids)
        raw = torch.tensor(self.scorer(answers), dtype=torch.float32, device=rollout.mask.device)
        rules = self.config.score
        used = raw
        if rules.normalise:
            used = normalise_scores(raw, self.normalisation.mean, self.normalisation.std, rules.clip)
        else:
            used = raw.clamp(-rules.clip, rules.clip)
        gold = self.judge.score(rollout.prompts, rollout.texts) if self.judge else None
        return Scores(raw, penalise_missing_eos(used, rollout.ended, rules.missing_eos_penalty), gold)

    def assign_credit(self, rollout: Rollout, scores: Scores) -> Credit:
        """Token rewards with the KL leash, then GAE, then whitening over all real tokens of the batch."""
        config, mask = self.config, rollout.mask
        kl = estimate_kl(rollout.old_logprobs, rollout.ref_logprobs, "k1", mask)
        kl_coef = self.controller.coef if config.kl.penalty == "reward" else 0.0
        rewards = shape_rewards(scores.used, kl, mask, kl_coef, config.kl.placement)
        values = torch.nn.functional.pad(rollout.old_values, (0, 1))
        advantages, returns = compute_gae(rewards, values, config.gamma, config.lam, mask)
        if not config.whiten_advantages:
            return Credit(kl, rewards, advantages, returns, advantages, scale=1.0)
        scale = deviation(advantages, mask).item()
        return Credit(kl, rewards, advantages, returns, whiten(advantages, mask), scale)

    def answer(self, prompts: Sequence[Conversation]) -> list[dict[str, Any]]:
        """The policy's answers to held-out prompts, scored, for people to read."""
        prompt_ids = [encode_prompt(self.tokenizer, prompt) for prompt in prompts]
        keys = [(self.seed, SAMPLES, self.steps_done, place) for place in range(len(prompts))]
        sampled = self.engine(self.policy, prompt_ids, keys)
        texts = self._texts(sampled)
        rewards = self.scorer(Answers(prompts, texts, prompt_ids, sampled.responses))
        gold = self.judge.score(prompts, texts) if self.judge else [None] * len(texts)
        return [
            {"step": self.steps_done, "prompt": prompt, "response": text, "reward": reward, "gold": g}
            for prompt, text, reward, g in zip(prompts, texts, rewards, gold, strict=True)
        ]

    def _texts(self, sampled: Sampled) -> list[str]:
        return [decode_response(self.tokenizer, response, self.stop_ids) for response in sampled.responses]

    def _timed(self, phase: str, work: Any, *arguments: Any) -> Any:
        start = time.perf_counter()
        result = work(*arguments)
        self.seconds[phase] = time.perf_counter() - start
        return result

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on; prompt order, minibatch order and noise are functions of the
        step."""
        parts = self._stateful()
        return {"steps_done": self.steps_done} | {name: part.state_dict() for name, part in parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        for name, part in self._stateful().items():
            part.load_state_dict(state[name])
        self.steps_done = int(state["steps_done"])

    def _stateful(self) -> dict[str, Any]:
        named: dict[str, Any] = {f"optimizer_{name}": part for name, part in self.optimizers.items()}
        named |= {f"scheduler_{name}": part for name, part in self.schedulers.items()}
        named |= {"controller": self.controller, "step_price": self.step_price}
        return {"policy": self.policy, "critic": self.critic} | named


def _controller(config: PPOConfig) -> KLController:
    if config.kl.controller == "fixed":
        return FixedKLController(config.kl.coef)
    return AdaptiveKLController(config.kl.coef, config.kl.target, config.kl.horizon, config.batch_size)


def _adam(model: PreTrainedModel, learning_rate: float, config: PPOConfig) -> torch.optim.Adam:
    beta1, beta2 = config.optimizer.betas
    return torch.optim.Adam(model.parameters(), lr=learning_rate, betas=(beta1, beta2), eps=config.optimizer.eps)


def _schedule(optimizer: torch.optim.Optimizer, config: PPOConfig) -> torch.optim.lr_scheduler.LambdaLR:
    warmup, steps, decay = config.optimizer.warmup_steps, config.steps, config.optimizer.decay

    def factor(step: int) -> float:
        rising = (step + 1) / (warmup + 1) if step < warmup else 1.0
        falling = (steps - step) / max(1, steps - warmup) if decay == "linear" else 1.0
        return min(rising, falling)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
