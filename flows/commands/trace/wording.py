"""Sentences and formulas about a trace, for the terminal and the page."""

import math
from collections.abc import Iterator

from flows.commands.trace.trace import Traced
from rlhf_core.inspect.trace.records import Reading, Token, Trace

NOTHING = "–"
FEW = 8
"""Most answers whose returns are listed one by one."""
LARGEST_CHANGE = 700.0
"""Nats; the exponential of more overflows."""


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


def clip_word(reading: Reading) -> str:
    """`yes`: the ratio is outside [1−ε, 1+ε] and the gradient is 0; `out`: outside, with a gradient."""
    if reading.clipped is None:
        return NOTHING
    return ("yes" if reading.pull == 0 else "out") if reading.clipped else ""


def where(traced: Traced) -> str:
    """Which step this is, and of which models."""
    step, start = traced.trace.step.number, traced.model
    row, rows = traced.trace.row + 1, traced.config.batch_size
    return f"PPO step {step} of {traced.config.steps}, from {start}, seed {traced.seed}; answer {row} of {rows}"


def score_lines(traced: Traced) -> Iterator[str]:
    """From the reward model's number to the sum of the token rewards."""
    trace, config, beta = traced.trace, traced.config, f"{traced.trace.step.kl_coef:g}"
    kind = "normalised" if config.score.normalise else "scaled" if config.score.scale == "running" else "clipped"
    lost = f" → it did not end: −{config.score.missing_eos_penalty:g}, so R = {number(trace.score)}"
    yield (
        f"reward model: raw {number(trace.score_raw)} → {kind} {number(trace.score_normalised)}"
        f"{' = R' if trace.ended else lost}"
    )
    if trace.gold is not None:
        yield f"gold score (watched, never trained on): {number(trace.gold)}"
    if config.kl.penalty == "loss":
        yield f"Σ KL = {number(trace.kl)} nats; the leash (β = {beta}) is in the loss, so Σ r = {number(trace.return_)}"
    else:
        yield (
            f"Σ r = R − β·Σ KL = {number(trace.score)} − {beta} · {operand(trace.kl)} = {number(trace.return_)}"
            f"{', the KL charged at the last token' if config.kl.placement == 'sequence_end' else ''}"
        )


def credit_lines(traced: Traced) -> Iterator[str]:
    """How the one reward is spread over the tokens."""
    trace, config, step = traced.trace, traced.config, traced.trace.step
    last = trace.tokens[-1]
    if config.has_critic:
        yield (
            f"δ_T = r_T + γ·0 − V(s_T) = {number(last.reward)} − {operand(last.value)} = {number(last.delta)}, "
            "and A_T = δ_T"
        )
        for one in trace.tokens[-2:-1]:
            yield (
                f"A_(T−1) = δ_(T−1) + γλ·A_T = {number(one.delta)} + {config.gamma:g} · {config.lam:g} · "
                f"{operand(last.advantage)} = {number(one.advantage)}, and so on from right to left"
            )
    else:
        yield f"no critic ({config.advantage}): Σ r = {number(trace.return_)} is compared with {rivals(trace)}"
        yield f"so A = {number(last.advantage)}, the same for every token"
    if config.whiten_advantages:
        mean, scale = operand(step.advantage_mean), number(step.advantage_scale)
        yield f"Â = (A − {mean}) / {scale}: mean and deviation over all tokens of the batch"
    else:
        yield "Â = A: whitening is off"


def rivals(trace: Trace) -> str:
    """The returns that replace a critic."""
    if len(trace.rivals) > FEW:
        return f"the mean of the batch, {number(sum(trace.rivals) / len(trace.rivals))}"
    return "those of the other answers to the prompt: " + ", ".join(map(number, trace.rivals))


def update_lines(traced: Traced) -> Iterator[str]:
    """The loss, the gradient norms and the diagnostics of the update."""
    config, step = traced.config, traced.trace.step
    yield f"total loss = {total_loss(traced)}"
    if not step.trains_policy:
        yield f"the critic warms up ({config.critic.warmup_steps} steps): the policy does not change"
    for name, rate in step.learning_rates.items():
        norms = ", ".join(map(number, step.grad_norms[name]))
        limit = f"clipped at {config.optimizer.max_grad_norm:g}"
        yield f"{name}: learning rate {rate:.3g}, gradient norms {norms} ({limit})"
    row = step.diagnostics
    names = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")
    means = ", ".join(f"{name} {value:.4f}".replace("-", "−") for name in names if (value := row[name]) is not None)
    early = "; it stopped early (stop_kl)" if step.stopped_early else ""
    yield f"over the batch, named as in plots/ppo.csv: {means}{early}"


def total_loss(traced: Traced) -> str:
    """The terms of the loss, with their weights."""
    config, step = traced.config, traced.trace.step
    terms = ["L_π"] if step.trains_policy else []
    terms += [f"{config.vf_coef:g}·L_V"] if config.has_critic else []
    formula = " + ".join(terms)
    if step.trains_policy and config.entropy_coef:
        formula += f" − {config.entropy_coef:g}·entropy"
    if step.trains_policy and config.kl.penalty == "loss":
        formula += f" + {step.kl_coef:g}/{number(step.advantage_scale)}·KL loss"
    return formula


def change_line(traced: Traced) -> str:
    """What the update did to the answer."""
    trace = traced.trace
    change = trace.logprob_after - trace.logprob_before
    return (
        f"log π of the whole answer: {number(trace.logprob_before)} before, {number(trace.logprob_after)} after the "
        f"update: its probability × {math.exp(min(change, LARGEST_CHANGE)):.3f}"
    )


PASSES = (
    "pass", "epoch", "minibatch", "mean ρ", "clipped", "L_π answer", "L_V answer",
    "L_π", "L_V", "entropy", "KL loss", "total loss",
)  # fmt: skip
"""Heads of the columns of `passes`."""


def passes(traced: Traced) -> list[tuple[str, ...]]:
    """One row for each pass of the update over the answer: means over its tokens, then those of the minibatch."""
    trace = traced.trace
    rows: list[tuple[str, ...]] = []
    for turn, place in enumerate(trace.minibatches):
        minibatch, read = trace.step.minibatches[place], [token.passes[turn] for token in trace.tokens]
        clipped = [None if reading.clipped is None else reading.clipped and reading.pull == 0 for reading in read]
        valued = traced.config.has_critic
        rows.append(
            (
                str(turn + 1),
                str(minibatch.epoch),
                f"{place + 1} of {len(trace.step.minibatches)}",
                number(_mean([reading.ratio for reading in read])),
                NOTHING if None in clipped else f"{sum(map(bool, clipped))} of {len(clipped)}",
                signed(_mean([reading.policy_loss for reading in read])),
                number(_mean([reading.value_loss or 0.0 for reading in read]) if valued else None),
                signed(minibatch.policy_loss),
                number(minibatch.value_loss if valued else None),
                number(minibatch.entropy),
                number(minibatch.kl_loss),
                signed(minibatch.total_loss),
            )
        )
    return rows


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def cells(token: Token) -> list[str]:
    """The token's row in the table, without its place and text."""
    after = token.after
    return [
        number(token.old_logprob),
        number(token.ref_logprob),
        *map(signed, (token.kl, token.reward)),
        number(token.value),
        *map(signed, (token.delta, token.advantage, token.weight, token.return_)),
        number(after.ratio),
        clip_word(after),
        signed(after.policy_loss),
        number(after.value_loss),
    ]
