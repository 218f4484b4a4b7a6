"""One PPO step read token by token: what was sampled, what each token was paid, and what the update made of it.

The step is a real one of a `PPOTrainer`, and every number comes from the functions that it trains with, asked about one
token at a time. Nothing is loaded, printed or drawn here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_core.data.chat import Conversation
from rlhf_core.finite import at_step
from rlhf_core.models.batch import TokenBatch
from rlhf_core.models.masked import masked_mean
from rlhf_core.ppo.advantages import compute_gae
from rlhf_core.ppo.kl import full_kl
from rlhf_core.ppo.losses import clip_fraction, compute_value_loss, value_clip_fraction
from rlhf_core.ppo.objective import Pass, kl_loss, policy_loss
from rlhf_core.ppo.rollout import Credit, Rollout, Scores
from rlhf_core.ppo.statistics import UpdateStatistics
from rlhf_core.ppo.trainer import PPOTrainer

CHOICES = 4
"""Likeliest tokens that are named beside the one that was drawn."""


@dataclass(frozen=True)
class Reading:
    """What a forward pass and the losses say of one token. None where the settings have no such thing."""

    logprob: float
    """log π_θ, nats."""
    ratio: float
    """ρ = π_θ/π_old."""
    clipped: bool | None
    """Whether ρ lies outside [1−ε, 1+ε]."""
    pull: float
    """−∂(policy loss)/∂log π_θ: what the loss would add to this token's log-probability; 0 where the clip holds it."""
    policy_loss: float
    value: float | None
    value_clipped: bool | None
    """Whether V moved by more than the value clip."""
    value_loss: float | None
    """Without its weight `vf_coef`."""
    entropy: float
    """Of the distribution that the token stands in, nats."""
    kl_loss: float | None
    """KL to the reference as a loss, nats, without its weight; None where the leash is in the reward."""


@dataclass(frozen=True)
class Choice:
    """A token that π_old found likely in one place, and its probability before and after the update."""

    text: str
    before: float
    after: float


@dataclass(frozen=True)
class Token:
    """One token of the answer on its way through a PPO step. Scores, rewards and values in units of the score."""

    id: int
    text: str
    old_logprob: float
    ref_logprob: float
    kl: float
    """k1 = log π_old − log π_ref, nats."""
    reward: float
    value: float | None
    next_value: float | None
    """V(s_{t+1}); 0 after the last token."""
    delta: float | None
    advantage: float
    weight: float
    """The advantage that the loss uses: whitened over the batch, or as it is."""
    return_: float
    choices: list[Choice]
    passes: list[Reading]
    """At each pass of the update over this answer: one an epoch, each before its optimiser step."""
    after: Reading
    """After the last optimiser step."""


@dataclass(frozen=True)
class Minibatch:
    """The losses of one minibatch, as means over its real tokens, and the rows of the batch that stand in it."""

    epoch: int
    """From 1."""
    rows: list[int]
    tokens: int
    policy_loss: float
    value_loss: float
    entropy: float
    kl_loss: float | None
    total_loss: float


@dataclass(frozen=True)
class Step:
    """The PPO step that the answer was part of."""

    number: int
    """From 1."""
    trains_policy: bool
    """False while only the critic warms up."""
    uses_ratio: bool
    """False in the warm-up with the plain policy gradient."""
    kl_coef: float
    """β, units of the score per nat."""
    advantage_mean: float
    """Over all real tokens of the batch; what whitening subtracts."""
    advantage_scale: float
    """What whitening divides by; 1 without it."""
    learning_rates: dict[str, float]
    """Of `policy`, and of `critic` where there is one."""
    grad_norms: dict[str, list[float]]
    """Of each optimiser step, before clipping."""
    minibatches: list[Minibatch]
    stopped_early: bool
    diagnostics: dict[str, float | None]
    """The step's row in plots/ppo.csv."""


@dataclass(frozen=True)
class Trace:
    """One answer through one PPO step."""

    step: Step
    row: int
    """Its place in the batch, from 0."""
    prompt: Conversation
    prompt_tokens: int
    text: str
    ended: bool
    score_raw: float
    score_normalised: float
    """Normalised or scaled, and clipped; before the penalty for an answer without end."""
    score: float
    """What enters the reward."""
    gold: float | None
    rivals: list[float]
    """Returns of the answers that it is compared with where there is no critic: to the same prompt, or (`reinforce`)
    of the whole batch, itself included."""
    tokens: list[Token]

    @property
    def kl(self) -> float:
        """Summed k1 of the answer, nats."""
        return sum(token.kl for token in self.tokens)

    @property
    def return_(self) -> float:
        """Σ r_t of the answer."""
        return sum(token.reward for token in self.tokens)

    @property
    def logprob_before(self) -> float:
        """log π_old of the whole answer, nats."""
        return sum(token.old_logprob for token in self.tokens)

    @property
    def logprob_after(self) -> float:
        """log π_θ of the whole answer after the update, nats."""
        return sum(token.after.logprob for token in self.tokens)

    @property
    def minibatches(self) -> list[int]:
        """The places of its minibatches among those of the step, one for each pass."""
        return [place for place, minibatch in enumerate(self.step.minibatches) if self.row in minibatch.rows]


def trace_step(trainer: PPOTrainer, rows: Sequence[int]) -> list[Trace]:
    """Do the update of the trainer's next PPO step, and trace the answers in the given rows of its batch.

    The models are trained by it as `trainer.step()` would train them; controllers, schedules and the count of steps
    stay, so that the trainer is of no use for a second step. Raises as `trainer.step()`.
    """
    with at_step(trainer.steps_done + 1):
        rollout = trainer.rollout()
        scores = trainer.score(rollout)
        credit = trainer.assign_credit(rollout, scores)
        reader = _Reader(trainer, rollout, scores, credit, rows)
        statistics = reader.update()
        step = reader.step(statistics)
        return [reader.trace(step, row) for row in rows]


class _Recorder:
    """Keeps, of each minibatch, the sums of the losses, and the passes over the rows that are traced."""

    def __init__(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        self.traced, self.lengths = frozenset(rows), lengths
        self.seen: dict[int, list[int]] = {}
        self.sums: dict[int, dict[str, float]] = {}
        self.passes: dict[int, dict[int, Pass]] = {row: {} for row in rows}

    def __call__(self, number: int, rows: Sequence[int], forward: Pass, losses: dict[str, Tensor]) -> None:
        if not set(self.seen.get(number, ())).isdisjoint(rows):  # memory made the minibatch begin again
            self.seen[number], self.sums[number] = [], {}
        self.seen.setdefault(number, []).extend(rows)
        sums = self.sums.setdefault(number, {})
        for name, loss in losses.items():
            sums[name] = sums.get(name, 0.0) + loss.item()
        for place, row in enumerate(rows):
            if row in self.traced:
                self.passes[row][number] = _part(forward, slice(place, place + 1), slice(0, self.lengths[row]))


class _Reader:
    """One PPO step, and the questions that a trace asks about it."""

    def __init__(
        self, trainer: PPOTrainer, rollout: Rollout, scores: Scores, credit: Credit, rows: Sequence[int]
    ) -> None:
        self.trainer, self.rollout, self.scores, self.credit = trainer, rollout, scores, credit
        self.config, self.models = trainer.config, trainer.models
        self.plan = trainer.plan()
        self.recorder = _Recorder(rows, rollout.lengths)
        self.before = {row: self._distribution(row) for row in rows}

    def update(self) -> UpdateStatistics:
        """The update of the trainer, watched."""
        updater = self.trainer.updater
        updater.watch = self.recorder
        try:
            return updater.run(self.rollout, self.credit, self.plan)
        finally:
            updater.watch = None

    def step(self, statistics: UpdateStatistics) -> Step:
        """What the answers of the batch share."""
        trainer, credit, mask = self.trainer, self.credit, self.rollout.mask
        rates = {name: optimizer.param_groups[0]["lr"] for name, optimizer in trainer.optimizers.items()}
        return Step(
            number=self.plan.step + 1,
            trains_policy=self.plan.trains_policy,
            uses_ratio=self.plan.uses_ratio,
            kl_coef=self.plan.kl_coef,
            advantage_mean=masked_mean(credit.advantages, mask).item(),
            advantage_scale=credit.scale,
            learning_rates=rates,
            grad_norms=dict(statistics.grad_norms),
            minibatches=[self._minibatch(place) for place in sorted(self.recorder.seen)],
            stopped_early=statistics.stopped_early,
            diagnostics=trainer.diagnose(self.plan, self.rollout, self.scores, credit, statistics),
        )

    def trace(self, step: Step, row: int) -> Trace:
        """The answer in this row of the batch."""
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
        readings = [self._readings(row, found) for _, found in sorted(self.recorder.passes[row].items())]
        after = self._readings(row, self._now(row))
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
                passes=[found[t] for found in readings],
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
        deltas, _ = compute_gae(
            self.credit.rewards[row, :time], values, self.config.gamma, 0.0, self.rollout.mask[row, :time]
        )
        return values[:-1].tolist(), values[1:].tolist(), deltas.tolist()

    def _distribution(self, row: int) -> Float[Tensor, "time vocabulary"]:
        """What the policy would say in each place of the answer, at the sampling temperature."""
        with torch.no_grad():
            logits = self.models.policy_logits(self.rollout.batch([row], self.trainer.pad_id))[0]
            return (logits.float() / self.config.temperature).softmax(dim=-1)

    def _choices(self, row: int) -> list[list[Choice]]:
        before, after = self.before[row], self._distribution(row)
        likeliest = before.topk(min(CHOICES, before.shape[-1]), dim=-1).indices.tolist()
        return [
            [Choice(token_text(self.trainer.tokenizer, i), before[t, i].item(), after[t, i].item()) for i in found]
            for t, found in enumerate(likeliest)
        ]

    def _now(self, row: int) -> Pass:
        config, pad_id = self.config, self.trainer.pad_id
        return Pass.over([row], self.rollout, self.credit, self.models, config.temperature, pad_id)

    def _readings(self, row: int, forward: Pass) -> list[Reading]:
        kl_losses = self._kl_losses(row, forward)
        return [self._reading(token, kl) for token, kl in zip(_each_token(forward), kl_losses, strict=True)]

    def _reading(self, token: Pass, kl: float | None) -> Reading:
        """The functions of the loss, asked about a pass over one token."""
        config, mask = self.config, token.batch.mask
        with torch.enable_grad():
            token = replace(token, logprobs=token.logprobs.detach().requires_grad_())
            loss = policy_loss(token, config, self.plan)
            (slope,) = torch.autograd.grad(loss, token.logprobs)
        new, old, ratios = token.logprobs, token.old_logprobs, self.plan.uses_ratio and config.objective == "clip"
        critic, limit = self.models.has_critic, config.critic
        value_loss = compute_value_loss(
            token.values, token.returns, token.old_values, limit.clip_value, limit.value_clip, mask, reduction="sum"
        )
        moved = value_clip_fraction(token.values, token.old_values, limit.value_clip, mask).item() > 0
        return Reading(
            logprob=new.item(),
            ratio=torch.exp(new - old).item(),
            clipped=clip_fraction(new, old, config.clip_ratio, mask).item() > 0 if ratios else None,
            pull=-slope.item(),
            policy_loss=loss.item(),
            value=token.values.item() if critic else None,
            value_clipped=moved if critic and limit.clip_value else None,
            value_loss=value_loss.item() if critic else None,
            entropy=token.entropy.item(),
            kl_loss=kl,
        )

    def _kl_losses(self, row: int, forward: Pass) -> Sequence[float | None]:
        if self.config.kl.penalty != "loss":
            return [None] * forward.logprobs.shape[1]
        if self.config.kl.estimator != "full":
            return [kl_loss(token, self.config, self.models).item() for token in _each_token(forward)]
        temperature = self.config.temperature
        reference = self.models.reference_logits(self.rollout.batch([row], self.trainer.pad_id))
        return full_kl(forward.logits / temperature, reference / temperature)[0].tolist()


def _part(forward: Pass, rows: slice, times: slice) -> Pass:
    """A piece of a pass, cut out of the graph; of its batch, only the mask is of use."""

    def cut(table: Tensor) -> Tensor:
        return table[rows, times].detach().clone()

    batch = TokenBatch(forward.batch.input_ids[rows], forward.batch.attention_mask[rows], cut(forward.batch.mask))
    tables = {name: cut(table) for name, table in vars(forward).items() if isinstance(table, Tensor)}
    return replace(forward, batch=batch, **tables)  # type: ignore[arg-type]


def _each_token(forward: Pass) -> Iterator[Pass]:
    """Passes of [1, 1] over the tokens of a pass of one row."""
    for t in range(forward.logprobs.shape[1]):
        yield _part(forward, slice(0, 1), slice(t, t + 1))


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text; the tokenizer's own name for it where that is nothing that can be read."""
    texts, whole = [], ""
    for end, token in enumerate(ids, start=1):
        longer = str(tokenizer.decode(list(ids[:end])))
        added = longer[len(whole) :] if longer.startswith(whole) else ""
        texts.append(added if added and "�" not in added else token_text(tokenizer, token))
        whole = longer
    return texts


def token_text(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """One token as text; the tokenizer's own name for it where it is no whole character."""
    text = str(tokenizer.decode([token]))
    return text if text and "�" not in text else str(tokenizer.convert_ids_to_tokens(token))
