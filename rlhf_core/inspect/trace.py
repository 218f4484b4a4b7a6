"""One PPO step of a `PPOTrainer`, token by token: samples, rewards, credit, and the effect of the update. Every number
comes from the functions that PPO trains with."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.data.chat import Conversation
from rlhf_core.finite import at_step
from rlhf_core.models.head import Predictions
from rlhf_core.models.masked import masked_mean
from rlhf_core.ppo.advantages import compute_gae
from rlhf_core.ppo.credit import assign_credit
from rlhf_core.ppo.losses import policy_ratio
from rlhf_core.ppo.objective import Pass, losses_of
from rlhf_core.ppo.plan import StepPlan
from rlhf_core.ppo.rollout import Credit, Rollout
from rlhf_core.ppo.trainer import PPOTrainer

CHOICES = 4
"""Number of the most likely tokens at each position."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One token in a forward pass and in the losses. None for terms that the settings do not have."""

    logprob: float
    """log π_θ, nats."""
    ratio: float
    """ρ = π_θ/π_old; with `ratio: sequence` that of the whole answer."""
    clipped: bool
    """Whether ρ lies outside [1−ε, 1+ε_high]."""
    pull: float
    """−∂(policy loss)/∂log π_θ of this token; 0 where it is clipped."""
    policy_loss: float
    value: float | None = None
    value_clipped: bool | None = None
    """Whether V moved by more than the value clip."""
    value_loss: float | None = None
    """Without its weight `vf_coef`."""
    entropy: float
    """Of the token's distribution, nats."""
    kl_loss: float | None = None
    """KL to the reference as a loss, nats, without its weight; None where the KL penalty is in the reward."""


@dataclass(frozen=True)
class Choice:
    """A likely token under π_old at one position, and its probability before and after the update."""

    text: str
    before: float
    after: float


@dataclass(frozen=True, kw_only=True)
class Token:
    """One token of the response in a PPO step. Scores, rewards and values in units of the score; log-probabilities in
    nats. No values without a critic."""

    id: int
    text: str
    old_logprob: float
    ref_logprob: float
    kl: float
    """k1 = log π_old − log π_ref."""
    reward: float
    value: float | None = None
    next_value: float | None = None
    """V(s_{t+1}); 0 after the last token."""
    delta: float | None = None
    """The advantage at λ = 0."""
    advantage: float
    weight: float
    """The advantage in the loss, whitened over the batch if the settings say so."""
    return_: float
    choices: list[Choice]
    passes: list[Reading]
    """At each pass of the update over this response: one an epoch, each before its optimiser step."""
    after: Reading
    """After the last optimiser step."""


@dataclass(frozen=True)
class Minibatch:
    """The losses of one minibatch, as means over its real tokens, and its rows of the batch."""

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
    """The PPO step of the response."""

    number: int
    """From 1."""
    trains_policy: bool
    """False while only the critic warms up."""
    kl_coef: float
    """β, units of the score per nat."""
    advantage_mean: float
    """Over all real tokens of the answers that are trained on; whitening subtracts it."""
    advantage_scale: float
    """Whitening divides by it; 1 without whitening."""
    left_out: int
    """Answers that are not trained on."""
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
    """One response in one PPO step."""

    step: Step
    row: int
    """Its place in the batch, from 0."""
    prompt: Conversation
    prompt_tokens: int
    text: str
    ended: bool
    trained: bool
    """Whether the step learns from it: not where its group has equal scores, or it was cut off, and the settings leave
    such answers out."""
    score_raw: float
    score_normalised: float
    """Normalised or scaled, and clipped; before the penalty for a response without an end."""
    score: float
    """The score in the reward."""
    gold: float | None
    rivals: list[float]
    """Without a critic, the returns in the baseline: of the other responses to the prompt, or (`reinforce`) of the
    whole batch."""
    tokens: list[Token]
    sums: dict[str, float]
    """Over the tokens, nats: `kl` (k1), `return` (Σ r_t, units of the score), and `logprob_before` and `logprob_after`
    the update."""

    @property
    def minibatches(self) -> list[int]:
        """The places of its minibatches among those of the step, one for each pass."""
        return [place for place, minibatch in enumerate(self.step.minibatches) if self.row in minibatch.rows]


def trace_step(trainer: PPOTrainer, rows: Sequence[int]) -> list[Trace]:
    """Do the trainer's next PPO step, and trace the responses in the given rows of its batch. Raises as
    `trainer.step()`."""
    config, models, beta = trainer.config, trainer.models, trainer.controller.coef
    plan = StepPlan.of(config, trainer.steps_done)
    with at_step(plan.step + 1):
        rollout = trainer.rollout()
        scores = trainer.score(rollout)
    credit = assign_credit(rollout, scores, config, beta)
    before = {row: _probabilities(trainer, rollout, row) for row in rows}
    rates = {name: optimizer.param_groups[0]["lr"] for name, optimizer in trainer.optimizers.items()}

    norms: dict[str, list[float]] = {name: [] for name in trainer.optimizers}
    sums: defaultdict[int, Counter[str]] = defaultdict(Counter)
    seen: defaultdict[int, list[int]] = defaultdict(list)
    passes: dict[int, list[list[Reading]]] = {row: [] for row in rows}

    def watch(number: int, of: Sequence[int], forward: Pass, losses: dict[str, Tensor]) -> None:
        seen[number] += of
        sums[number].update({name: loss.item() for name, loss in losses.items()})
        found = _readings(forward, config, beta, plan.trains_policy)
        for row in passes.keys() & of:
            passes[row].append(found[of.index(row)])

    diagnostics = trainer.step(rollout, watch, norms)

    minibatches = []
    for number, of in seen.items():
        count = sum(rollout.lengths[row] for row in of)
        means = {"kl_loss": None} | {name: total / count for name, total in sums[number].items()}
        minibatches.append(Minibatch(1 + number // plan.minibatches, sorted(of), count, **means))  # type: ignore[arg-type]
    step = Step(
        number=plan.step + 1,
        trains_policy=plan.trains_policy,
        kl_coef=beta,
        advantage_mean=masked_mean(credit.advantages, rollout.mask * credit.trained[:, None]).item(),
        advantage_scale=credit.scale,
        left_out=int((~credit.trained).sum()),
        learning_rates=rates,
        grad_norms=norms,
        minibatches=minibatches,
        stopped_early=bool(diagnostics["stopped_early"]),
        diagnostics=diagnostics,
    )
    returns = credit.rewards.sum(dim=1).tolist()
    traces = []
    for row in rows:
        with torch.no_grad():
            now = Pass.over(rollout.batch([row], trainer.pad_id), [row], rollout, credit, models, config)
        [after] = _readings(now, config, beta, plan.trains_policy)
        tokens = _tokens(trainer, rollout, credit, row, before[row], passes[row], after)
        used, lost = scores.used[row].item(), 0.0 if rollout.ended[row] else config.score.missing_eos_penalty
        rivals = returns if config.advantage == "reinforce" else []
        if config.advantage not in ("gae", "reinforce"):
            first = row - row % config.samples_per_prompt
            group = range(first, first + config.samples_per_prompt)
            rivals = [returns[other] for other in group if other != row]
        trace = Trace(
            step=step,
            row=row,
            prompt=rollout.prompts[row],
            prompt_tokens=len(rollout.prompt_ids[row]),
            text=rollout.texts[row],
            ended=bool(rollout.ended[row]),
            trained=bool(credit.trained[row]),
            score_raw=scores.raw[row].item(),
            score_normalised=used + lost,
            score=used,
            gold=None if scores.gold is None else scores.gold[row],
            rivals=rivals,
            tokens=tokens,
            sums={
                "kl": sum(token.kl for token in tokens),
                "return": sum(token.reward for token in tokens),
                "logprob_before": sum(token.old_logprob for token in tokens),
                "logprob_after": sum(token.after.logprob for token in tokens),
            },
        )
        traces.append(trace)
    return traces


def _readings(forward: Pass, config: PPOConfig, kl_coef: float, trains_policy: bool) -> list[list[Reading]]:
    """The readings of each response of a pass, with the losses that train its tokens, before an average over answers
    weighs them."""
    mask = forward.batch.mask
    with torch.enable_grad():
        logprobs = forward.logprobs.detach().requires_grad_()
        losses = losses_of(
            replace(forward, logprobs=logprobs, weights=mask), config, kl_coef, trains_policy, reduction="none"
        )
        (slope,) = torch.autograd.grad(losses["policy_loss"].sum(), logprobs)
    ratio = policy_ratio(logprobs, forward.old_logprobs, config.ratio, mask)
    tables = {
        "logprob": logprobs,
        "ratio": ratio,
        "clipped": (ratio < 1 - config.clip_ratio) | (ratio > 1 + (config.clip_ratio_high or config.clip_ratio)),
        "pull": -slope,
        "policy_loss": losses["policy_loss"],
        "entropy": forward.entropy,
    }
    if config.has_critic:
        tables |= {"value": forward.values, "value_loss": losses["value_loss"]}
        if config.critic.clip_value and trains_policy:
            tables["value_clipped"] = (forward.values - forward.old_values).abs() > config.critic.value_clip
    if "kl_loss" in losses:
        tables["kl_loss"] = losses["kl_loss"]
    lengths = mask.sum(dim=1).int().tolist()
    return [[Reading(**numbers) for numbers in _rows_of(tables, row, length)] for row, length in enumerate(lengths)]


@torch.no_grad()
def _tokens(
    trainer: PPOTrainer,
    rollout: Rollout,
    credit: Credit,
    row: int,
    before: Float[Tensor, "time vocabulary"],
    passes: list[list[Reading]],
    after: list[Reading],
) -> list[Token]:
    """The tokens of the response. `before`: the policy's probabilities before the update; `passes`, `after`: the
    readings of its tokens during and after it."""
    ids, now, tokenizer = rollout.response_ids[row], _probabilities(trainer, rollout, row), trainer.tokenizer
    likeliest = before.topk(min(CHOICES, before.shape[-1]), dim=-1).indices.tolist()
    tables = {
        "old_logprob": rollout.old_logprobs,
        "ref_logprob": rollout.ref_logprobs,
        "kl": credit.kl,
        "reward": credit.rewards,
        "advantage": credit.advantages,
        "weight": credit.weights,
        "return_": credit.returns,
    }
    if trainer.models.has_critic:
        values = pad(rollout.old_values, (0, 1))
        deltas, _ = compute_gae(credit.rewards, values, trainer.config.gamma, 0.0, rollout.mask)
        tables |= {"value": values, "next_value": values[:, 1:], "delta": deltas}
    return [
        Token(
            id=ids[t],
            text=text,
            choices=[Choice(token_text(tokenizer, i), before[t, i].item(), now[t, i].item()) for i in likeliest[t]],
            passes=[found[t] for found in passes],
            after=after[t],
            **numbers,
        )
        for t, (text, numbers) in enumerate(
            zip(token_texts(tokenizer, ids), _rows_of(tables, row, len(ids)), strict=True)
        )
    ]


def _rows_of(tables: dict[str, Tensor], row: int, length: int) -> list[dict[str, Any]]:
    """The numbers of each of the first `length` positions in one row of the tables, by the tables' names."""
    columns = [table[row, :length].tolist() for table in tables.values()]
    return [dict(zip(tables, numbers, strict=True)) for numbers in zip(*columns, strict=True)]


@torch.no_grad()
def _probabilities(trainer: PPOTrainer, rollout: Rollout, row: int) -> Float[Tensor, "time vocabulary"]:
    """The policy's distribution at each position of the response, at the sampling temperature."""
    logits = trainer.models.read_policy(rollout.batch([row], trainer.pad_id), Predictions.logits)
    return (logits / trainer.config.temperature).softmax(dim=-1)


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """The text that each token adds; the tokenizer's name of a token without readable text."""
    texts, whole = [], ""
    for end, token in enumerate(ids, start=1):
        longer = str(tokenizer.decode(list(ids[:end])))
        added = longer[len(whole) :] if longer.startswith(whole) else ""
        texts.append(added if added and "�" not in added else token_text(tokenizer, token))
        whole = longer
    return texts


def token_text(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """One token as text; the tokenizer's name of a token that is not a whole character."""
    text = str(tokenizer.decode([token]))
    return text if text and "�" not in text else str(tokenizer.convert_ids_to_tokens(token))
