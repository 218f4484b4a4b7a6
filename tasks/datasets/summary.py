"""What a person wants to see of a data set before training: lengths, two rows as the model reads them, near-duplicates,
contradictions, the bias for long answers, and agreement. Equal examples give equal lines."""

import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from math import sqrt
from typing import TYPE_CHECKING
from unicodedata import normalize

import numpy as np
from jaxtyping import UInt64
from numpy import ndarray

from rlhf_core.data.chat import Conversation
from rlhf_core.evaluation.krippendorff import alpha_interval
from tasks.datasets.labels import contradictions, label_figures, place_of, units_of
from tasks.datasets.sources.example import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENCODED = 2_000
"""Rows whose tokens are counted, at equal distances in the data."""
SHOWN = 300
"""Characters of a text that are printed."""
WORD = re.compile(r"[぀-ヿ㐀-鿿]|[^\W_぀-ヿ㐀-鿿]+")
"""A word; in Chinese and Japanese a character."""
COMPARED = 100
"""Characters at the beginning and at the end of a prompt that are compared with other prompts."""
MOST_COMPARED = 100_000
"""Prompts that are compared, at equal distances in the data; they take about two seconds."""
BANDS, HASHES = 4, 4
"""Prompts are near-duplicates where all hashes of one band are equal. With three-word sequences that overlap by a
Jaccard index J this has the probability 1 − (1 − J⁴)⁴: 0.99 at J = 0.9, 0.88 at 0.8, 0.23 at 0.5, 0.03 at 0.3."""
FEWEST = 10
"""Pairs by several annotators, below which agreement is not named."""
LARGE, CLEAR = 0.667, 0.4
"""Krippendorff's alpha from which agreement is called good (his limit for tentative conclusions) and moderate (70% of
the labels are equal, where both answers are chosen equally often)."""


def summary(examples: Sequence[Example], tokenizer: "PreTrainedTokenizerBase | None" = None) -> list[str]:
    """The lines for clean examples; what the data do not have gets no line. Without a tokenizer, lengths are in
    characters only, and prompts are printed with the names of the roles.

    Raises UserError for a row that the tokenizer cannot encode: file, row and reason.
    """
    pairs = [example for example in examples if example.kind == "pair" and not example.tie]
    return [
        *lengths(examples, tokenizer),
        *(line for example in _first_rows(examples) for line in as_read(example, tokenizer)),
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
        encoded = [_tokens(example, tokenizer) for example in _spread(prompts, ENCODED)]
        rows["prompts, tokens"] = [len(prompt) for prompt, _ in encoded]
        encoded = [_tokens(example, tokenizer) for example in _spread(answered, ENCODED)]
        rows["answers, tokens"] = [len(answer) for _, answers in encoded for answer in answers]
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
    answers. Without a tokenizer the prompt has the names of the roles."""
    if tokenizer is not None:
        prompt_ids, answer_ids = _tokens(example, tokenizer)
        prompt, *answers = (
            str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)) for ids in (prompt_ids, *answer_ids)
        )
        how = "as the model reads it"
    else:
        prompt = "\n".join(f"[{turn['role']}] {turn['content']}" for turn in example.prompt)
        answers, how = example.answers, "before the tokenizer is known: roles in brackets, without the end of an answer"
    names = ("chosen", "rejected") if example.kind == "pair" else ("response",)
    texts = {"prompt": prompt, **dict(zip(names, answers, strict=False))}
    return [f"{place_of(example)}, a {example.kind}, {how}"] + [f"  {name:<8}  {_line(t)}" for name, t in texts.items()]


def near_duplicates(examples: Sequence[Example]) -> list[str]:
    """The share of distinct prompts that are nearly an earlier one, and of held-out prompts that are nearly a training
    prompt, among `MOST_COMPARED` at most. Compared are the words of both ends of a prompt, without the system's turn:
    by MinHash over sequences of three words, `BANDS` times `HASHES` hash functions (Broder 1997)."""
    distinct: dict[str, Example] = {}
    for example in sorted(examples, key=lambda example: example.heldout):
        distinct.setdefault(example.prompt_id, example)
    # Training rows first: the earlier one is a training row where there is one.
    rows = _spread(list(distinct.values()), MOST_COMPARED)
    if len(rows) < 2:
        return []
    earlier = np.arange(len(rows))
    for keys in _band_keys(rows):
        _, first, group = np.unique(keys, return_index=True, return_inverse=True)
        earlier = np.minimum(earlier, first[group])
    found = np.flatnonzero(earlier < np.arange(len(rows)))
    lines = [f"near-duplicate prompts: {len(found) / len(rows):.1%} of {len(rows):,}"]
    if len(found):
        named = (f"{place_of(rows[int(place)])} is nearly {place_of(rows[int(earlier[place])])}" for place in found[:3])
        lines[0] += f" ({'; '.join(named)}{'; …' if len(found) > 3 else ''})"
    if leaked := [place for place in found if rows[int(place)].heldout and not rows[int(earlier[place])].heldout]:
        heldout = sum(example.heldout for example in rows)
        lines.append(f"held-out prompts that are nearly a training prompt: {len(leaked):,} of {heldout:,}")
    return lines


def longer_answers(pairs: Iterable[Example]) -> list[str]:
    """How often the longer answer (in characters) is chosen, of the pairs with answers of different lengths."""
    differences = [len(example.chosen or "") - len(example.rejected or "") for example in pairs]
    counted = [difference > 0 for difference in differences if difference]
    if not counted:
        return []
    share, n = sum(counted) / len(counted), len(counted)
    low, high = wilson_interval(sum(counted), n)
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
    line = f"agreement of annotators: {number:,} pairs by several"
    if alpha is not None:
        line += f", Krippendorff's alpha {alpha:.2f}" + (
            f" ({interval[0]:.2f} – {interval[1]:.2f})" if interval else ""
        )
    if alpha is None or interval is None or number < FEWEST:
        words = "too few pairs to tell"
    elif interval[0] <= 0.0:
        words = "this is chance" if interval[1] >= 0.0 else "this is worse than chance"
    else:
        words = "good" if alpha >= LARGE else "moderate" if alpha >= CLEAR else "weak"
    shares = sorted((share, name) for name, share in figures["agreement"].items() if share is not None)
    named = ", ".join(f"{name} {share:.0%}" for share, name in shares[:10]) + (", …" if len(shares) > 10 else "")
    return [f"{line}: {words}", f"equal to the labels of the others: {named}"]


def wilson_interval(successes: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """The 95% score interval of a share of `n` > 0 independent trials (Wilson 1927)."""
    share = successes / n
    middle = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return middle - half, middle + half


def _first_rows(examples: Sequence[Example]) -> list[Example]:
    """The first pair and the first demonstration, or the first row."""
    first: dict[str, Example] = {}
    for example in examples:
        first.setdefault(example.kind, example)
    return [first[kind] for kind in ("pair", "demonstration") if kind in first] or list(first.values())


def _tokens(example: Example, tokenizer: "PreTrainedTokenizerBase") -> tuple[list[int], list[list[int]]]:
    """Token ids of the prompt, and of each answer with its end where it ended."""
    from rlhf_core.data.tokenizer import encode_prompt, encode_response  # imports transformers
    from rlhf_core.errors import UserError

    ended = example.ended or (True, True)
    try:
        answers = [encode_response(tokenizer, text, end) for text, end in zip(example.answers, ended, strict=False)]
        return encode_prompt(tokenizer, example.prompt), answers
    except UserError as error:
        raise UserError(f"{place_of(example)}: {error}") from None


def _spread(rows: Sequence[Example], most: int) -> Sequence[Example]:
    """At most so many rows, at equal distances."""
    return rows[:: -(-len(rows) // most) or 1]


def _band_keys(rows: Sequence[Example]) -> Iterator[UInt64[ndarray, "rows"]]:
    """For each band a number of each row, from the smallest hashes of its sequences of three words."""
    code = cache(lambda word: zlib.crc32(word.encode("utf-8")))
    words: list[list[int]] = []
    for number, example in enumerate(rows):
        found = WORD.findall(normalize("NFKC", _ends(example.prompt)).casefold())
        # A row without a word is like no other one.
        words.append(list(map(code, found)) or [2**32 + number])
    starts = np.cumsum([0, *(len(row) + 2 for row in words)])  # two zeros end a row: a sequence starts at each word
    flat = np.fromiter(chain.from_iterable((*row, 0, 0) for row in words), np.uint64, starts[-1])
    sequences = _mix(_mix(_mix(flat) + np.roll(flat, -1)) + np.roll(flat, -2))
    sequences[starts[1:] - 1] = sequences[starts[1:] - 2] = sequences[starts[1:] - 3]  # none starts at a zero
    for band in (_mix(np.arange(BANDS * HASHES, dtype=np.uint64)) | np.uint64(1)).reshape(BANDS, HASHES):
        keys = np.zeros(len(rows), np.uint64)
        for odd in band:
            keys = _mix(keys + np.minimum.reduceat(sequences * odd, starts[:-1]))
        yield keys


def _ends(prompt: Conversation) -> str:
    """The first and the last `COMPARED` characters of the turns that are not the system's."""
    text = " ".join(turn["content"] for turn in prompt if turn["role"] != "system")
    return text if len(text) <= 2 * COMPARED else f"{text[:COMPARED]} {text[-COMPARED:]}"


def _mix(values: UInt64[ndarray, "values"]) -> UInt64[ndarray, "values"]:
    """A hash of each number (the finaliser of SplitMix64, Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed


def _line(text: str) -> str:
    """The text in quotes, without its middle where it is long; line breaks and what is invisible as escapes."""
    half = SHOWN // 2
    return repr(text if len(text) <= SHOWN else f"{text[:half]} […] {text[-half:]}")
