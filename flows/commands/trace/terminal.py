"""A traced PPO step for the terminal and as JSON: its tables, and how the numbers add up."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from flows.commands.trace.trace import Traced
from flows.text import table
from rlhf_core.inspect.trace import Token

NOTHING = "–"
FEW = 8
"""Most answers whose returns are listed one by one."""
LARGEST_CHANGE = 700.0
"""Nats; the exponential of more overflows."""
COLUMNS = ("log π_old", "log π_ref", "KL", "r", "V", "δ", "A", "Â", "return", "ρ", "clip", "L_π", "L_V")
"""Heads of the columns of `cells`."""
PASSES = (
    "pass", "epoch", "minibatch", "mean ρ", "clipped", "L_π answer", "L_V answer",
    "L_π", "L_V", "entropy", "KL loss", "total loss",
)  # fmt: skip
"""Heads of the columns of `passes`."""
TEXTS = {"token", "clip"}
"""Columns of text, aligned to the left; numbers are aligned to the right."""


def number(value: float | None, sign: bool = False) -> str:
    """Three digits, with a sign on request, or a dash; what rounds to 0 has no sign."""
    if value is None:
        return NOTHING
    return "0.000" if abs(value) < 0.0005 else f"{value:{'+' if sign else ''}.3f}".replace("-", "−")


def signed(value: float | None) -> str:
    """`number` with its sign."""
    return number(value, sign=True)


def operand(value: float | None) -> str:
    """`number` after an operator: negative ones in brackets."""
    text = number(value)
    return f"({text})" if text.startswith("−") else text


def where(traced: Traced) -> str:
    """Which step this is, and of which models."""
    step, start = traced.trace.step.number, traced.model
    row, rows = traced.trace.row + 1, traced.config.batch_size
    return f"PPO step {step} of {traced.config.steps}, from {start}, seed {traced.seed}; answer {row} of {rows}"


def cells(token: Token) -> list[str]:
    """The token's row in the table, without its place and text. `clip` is `yes` where ρ is outside [1−ε, 1+ε] and the
    gradient is 0, `out` where it is outside and there is a gradient."""
    after = token.after
    clip = "" if not after.clipped else "yes" if after.pull == 0 else "out"
    return [
        number(token.old_logprob), number(token.ref_logprob), signed(token.kl), signed(token.reward),
        number(token.value), signed(token.delta), signed(token.advantage), signed(token.weight), signed(token.return_),
        number(after.ratio), clip, signed(after.policy_loss), number(after.value_loss),
    ]  # fmt: skip


def passes(traced: Traced) -> list[list[str]]:
    """One row for each pass of the update over the answer: means over its tokens, then those of the minibatch."""
    trace, has_critic = traced.trace, traced.config.has_critic
    rows = []
    for turn, place in enumerate(trace.minibatches):
        minibatch, read = trace.step.minibatches[place], [token.passes[turn] for token in trace.tokens]
        clipped = sum(reading.clipped and reading.pull == 0 for reading in read)
        row = [
            str(turn + 1), str(minibatch.epoch), f"{place + 1} of {len(trace.step.minibatches)}",
            number(fmean(reading.ratio for reading in read)), f"{clipped} of {len(read)}",
            signed(fmean(reading.policy_loss for reading in read)),
            number(fmean(reading.value_loss or 0.0 for reading in read) if has_critic else None),
            signed(minibatch.policy_loss), number(minibatch.value_loss if has_critic else None),
            number(minibatch.entropy), number(minibatch.kl_loss), signed(minibatch.total_loss),
        ]  # fmt: skip
        rows.append(row)
    return rows


def explain(traced: Traced) -> dict[str, list[str]]:
    """How the numbers add up, in lines: the score and its sum of rewards, how it is spread over the tokens as credit,
    the loss and the optimiser steps of the update, and what the update did to the answer."""
    trace, config, step = traced.trace, traced.config, traced.trace.step
    total, beta = number(trace.sums["return"]), f"{step.kl_coef:g}"

    kind = "normalised" if config.score.normalise else "clipped"
    lost = f"→ it did not end: −{config.score.missing_eos_penalty:g}, so R = {number(trace.score)}"
    raw, used = number(trace.score_raw), number(trace.score_normalised)
    score = [f"reward model: raw {raw} → {kind} {used} {'= R' if trace.ended else lost}"]
    if trace.gold is not None:
        score.append(f"gold score (watched, never trained on): {number(trace.gold)}")
    if config.kl.penalty == "loss":
        score.append(f"Σ KL = {number(trace.sums['kl'])} nats; the leash (β = {beta}) is in the loss, so Σ r = {total}")
    else:
        sum_of = f"{number(trace.score)} − {beta} · {operand(trace.sums['kl'])}"
        score.append(f"Σ r = R − β·Σ KL = {sum_of} = {total}")

    last = trace.tokens[-1]
    if config.has_critic:
        delta = f"{number(last.reward)} − {operand(last.value)} = {number(last.delta)}"
        credit = [f"δ_T = r_T + γ·0 − V(s_T) = {delta}, and A_T = δ_T"]
        for one in trace.tokens[-2:-1]:
            decayed = f"{config.gamma:g} · {config.lam:g} · {operand(last.advantage)}"
            advantage = f"{number(one.delta)} + {decayed} = {number(one.advantage)}"
            credit.append(f"A_(T−1) = δ_(T−1) + γλ·A_T = {advantage}, and so on from right to left")
    else:
        rivals = f"those of the other answers to the prompt: {', '.join(map(number, trace.rivals))}"
        if len(trace.rivals) > FEW:
            rivals = f"the mean of the batch, {number(fmean(trace.rivals))}"
        credit = [f"no critic ({config.advantage}): Σ r = {total} is compared with {rivals}"]
        if config.advantage == "gdpo":
            credit.append("each term of the score apart: less its mean in the group, divided by its deviation")
        credit.append(f"so A = {number(last.advantage)}, the same for every token")
    if config.whiten_advantages:
        mean, scale = operand(step.advantage_mean), number(step.advantage_scale)
        of = "of the batch" if step.left_out == 0 else f"of the batch, without the {step.left_out} answers left out"
        credit.append(f"Â = (A − {mean}) / {scale}: mean and deviation over all tokens {of}")
    else:
        credit.append("Â = A: whitening is off")

    terms = ["L_π"] if step.trains_policy else []
    terms += [f"{config.vf_coef:g}·L_V"] if config.has_critic else []
    loss = " + ".join(terms)
    if step.trains_policy and config.entropy_coef:
        loss += f" − {config.entropy_coef:g}·entropy"
    if step.trains_policy and config.kl.penalty == "loss":
        loss += f" + {beta}/{number(step.advantage_scale)}·KL loss"
    update = [f"total loss = {loss}"]
    if not step.trains_policy:
        update.append(f"the critic warms up ({config.critic_warmup_steps} steps): the policy does not change")
    for name, rate in step.learning_rates.items():
        norms = ", ".join(map(number, step.grad_norms[name]))
        limit = f"clipped at {config.optimizer.max_grad_norm:g}"
        update.append(f"{name}: learning rate {rate:.3g}, gradient norms {norms} ({limit})")
    names = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")
    means = {name: value for name in names if (value := step.diagnostics[name]) is not None}
    listed = ", ".join(f"{name} {value:.4f}" for name, value in means.items()).replace("-", "−")
    early = "; it stopped early (stop_kl)" if step.stopped_early else ""
    update.append(f"over the batch, named as in plots/ppo.csv: {listed}{early}")

    before, after = trace.sums["logprob_before"], trace.sums["logprob_after"]
    change = math.exp(min(after - before, LARGEST_CHANGE))
    effect = f"{number(before)} before, {number(after)} after the update: its probability × {change:.3f}"
    answer = [f"log π of the whole answer: {effect}"]
    return {"score": score, "credit": credit, "update": update, "the answer": answer}


def as_dict(traced: Traced) -> dict[str, Any]:
    """The trace as plain values, for `--json`."""
    content = asdict(traced.trace)
    for token in content["tokens"]:
        token["return"] = token.pop("return_")
    settings = traced.config.model_dump(mode="json")
    return {"start": traced.start, "seed": traced.seed, "notes": traced.notes, "settings": settings, **content}


def render(traced: Traced) -> str:
    """The trace for a terminal: the rollout, the table of tokens, then how the numbers add up to the loss."""
    trace, lines = traced.trace, explain(traced)
    cut = "" if trace.ended else "   [cut off: no end-of-sequence token]"
    notes = [f"  ({note})" for note in traced.notes]
    rollout = [where(traced), *notes, f"prompt  {trace.prompt[-1]['content']}", f"answer  {trace.text}{cut}"]
    rows = [[str(place), repr(token.text)[1:-1], *cells(token)] for place, token in enumerate(trace.tokens, start=1)]
    listed = {title: "\n".join([title, *(f"  {line}" for line in lines[title])]) for title in lines}
    return "\n\n".join(
        [
            "\n".join(rollout),
            f"{_table(('t', 'token', *COLUMNS), rows)}\nρ, clip, L_π, L_V: after the update. clip yes: ρ is outside "
            "[1−ε, 1+ε] and the gradient is 0; out: outside, with a gradient.",
            listed["score"],
            listed["credit"],
            "the answer's passes through the update (losses: means over tokens; from the second L_π on: of the "
            f"minibatch)\n{_table(PASSES, passes(traced))}",
            listed["update"],
            listed["the answer"],
        ]
    )


def _table(head: Sequence[str], rows: list[list[str]]) -> str:
    padded = []
    for name, *column in zip(head, *rows, strict=True):
        width = max(map(len, (name, *column)))
        padded.append([cell.ljust(width) if name in TEXTS else cell.rjust(width) for cell in (name, *column)])
    return table(zip(*padded, strict=True))
