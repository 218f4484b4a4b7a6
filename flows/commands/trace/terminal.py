"""Formats a traced PPO step for the terminal and as JSON."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from flows.commands.trace.trace import Traced
from flows.commands.trace.wording import (
    PASSES,
    cells,
    change_line,
    credit_lines,
    passes,
    score_lines,
    update_lines,
    where,
)
from flows.text import table

TOKENS = ("t", "token", "log π_old", "log π_ref", "KL", "r", "V", "δ", "A", "Â", "return", "ρ", "clip", "L_π", "L_V")
TEXTS = {"token", "clip"}
"""Columns of text, aligned to the left; numbers are aligned to the right."""


def as_dict(traced: Traced) -> dict[str, Any]:
    """The trace as plain values, for `--json`."""
    trace = traced.trace
    content = asdict(trace)
    for token in content["tokens"]:
        token["return"] = token.pop("return_")
    return {
        "start": traced.start,
        "seed": traced.seed,
        "notes": traced.notes,
        "settings": traced.config.model_dump(mode="json"),
        **content,
        "sums": {
            "kl": trace.kl,
            "return": trace.return_,
            "logprob_before": trace.logprob_before,
            "logprob_after": trace.logprob_after,
        },
    }


def render(traced: Traced) -> str:
    """The trace for a terminal: the rollout, the table of tokens, then how the numbers add up to the loss."""
    rows = [
        (str(place), repr(token.text)[1:-1], *cells(token)) for place, token in enumerate(traced.trace.tokens, start=1)
    ]
    parts = [
        _opening(traced),
        f"{_table(TOKENS, rows)}\nρ, clip, L_π, L_V: after the update. clip yes: ρ is outside [1−ε, 1+ε] and the "
        "gradient is 0; out: outside, with a gradient.",
        _listed("score", score_lines(traced)),
        _listed("credit", credit_lines(traced)),
        "the answer's passes through the update (losses: means over tokens; from the second L_π on: of the minibatch)\n"
        + _table(PASSES, passes(traced)),
        _listed("update", update_lines(traced)),
        _listed("the answer", [change_line(traced)]),
    ]
    return "\n\n".join(parts)


def _opening(traced: Traced) -> str:
    trace = traced.trace
    cut = "" if trace.ended else "   [cut off: no end-of-sequence token]"
    notes = [f"  ({note})" for note in traced.notes]
    return "\n".join([where(traced), *notes, f"prompt  {trace.prompt[-1]['content']}", f"answer  {trace.text}{cut}"])


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    padded = []
    for name, *column in zip(head, *rows, strict=True):
        width = max(map(len, (name, *column)))
        padded.append([cell.ljust(width) if name in TEXTS else cell.rjust(width) for cell in (name, *column)])
    return table(zip(*padded, strict=True))


def _listed(title: str, lines: Iterable[str]) -> str:
    return "\n".join([title, *(f"  {line}" for line in lines)])
