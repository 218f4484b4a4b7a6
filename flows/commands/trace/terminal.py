"""Formats a traced PPO step for the terminal and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from flows.commands.trace.trace import Traced
from flows.commands.trace.wording import COLUMNS, PASSES, cells, explain, passes, where
from flows.text import table

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
