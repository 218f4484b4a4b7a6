"""The page of `leash trace`, one HTML document: the numbers of each token in its formulas."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from flows.commands.trace.terminal import COLUMNS, PASSES, cells, explain, number, operand, passes, signed, where
from flows.commands.trace.trace import Traced
from rlhf_core.errors import UserError
from rlhf_core.files import atomic
from rlhf_core.inspect.trace import Token
from tasks.page import page as report_page

STILL = 0.002
"""|ρ − 1| below which a token counts as unchanged."""
Formula = tuple[str, str, str]
"""One number of a token: name, formula, value."""


def write_trace(traced: Traced, path: Path) -> None:
    """Write the page, whole or not at all. Raises UserError where the path is a folder or cannot be written."""
    if path.is_dir():
        raise UserError(f"{path}: cannot be written (it is a folder); name a file in it")
    try:
        with atomic(path) as partial:
            report_page.write_page(render(traced), partial)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None


def render(traced: Traced) -> str:
    """The page as one HTML document."""
    folder, trace = Path(__file__).parent, traced.trace
    environment = Environment(
        loader=FileSystemLoader([folder, Path(report_page.__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = (folder / "trace.js.j2").read_text(encoding="utf-8")
    largest = max(abs(token.weight) for token in trace.tokens) or 1.0
    tokens = [
        {
            "token": token,
            "text": token.text.replace("\n", "↵").replace(" ", "\u00a0"),
            "strength": token.weight / largest,  # as a share of the answer's largest, from −1 to 1
            "formulas": formulas(traced, place),
            "verdict": verdict(traced, token),
            "cells": cells(token),
        }
        for place, token in enumerate(trace.tokens)
    ]
    page = environment.get_template("trace.html.j2").render(
        traced=traced,
        trace=trace,
        config=traced.config,
        where=where(traced),
        tokens=tokens,
        columns=COLUMNS,
        explained=explain(traced),
        pass_columns=PASSES,
        passes=passes(traced),
        script=Markup(script),
        script_hash=report_page.script_hash(script),
    )
    return f"{page}\n"


def formulas(traced: Traced, place: int) -> list[Formula]:
    """The numbers of one token from its probability to its loss, each computed from those before it."""
    trace, config, step = traced.trace, traced.config, traced.trace.step
    token, is_last = trace.tokens[place], place == len(trace.tokens) - 1
    old, weight, beta = operand(token.old_logprob), operand(token.weight), f"{step.kl_coef:g}"
    found: list[tuple[str, str, float | None]] = [
        ("KL", f"log π_old − log π_ref = {number(token.old_logprob)} − {operand(token.ref_logprob)}", token.kl)
    ]

    reward = f"R = {number(trace.score)}" if is_last else "0, for the reward comes at the last token"
    if config.kl.penalty != "loss":
        penalty = f"−{beta} · {operand(token.kl)}"
        reward = f"−β·KL + R = {penalty} + {operand(trace.score)}" if is_last else f"−β·KL = {penalty}"
    found.append(("r", reward, token.reward))

    if config.has_critic:
        following = 0.0 if is_last else trace.tokens[place + 1].advantage
        gamma, value = f"{config.gamma:g}", operand(token.value)
        change = f"{number(token.reward)} + {gamma} · {operand(token.next_value)} − {value}"
        later = f"{number(token.delta)} + {gamma} · {config.lam:g} · {operand(following)}"
        found += [
            ("δ", f"r + γ·V(s′) − V(s) = {change}", token.delta),
            ("A", f"δ + γλ·A′ = {later}", token.advantage),
            ("return", f"A + V(s) = {number(token.advantage)} + {value}", token.return_),
        ]
    else:
        found.append(("A", "of the whole answer: see “Credit”", token.advantage))
    if config.whiten_advantages:
        mean, scale = operand(step.advantage_mean), number(step.advantage_scale)
        found.append(("Â", f"(A − μ)/σ = ({number(token.advantage)} − {mean}) / {scale}", token.weight))
    shown = [(name, formula, signed(value)) for name, formula, value in found]

    after, ratio = token.after, number(token.after.ratio)
    of_token = f"exp(log π_θ − log π_old) = exp({number(after.logprob)} − {old})"
    of_answer = "exp of the mean of log π_θ − log π_old over the answer"
    shown.append(("ρ", of_token if config.ratio == "token" else of_answer, ratio))
    low, high = 1 - config.clip_ratio, 1 + (config.clip_ratio_high or config.clip_ratio)
    bound = number(min(max(after.ratio, low), high))
    loss = f"−min(ρÂ, clip(ρ, {low:g}, {high:g})·Â) = −min({ratio} · {weight}, {bound} · {weight})"
    loss += ", dual clip" if config.dual_clip is not None else ""
    loss += ", weighed by π_old/π_engine" if config.importance_cap is not None else ""
    shown.append(("L_π", loss, signed(after.policy_loss)))
    if after.value is not None:
        error = f"(V_θ(s) − return)² = ({number(after.value)} − {operand(token.return_)})²"
        if config.critic.clip_value:
            error += f", or that of V clipped to {number(token.value)} ± {config.critic.value_clip:g}, if larger"
        shown.append(("L_V", error, number(after.value_loss)))
    return shown


def verdict(traced: Traced, token: Token) -> str:
    """What PPO does with the token, in a sentence."""
    if not traced.trace.step.trains_policy:
        return "The critic warms up: the policy does not learn from this step."
    if not traced.trace.trained:
        return "The step learns nothing from this answer: it was cut off, or its group has equal scores."
    if token.weight == 0:
        return "Exactly as expected: the gradient of this token is 0."
    good, after = token.weight > 0, token.after
    opening = "Worse than expected (Â < 0): make it less likely."
    if good:
        opening = "Better than expected (Â > 0): make it more likely."
    if after.clipped and after.pull == 0:
        return f"{opening} Its ratio is already beyond the clip, so the gradient is 0."
    if after.clipped:
        return f"{opening} Its ratio is beyond the clip on the other side: the gradient leads it back."
    if abs(after.ratio - 1) < STILL:
        return f"{opening} It has hardly changed."
    if (after.ratio > 1) == good:
        return f"{opening} It did."
    return f"{opening} It changed the other way, because of the other tokens."
