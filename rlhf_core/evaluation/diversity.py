"""Diversity of answers: over all prompts, and among the answers to one prompt. Pure functions of texts."""

from collections.abc import Sequence
from itertools import combinations, pairwise

NGram = tuple[str, ...]


def distinct_n(texts: Sequence[str], n: int) -> float:
    """Distinct n-grams of words over all n-grams of words of all texts (Li et al. 2016); 0 without any.

    It falls with the number of texts, so that only equal numbers of answers can be compared.
    """
    ngrams = [
        tuple(words[i : i + n])
        for words in (text.casefold().split() for text in texts)
        for i in range(len(words) - n + 1)
    ]
    return len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def overlap(answers: Sequence[str]) -> float | None:
    """Mean pairwise overlap of one prompt's answers: the Jaccard index of their sets of word bigrams.

    1 for equal answers, 0 where no two share a bigram; None for fewer than two answers. An answer of one word counts as
    that word, an empty one as an empty word: equal short answers overlap by 1.
    """
    sets = [_bigrams(answer) for answer in answers]
    shares = [len(a & b) / len(a | b) for a, b in combinations(sets, 2)]
    return sum(shares) / len(shares) if shares else None


def mean_overlap(answers: Sequence[Sequence[str]]) -> float | None:
    """The mean of `overlap` over prompts, [prompts][answers]; None where no prompt has two answers."""
    found = [value for value in map(overlap, answers) if value is not None]
    return sum(found) / len(found) if found else None


def _bigrams(text: str) -> frozenset[NGram]:
    words = text.casefold().split()
    pairs = frozenset(pairwise(words))
    return pairs or frozenset({tuple(words)})
