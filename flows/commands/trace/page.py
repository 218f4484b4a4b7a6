"""The page of `leash trace`, one HTML document: the numbers of each token in its formulas."""

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from flows.commands.trace.trace import Traced
from flows.commands.trace.wording import (
    PASSES,
    cells,
    change_line,
    credit_lines,
    number,
    operand,
    passes,
    score_lines,
    signed,
    total_loss,
    update_lines,
    where,
)
from rlhf_core.errors import UserError
from rlhf_core.inspect.trace.records import Reading, Token
from tasks.page import page as report_page
from tasks.page.page import write_page

SCRIPT = "trace.js.j2"
STILL = 0.002
"""|ρ − 1| below which a token counts as unchanged."""


@dataclass(frozen=True)
class Formula:
    """One number of a token: name, formula, value."""

    name: str
    formula: str
    value: str


@dataclass(frozen=True)
class Shown:
    """A token on the page."""

    place: int
    token: Token
    text: str
    strength: float
    """The advantage that the loss uses, as a share of the answer's largest, from −1 to 1."""
    formulas: list[Formula]
    verdict: str
    cells: list[str]


COLUMNS = ("log π_old", "log π_ref", "KL", "r", "V", "δ", "A", "Â", "return", "ρ", "clip", "L_π", "L_V")


def write_trace(traced: Traced, path: Path) -> None:
    """Write the page, whole or not at all. Raises UserError where the path is a folder or cannot be written."""
    page = render(traced)
    beside = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_page(page, beside)
        beside.replace(path)
    except OSError as error:
        if beside.is_file():
            beside.unlink()
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None


def render(traced: Traced) -> str:
    """The page as one HTML document."""
    folder = Path(__file__).parent
    styles = Path(report_page.__file__).parent
    environment = Environment(
        loader=FileSystemLoader([folder, styles]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = (folder / SCRIPT).read_text(encoding="utf-8")
    return (
        environment.get_template("trace.html.j2").render(
            traced=traced,
            trace=traced.trace,
            config=traced.config,
            where=where(traced),
            tokens=shown(traced),
            columns=COLUMNS,
            score=list(score_lines(traced)),
            credit=list(credit_lines(traced)),
            update=list(update_lines(traced)),
            change=change_line(traced),
            total_loss=total_loss(traced),
            pass_columns=PASSES,
            passes=passes(traced),
            number=number,
            script=Markup(script),
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii"),
        )
        + "\n"
    )


def shown(traced: Traced) -> list[Shown]:
    """The tokens of the answer with their formulas."""
    tokens = traced.trace.tokens
    largest = max(abs(token.weight) for token in tokens) or 1.0
    return [
        Shown(
            place=place,
            token=token,
            text=token.text.replace("\n", "↵").replace(" ", "\u00a0"),
            strength=token.weight / largest,
            formulas=formulas(traced, place),
            verdict=verdict(traced, token),
            cells=cells(token),
        )
        for place, token in enumerate(tokens)
    ]


def formulas(traced: Traced, place: int) -> list[Formula]:
    """The numbers of one token from its probability to its loss, each computed from those before it."""
    token = traced.trace.tokens[place]
    return [
        Formula("KL", f"log π_old − log π_ref = {number(token.old_logprob)} − {operand(token.ref_logprob)}",
                signed(token.kl)),
        Formula("r", _reward(traced, place), signed(token.reward)),
        *_credit(traced, place),
        *_update(traced, token),
    ]  # fmt: skip


def _reward(traced: Traced, place: int) -> str:
    trace, config, token = traced.trace, traced.config, traced.trace.tokens[place]
    last = place == len(trace.tokens) - 1
    score = f"R = {number(trace.score)}" if last else "0, for the reward comes at the last token"
    if config.kl.penalty == "loss":
        return score
    beta = f"{trace.step.kl_coef:g}"
    if config.kl.placement == "sequence_end":
        return f"R − β·Σ KL = {number(trace.score)} − {beta} · {operand(trace.kl)}" if last else score
    gain = (
        f" + R = −{beta} · {operand(token.kl)} + {operand(trace.score)}"
        if last
        else f" = −{beta} · {operand(token.kl)}"
    )
    return f"−β·KL{gain}"


def _credit(traced: Traced, place: int) -> list[Formula]:
    trace, config, token = traced.trace, traced.config, traced.trace.tokens[place]
    found = []
    if config.has_critic:
        following = trace.tokens[place + 1].advantage if place + 1 < len(trace.tokens) else 0.0
        gamma, lam = f"{config.gamma:g}", f"{config.lam:g}"
        found = [
            Formula(
                "δ",
                f"r + γ·V(s′) − V(s) = {number(token.reward)} + {gamma} · {operand(token.next_value)} − "
                f"{operand(token.value)}",
                signed(token.delta),
            ),
            Formula(
                "A",
                f"δ + γλ·A′ = {number(token.delta)} + {gamma} · {lam} · {operand(following)}",
                signed(token.advantage),
            ),
            Formula("return", f"A + V(s) = {number(token.advantage)} + {operand(token.value)}", signed(token.return_)),
        ]
    else:
        found = [Formula("A", "of the whole answer: see “Credit”", signed(token.advantage))]
    if config.whiten_advantages:
        mean, scale = operand(trace.step.advantage_mean), number(trace.step.advantage_scale)
        found.append(Formula("Â", f"(A − μ)/σ = ({number(token.advantage)} − {mean}) / {scale}", signed(token.weight)))
    return found


def _update(traced: Traced, token: Token) -> list[Formula]:
    after = token.after
    change = f"exp(log π_θ − log π_old) = exp({number(after.logprob)} − {operand(token.old_logprob)})"
    found = [
        Formula("ρ", change, number(after.ratio)),
        Formula("L_π", _policy_loss(traced, token), signed(after.policy_loss)),
    ]
    if after.value is not None:
        found.append(Formula("L_V", _value_loss(traced, token, after), number(after.value_loss)))
    return found


def _policy_loss(traced: Traced, token: Token) -> str:
    config, ratio, weight = traced.config, number(token.after.ratio), operand(token.weight)
    if not traced.trace.step.uses_ratio:
        return f"−Â·log π_θ = −{weight} · {operand(token.after.logprob)}"
    if config.objective == "kl_penalty":
        return f"−(ρÂ − c·KL(π_old ‖ π_θ)), with ρÂ = {ratio} · {weight}"
    low, high = 1 - config.clip_ratio, 1 + config.clip_ratio
    bound = number(min(max(token.after.ratio, low), high))
    more = ", dual clip" if config.dual_clip is not None else ""
    more += ", weighed by π_old/π_engine" if config.importance_cap is not None else ""
    return f"−min(ρÂ, clip(ρ, {low:g}, {high:g})·Â) = −min({ratio} · {weight}, {bound} · {weight}){more}"


def _value_loss(traced: Traced, token: Token, after: Reading) -> str:
    plain = f"(V_θ(s) − return)² = ({number(after.value)} − {operand(token.return_)})²"
    if not traced.config.critic.clip_value:
        return plain
    return f"{plain}, or that of V clipped to {number(token.value)} ± {traced.config.critic.value_clip:g}, if larger"


def verdict(traced: Traced, token: Token) -> str:
    """What PPO does with the token, in a sentence."""
    if not traced.trace.step.trains_policy:
        return "The critic warms up: the policy does not learn from this step."
    if token.weight == 0:
        return "Exactly as expected: the gradient of this token is 0."
    good = token.weight > 0
    opening = (
        "Better than expected (Â > 0): make it more likely."
        if good
        else "Worse than expected (Â < 0): make it less likely."
    )
    after = token.after
    if after.clipped and after.pull == 0:
        return f"{opening} Its ratio is already beyond the clip, so the gradient is 0."
    if after.clipped:
        return f"{opening} Its ratio is beyond the clip on the other side: the gradient leads it back."
    if abs(after.ratio - 1) < STILL:
        return f"{opening} It has hardly changed."
    moved = (after.ratio > 1) == good
    return f"{opening} {'It did' if moved else 'It changed the other way, because of the other tokens'}."
