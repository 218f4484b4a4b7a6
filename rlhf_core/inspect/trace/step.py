"""One PPO step of a `PPOTrainer`, token by token: samples, rewards, and the effect of the update."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_core.finite import at_step
from rlhf_core.inspect.trace.readings import PassRecorder, readings
from rlhf_core.inspect.trace.records import Choice, Minibatch, Step, Token, Trace
from rlhf_core.inspect.trace.tokens import token_text, token_texts
from rlhf_core.models.masked import masked_mean
from rlhf_core.ppo.advantages import compute_gae
from rlhf_core.ppo.credit import assign_credit
from rlhf_core.ppo.objective import Pass
from rlhf_core.ppo.plan import StepPlan
from rlhf_core.ppo.rollout import Rollout
from rlhf_core.ppo.trainer import PPOTrainer

CHOICES = 4
"""Number of the most likely tokens at each position."""


def trace_step(trainer: PPOTrainer, rows: Sequence[int]) -> list[Trace]:
    """Do the trainer's next PPO step, and trace the responses in the given rows of its batch. Raises as
    `trainer.step()`."""
    with at_step(trainer.steps_done + 1):
        tracer = _Tracer(trainer, trainer.rollout(), rows)
    step = tracer.step()
    return [tracer.trace(step, row) for row in rows]


class _Tracer:
    """One PPO step and the traces of its responses."""

    def __init__(self, trainer: PPOTrainer, rollout: Rollout, rows: Sequence[int]) -> None:
        self.trainer, self.rollout = trainer, rollout
        self.config, self.models, self.kl_coef = trainer.config, trainer.models, trainer.controller.coef
        self.scores = trainer.score(rollout)
        self.credit = assign_credit(rollout, self.scores, self.config, self.kl_coef)
        self.plan = StepPlan.of(self.config, trainer.steps_done)
        self.recorder = PassRecorder(rows, rollout.lengths)
        self.before = {row: self._distribution(row) for row in rows}

    def step(self) -> Step:
        """Do the step; what is the same for all responses of the batch."""
        trainer, credit, mask = self.trainer, self.credit, self.rollout.mask
        rates = {name: optimizer.param_groups[0]["lr"] for name, optimizer in trainer.optimizers.items()}
        norms: dict[str, list[float]] = {name: [] for name in trainer.optimizers}
        diagnostics = trainer.step(self.rollout, self.recorder, norms)
        return Step(
            number=self.plan.step + 1,
            trains_policy=self.plan.trains_policy,
            kl_coef=self.kl_coef,
            advantage_mean=masked_mean(credit.advantages, mask).item(),
            advantage_scale=credit.scale,
            learning_rates=rates,
            grad_norms=norms,
            minibatches=[self._minibatch(place) for place in sorted(self.recorder.seen)],
            stopped_early=bool(diagnostics["stopped_early"]),
            diagnostics=diagnostics,
        )

    def trace(self, step: Step, row: int) -> Trace:
        """The response in this row of the batch."""
        rollout, scores = self.rollout, self.scores
        ended, used = bool(rollout.ended[row]), scores.used[row].item()
        return Trace(
            step=step,
            row=row,
            prompt=rollout.prompts[row],
            prompt_tokens=len(rollout.prompt_ids[row]),
            text=rollout.texts[row],
            ended=ended,
            score_raw=scores.raw[row].item(),
            score_normalised=used if ended else used + self.config.score.missing_eos_penalty,
            score=used,
            gold=scores.gold[row] if scores.gold is not None else None,
            rivals=self._rivals(row),
            tokens=self._tokens(row),
        )

    def _minibatch(self, number: int) -> Minibatch:
        rows, sums = self.recorder.seen[number], self.recorder.sums[number]
        tokens = sum(self.rollout.lengths[row] for row in rows)
        means = {name: total / tokens for name, total in sums.items()}
        epoch = 1 + number // self.plan.minibatches
        return Minibatch(epoch, sorted(rows), tokens, **({"kl_loss": None} | means))  # type: ignore[arg-type]

    def _rivals(self, row: int) -> list[float]:
        returns = self.credit.rewards.sum(dim=1).tolist()
        if self.config.advantage == "gae":
            return []
        if self.config.advantage == "reinforce":
            return returns
        each = self.config.samples_per_prompt
        first = row - row % each
        return [returns[other] for other in range(first, first + each) if other != row]

    @torch.no_grad()
    def _tokens(self, row: int) -> list[Token]:
        rollout, credit = self.rollout, self.credit
        ids = rollout.response_ids[row]
        passes = [found for _, found in sorted(self.recorder.passes[row].items())]
        now = Pass.over([row], rollout, credit, self.models, self.config, self.trainer.pad_id)
        *before, after = (
            readings(found, self.config, self.kl_coef, self.plan.trains_policy) for found in [*passes, now]
        )
        choices = self._choices(row)
        values, next_values, deltas = self._values(row)
        texts = token_texts(self.trainer.tokenizer, ids)

        def at(table: Tensor, t: int) -> float:
            return table[row, t].item()

        return [
            Token(
                id=ids[t],
                text=texts[t],
                old_logprob=at(rollout.old_logprobs, t),
                ref_logprob=at(rollout.ref_logprobs, t),
                kl=at(credit.kl, t),
                reward=at(credit.rewards, t),
                value=values[t],
                next_value=next_values[t],
                delta=deltas[t],
                advantage=at(credit.advantages, t),
                weight=at(credit.weights, t),
                return_=at(credit.returns, t),
                choices=choices[t],
                passes=[found[t] for found in before],
                after=after[t],
            )
            for t in range(len(ids))
        ]

    def _values(self, row: int) -> tuple[list[float | None], list[float | None], list[float | None]]:
        """V(s_t), V(s_{t+1}) and δ_t, which is the advantage at λ = 0."""
        time = self.rollout.lengths[row]
        if not self.models.has_critic:
            nothing: list[float | None] = [None] * time
            return nothing, nothing, nothing
        values = torch.nn.functional.pad(self.rollout.old_values[row, :time], (0, 1))
        rewards, mask = self.credit.rewards[row, :time], self.rollout.mask[row, :time]
        deltas, _ = compute_gae(rewards, values, self.config.gamma, 0.0, mask)
        return values[:-1].tolist(), values[1:].tolist(), deltas.tolist()

    def _distribution(self, row: int) -> Float[Tensor, "time vocabulary"]:
        """The policy's probabilities at each position of the response, at the sampling temperature."""
        with torch.no_grad():
            logits = self.models.predict(self.rollout.batch([row], self.trainer.pad_id)).logits()
            return (logits / self.config.temperature).softmax(dim=-1)

    def _choices(self, row: int) -> list[list[Choice]]:
        before, after = self.before[row], self._distribution(row)
        likeliest = before.topk(min(CHOICES, before.shape[-1]), dim=-1).indices.tolist()
        return [
            [Choice(token_text(self.trainer.tokenizer, i), before[t, i].item(), after[t, i].item()) for i in found]
            for t, found in enumerate(likeliest)
        ]
