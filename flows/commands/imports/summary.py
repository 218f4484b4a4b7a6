"""What a person wants to see of a data set before training: lengths, two rows as the model reads them, near-duplicates,
contradictions, the bias for long answers, and agreement. Equal examples give equal lines."""

import re
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import nsmallest
from typing import TYPE_CHECKING
from unicodedata import normalize

import numpy as np
from scipy.stats import binomtest

from rlhf_core.errors import UserError
from rlhf_core.evaluation.krippendorff import alpha_interval
from tasks.datasets.labels import contradictions, label_figures, place_of, units_of
from tasks.datasets.sources.example import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENCODED = 2_000
"""Rows whose tokens are counted, at equal distances in the data."""
SHOWN = 300
"""Characters of a text that are printed."""
COMPARED = 50_000
"""Prompts that are compared with each other, at equal distances in the data; they take some seconds."""
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+")
"""A word; in Chinese and Japanese a character."""
SKETCH, ALIKE = 16, 0.65
"""Prompts are near-duplicates where this share (Jaccard) of so many smallest hashes of each is equal (Broder 1997)."""
FEWEST = 10
"""Pairs by several annotators, below which agreement is not named."""
LARGE, CLEAR = 0.667, 0.4
"""Krippendorff's alpha from which agreement is called good (his limit for tentative conclusions) and moderate (70% of
the labels are equal, where both answers are chosen equally often)."""
MARKERS = "<|{}|>{}", "<|assistant|>", "<|end|>"
"""How the chat template of a model from scratch writes a turn, opens an answer and closes it."""


def summary(examples: Sequence[Example], tokenizer: "PreTrainedTokenizerBase | None" = None) -> list[str]:
    """The lines for clean examples; what the data do not have gets no line. Without a tokenizer, lengths are in
    characters only, and rows are printed as a model from scratch reads them.

    Raises UserError for a row that the tokenizer cannot encode: file, row and reason.
    """
    pairs = [example for example in examples if example.kind == "pair" and not example.tie]
    rows = [example for example in examples if not example.heldout] or list(examples)
    first = {example.kind: example for example in reversed(rows)}
    shown = [first[kind] for kind in ("pair", "demonstration") if kind in first]
    shown = (shown + [row for row in rows[:2] if row not in shown])[:2]
    return [
        *lengths(examples, tokenizer),
        *(line for example in shown for line in as_read(example, tokenizer)),
        *near_duplicates(examples),
        *contradictions(pairs),
        *longer_answers(pairs),
        *agreement(examples),
    ]


def lengths(examples: Sequence[Example], tokenizer: "PreTrainedTokenizerBase | None") -> list[str]:
    """A table of median, 95th percentile (values that occur) and maximum, of distinct prompts and all answers."""
    prompts = list({example.prompt_id: example for example in examples}.values())
    answered = [example for example in examples if example.answers]
    rows = {
        "prompts, characters": [sum(len(turn["content"]) for turn in example.prompt) for example in prompts],
        "answers, characters": [len(text) for example in answered for text in example.answers],
    }
    if tokenizer is not None:
        rows["prompts, tokens"] = [len(_tokens(example, tokenizer)[0]) for example in _spread(prompts, ENCODED)]
        encoded = [_tokens(example, tokenizer)[1] for example in _spread(answered, ENCODED)]
        rows["answers, tokens"] = [len(answer) for answers in encoded for answer in answers]
    cells = [("lengths", "median", "95%", "longest")]
    for name, found in rows.items():
        if found:
            points = np.quantile(found, [0.5, 0.95, 1.0], method="inverted_cdf")
            cells.append((name, *(f"{int(point):,}" for point in points)))  # type: ignore[arg-type]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join([first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))])
        for first, *rest in cells
    ]
    if tokenizer is not None:
        some = f"; of {ENCODED:,} rows at most" if max(len(prompts), len(answered)) > ENCODED else ""
        lines.append(f"tokens of an answer include its end{some}")
    return lines if len(lines) > 1 else []


def as_read(example: Example, tokenizer: "PreTrainedTokenizerBase | None") -> list[str]:
    """The row as the model reads it: the control tokens of the chat template in the prompt, the end token in the
    answers. Without a tokenizer, as a model from scratch reads it."""
    if tokenizer is not None:
        prompt_ids, answer_ids = _tokens(example, tokenizer)
        prompt, *answers = (
            str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)) for ids in (prompt_ids, *answer_ids)
        )
    else:
        turn, start, end = MARKERS
        prompt = "".join(turn.format(one["role"], one["content"]) + end for one in example.prompt) + start
        answers = [text.strip() + end for text in example.answers]
    names = ("chosen", "rejected") if example.kind == "pair" else ("response",)
    texts = {"prompt": prompt, **dict(zip(names, answers, strict=False))}
    how = "as the model reads it" if tokenizer is not None else "as a model from scratch reads it"
    return [f"{place_of(example)}, a {example.kind}, {how}:"] + [
        f"  {name:<8}  {_line(t)}" for name, t in texts.items()
    ]


def near_duplicates(examples: Sequence[Example]) -> list[str]:
    """The share of distinct prompts that are nearly an earlier one, and of held-out prompts that are nearly a training
    prompt, among `COMPARED` at most; by the sequences of three words of all turns but the system's."""
    distinct: dict[str, Example] = {}
    for example in sorted(examples, key=lambda example: example.heldout):
        distinct.setdefault(example.prompt_id, example)
    rows = _spread(list(distinct.values()), COMPARED)  # training rows first
    earlier: dict[int, int] = {}
    sketches: list[frozenset[int]] = []
    found: list[tuple[Example, Example]] = []
    for number, row in enumerate(rows):
        text = " ".join(turn["content"] for turn in row.prompt if turn["role"] != "system")
        words = WORD.findall(normalize("NFKC", text).casefold()) or [row.prompt_id]
        sequences = {" ".join(words[place : place + 3]) for place in range(max(1, len(words) - 2))}
        sketch = frozenset(nsmallest(SKETCH, (zlib.crc32(sequence.encode()) for sequence in sequences)))
        sketches.append(sketch)
        for other, shared in Counter(earlier[code] for code in sketch if code in earlier).most_common(1):
            if shared >= ALIKE * len(sketch | sketches[other]):
                found.append((row, rows[other]))
        for code in sketch:
            earlier.setdefault(code, number)
    if len(rows) < 2:
        return []
    named = "; ".join(f"{place_of(row)} is nearly {place_of(other)}" for row, other in found[:3])
    line = f"near-duplicate prompts: {len(found) / len(rows):.1%} of {len(rows):,}"
    line += f" ({named}{'; …' if len(found) > 3 else ''})" if found else ""
    leaked = sum(row.heldout and not other.heldout for row, other in found)
    held = f"held-out prompts that are nearly a training prompt: {leaked:,} of {sum(row.heldout for row in rows):,}"
    return [line, held] if leaked else [line]


def longer_answers(pairs: Iterable[Example]) -> list[str]:
    """How often the longer answer (in characters) is chosen, of the pairs with answers of different lengths."""
    differences = [len(example.chosen or "") - len(example.rejected or "") for example in pairs]
    counted = [difference > 0 for difference in differences if difference]
    if not counted:
        return []
    share, n = sum(counted) / len(counted), len(counted)
    low, high = binomtest(sum(counted), n).proportion_ci(method="wilson")
    if low <= 0.5 <= high:
        words = "length says nothing about the choice" if high - low <= 0.2 else "too few pairs to tell"
    elif 0.4 <= share <= 0.6:
        words = f"a small preference for {'longer' if share > 0.5 else 'shorter'} answers"
    else:
        words = "length is a confound: report wins at equal length"
    return [f"the longer answer is chosen in {share:.0%} of {n:,} pairs ({low:.0%} – {high:.0%}): {words}"]


def agreement(examples: Sequence[Example]) -> list[str]:
    """Krippendorff's alpha of the pairs that several annotators labelled, with its interval and what it means, and each
    annotator's agreement with the others, the lowest first. Where the interval has 0 in it, the annotators agree as
    often as by chance."""
    figures = label_figures(examples)
    if figures is None or not figures["pairs_by_several"]:
        return []
    number, alpha = figures["pairs_by_several"], figures["alpha"]
    interval = alpha_interval(list(units_of([example for example in examples if example.annotator is not None])))
    if alpha is None or interval is None or number < FEWEST:
        words = "too few pairs to tell"
    elif interval[0] <= 0.0:
        words = "this is chance" if interval[1] >= 0.0 else "this is worse than chance"
    else:
        words = "good" if alpha >= LARGE else "moderate" if alpha >= CLEAR else "weak"
    found = "" if alpha is None else f", Krippendorff's alpha {alpha:.2f}"
    found += f" ({interval[0]:.2f} – {interval[1]:.2f})" if found and interval else ""
    shares = sorted((share, name) for name, share in figures["agreement"].items() if share is not None)
    named = ", ".join(f"{name} {share:.0%}" for share, name in shares[:10]) + (", …" if len(shares) > 10 else "")
    return [
        f"agreement of annotators: {number:,} pairs by several{found}: {words}",
        f"equal to the labels of the others: {named}",
    ]


def _tokens(example: Example, tokenizer: "PreTrainedTokenizerBase") -> tuple[list[int], list[list[int]]]:
    """Token ids of the prompt, and of each answer with its end."""
    from rlhf_core.data.tokenizer import encode_prompt, encode_response  # imports transformers

    try:
        answers = [encode_response(tokenizer, text) for text in example.answers]
        return encode_prompt(tokenizer, example.prompt), answers
    except UserError as error:
        raise UserError(f"{place_of(example)}: {error}") from None


def _spread(rows: Sequence[Example], most: int) -> Sequence[Example]:
    """At most so many rows, at equal distances."""
    return rows[:: -(-len(rows) // most) or 1]


def _line(text: str) -> str:
    """The text in quotes, without its middle where it is long; line breaks and what is invisible as escapes."""
    half = SHOWN // 2
    return repr(text if len(text) <= SHOWN else f"{text[:half]} […] {text[-half:]}")
